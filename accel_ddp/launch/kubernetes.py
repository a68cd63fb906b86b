"""Starts, shows and stops jobs on Kubernetes through the user's own `kubectl`, as ssh jobs go through the system's `ssh`.

Contexts, credentials and proxies are therefore the user's.
"""

import json
import re
import subprocess
import sys
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.launch.commands import Job
from accel_ddp.launch.description import Cluster
from accel_ddp.launch.manifests import CONTAINER, INSTANCE, TRAINER, fail, object_name, read_settings, render


def launch(cluster: Cluster, job: Job) -> int:
    """Create the objects of a job and print how to follow and stop the job. If one cannot be created, none remains."""
    settings, manifest = read_settings(cluster), render(cluster, job)
    kind, name = settings["kind"], object_name(job.name, len(cluster.nodes), settings["kind"])
    kubectl = _Kubectl(cluster, settings)
    if found := kubectl.run("get", "-f", "-", "--ignore-not-found", "-o", "name", text=manifest).split():
        state = f" ({_state(kubectl.get(found[-1]))})" if len(found) > 1 else ""
        raise UserError(
            f"{found[-1]} exists in the namespace {settings['namespace']}{state}. `accel-ddp stop {cluster.file} --name {job.name}` "
            "deletes it, and keeps its checkpoints. Or choose another name with --name."
        )
    _check_volume_and_secrets(cluster, settings, kubectl)
    try:
        kubectl.run("create", "-f", "-", "-o", "name", text=manifest)
    except UserError:
        kubectl.run("delete", "-f", "-", "--ignore-not-found", "--wait=false", text=manifest, check=False)
        raise
    follow = f"{cluster.file} --name {job.name}"
    print(f"submitted: {kind} {name} in the namespace {settings['namespace']}")
    print(f"  status:  accel-ddp status {follow}\n  output:  accel-ddp logs -f {follow}\n  stop:    accel-ddp stop {follow}")
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


def status(cluster: Cluster, name: str) -> int:
    """Print the state of a job and of its pods, and the last message of each pod that failed."""
    settings, kubectl, resource = _find(cluster, name)
    found = kubectl.get(resource)
    if found is None:
        raise _not_found(cluster, settings, resource)
    print(f"{settings['kind']} {found['metadata']['name']} in the namespace {settings['namespace']}: {_state(found)}")
    pods = json.loads(kubectl.run("get", "pods", "-l", f"{INSTANCE}={found['metadata']['name']}", "-o", "json"))["items"]
    for pod in sorted(pods, key=_index):
        state, message = _pod_state(pod)
        print(
            f"node {_index(pod)}: pod {pod['metadata']['name']} on {pod.get('spec', {}).get('nodeName', 'no machine yet')}: {state}"
        )
        for line in message.strip().splitlines()[-3:]:
            print(f"    {line}")
    return 0


def logs(cluster: Cluster, name: str, follow: bool = False) -> int:
    """Print the output of all pods of a job, each line with the name of its pod. Return the exit code of kubectl."""
    settings, kubectl, resource = _find(cluster, name)
    if kubectl.get(resource) is None:
        raise _not_found(cluster, settings, resource)
    label = f"{INSTANCE}={resource.partition('/')[2]}"
    if not kubectl.run("get", "pods", "-l", label, "-o", "name").split():
        raise UserError(f"{resource} has no pods yet. Try again, or see `accel-ddp status {cluster.file} --name {name}`.")
    words = ["logs", "-l", label, "-c", CONTAINER, "--prefix", "--tail=-1", f"--max-log-requests={max(5, len(cluster.nodes))}"]
    return kubectl.show(*words, *(["-f"] if follow else []))


def stop(cluster: Cluster, name: str) -> int:
    """Delete a job. Its ranks save a checkpoint within the grace period. Return after the pods have ended."""
    settings, kubectl, resource = _find(cluster, name)
    if kubectl.get(resource) is None:
        raise _not_found(cluster, settings, resource)
    name = resource.partition("/")[2]
    print(f"stopping {resource}: its ranks have {settings['grace_seconds']} s to save a checkpoint", flush=True)
    # The job goes first: Kubernetes keeps a TrainingRuntime that a TrainJob uses, and pods need the Service until they end.
    wait = ["--cascade=foreground", f"--timeout={settings['grace_seconds'] + 60}s"]
    kubectl.run("delete", resource, "--ignore-not-found", *wait, timeout=0)
    other = "service" if settings["kind"] == "Job" else f"trainingruntime.{TRAINER}"
    kubectl.run("delete", f"{other}/{name}", "--ignore-not-found")
    print("stopped")
    return 0


def _find(cluster: Cluster, name: str) -> tuple[dict[str, Any], "_Kubectl", str]:
    """Return the settings, kubectl, and TYPE/NAME of a job."""
    settings = read_settings(cluster)
    types = {"TrainJob": f"trainjob.{TRAINER}", "Job": "job.batch"}
    name = object_name(name, len(cluster.nodes), settings["kind"])
    return settings, _Kubectl(cluster, settings), f"{types[settings['kind']]}/{name}"


