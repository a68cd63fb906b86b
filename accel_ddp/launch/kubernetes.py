"""Jobs on Kubernetes: started, shown and stopped through the user's own `kubectl`, with the user's contexts and credentials."""

import json
import re
import secrets
import subprocess
import sys
import time
from typing import Any

from accel_ddp.errors import STOPPED, UserError
from accel_ddp.launch.description import Cluster
from accel_ddp.launch.job_commands import REFUSALS, Job, follow_lines, words_of_job
from accel_ddp.launch.manifests import fail, make_objects, object_name, read_settings, render, token_name
from accel_ddp.nodes.run_secret import TOKEN

_TRAIN_JOB, _RUNTIME = "trainjob.trainer.kubeflow.org", "trainingruntime.trainer.kubeflow.org"
_CONTAINER, _INSTANCE = "node", "app.kubernetes.io/instance"  # as in manifest.yaml
_POLL_SECONDS = 2
_RUNTIME_SECONDS = 15  # until a webhook sees an object that exists


def launch(cluster: Cluster, job: Job) -> int:
    """Create the objects of a job and print how to follow and stop the job. If one cannot be created, none remains."""
    settings, manifest = read_settings(cluster), render(cluster, job)
    name, kubectl = object_name(job.name, len(cluster.nodes)), _Kubectl(cluster)
    if found := kubectl.run("get", "-f", "-", "--ignore-not-found", "-o", "name", text=manifest).split():
        one = kubectl.get(f"{_TRAIN_JOB}/{name}")
        raise UserError(
            f"{found[-1]} exists in the namespace {settings['namespace']} ({_state(one) if one else 'without a job'}). `accel-ddp stop "
            f"{words_of_job(cluster, job)}` deletes it, and keeps its checkpoints. Or choose another name with --name."
        )
    _check_volume_and_secrets(cluster, settings, kubectl)
    created: list[str] = []
    create = lambda one: kubectl.start("create", "-f", "-", "-o", "name", text=json.dumps(one))
    token = {
        "metadata": {"name": token_name(name), "namespace": settings["namespace"]},
        "stringData": {TOKEN: secrets.token_hex(32)},
    }
    kubectl.start("delete", f"secret/{token_name(name)}", "--ignore-not-found")  # of an earlier job
    done = create({"apiVersion": "v1", "kind": "Secret", **token}) if len(cluster.nodes) > 1 else None
    if done and done.returncode:
        reason = kubectl.explain("create", done.stderr)
        print(f"note: without the secret {token_name(name)}, the pods exchange keys when they start: {reason}", file=sys.stderr)
    created += done.stdout.split() if done else []
    for one in make_objects(cluster, job):
        deadline = time.monotonic() + _RUNTIME_SECONDS
        # The webhook of Kubeflow Trainer may not see a TrainingRuntime yet that was created a moment before.
        while "must be created before the TrainJob" in (done := create(one)).stderr and time.monotonic() < deadline:
            time.sleep(0.5)
        if done.returncode:
            # Only what this command has created is deleted. An object of the same name may belong to somebody else.
            for name_of_created in created:
                kubectl.start("delete", name_of_created, "--ignore-not-found", "--wait=false")
            raise UserError(kubectl.explain("create", done.stderr))
        created += done.stdout.split()
    print(f"submitted: TrainJob {name} in the namespace {settings['namespace']}")
    print("\n".join(follow_lines(cluster, job)))
    return 0


def _check_volume_and_secrets(cluster: Cluster, settings: dict[str, Any], kubectl: "_Kubectl") -> None:
    """Raise UserError if pods would wait for ever for a volume or a secret. Users who may not read these are not stopped."""
    claim = kubectl.get(f"persistentvolumeclaim/{settings['volume_claim']}", may_be_forbidden=True)
    namespace = f"in the namespace {settings['namespace']}"
    if claim is None:
        fail(cluster, "kubernetes.volume_claim", settings["volume_claim"], f"there is no such PersistentVolumeClaim {namespace}")
    modes = (claim or {}).get("spec", {}).get("accessModes", ["ReadWriteMany"])
    if len(cluster.nodes) > 1 and "ReadWriteMany" not in modes:
        reason = f"its access modes are {', '.join(modes)}. Several nodes need ReadWriteMany"
        fail(cluster, "kubernetes.volume_claim", settings["volume_claim"], reason)
    for secret in settings["secrets"]:
        if kubectl.get(f"secret/{secret}", may_be_forbidden=True, output="name") is None:
            create = f"kubectl --namespace {settings['namespace']} create secret generic {secret} --from-env-file=FILE"
            fail(cluster, "kubernetes.secrets", secret, f"there is no such secret {namespace}. Create it: {create}")


