"""Import the libraries once, then fork this process for each program that a test requests. See tests/forking.py.

A fork copies only the thread that calls it, and locks of other threads would stay locked. This process therefore has only one
thread, and it calls no function of the libraries apart from those in `fill_caches`. It imports neither accel_ddp nor a recipe,
because these read environment variables when they are imported, and must read those of the test.
"""

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None)
# The lists include modules that the libraries import at first use, if the recipes or these test programs use them.
OF_LOOP = [
    "accelerate", "numpy", "psutil", "safetensors.torch", "torch", "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torch.distributed.fsdp",
    "yaml",
]  # fmt: skip
LIBRARIES = {
    "loop": OF_LOOP,
    "recipes": [
        *OF_LOOP, "datasets", "evaluate", "peft", "PIL.Image", "rouge_score.rouge_scorer", "sacrebleu", "scipy.io", "scipy.stats",
        "seqeval.metrics", "sklearn.metrics", "transformers.data.data_collator", "transformers.generation.utils",
        "transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert",
        "transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5",
    ],
}  # fmt: skip


def fill_caches() -> None:
    """Compute what every fork would compute again in 0.4 s: pure Python, without threads and independent of the environment."""
    inspect.getmodule(compile("", "a file of no module", "exec"))  # the files of all modules, for torch.library.custom_op
    if conversions := sys.modules.get("transformers.conversion_mapping"):  # not in old versions
        conversions.get_checkpoint_conversion_mapping("bert")  # compiles the patterns of all models


class Children:
    """The forked processes that are not reaped yet."""

    def __init__(self, poll: select.poll):
        self.poll = poll
        self.running: dict[int, tuple[int, int]] = {}  # pidfd -> pid, pipe for the exit code
        self.reported: dict[int, int] = {}  # pipe for the exit code -> pid

    def add(self, pid: int, report: int) -> None:
        pidfd = os.pidfd_open(pid)  # becomes readable when the process ends
        self.running[pidfd] = (pid, report)
        self.poll.register(pidfd, select.POLLIN)

    def handle(self, descriptor: int) -> None:
        """Report the exit code of a process that has ended, or reap a process after its exit code was read.

        The kernel does not reuse the pid before the process is reaped. So the test can use the pid until it has the exit code.
        """
        if descriptor in self.running:
            pid, report = self.running.pop(descriptor)
            self.poll.unregister(descriptor)
            os.close(descriptor)
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            with contextlib.suppress(BrokenPipeError):  # a failed test has closed the pipe
                os.write(report, str(code).encode())
            self.reported[report] = pid
            self.poll.register(report, 0)  # reports when the reader closes the pipe
        else:
            os.waitpid(self.reported.pop(descriptor), 0)
            self.poll.unregister(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """Close the descriptors of the other processes, in a new fork."""
        for descriptor in [*self.running, *(report for _, report in self.running.values()), *self.reported]:
            os.close(descriptor)


def serve(tests: socket.socket) -> tuple[dict, int]:
    """Fork for every request, and exit when the tests close the connection. Return the request and the output pipe in the fork."""
    poll = select.poll()
    poll.register(tests, select.POLLIN)
    children = Children(poll)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != tests.fileno():
                children.handle(descriptor)
                continue
            message, descriptors, _, _ = socket.recv_fds(tests, 1 << 20, 2, socket.MSG_CMSG_CLOEXEC)
            if not message:
                os._exit(0)
            output, report = descriptors
            threads = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
            assert len(threads) == 1, (
                f"only a process with one thread can be forked safely, and this one has the threads {threads}"
            )
            pid = os.fork()
            if pid == 0:
                children.close()
                os.close(report)
                tests.close()
                return json.loads(message), output
            children.add(pid, report)
            os.close(output)
            tests.send(str(pid).encode())


def become(request: dict, output: int) -> None:
    """Set up this process as a shell, the operating system and the interpreter do for `python script.py ...`."""
    if request["new_session"]:
        os.setsid()
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the server ends with the tests, and this process with the server
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if threads := os.environ.get("OMP_NUM_THREADS"):  # torch read the variable when it was imported
        sys.modules["torch"].set_num_threads(int(threads))
    sys.modules["numpy"].random.seed()  # Python seeds its own generator after a fork
    gc.enable()
    script = Path(request["argv"][0])
    sys.argv = request["argv"]
    sys.path[0] = str(script.resolve().parent)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the tests and for forks in the same session
    gc.disable()
    for library in LIBRARIES[sys.argv[2]]:
        importlib.import_module(library)
    for name in [name for name in sys.modules if name.startswith("accel_ddp")]:
        del sys.modules[name]  # torch imports the entry point of the doctor for torchrun
    fill_caches()
    gc.freeze()  # a collection writes to shared memory, which would then be copied
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
    # The call is not inside a function, so that an exception of the script ends this interpreter as it ends any other.
    runpy.run_path(sys.argv[0], run_name="__main__")
