"""Ranks that mpirun has started: their variables are translated into those of torch.

torch does not read these variables, and Accelerate reads them only on CPUs. Without the translation each rank would train alone on
its GPU, and on CPUs Accelerate would create another world than `ranks.group`.
"""

import os
import zlib

# Names of the rank, the number of ranks, the local rank and the number of local ranks.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MVAPICH = tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # also Intel MPI
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MARK = "ACCEL_DDP_WORLD_OF_MPI"


def adopt_mpi_world() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from the variables of mpirun, unless a launcher has set them.

    On one node MASTER_ADDR and MASTER_PORT are set too. On several nodes only the user can state the address of rank 0.
    """
    if any(name in os.environ for name in _TORCH[:2]):
        return
    for names in (_OPEN_MPI, _MVAPICH, _MPICH):
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdigit() for value in values) and int(values[1]) > 1:
            os.environ.update(zip(_TORCH, values))
            os.environ[_MARK] = "1"
            if values[1] == values[3]:
                os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
                # Two jobs on one machine have different names. This range is below the one from which systems assign ports.
                name = os.environ.get("PMIX_NAMESPACE", "")
                os.environ.setdefault("MASTER_PORT", str(20000 + zlib.crc32(name.encode()) % 12000 if name else 29500))
            os.environ.setdefault("MASTER_PORT", "29500")
            return


def is_world_of_mpi() -> bool:
    """Return whether mpirun has started the ranks of this world, without another launcher."""
    return os.environ.get(_MARK) == "1"


def remove_mpi_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment for processes that are not ranks of the world that mpirun has started."""
    known = {*_OPEN_MPI, *_MVAPICH, *_MPICH, _MARK}
    return {name: value for name, value in environment.items() if name not in known}
