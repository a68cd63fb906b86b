"""Jobs on Kubernetes: started, shown and stopped through the user's own `kubectl`, with the user's contexts and credentials."""

import json
import re
import secrets
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from accel_ddp.errors import STOPPED, UNSAVED, USER_ERROR, UserError
from accel_ddp.launch import job_commands
from accel_ddp.launch.description import Cluster, shown_value
from accel_ddp.launch.job_commands import REFUSALS, Job, Shell, follow_lines, launcher_words, shell_path, to_shell, words_of_job
from accel_ddp.nodes.run_secret import TOKEN
from accel_ddp.text import read_table
from accel_ddp.words import find_options, has_option

_TRAIN_JOB, _RUNTIME = "trainjob.trainer.kubeflow.org", "trainingruntime.trainer.kubeflow.org"
_CONTAINER, _INSTANCE = "node", "app.kubernetes.io/instance"  # as in manifest.yaml
_POLL_SECONDS = 2
_RUNTIME_SECONDS = 15  # until a webhook sees an object that exists
WAIT_SECONDS = 1800  # of the first pods for the others: pods are scheduled, and images are pulled, at different times
REPORT_SECONDS = 15  # the launcher ends its ranks this long before the kubelet ends it, and then has the time to report
TRAINER_PORT = 29500  # Kubeflow Trainer announces it in PET_MASTER_PORT
DEFAULTS = {
    "namespace": "default", "mount": "/data", "shared_memory": "16Gi", "grace_seconds": 300, "secrets": [], "labels": {}, "pod": {},
    "resources": {},
}  # fmt: skip


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
    """Follow later pods too, each by its own kubectl: one with a label repeats replaced pods, and ends if an image is late."""
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


# ---- manifests, with references to secrets and never their values


def render(cluster: Cluster, job: Job) -> str:
    """Return the manifests of a job as YAML with several documents, in the order in which they must be created."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_str(self, text: str) -> yaml.Node:
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, Dumper.represent_str)
    text = yaml.dump_all(make_objects(cluster, job), Dumper=Dumper, sort_keys=False, width=10_000, explicit_start=True)
    settings = read_settings(cluster)
    notes = [f"# {job.name}: {len(cluster.nodes)} nodes x {cluster.nodes[0].processes} processes, from {cluster.file.name}."]
    notes += ["# Needs Kubeflow Trainer v2 in the cluster."]
    notes += [f"# Needs the volume claim {settings['volume_claim']} (ReadWriteMany) in the namespace {settings['namespace']}."]
    notes += [f"# Needs the secret {secret} there. Its values are variables of the ranks." for secret in settings["secrets"]]
    return "\n".join(notes) + f"\n{text}"


def make_objects(cluster: Cluster, job: Job) -> list[dict[str, Any]]:
    """Return the objects of a job, in the order in which they must be created. Raises UserError if a job cannot run like this."""
    settings, node = read_settings(cluster), cluster.nodes[0]
    name = object_name(job.name, len(cluster.nodes))
    _refuse_secrets(cluster, settings)
    if not cluster.image:
        raise UserError(f"{cluster.file}: the key image is missing. Write the container image that has accel_ddp and the recipe.")
    sources = [{"secretRef": {"name": secret}} for secret in settings["secrets"]]
    if len(cluster.nodes) > 1:  # first: a secret of the user takes precedence
        sources.insert(0, {"secretRef": {"name": token_name(name), "optional": True}})
    variables = {
        **job_commands.node_environment(cluster, node),
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(settings["grace_seconds"] - REPORT_SECONDS),
    }
    own = {"cpu": settings.get("cpu"), "memory": settings.get("memory"), "nvidia.com/gpu": node.gpus}
    amounts = {key: str(amount) for key, amount in {**own, **settings["resources"]}.items() if amount}
    values = {
        **settings, "name": name, "mount": settings["mount"].rstrip("/"), "image": cluster.image, "nodes": len(cluster.nodes),
        "processes": node.processes, "restarts": cluster.restarts, "time_limit": cluster.time_limit,
        "command": _command(cluster, _place_on_volume(cluster, settings, job)),
        "env": [{"name": key, "value": _escape(value)} for key, value in variables.items()], "sources": sources or None,
        # Kubeflow Trainer sets numProcPerNode to 1 if there are limits without requests.
        "resources": {"requests": amounts, "limits": amounts} if amounts else None,
        "codes_of_stop": [STOPPED], "codes_of_end": sorted([1, USER_ERROR, UNSAVED]),
    }  # fmt: skip
    return _fill(read_table(Path(__file__).with_name("manifest.yaml")), values)


def _fill(part: Any, values: dict[str, Any]) -> Any:
    if isinstance(part, list):
        return [_fill(one, values) for one in part]
    if not isinstance(part, dict):
        return values[part[1:]] if isinstance(part, str) and part.startswith("$") else part
    filled: dict[str, Any] = {}
    for key, value in ((key, _fill(one, values)) for key, one in part.items()):
        filled |= value if key == "<<" else {} if value is None else {key: value}
    return filled


def object_name(name: str, num_nodes: int = 1) -> str:
    """Return the name of a job's objects: lower case, with `-` in the place of `_` and `.`, as own-model for own_model."""
    result = re.sub(r"[._]", "-", name.lower())
    # A pod is called NAME-node-0-INDEX-abcde. A label has at most 63 characters.
    longest = 63 - len(f"-node-0-{num_nodes - 1}-abcde")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", result) or len(result) > longest:
        raise UserError(
            f"the name {name!r} cannot be the name of a TrainJob in Kubernetes. It must begin with a letter, end with a letter or a "
            f"digit, and have at most {longest} characters. Choose another one with --name, or with the key name."
        )
    return result


