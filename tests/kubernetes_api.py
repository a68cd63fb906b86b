"""An emulated API server of Kubernetes, to which a real kubectl submits. It stores objects and has no controllers: no pod runs.

Unknown fields are refused, as by a real server and a kubectl since 1.25. The types are those of kubeflow-trainer-api.
"""

import base64
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PROTOBUF = b"k8s\0"  # an object in this format begins with it
TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
KINDS = {
    "/api/v1": {"pods": "Pod", "secrets": "Secret", "persistentvolumeclaims": "PersistentVolumeClaim"},
    TRAINER: {"trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime"},
}


def unknown_fields(given: Any, known: Any, path: str = "") -> list[str]:
    """Return the paths of fields that are in `given` and not in `known`."""
    if isinstance(given, dict):
        known = known if isinstance(known, dict) else {}
        inner = [
            unknown_fields(value, known[key], f"{path}.{key}") if key in known else [f"{path}.{key}"]
            for key, value in given.items()
        ]
        return [one for found in inner for one in found]
    if isinstance(given, list):
        pairs = zip(given, known if isinstance(known, list) else [None] * len(given))
        return [one for number, pair in enumerate(pairs) for one in unknown_fields(*pair, f"{path}[{number}]")]
    return []


def typed_errors(one: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object according to the typed models of Kubeflow Trainer 2.3: wrong types and unknown fields."""
    from kubeflow_trainer_api import models
    from pydantic import ValidationError

    names = {"TrainJob": "TrainerV1alpha1TrainJob", "TrainingRuntime": "TrainerV1alpha1TrainingRuntime"}
    if one["kind"] not in names:
        return []
    try:
        read = getattr(models, names[one["kind"]]).from_dict(one)
    except (ValidationError, ValueError) as error:
        return [str(error)]
    return [f'unknown field "{path[1:]}"' for path in unknown_fields(one, json.loads(read.to_json()))]


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each field of a protobuf message. Numbers are left out."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value, at

    at = 0
    while at < len(message):
        tag, at = varint(at)
        size, at = varint(at)
        if tag & 7 == 2:
            yield tag >> 3, message[at : at + size]
            at += size


def read_secret(body: bytes) -> dict[str, Any]:
    """Return the Secret that `kubectl create secret` sends. kubectl 1.20 sends JSON, and kubectl 1.32 protobuf."""
    kind, secret = [content for _, content in fields(body.removeprefix(PROTOBUF))][:2]
    assert dict(fields(kind)) == {1: b"v1", 2: b"Secret"}
    names = [dict(fields(content))[1].decode() for number, content in fields(secret) if number == 1]
    data = [dict(fields(content)) for number, content in fields(secret) if number == 2]
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": names[0]},
        "data": {one[1].decode(): base64.b64encode(one[2]).decode() for one in data},
    }  # fmt: skip


class Api:
    """The server and its objects. `objects` maps (folder, plural, namespace, name) to an object."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        self.requests: list[str] = []
        self.refusals: dict[str, tuple[int, str, str]] = {}  # "POST trainjobs" -> (code, reason, message)
        self.missing: set[str] = set()  # groups that are not installed
        self.logs: dict[str, str] = {}  # of pods
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def handle_method(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                api.requests.append(f"{self.command} {self.path}")
                code, answer = api.answer(self.command, urlsplit(self.path), body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json" if isinstance(answer, dict) else "text/plain")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):
                    self.wfile.write(content)

            do_GET = do_POST = do_DELETE = handle_method

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, plural: str, one: dict[str, Any], namespace: str = "default") -> None:
        """Store an object as a controller or another user would."""
        folder = next(folder for folder, kinds in KINDS.items() if plural in kinds)
        one = {"apiVersion": folder.removeprefix("/apis/").removeprefix("/api/"), "kind": KINDS[folder][plural], **one}
        self.objects[folder, plural, namespace, one["metadata"]["name"]] = one

    def wait_for(self, path: str, seconds: float = 180) -> None:
        """Wait until a request has come whose path contains `path`."""
        deadline = time.monotonic() + seconds
        while not any(path in request for request in list(self.requests)):
            assert time.monotonic() < deadline, f"no request for {path}: {self.requests}"
            time.sleep(0.05)

    def names(self) -> list[str]:
        """Return all objects that jobs consist of, as KIND/NAME."""
        kinds = ("TrainJob", "TrainingRuntime", "Job", "Service")
        return [f"{one['kind']}/{one['metadata']['name']}" for one in self.objects.values() if one["kind"] in kinds]

    def answer(self, method: str, url: Any, body: bytes) -> tuple[int, dict[str, Any] | bytes]:
        """Return the code and the content of a response."""
        kinds = {folder: plurals for folder, plurals in KINDS.items() if folder not in self.missing}
        if url.path == "/openapi/v2":  # kubectl 1.20 reads it as protobuf: a document without definitions
            return 200, b"\x0a\x032.0"
        if url.path == "/version":
            return 200, {"major": "1", "minor": "34"}
        if url.path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if url.path == "/apis":
            versions = [
                {"groupVersion": folder[6:], "version": folder.rpartition("/")[2]} for folder in kinds if folder != "/api/v1"
            ]
            groups = [
                {"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one} for one in versions
            ]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if url.path in kinds:
            verbs = ["create", "delete", "get", "list", "watch"]
            resources = [{"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
                         for name, kind in kinds[url.path].items()]  # fmt: skip
            version = url.path.removeprefix("/apis/").removeprefix("/api/")
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        found = re.fullmatch(r"(/api/v1|/apis/[^/]+/[^/]+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?", url.path)
        if not found or found[1] not in kinds or found[3] not in kinds[found[1]]:
            return _status(404, "NotFound", "the server could not find the requested resource")
        folder, namespace, plural, name, is_log = found.groups()
        if refusal := self.refusals.get(f"{method} {plural}"):
            return _status(*refusal)
        if is_log:
            return 200, self.logs[name].encode()
        return self.handle(method, (folder, plural, namespace, name), parse_qs(url.query), body)

    def handle(self, method: str, key: tuple, query: dict[str, list[str]], body: bytes) -> tuple[int, dict[str, Any]]:
        folder, plural, _, name = key
        if method == "POST":
            one = read_secret(body) if body.startswith(PROTOBUF) else json.loads(body)
            name = one["metadata"]["name"]
            if key[:3] + (name,) in self.objects:
                return _status(409, "AlreadyExists", f'{plural} "{name}" already exists')
            if errors := typed_errors(one):
                return _status(
                    400, "BadRequest", f"{one['kind']} in version {one['apiVersion']}: strict decoding error: {errors[0]}"
                )
            self.objects[key[:3] + (name,)] = one
            return 201, one
        if not name:
            wanted = [pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair]
            exact = query.get("fieldSelector", ["metadata.name="])[0].removeprefix("metadata.name=")
            listed = [
                one
                for other, one in self.objects.items()
                if other[:3] == key[:3]
                and all(one["metadata"].get("labels", {}).get(label) == value for label, value in wanted)
                and exact in ("", one["metadata"]["name"])
            ]
            kind = f"{KINDS[folder][plural]}List"
            version = folder.removeprefix("/apis/").removeprefix("/api/")
            return 200, {"kind": kind, "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": listed}
        if key not in self.objects:
            return _status(404, "NotFound", f'{plural} "{name}" not found')
        if method == "DELETE":
            return 200, self.objects.pop(key)
        return 200, self.objects[key]


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    details = {"causes": [{"message": message, "field": "spec"}]} if reason == "Invalid" else {}  # kubectl prints these
    return code, {**status, "message": message, "reason": reason, "code": code, "details": details}
