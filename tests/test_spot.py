"""The loop that reads the interruption notice of a spot instance from IMDSv2, here from a local server with the same rules."""

import json
import os
import re
import secrets
import subprocess
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_launch_guard import start_guard

NOTICE = "/latest/meta-data/spot/instance-action"
SAVES = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))  # as ranks do after their checkpoint
print("trains", flush=True)
time.sleep(600)
"""


class Service(ThreadingHTTPServer):
    """Behaves as IMDSv2: 400 for a token without a lifetime, 401 for a document without a valid token, 404 until there is one."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens: set[str] = set()
        self.documents: dict[str, str] = {}
        self.requests: list[tuple[str, str, int]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def answer(self, status: int, text: str = "") -> None:
        self.server.requests.append((self.command, self.path, status))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        if self.path != "/latest/api/token" or not 1 <= int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", 0)) <= 21600:
            return self.answer(400)
        self.server.tokens.add(token := secrets.token_urlsafe(40))
        self.answer(200, token)

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens:
            return self.answer(401)
        text = self.server.documents.get(self.path)
        self.answer(404 if text is None else 200, text or "")

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def service():
    with Service() as one:
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield one
        one.shutdown()


def test_the_loop_of_the_template_makes_the_guard_stop_its_job(service, tmp_path):
    template = (ROOT / "docs" / "aws" / "cluster.cfn.yaml").read_text()
    loop = textwrap.dedent(re.search(r"spot_notice.sh <<'END'\n(.*?)\n +END\n", template, re.DOTALL)[1])
    assert loop in (ROOT / "docs" / "aws.md").read_text()
    guard = start_guard(tmp_path, SAVES)
    # The real program would end the guards of other tests on this machine.
    stand_ins = {"pkill": f'echo "$3" > {tmp_path}/pattern; kill $1 {guard.pid}', "sleep": "exec /bin/sleep 0.1"}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    messages = (json.loads(line) for line in guard.stdout if line.strip())
    next(message for message in messages if message["is"] == "out")
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(["bash", "-c", loop.replace("http://169.254.169.254", service.address)], env=environment) as looping:
        limit = time.monotonic() + 60
        while (("GET", NOTICE, 404)) not in service.requests:
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert guard.poll() is None
        command = Path(f"/proc/{guard.pid}/cmdline").read_text().replace("\0", " ")
        service.documents[NOTICE] = '{"action": "terminate", "time": "2026-11-16T12:34:56Z"}'
        found = list(messages)
        assert looping.wait(60) == 0
    notices = [message["text"] for message in found if message["is"] == "notice"]
    assert notices == ["here: a stop was requested: the job saves a checkpoint and stops"]
    assert [message["code"] for message in found if message["is"] == "end"] == [75]
    assert re.search((tmp_path / "pattern").read_text().strip(), command)