def read_settings(cluster: Cluster) -> dict[str, Any]:
    """Return the keys of `kubernetes` with their defaults. Raises UserError for values that cannot work together."""
    settings = {**DEFAULTS, **cluster.kubernetes}
    wrong = lambda key, value, reason: fail(cluster, f"kubernetes.{key}", value, reason)
    if "volume_claim" not in settings:
        raise UserError(
            f"{cluster.file}: the key kubernetes.volume_claim is missing. Name a PersistentVolumeClaim with the access mode "
            "ReadWriteMany. It stores the run folder, from which a restarted pod continues."
        )
    if not settings["mount"].startswith("/") or settings["mount"].rstrip("/") in ("", "/dev/shm"):
        wrong("mount", settings["mount"], "must be an absolute path in the container, for example /data")
    for key in ("shared_memory", "memory"):
        if key in settings and not re.fullmatch(r"\d+(\.\d+)?([KMGT]i?|k)?", settings[key]):
            wrong(key, settings[key], "must be an amount of memory, for example 64Gi")
    if settings["grace_seconds"] < 2 * REPORT_SECONDS:
        wrong("grace_seconds", settings["grace_seconds"], f"is too short for a checkpoint. Use at least {2 * REPORT_SECONDS}")
    own = {"containers", "restartPolicy", "terminationGracePeriodSeconds", "volumes", "subdomain", "shareProcessNamespace"}
    if taken := sorted(own & settings["pod"].keys()):
        wrong("pod", ", ".join(taken), "is set by accel-ddp. Print the manifest with --print and change it there")
    if cluster.main_port != TRAINER_PORT:
        reason = f"has no effect on a TrainJob. Kubeflow Trainer uses {TRAINER_PORT}. Remove it"
        fail(cluster, "main_port", cluster.main_port, reason)
    if reserved := [name for name in cluster.nodes[0].env if name.startswith("PET_")]:
        fail(cluster, "env", reserved[0], "is reserved for torchrun and Kubeflow Trainer. Remove it")
    return settings


