"""The way a recipe runs: its options are parsed, the cluster is checked, `main` runs, and the exit code states how it ended."""

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.doctor import cluster
from accel_ddp.errors import INTERRUPTED, STOPPED, USER_ERROR, UserError
from accel_ddp.nodes.cores import set_num_threads
from accel_ddp.nodes.sharding_plan import read_plan
from accel_ddp.nodes.spawn import is_pending
from accel_ddp.nodes.terminal import connect_output, in_notebook
from accel_ddp.nodes.topology import is_local_main, topology_of_this_rank
from accel_ddp.ranks import reporting
from accel_ddp.ranks.failures import write_error_file
from accel_ddp.ranks.process import this_rank
from accel_ddp.records.redaction import redact
from accel_ddp.watch.restart_files import launcher_pid, write_outcome

C = TypeVar("C", bound=TrainConfig)


def run(cls: type[C], main: Callable[[C], object]) -> NoReturn:
    """Parse the command line into `cls`, run `main(cfg)`, and exit. A failure prints a message and exits with a non-zero code."""
    if in_notebook():
        _run_in_notebook(cls, main)
    connect_output()
    sys.stdout.reconfigure(line_buffering=True)  # a killed run has shown everything that it printed
    sys.stdout, sys.stderr = _NeverFails(sys.stdout), _NeverFails(sys.stderr)
    reporting.configure()
    has_valid_options = False
    try:
        cfg = parse_config(cls)
        if read_plan(os.environ, this_rank.num_ranks):
            cfg.validate_sharded()
        has_valid_options = True
        _act_on_early_stop(signal.Signals[f"SIG{cfg.stop_signal}"])
        cluster.run_preflight(cfg)  # reports a fault of the cluster within seconds, before torch is imported
        _set_variables(cfg)
        if topology_of_this_rank().num_nodes <= 1:  # other nodes would wait for this one, and the preflight compares their files
            from accel_ddp.sources.data import check_inputs  # imports numpy, which reads the variables

            check_inputs(cfg)
    except UserError as error:
        if is_local_main():
            print(f"error: {error}", file=sys.stderr, flush=True)
        if not has_valid_options:  # otherwise the preflight has already reported it to the other nodes
            cluster.report_to_other_nodes(str(error))
        _report_end(f"error: {error}")
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    gc.disable()  # the search for cycles among imported modules would take 0.5 s
    try:
        from accel_ddp.ranks.supervise import supervise  # imports torch, which takes seconds
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    gc.freeze()
    gc.enable()
    code = supervise(main, cfg)
    if code:  # at once, because an interpreter that shuts down may wait for ranks that are gone
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    gc.freeze()  # the interpreter would look for cycles in compiled code and CUDA graphs: 20 s after a compilation
    sys.exit(0)


def _run_in_notebook(cls: type[C], main: Callable[[C], object]) -> NoReturn:
    """Run `main(cfg)` under `%run`, and raise SystemExit. Streams, signals and the process stay the kernel's."""
    from accel_ddp.ranks.failures import Diverged, Stopped
    from accel_ddp.ranks.supervise import forget_run

    try:
        main(parse_config(cls))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)
    except (Stopped, Diverged) as end:
        print(end.failure, file=sys.stderr, flush=True)
        sys.exit(end.failure.exit_code)
    finally:
        forget_run()
    sys.exit(0)


def _set_variables(cfg: TrainConfig) -> None:
    """Set the variables that torch and numpy read when they are imported."""
    # Let idle OpenMP threads sleep instead of spin. On cores that are shared with other processes this is 3 times as fast (20
    # instead of 6 items/s beside one other process). On free cores it is 10 % slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    set_num_threads(cfg.num_threads, this_rank.local_ranks)
    # When the main node is lost, torch's store prints pages of C++ frames as warnings. Errors are still printed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _act_on_early_stop(number: signal.Signals) -> None:
    """End at the stop signal until `ranks.signals` handles it. A Slurm job's script blocks it, so it may be pending by now."""

    def end(*_: object) -> None:
        text = f"stopped: received {number.name} on {socket.gethostname()} before the first step."
        if is_local_main():
            os.write(2, f"{text} The same command, or --resume, continues.\n".encode())  # `print` may have been interrupted
        _report_end(text, "stopped", STOPPED)
        os._exit(STOPPED)

    signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    if (launcher := launcher_pid()) and is_pending(launcher, number):
        end()


def _report_end(text: str, kind: str = "error", code: int = USER_ERROR) -> None:
    """Store the error for the launcher, which prints it as the root cause and does not start the ranks again."""
    write_error_file(text)
    outcome = {"kind": kind, "text": text, "exit_code": code, "step": None, "rank": int(os.environ.get("RANK", 0))}
    write_outcome(launcher_pid(), {**outcome, "host": socket.gethostname(), "time": time.time()})
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not is_local_main():
        time.sleep(2)  # the launcher ends all ranks when one exits, and the first rank of the node must print before


class _NeverFails:
    """A stream that ignores errors of writing, because a full disk or a closed pipe must not end the run. It writes no secrets."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(redact(text))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
