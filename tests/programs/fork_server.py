"""Imports the libraries once; then each program that a test asks for is a fork of this process. See tests/forking.py.

A fork takes over the thread that forks and nothing that other threads were doing, so this process has only one thread, and
uses the libraries for nothing but importing them. Neither accel_ddp nor a recipe is imported: what they read from their
environment when they are imported is the environment of the test.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path

# Also what they import when they are first used, as far as the recipes and the programs beside this one use it.
LIBRARIES = [
    "accelerate", "datasets", "evaluate", "numpy", "peft", "PIL.Image", "psutil", "rouge_score.rouge_scorer", "sacrebleu",
    "safetensors.torch", "scipy.io", "scipy.stats", "seqeval.metrics", "sklearn.metrics", "torch",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "transformers.data.data_collator",
    "transformers.generation.utils", "transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert",
    "transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5",
    "tyro", "yaml",
]  # fmt: skip


class Children:
    """Those that a test may still ask about."""

    def __init__(self, poll: select.poll):
        self.poll = poll
        self.running: dict[int, tuple[int, int]] = {}  # by a descriptor that is readable at its end: pid, place for the report
        self.reported: dict[int, int] = {}  # by the place of the report: pid

    def add(self, pid: int, report: int) -> None:
        ends = os.pidfd_open(pid)
        self.running[ends] = (pid, report)
        self.poll.register(ends, select.POLLIN)

    def look_at(self, descriptor: int) -> None:
        """One has ended, and is reported; or the report was read, and only then it is reaped: like that of any child, its
        pid is nobody else's until then."""
        if descriptor in self.running:
            pid, report = self.running.pop(descriptor)
            self.poll.unregister(descriptor)
            os.close(descriptor)
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            with contextlib.suppress(BrokenPipeError):  # a test that failed has left it
                os.write(report, str(code).encode())
            self.reported[report] = pid
            self.poll.register(report, 0)  # the reader closes it
        else:
            os.waitpid(self.reported.pop(descriptor), 0)
            self.poll.unregister(descriptor)
            os.close(descriptor)

    def forget(self) -> None:
        """In a child, whose siblings are not its own."""
        for descriptor in [*self.running, *(report for _, report in self.running.values()), *self.reported]:
            os.close(descriptor)


def serve(tests: socket.socket) -> tuple[dict, int]:
    """Fork for every request, until the tests are gone. Returns in the children: what the child is to be, and where it writes."""
    poll = select.poll()
    poll.register(tests, select.POLLIN)
    children = Children(poll)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != tests.fileno():
                children.look_at(descriptor)
                continue
            message, descriptors, _, _ = socket.recv_fds(tests, 1 << 20, 2, socket.MSG_CMSG_CLOEXEC)
            if not message:
                os._exit(0)
            output, report = descriptors
            threads = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
            assert len(threads) == 1, f"only a process of one thread can be forked safely; this one has {threads}"
            pid = os.fork()
            if pid == 0:
                children.forget()
                os.close(report)
                tests.close()
                return json.loads(message), output
            children.add(pid, report)
            os.close(output)
            tests.send(str(pid).encode())


def become(wanted: dict, output: int) -> None:
    """What a shell, the operating system and the interpreter do for `python script.py ...`."""
    if wanted["new_session"]:
        os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if threads := os.environ.get("OMP_NUM_THREADS"):  # read by torch's libraries when they are loaded
        sys.modules["torch"].set_num_threads(int(threads))
    sys.modules["numpy"].random.seed()  # Python's own generator does it by itself
    gc.enable()
    script = Path(wanted["words"][0])
    sys.argv = wanted["words"]
    sys.path[0] = str(script.resolve().parent)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the tests, and for children with its session
    gc.disable()
    for library in LIBRARIES:
        importlib.import_module(library)
    for name in [name for name in sys.modules if name.startswith("accel_ddp")]:
        del sys.modules[name]  # torch loads the doctor's door to its launcher
    gc.freeze()  # a collection would touch, and so copy, the memory that all share
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
    # At the bottom of the stack, so that what the script raises ends this interpreter as it would any other.
    runpy.run_path(sys.argv[0], run_name="__main__")