def fail(cluster: Cluster, key: str, value: object, reason: str) -> NoReturn:
    raise UserError(f"{cluster.file}: {key} {value}: {reason}.")


def _refuse_secrets(cluster: Cluster, settings: dict[str, Any]) -> None:
    """Raise UserError if values of secrets would be part of a manifest, which everybody with access to the namespace can read."""
    secret, namespace = f"{object_name(cluster.name or 'training')}-env", shlex.quote(settings["namespace"])
    found = [(f"env_file {file}: its values", "them", f"env-file={shlex.quote(file)}") for file in cluster.env_files]
    names = [name for name, value in cluster.nodes[0].env.items() if shown_value(name, value) == "***"]
    found += [(f"env.{name}: its value", "it", f"literal={name}=...") for name in names]
    for what, pronoun, source in found:
        raise UserError(
            f"{cluster.file}: {what} would be readable in the manifest. Store {pronoun} as a secret instead, and remove the key. "
            f"Run: kubectl --namespace {namespace} create secret generic {secret} --from-{source}  "
            f"Then write `kubernetes: {{secrets: [{secret}]}}`."
        )


def _place_on_volume(cluster: Cluster, settings: dict[str, Any], job: Job) -> Job:
    mount = settings["mount"].rstrip("/")
    folder, options = job.run_folder, list(job.options)
    if not folder.startswith("/"):
        folder = f"{mount}/{folder}"
        for option in find_options(options, ["output_dir"]):
            options[option.end - 1] = options[option.end - 1].removesuffix(option.value or "") + folder
    if not f"{folder}/".startswith(f"{mount}/") or {"..", "~"} & set(Path(folder).parts):
        raise UserError(
            f"the output folder {job.run_folder} is not on the volume, which is mounted at {mount}. A restarted pod would "
            f"not find its checkpoints. Use a relative path, or one below {mount}, for the key output or for --output_dir."
        )
    if job_commands.uses_package(job.script):
        if not has_option(options, "resume"):
            options += ["--resume"]
        if not has_option(options, "preflight_wait") and len(cluster.nodes) > 1:
            options += ["--preflight_wait", str(WAIT_SECONDS)]
    return replace(job, run_folder=folder, options=tuple(options))


def token_name(name: str) -> str:
    """Return the name of the Secret by which the pods of a job recognize each other. `launch` creates it; a job runs without it too."""
    return f"accel-ddp-{name}-token"


def _command(cluster: Cluster, job: Job) -> list[str]:
    """Return the command of a container. It checks the image, and then replaces the shell by the launcher, which gets SIGTERM."""
    rank, address, port = map(Shell, ("$PET_NODE_RANK", "$PET_MASTER_ADDR", "$PET_MASTER_PORT"))
    words = launcher_words(cluster, job, node_rank=rank, address=address, port=port)
    files = [file for file in (job.script, job_commands.used_config(cluster)) if file]
    folder = cluster.nodes[0].folder
    enter = (
        [f"cd {shell_path(folder)} || fail {shlex.quote(f'has no folder {folder}. Change the key folder.')}"] if folder else []
    )
    lines = [
        f"image={shlex.quote(cluster.image)}",
        'fail() { echo "error: the image $image $*" >&2; exit 2; }',
        f"for program in accel-ddp {words[0]}; do",
        '  command -v "$program" > /dev/null || fail "does not contain the program $program. Install accel_ddp in the image."',
        "done",
        *enter,
        f"for file in {to_shell(files)}; do",
        '  [ -f "$file" ] || fail "has no file $file in the folder $PWD. Copy it into the image, or change the key folder."',
        "done",
        f"exec {job_commands.wrap(words)}",
    ]
    return ["/bin/sh", "-c", _escape("\n".join(lines) + "\n")]


def _escape(text: str) -> str:
    """Return a text that Kubernetes, which replaces $(NAME) and $$ in commands and variables, turns into `text`."""
    return re.sub(r"\$(?=[$(])", "$$", text)
