"""Behave as the first argument demands, for tests of launchers. This script imports nothing that takes time.

end      print what this rank has received, and end
wait     the same, and wait for a signal, with a child process that has left the session and lost its parent
fail     the same, and when there is a file "fail now", the last rank fails with exit code 7 and the others wait
ignore   wait, and ignore SIGINT and SIGTERM
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

action, rank = sys.argv[1], int(os.environ["RANK"])
if action == "ignore":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
received = {
    "argv": sys.argv[2:],
    "folder": os.getcwd(),
    "home": os.environ["HOME"],
    "variables": {name: value for name, value in os.environ.items() if name.startswith("TEST_")},
    "secret": len(os.environ.get("WANDB_API_KEY", "")),
    "token": hashlib.sha256(os.environ.get("ACCEL_DDP_TOKEN", "").encode()).hexdigest()[:20],
    "world": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
    "user": os.getuid(),
}
if action in ("wait", "ignore"):
    # The shell ends at once, so that its child has no parent that belongs to the job.
    subprocess.Popen(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"]).wait()
print(json.dumps(received), flush=True)
print(f"rank {rank} prints an error", file=sys.stderr, flush=True)
if action == "fail" and rank == int(os.environ["WORLD_SIZE"]) - 1:
    while not os.path.exists("fail now"):
        time.sleep(0.05)
    print("ValueError: this rank has failed", file=sys.stderr, flush=True)
    sys.exit(7)
while action != "end":
    time.sleep(600)
