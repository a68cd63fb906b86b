"""The interruption notice of a spot instance is read from IMDSv2, here from a local server with the same rules."""

import json
import secrets
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from accel_ddp.launch import spot
from tests.conftest import ROOT, clean_environment, free_port

END = datetime(2026, 11, 16, 12, 34, 56, tzinfo=timezone.utc)
NOTICE = '{"action": "terminate", "time": "2026-11-16T12:34:56Z"}'


class Service(ThreadingHTTPServer):
    """Behaves as IMDSv2: 400 for a token without a lifetime, 401 for a document without a valid token, 404 until there is one."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens: set[str] = set()
        self.documents: dict[str, str] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.status = 0  # of every answer, if it is not 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def answer(self, status: int, text: str = "") -> None:
        status = self.server.status or status
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


class Watched:
    """The results of `watch` with short intervals."""

    def __init__(self):
        self.ends: list[datetime] = []
        self.reports: list[str] = []
        self.stop = spot.watch(self.ends.append, self.reports.append, every=0.02, every_without_service=0.05)


def until(is_true, seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.01)


@pytest.fixture
def service(monkeypatch):
    with Service() as one:
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", one.address)
        yield one
        one.shutdown()


@pytest.fixture
def watched(service):
    one = Watched()
    yield one
    one.stop.set()


def polls(service: Service, path: str = spot.NOTICE) -> list[int]:
    return [status for _, requested, status in list(service.requests) if requested == path]


def test_a_notice_is_passed_on_once_with_its_time(service, watched):
    until(lambda: len(polls(service)) > 3)
    assert set(polls(service)) == {404}
    assert not watched.ends, "there is no notice yet"
    service.documents[spot.NOTICE] = NOTICE
    until(lambda: watched.ends)
    count = len(service.requests)
    time.sleep(0.2)
    assert watched.ends == [END]
    assert len(service.requests) == count, "the thread has ended"
    assert [request for request in service.requests if request[0] == "PUT"] == [("PUT", "/latest/api/token", 200)], "one token"
    assert not watched.reports


def test_a_token_that_is_not_valid_any_more_is_renewed(service, watched):
    until(lambda: polls(service))
    service.tokens.clear()
    until(lambda: 401 in polls(service) + polls(service, spot.REBALANCE))
    service.documents[spot.NOTICE] = NOTICE
    until(lambda: watched.ends)
    assert watched.ends == [END]
    assert not watched.reports


def test_a_rebalance_recommendation_is_only_reported(service, watched):
    service.documents[spot.REBALANCE] = '{"noticeTime": "2026-11-16T12:00:00Z"}'
    until(lambda: watched.reports)
    before = len(polls(service))
    until(lambda: len(polls(service)) > before + 3)
    assert len(watched.reports) == 1
    assert "recommends to replace this node" in watched.reports[0]
    assert not watched.ends


def test_an_error_of_the_service_is_silent_and_the_notice_arrives_afterwards(service, watched):
    until(lambda: polls(service))
    service.status = 503
    until(lambda: 503 in polls(service))
    service.documents[spot.NOTICE], service.status = NOTICE, 0
    until(lambda: watched.ends)
    assert watched.ends == [END]


def test_a_service_that_fails_for_rebalance_alone_is_polled_as_often_as_before(service):
    class Broken(dict):
        def get(self, path, default=None):
            return 1 / 0 if path == spot.REBALANCE else super().get(path, default)  # the connection is closed without an answer

    service.documents = Broken()
    service.handle_error = lambda *_: None
    ends, reports = [], []
    stop = spot.watch(ends.append, reports.append, every=0.02, every_without_service=600)
    until(lambda: len(polls(service)) > 2 * spot.ATTEMPTS)
    service.documents[spot.NOTICE] = NOTICE
    until(lambda: ends)
    stop.set()
    assert not reports


@pytest.mark.parametrize("status", [0, 404, 403])
def test_a_machine_that_is_not_on_ec2_prints_one_warning(status, service, monkeypatch):
    """Nothing listens there, as on a machine of your own; or a service of another cloud answers; or the service is turned off."""
    if status:
        service.status = status
    else:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    watched = Watched()
    until(lambda: watched.reports)
    time.sleep(0.3)
    watched.stop.set()
    assert len(watched.reports) == 1
    assert "remove `spot: aws`" in watched.reports[0]
    assert (f"HTTP status {status}" if status else "refused") in watched.reports[0]
    assert not watched.ends


def test_a_service_that_appears_late_is_used(service):
    service.status = 500
    watched = Watched()
    until(lambda: watched.reports)
    service.documents[spot.NOTICE], service.status = NOTICE, 0
    until(lambda: watched.ends)
    assert watched.ends == [END]


def test_a_proxy_is_not_asked_about_the_instance(service, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    service.documents[spot.NOTICE] = NOTICE
    watched = Watched()
    until(lambda: watched.ends)
    assert not watched.reports


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AWS_EC2_METADATA_DISABLED", "true", "AWS_EC2_METADATA_DISABLED=true"),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "169.254.169.254", "not an address such as http://"),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://host:port", "port"),
    ],
)
def test_a_service_that_cannot_be_asked_is_reported(name, value, message, service, monkeypatch):
    monkeypatch.setenv(name, value)
    watched = Watched()
    assert message in watched.reports[0]
    assert not service.requests


def test_the_thread_ends_when_it_is_told_to(service, watched):
    until(lambda: polls(service))
    watched.stop.set()
    time.sleep(1)  # for a request that was under way
    service.documents[spot.NOTICE] = NOTICE
    count = len(service.requests)
    time.sleep(0.2)
    assert len(service.requests) == count
    assert not watched.ends


def test_texts_that_are_not_a_notice_are_ignored_and_a_notice_without_a_time_counts_from_now():
    assert spot.parse_notice(NOTICE) == END
    for text in (None, "", "<html>sign in</html>", "[]", "{}", "null", '"terminate"', '{"time": "2026-11-16T12:34:56Z"}'):
        assert spot.parse_notice(text) is None
    for text in ('{"action": "stop"}', '{"action": "stop", "time": "soon"}', '{"action": "hibernate", "time": 1}'):
        left = spot.parse_notice(text) - datetime.now(timezone.utc)
        assert timedelta(seconds=100) < left <= timedelta(minutes=2)


def test_the_address_follows_the_variables_of_the_sdks():
    assert spot.endpoint({}) == "http://169.254.169.254"
    assert spot.endpoint({"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}) == "http://[fd00:ec2::254]"
    both = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1338/x/", "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}
    client = spot.Metadata(spot.endpoint(both))
    assert (client.host, client.port, client.path) == ("127.0.0.1", 1338, "/x")
    assert spot.Metadata("http://[fd00:ec2::254]").host == "fd00:ec2::254"


SAVES = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))  # as ranks do after their checkpoint
print("trains", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("has_service", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_guard_turns_the_notice_into_a_stop_of_the_job(has_service, service, tmp_path):
    """Without a service, the launching machine receives the warning, and the job goes on until the launching machine stops it."""
    service.status = 0 if has_service else 404
    guard = subprocess.Popen(
        [sys.executable, "-m", "accel_ddp.launch.guard"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=clean_environment(AWS_EC2_METADATA_SERVICE_ENDPOINT=service.address),
    )  # fmt: skip
    words = [sys.executable, "-c", SAVES]
    request = {
        "words": words, "kinds": [""] * len(words), "env": {},
        "run_folder": str(tmp_path), "output": str(tmp_path), "host": "node", "job": "job", "rank": 0,
        "processes": 1, "detach": False, "first_rank": 0, "time_limit": None, "spot": "aws", "terminal": None,
    }  # fmt: skip

    def send(**message) -> None:
        guard.stdin.write(json.dumps(message) + "\n")
        guard.stdin.flush()

    def read(kind: str) -> dict:
        for line in filter(str.strip, guard.stdout):
            if (message := json.loads(line))["is"] == kind:
                return message
            assert message["is"] != "failed", message
        raise AssertionError(f"the guard has ended without {kind}")

    with guard:
        beats = threading.Event()
        send(do="start", **request)
        assert read("out")["lines"] == ["trains"]
        beat = threading.Thread(target=lambda: [send(do="beat") for _ in iter(lambda: beats.wait(2), True)])
        beat.start()
        try:
            service.documents[spot.NOTICE] = NOTICE
            notice = read("notice")["text"]
            if has_service:
                assert notice == "node: AWS ends this spot instance at 12:34:56 UTC: the job saves a checkpoint and stops"
            else:
                assert "remove `spot: aws`" in notice
                send(do="stop", why="the test ends")
            assert read("end")["code"] == 75
        finally:
            beats.set()
            beat.join()
            guard.stdin.close()
