"""The manifests of a job on Kubernetes: a TrainJob of Kubeflow Trainer, and the TrainingRuntime that it uses.

Manifests contain references to secrets, and never their values.
"""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from accel_ddp.errors import STOPPED, UNSAVED, USER_ERROR, UserError
from accel_ddp.launch import job_commands
from accel_ddp.launch.description import Cluster, shown_value
from accel_ddp.launch.job_commands import Job, Shell, launcher_words, shell_path, to_shell, used_config, uses_package
from accel_ddp.words import find_options, has_option

TRAINER = "trainer.kubeflow.org"
CONTAINER = "node"  # Kubeflow Trainer sets variables and the command of the container with this name
INSTANCE = "app.kubernetes.io/instance"
# Pods are scheduled, and images are pulled, at different times. The launchers of the first pods wait for the others.
WAIT_SECONDS = 1800
# The launcher ends its ranks this long before the kubelet ends the launcher, which then has the time to report.
REPORT_SECONDS = 15
# The port that Kubeflow Trainer announces in PET_MASTER_PORT.
TRAINER_PORT = 29500
DEFAULTS = {
    "namespace": "default", "mount": "/data", "shared_memory": "16Gi", "grace_seconds": 300, "secrets": [], "labels": {}, "pod": {},
    "resources": {},
}  # fmt: skip


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
    settings = read_settings(cluster)
    name = object_name(job.name, len(cluster.nodes))
    _refuse_secrets(cluster, settings)
    if not cluster.image:
        raise UserError(f"{cluster.file}: the key image is missing. Write the container image that has accel_ddp and the recipe.")
    return _train_job(cluster, settings, _place_on_volume(cluster, settings, job), name)


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
    if uses_package(job.script):
        if not has_option(options, "resume"):
            options += ["--resume"]
        if not has_option(options, "preflight_wait") and len(cluster.nodes) > 1:
            options += ["--preflight_wait", str(WAIT_SECONDS)]
    return replace(job, run_folder=folder, options=tuple(options))


def _train_job(cluster: Cluster, settings: dict[str, Any], job: Job, name: str) -> list[dict[str, Any]]:
    """Return a TrainingRuntime and a TrainJob that uses it.

    The fields of a TrainJob that change pods have had other names in other versions of Kubeflow Trainer (podSpecOverrides,
    podTemplateOverrides, runtimePatches), and none of them can express `envFrom`, restarts or a time limit. The fields of a runtime
    are those of Kubernetes' own Job.
    """
    rank, address, port = map(Shell, ("$PET_NODE_RANK", "$PET_MASTER_ADDR", "$PET_MASTER_PORT"))
    words = launcher_words(cluster, job, node_rank=rank, address=address, port=port)
    container = _container(cluster, settings, name)
    resources, env = container.pop("resources", None), container.pop("env")
    labels = {f"{TRAINER}/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": labels}, "spec": _job_spec(cluster, settings, name, container)}
    runtime_spec = {
        "mlPolicy": {"numNodes": len(cluster.nodes), "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": CONTAINER, "template": template}]}},
    }
    trainer = {
        "image": cluster.image,
        "numNodes": len(cluster.nodes),
        "numProcPerNode": cluster.nodes[0].processes,
        "command": _command(cluster, job, words),
        "env": env,
        **({"resourcesPerNode": resources} if resources else {}),
    }
    spec = {"runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": name}, "trainer": trainer}
    api = f"{TRAINER}/v1alpha1"
    metadata = {"name": name, "namespace": settings["namespace"], "labels": {**settings["labels"], **_labels(name)}}
    return [
        {"apiVersion": api, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime_spec},
        {"apiVersion": api, "kind": "TrainJob", "metadata": metadata, "spec": spec},
    ]


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "accel-ddp", INSTANCE: name}


def _job_spec(cluster: Cluster, settings: dict[str, Any], name: str, container: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the Job inside the TrainingRuntime that decide what is started again, and its pods.

    A launcher starts its ranks again by itself (`restarts`, --max_restarts). A pod is started again
    - after it was evicted, drained or preempted, and after exit code 75: the run has saved a checkpoint, and continues from it;
    - at most `restarts` times after it was lost in another way, for example killed for its use of memory.
    Other failures end the job: a user's mistake (2), no place for the last checkpoint (74), a failure after all restarts (1).
    """

    def on_codes(action: str, *codes: int) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}}

    pod = {
        "restartPolicy": "Never",  # otherwise podFailurePolicy is not allowed
        "terminationGracePeriodSeconds": settings["grace_seconds"],
        # The launcher is not process 1, which would ignore SIGTERM until it has a handler, and must collect orphans.
        "shareProcessNamespace": True,
        "securityContext": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},  # of the user of our image
        **settings["pod"],
        "containers": [container],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings["shared_memory"]}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings["volume_claim"]}},
        ],
    }
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules = [disrupted, on_codes("Ignore", STOPPED), on_codes("FailJob", 1, USER_ERROR, UNSAVED)]
    return {
        "backoffLimit": cluster.restarts,
        **({"activeDeadlineSeconds": cluster.time_limit} if cluster.time_limit else {}),
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(name)}, "spec": pod},
    }


def token_name(name: str) -> str:
    """Return the name of the Secret by which the pods of a job recognize each other. `launch` creates it; a job runs without it too."""
    return f"accel-ddp-{name}-token"


def _container(cluster: Cluster, settings: dict[str, Any], name: str) -> dict[str, Any]:
    node = cluster.nodes[0]
    sources = [{"secretRef": {"name": secret}} for secret in settings["secrets"]]
    if len(cluster.nodes) > 1:  # first: a secret of the user takes precedence
        sources.insert(0, {"secretRef": {"name": token_name(name), "optional": True}})
    variables = {
        **job_commands.node_environment(cluster, node),
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(settings["grace_seconds"] - REPORT_SECONDS),
    }
    mounts = {"shared-memory": "/dev/shm", "runs": settings["mount"].rstrip("/")}
    own = {"cpu": settings.get("cpu"), "memory": settings.get("memory"), "nvidia.com/gpu": node.gpus}
    amounts = {name: str(amount) for name, amount in {**own, **settings["resources"]}.items() if amount}
    return {
        "name": CONTAINER,
        "env": [{"name": key, "value": _escape(value)} for key, value in variables.items()],
        **({"envFrom": sources} if sources else {}),
        # Kubeflow Trainer sets numProcPerNode to 1 if there are limits without requests.
        **({"resources": {"requests": amounts, "limits": dict(amounts)}} if amounts else {}),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # `accel-ddp status` prints the end of the log of a failed pod
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }


def _command(cluster: Cluster, job: Job, words: list[str]) -> list[str]:
    """Return the command of a container. It checks the image, and then replaces the shell by the launcher, which gets SIGTERM."""
    files = [file for file in (job.script, used_config(cluster)) if file]
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
