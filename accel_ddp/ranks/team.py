"""The ranks that compute a step together."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch.distributed as dist


class Team(NamedTuple):
    """The ranks that compute an optimizer step together: all of them, or with `--sync_every` those of one worker."""

    size: int = 1
    rank: int = 0  # of this rank among them
    group: "dist.ProcessGroup | None" = None  # None: all ranks
    workers: range = range(1)  # that these ranks compute, one after the other
    num_workers: int = 1  # of all ranks

    @classmethod
    def of(cls, accelerator: Any) -> "Team":
        """Return the team of all ranks."""
        return cls(accelerator.num_processes, accelerator.process_index)