def status(cluster: Cluster, job: Job | None) -> int:
    settings, kubectl = read_settings(cluster), _Kubectl(cluster)
    if job is None:
        found = json.loads(kubectl.run("get", _TRAIN_JOB, "-l", "app.kubernetes.io/name=accel-ddp", "-o", "json"))["items"]
        for one in found:
            print(f"TrainJob {one['metadata']['name']}: {_state(one)}")
        if not found:
            print(f"no jobs in the namespace {settings['namespace']}")
        return 0
    one = kubectl.find(job)
    print(f"TrainJob {one['metadata']['name']} in the namespace {settings['namespace']}: {_state(one)}")
    for pod in kubectl.pods(one):
        state, message = _pod_state(pod)
        machine = pod.get("spec", {}).get("nodeName", "no machine yet")
        print(f"node {_index(pod)}: pod {pod['metadata']['name']} on {machine}: {state}")
        for line in message.strip().splitlines()[-3:]:
            print(f"    {line}")
    return 0


def logs(cluster: Cluster, job: Job, follow: bool, lines: int) -> int:
    """Print the output of all pods of a job, each line with the name of its pod. With `follow`, return the exit code of the job.

    Pods that are started later, also those that replace others, are followed too. Each pod has a kubectl of its own: with a label,
    kubectl would print the logs of replaced pods again, and end if a single container waits for its image.
    """
    kubectl = _Kubectl(cluster)
    one: dict[str, Any] | None = kubectl.find(job)
    readers: dict[str, subprocess.Popen[bytes]] = {}
    waiting_for = ""
    try:
        while True:
            pods = kubectl.pods(one) if one else []
            for pod in filter(_has_started, pods):
                name = pod["metadata"]["name"]
                if name not in readers:
                    words = ["logs", f"pod/{name}", "-c", _CONTAINER, "--prefix", f"--tail={lines}"]
                    readers[name] = subprocess.Popen([*kubectl.words, *words, *(["-f"] if follow else [])])
            are_read = all(reader.poll() is not None for reader in readers.values())
            if not follow or one is None or (_state(one).startswith(("Complete", "Failed")) and are_read):
                break
            late = [pod for pod in pods if not _has_started(pod)]
            texts = [f"pod {pod['metadata']['name']}: {': '.join(filter(None, _pod_state(pod)))}" for pod in late]
            text = ", ".join(texts) if pods else f"{job.name} has no pods yet"
            if text and text != waiting_for:
                print(f"waiting: {text}", file=sys.stderr, flush=True)
            waiting_for = text
            time.sleep(_POLL_SECONDS)
            one = kubectl.get(kubectl.name_of(job))
        codes = [reader.wait() for reader in readers.values()]
    finally:
        for reader in readers.values():
            reader.terminate()
    return _report_end(job, one, pods) if follow else max(codes, default=0)


def _report_end(job: Job, one: dict[str, Any] | None, pods: list[dict[str, Any]]) -> int:
    if one is None:
        print(f"{job.name} was deleted", file=sys.stderr)
        return STOPPED
    if _state(one).startswith("Complete"):
        return 0
    print(f"{job.name}: {_state(one)}", file=sys.stderr)
    ends = sorted((_end(pod) for pod in pods), key=lambda end: end.get("finishedAt") or "")
    return next((end["exitCode"] for end in ends if end.get("exitCode")), 1)


def stop(cluster: Cluster, job: Job, now: bool) -> int:
    """Delete a job. Its ranks save a checkpoint within the grace period. Return after the pods have ended."""
    settings, kubectl = read_settings(cluster), _Kubectl(cluster)
    resource, seconds = kubectl.name_of(job), settings["grace_seconds"]
    name = resource.partition("/")[2]
    runtime = f"{_RUNTIME}/{name}"
    if kubectl.get(runtime) is None:  # it remains if an earlier `stop` was interrupted
        kubectl.find(job)
    if now:
        kubectl.run("delete", resource, "--ignore-not-found", "--wait=false")
        kubectl.run("delete", "pods", "-l", f"{_INSTANCE}={name}", "--grace-period=1", timeout=0)
    else:
        print(f"stopping {resource}: its ranks have {seconds} s to save a checkpoint", flush=True)
        # A deletion in the foreground ends after that of the pods.
        kubectl.run("delete", resource, "--ignore-not-found", "--cascade=foreground", f"--timeout={seconds + 60}s", timeout=0)
    # The job goes first: Kubernetes keeps a TrainingRuntime that a TrainJob uses.
    kubectl.run("delete", runtime, "--ignore-not-found")
    kubectl.start("delete", f"secret/{token_name(name)}", "--ignore-not-found")  # users who may not do this have created none
    print(f"stopped: {resource}")
    return 0


