"""A time limit for calls that have none, such as name lookups and accesses to a disk."""

import contextlib
import functools
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_with_timeout(call: Callable[[], T], seconds: float, default: T) -> T:
    """Return what `call` returns, or `default` if it fails or takes too long. The thread of such a call cannot be interrupted."""
    results: list[T] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else default


def limit_name_lookups() -> None:
    """Wait 2 s instead of 10 s for each name server in this launcher and its ranks, if none answers now.

    torch's launcher looks up its host at every event, and a TCPStore the names of addresses: 2 minutes for a run of two ranks. Another
    process asks, because glibc keeps the limit of the first lookup of a process.
    """
    try:
        subprocess.run(["getent", "hosts", "192.0.2.1"], capture_output=True, timeout=1)  # an address that no hosts file contains
    except OSError:
        return  # there is no getent
    except subprocess.TimeoutExpired:
        os.environ["RES_OPTIONS"] = f"{os.environ.get('RES_OPTIONS', '')} timeout:1 attempts:2".strip()
        socket.getfqdn = functools.cache(socket.getfqdn)