def _not_found(cluster: Cluster, settings: dict[str, Any], resource: str) -> UserError:
    return UserError(f"there is no {resource} in the namespace {settings['namespace']}. Check --name and {cluster.file}.")


def _state(found: dict[str, Any] | None) -> str:
    """Return the state of a Job or TrainJob: its last condition that is true."""
    conditions = [one for one in (found or {}).get("status", {}).get("conditions", []) if one.get("status") == "True"]
    ends = [one for one in conditions if one["type"] in ("Complete", "Failed")]
    if not (shown := (ends or conditions)[-1:]):
        return "not finished"
    reason = ": ".join(filter(None, [shown[0].get("reason"), shown[0].get("message")]))
    return shown[0]["type"] + (f" ({reason})" if reason else "")


def _index(pod: dict[str, Any]) -> int:
    metadata = pod.get("metadata", {})
    found = {**metadata.get("labels", {}), **metadata.get("annotations", {})}
    return int(found.get("batch.kubernetes.io/job-completion-index", 0))


def _pod_state(pod: dict[str, Any]) -> tuple[str, str]:
    """Return the state of a pod and the message that explains it."""
    status = pod.get("status", {})
    state, message = status.get("phase", "Unknown"), status.get("message", "")
    for container in status.get("containerStatuses", []):
        if ended := container.get("state", {}).get("terminated"):
            return f"{state}, exit code {ended.get('exitCode')}", ended.get("message", "") or ended.get("reason", "")
        if waiting := container.get("state", {}).get("waiting"):
            return f"{state}, {waiting.get('reason', 'waiting')}", waiting.get("message", "")
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message", "")
    return state, message


class _Kubectl:
    """The user's kubectl, in the context and namespace of a description."""

    def __init__(self, cluster: Cluster, settings: dict[str, Any]):
        self.cluster, self.namespace = cluster, settings["namespace"]
        context = [f"--context={settings['context']}"] if "context" in settings else []
        self.words = ["kubectl", *context, f"--namespace={self.namespace}"]

    def run(self, *words: str, text: str = "", check: bool = True, timeout: int = 30) -> str:
        """Return the output of a kubectl command with `text` as its input. Raises UserError with the reason why it failed."""
        limit = [f"--request-timeout={timeout}s"] if timeout else []
        try:
            done = subprocess.run([*self.words, *limit, *words], input=text, capture_output=True, text=True)
        except FileNotFoundError:
            raise _missing_kubectl() from None
        if done.returncode and check:
            raise UserError(self._explain(words[0], done.stderr))
        return done.stdout

    def show(self, *words: str) -> int:
        """Run kubectl with our own output. Return its exit code."""
        sys.stdout.flush()
        try:
            return subprocess.run([*self.words, *words]).returncode
        except FileNotFoundError:
            raise _missing_kubectl() from None

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

    def _explain(self, command: str, error: str) -> str:
        lines = list(dict.fromkeys(line.strip() for line in error.splitlines() if line.strip()))
        shown = " ".join(lines)[-600:] or "it printed nothing"
        where = f"kubectl {command} failed"
        if "no matches for kind" in error or "the server doesn't have a resource type" in error:
            return (
                f"{where}: the cluster has no Kubeflow Trainer (TrainJob, TrainingRuntime). Install it, "
                "https://www.kubeflow.org/docs/components/trainer/operator-guides/installation/ describes how, or write "
                f"`kubernetes: {{kind: Job}}` in {self.cluster.file}, which needs nothing. kubectl printed: {shown}"
            )
        unreachable = r"was refused|connection refused|no such host|i/o timeout|timed out|deadline exceeded|unable to connect"
        if re.search(unreachable, error, re.IGNORECASE):
            return f"{where}: the Kubernetes API server cannot be reached. Check `kubectl cluster-info`. kubectl printed: {shown}"
        if re.search(r"AlreadyExists|already exists", error):
            return f"{where}: a job of this name exists. Choose another name with --name. kubectl printed: {shown}"
        if re.search(r"Unauthorized|must be logged in|provide credentials", error):
            return f"{where}: the API server does not accept your credentials. Check `kubectl config current-context`. {shown}"
        if re.search(r"context .* does not exist|no context exists", error):
            return f"{where}: {self.cluster.file}: kubernetes.context is not a context of kubectl. {shown}"
        if re.search("forbidden", error, re.IGNORECASE):
            return f"{where}: you may not do this in the namespace {self.namespace}. kubectl printed: {shown}"
        return f"{where}, the cluster has refused it: {shown}"


def _missing_kubectl() -> UserError:
    return UserError(
        "kubectl is not installed, or not on PATH. Install it (https://kubernetes.io/docs/tasks/tools/), or write the manifest to a "
        "file with --print."
    )