def _container_states(pod: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    states = [one.get("state", {}) for one in pod.get("status", {}).get("containerStatuses", [])]
    return [state[kind] for state in states for kind in kinds if kind in state]


def _has_started(pod: dict[str, Any]) -> bool:
    return bool(_container_states(pod, "running", "terminated"))


def _state(found: dict[str, Any] | None) -> str:
    conditions = [one for one in (found or {}).get("status", {}).get("conditions", []) if one.get("status") == "True"]
    ends = [one for one in conditions if one["type"] in ("Complete", "Failed")]
    if not (shown := (ends or conditions)[-1:]):
        return "not finished"
    reason = ": ".join(filter(None, [shown[0].get("reason"), shown[0].get("message")]))
    return shown[0]["type"] + (f" ({reason})" if reason else "")


def _index(pod: dict[str, Any]) -> int:
    found = {**pod["metadata"].get("labels", {}), **pod["metadata"].get("annotations", {})}
    return int(found.get("batch.kubernetes.io/job-completion-index", 0))


def _end(pod: dict[str, Any]) -> dict[str, Any]:
    return next(iter(_container_states(pod, "terminated")), {})


def _pod_state(pod: dict[str, Any]) -> tuple[str, str]:
    status = pod.get("status", {})
    state, message = status.get("phase", "Unknown"), status.get("message", "")
    if end := _end(pod):
        reason = end.get("message") or end.get("reason", "")
        return f"{state}, exit code {end.get('exitCode')}", reason if end.get("exitCode") else ""
    for waiting in _container_states(pod, "waiting"):
        return f"{state}, {waiting.get('reason', 'waiting')}", waiting.get("message", "")
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message", "")
    return state, message


class _Kubectl:
    """The user's kubectl. Its first request fails within 10 s; other commands make many requests if there is no answer."""

    def __init__(self, cluster: Cluster):
        settings = read_settings(cluster)
        self.cluster, self.namespace = cluster, settings["namespace"]
        context = [f"--context={settings['context']}"] if "context" in settings else []
        self.words = ["kubectl", *context, f"--namespace={self.namespace}"]
        self.run("get", "--raw=/version", timeout=10)

    def start(self, *words: str, text: str = "", timeout: int = 15) -> subprocess.CompletedProcess[str]:
        limit = [f"--request-timeout={timeout}s"] if timeout else []
        try:
            return subprocess.run([*self.words, *limit, *words], input=text, capture_output=True, text=True)
        except FileNotFoundError:
            raise UserError(
                "kubectl is not installed, or not on PATH. Install it (https://kubernetes.io/docs/tasks/tools/), or write the "
                "manifest to a file with --print."
            ) from None

    def run(self, *words: str, text: str = "", timeout: int = 15) -> str:
        done = self.start(*words, text=text, timeout=timeout)
        if done.returncode:
            raise UserError(self.explain(words[0], done.stderr))
        return done.stdout

    def get(self, resource: str, may_be_forbidden: bool = False, output: str = "json") -> dict[str, Any] | None:
        """Return an object, or None if it does not exist. An object that may not be read is {} if `may_be_forbidden`."""
        try:
            text = self.run("get", resource, "--ignore-not-found", "-o", output)
        except UserError as error:
            if may_be_forbidden and "forbidden" in str(error).lower():
                return {}
            raise
        if not text.strip():
            return None
        return json.loads(text) if output == "json" else {}

    def name_of(self, job: Job) -> str:
        return f"{_TRAIN_JOB}/{object_name(job.name, len(self.cluster.nodes))}"

    def find(self, job: Job) -> dict[str, Any]:
        if (found := self.get(self.name_of(job))) is None:
            raise UserError(
                f"there is no {self.name_of(job)} in the namespace {self.namespace}. Check --name and {self.cluster.file}."
            )
        return found

    def pods(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the newest pod of each node of a TrainJob, in the order of the nodes. Pods that were replaced remain."""
        text = self.run("get", "pods", "-l", f"{_INSTANCE}={one['metadata']['name']}", "-o", "json")
        oldest_first = sorted(json.loads(text)["items"], key=lambda pod: pod["metadata"].get("creationTimestamp") or "")
        newest = {_index(pod): pod for pod in oldest_first}
        return [newest[index] for index in sorted(newest)]

    def explain(self, command: str, error: str) -> str:
        lines = list(dict.fromkeys(line.strip() for line in error.splitlines() if line.strip()))
        shown = " ".join(lines)[-600:] or "it printed nothing"
        fits = lambda pattern: re.search(pattern, error.strip(), re.IGNORECASE | re.DOTALL)
        found = next((text for pattern, text in REFUSALS["kubectl"].items() if fits(pattern)), None)
        if found is None:
            return f"kubectl {command} failed, the cluster has refused it: {shown}"
        return (
            f"kubectl {command} failed: {found.format(file=self.cluster.file, namespace=self.namespace)} kubectl printed: {shown}"
        )
