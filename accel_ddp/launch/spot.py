"""The interruption notice of an EC2 spot instance, which AWS publishes two minutes before it ends the instance.

The notice is read from the instance metadata service (IMDSv2). Spot instances of other clouds have other services.
"""

import contextlib
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from urllib.parse import urlsplit

NOTICE = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_SECONDS = 21600  # the longest that the service accepts
ATTEMPTS = 3  # without an answer before the warning
NO_SERVICE = (
    "spot: aws: the metadata service of EC2 does not answer at {address} ({reason}), so a spot interruption may end this node without "
    "a checkpoint. If this node is not an EC2 instance, remove `spot: aws` from the description. If it is a container on one, set "
    "HttpPutResponseHopLimit of the instance to 2."
)


def watch(
    on_notice: Callable[[datetime], None],
    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    every: float = 5.0,
    every_without_service: float = 30.0,
) -> threading.Event:
    """Poll the notice in a daemon thread. Return an event that ends the thread when it is set.

    `on_notice` is called at most once, in that thread, with the time (UTC) at which AWS ends the instance. `report` receives at most
    one warning that the service does not answer, and at most one line about a rebalance recommendation, which is only information.
    A poll is one or two requests to a service on the same host, each with a timeout of 2 s, and errors are otherwise silent.
    """
    ended = threading.Event()
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        report("spot: aws: the interruption notice is not watched, because AWS_EC2_METADATA_DISABLED=true is set on this node.")
        return ended
    try:
        service = Metadata(endpoint(os.environ))
    except ValueError as error:
        report(f"spot: aws: the interruption notice is not watched: {error}")
        return ended

    def poll() -> None:
        failures = 0
        has_rebalance = has_warned = False
        while not ended.is_set():
            try:
                time_of_end = parse_notice(service.get(NOTICE))
                failures = 0
            except (OSError, http.client.HTTPException) as error:
                time_of_end = None
                failures += 1
                if failures == ATTEMPTS and not has_warned:
                    has_warned = True
                    report(NO_SERVICE.format(address=service.address, reason=error or type(error).__name__))
            if time_of_end is not None and not ended.is_set():
                on_notice(time_of_end)
                return
            with contextlib.suppress(OSError, http.client.HTTPException):
                if not failures and not has_rebalance and service.get(REBALANCE) is not None:
                    has_rebalance = True
                    report("spot: aws: AWS recommends to replace this node, because an interruption has become more likely.")
            ended.wait(every_without_service if failures >= ATTEMPTS else every)

    threading.Thread(target=poll, name="spot", daemon=True).start()
    return ended


def endpoint(env: Mapping[str, str]) -> str:
    """Return the address of the metadata service. The variables are those of the AWS SDKs."""
    if given := env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        return given
    is_ipv6 = env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6"
    return "http://[fd00:ec2::254]" if is_ipv6 else "http://169.254.169.254"


def parse_notice(text: str | None) -> datetime | None:
    """Return the time at which the instance is ended, or None if the text is not a notice.

    A notice whose time cannot be read counts from now, because a checkpoint too many costs less than one too few.
    """
    with contextlib.suppress(ValueError):
        notice = json.loads(text or "")
        if isinstance(notice, dict) and notice.get("action"):
            with contextlib.suppress(ValueError, TypeError):
                return datetime.strptime(notice.get("time"), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
            return datetime.now(timezone.utc) + timedelta(minutes=2)
    return None


class Metadata:
    """A client of IMDSv2. http.client uses no proxy, which would answer for its own instance, and follows no redirect."""

    def __init__(self, address: str, timeout: float = 2.0):
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"AWS_EC2_METADATA_SERVICE_ENDPOINT={address} is not an address such as http://169.254.169.254.")
        self.address, self.timeout = address, timeout
        self.host, self.port, self.path = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self.token, self.token_ends = "", 0.0

    def get(self, path: str) -> str | None:
        """Return a document, or None if there is none (404). Raises OSError or HTTPException if the service does not answer."""
        status, text = self._get(path)
        if status == 401:  # the token is not valid any more, for example after the instance was stopped and started
            self.token_ends = 0.0
            status, text = self._get(path)
        if status not in (200, 404):
            raise OSError(f"HTTP status {status}")
        return text if status == 200 else None

    def _get(self, path: str) -> tuple[int, str]:
        if time.monotonic() >= self.token_ends:
            self._renew_token()
        return self._request("GET", path, {"X-aws-ec2-metadata-token": self.token})

    def _renew_token(self) -> None:
        status, text = self._request("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)})
        # Metadata services of other clouds have the same address and other answers.
        if status != 200 or not text.isascii() or not text.isprintable() or not text:
            raise OSError(f"HTTP status {status} instead of a token")
        self.token, self.token_ends = text, time.monotonic() + TOKEN_SECONDS / 2

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request(method, self.path + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(4096).decode("utf-8", "replace")
        finally:
            connection.close()
