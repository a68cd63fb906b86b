"""Says what a program can know of how it was started, and ends in the way that was asked for."""

import json
import os
import signal
import stat
import sys


def is_of_another_process(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode) or stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


print(
    json.dumps(
        {
            "name": __name__,
            "file": __file__,
            "argv": sys.argv,
            "path": sys.path,
            "cwd": os.getcwd(),
            "environment": dict(os.environ),
            "stdin": sys.stdin.read(),
            "streams": [sys.stdout.encoding, sys.stdout.write_through, sys.stderr.encoding],
            "leads a session": os.getsid(0) == os.getpid(),
            "handlers": {name.name: str(signal.getsignal(name)) for name in signal.valid_signals() if name < signal.SIGRTMIN},
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "pipes and sockets": [number for number in range(1000) if is_of_another_process(number)],
            "threads": len(os.listdir("/proc/self/task")),
            "ours": [name for name in sys.modules if name.startswith(("accel_ddp", "tests", "recipes"))],
        }
    )
)
how = sys.argv[1]
if how == "exit":
    sys.exit(75)
if how == "words":
    sys.exit("words instead of a code")
if how == "exception":
    raise ValueError("nobody catches it")
if how == "at once":
    os._exit(74)
if how.startswith("SIG"):
    os.kill(os.getpid(), signal.Signals[how])
