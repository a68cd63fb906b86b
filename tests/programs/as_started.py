"""Print as JSON how this process was started, then end it in the requested way."""

import json
import os
import signal
import stat
import sys
import time


def is_pipe_or_socket(descriptor: int) -> bool:
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
            "pipes and sockets": [number for number in range(1000) if is_pipe_or_socket(number)],
            "threads": len(os.listdir("/proc/self/task")),
            "ours": [name for name in sys.modules if name.startswith(("accel_ddp", "tests", "recipes"))],
        }
    )
)
how = sys.argv[1]
if how == "exit":
    sys.exit(75)
if how == "words":
    sys.exit("a message instead of an exit code")
if how == "exception":
    raise ValueError("an exception that is not caught")
if how == "at once":
    os._exit(74)
if how.startswith("SIG"):
    os.kill(os.getpid(), signal.Signals[how])
if how == "sleep":
    time.sleep(600)
