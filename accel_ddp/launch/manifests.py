"""The manifests of a job on Kubernetes (manifest.yaml), with references to secrets and never their values."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from accel_ddp.errors import STOPPED, UNSAVED, USER_ERROR, UserError
from accel_ddp.launch import job_commands
from accel_ddp.launch.description import Cluster, shown_value
from accel_ddp.launch.job_commands import Job, Shell, launcher_words, shell_path, to_shell, used_config, uses_package
from accel_ddp.text import read_table
from accel_ddp.words import find_options, has_option

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
    if uses_package(job.script):
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
