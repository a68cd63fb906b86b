"""Manifests are valid, contain no secrets, and run on two nodes as Kubernetes starts them. A real kubectl submits and stops them."""

import base64
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import psutil
import pytest
import yaml

from accel_ddp import cli
from accel_ddp.errors import UserError
from accel_ddp.launch.description import read_description
from accel_ddp.launch.job_commands import make_job
from accel_ddp.launch.kubernetes import render
from tests.conftest import ROOT, Running, clean_environment, free_port, run_ranks
from tests.kubernetes_api import TRAINER, Api, typed_errors

TRAINS = "tests/programs/trains.py"
WORDS = ["it's", "$(HOSTNAME)", "$$", "$$(X)", "a  b", '"', "$HOME", "`id`", "\\", "*", "line\nline", "--x=$(PET_NNODES)"]


def describe(place: Path, **more: object) -> Path:
    """Write a description and return its file. The keys of the table `kubernetes` may be given directly."""
    tables = {"namespace", "volume_claim", "mount", "shared_memory", "grace_seconds", "secrets", "cpu", "memory", "labels", "pod",
              "context", "resources"}  # fmt: skip
    table = {"volume_claim": "runs", **{key: value for key, value in more.items() if key in tables}}
    values = {"name": "classify", "backend": "kubernetes", "nodes": 2, "gpus_per_node": 8, "image": "registry.example.com/a:1"}
    values |= {key: value for key, value in more.items() if key not in tables} | {"kubernetes": table}
    file = place / "cluster.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    return file


def manifest(file: Path, *options: str, recipe: str = "classify", name: str = "") -> list[dict]:
    cluster = read_description(file)
    return list(yaml.safe_load_all(render(cluster, make_job(cluster, recipe, options, name))))


def pod_of(objects: list[dict]) -> dict:
    """Return the pod that Kubernetes makes of manifests: Kubeflow Trainer adds what the TrainJob states to that of its runtime."""
    pod, (*_, job) = job_spec_of(objects)["template"]["spec"], objects
    (container,), trainer = pod["containers"], job["spec"]["trainer"]
    own = {"image": trainer["image"], "command": trainer["command"], "resources": trainer.get("resourcesPerNode", {})}
    return {**pod, "containers": [{**container, **own, "env": [*container.get("env", []), *trainer["env"]]}]}


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) and $$ as Kubernetes does in commands and in values of variables."""
    found = lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0])
    return re.sub(r"\$\$|\$\(([^)]*)\)", found, text)


def job_spec_of(objects: list[dict]) -> dict:
    (replicated,) = objects[0]["spec"]["template"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


# ---- manifests


def test_manifests_state_what_a_job_on_several_nodes_needs(tmp_path):
    more = {
        "resources": {"vpc.amazonaws.com/efa": 4},
        "secrets": ["wandb"],
        "cpu": 16,
        "memory": "128Gi",
        "grace_seconds": 120,
        "namespace": "team",
        "restarts": 3,
    }
    file = describe(tmp_path, time_limit="12:00:00", labels={"kueue.x-k8s.io/queue-name": "gpus"}, **more)
    objects = manifest(file, "--lr", "1e-5")
    pod, spec = pod_of(objects), job_spec_of(objects)
    (container,) = pod["containers"]
    for one in objects:
        assert (one["metadata"]["name"], one["metadata"]["namespace"]) == ("classify", "team")
        assert one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert typed_errors(one) == []
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes == {
        "shared-memory": {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        "runs": {"persistentVolumeClaim": {"claimName": "runs"}},
    }
    assert {one["name"]: one["mountPath"] for one in container["volumeMounts"]} == {"shared-memory": "/dev/shm", "runs": "/data"}
    env = {one["name"]: one["value"] for one in container["env"]}
    assert pod["terminationGracePeriodSeconds"] == 120 > int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 60
    own = {
        "secretRef": {"name": "accel-ddp-classify-token", "optional": True}
    }  # a manifest that is printed and created by hand has none
    assert container["envFrom"] == [own, {"secretRef": {"name": "wandb"}}]
    amounts = {"cpu": "16", "memory": "128Gi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert spec["activeDeadlineSeconds"] == 12 * 3600
    rules = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in spec["podFailurePolicy"]["rules"]]
    assert rules == [("Ignore", None), ("Ignore", [75]), ("FailJob", [1, 2, 74])]
    assert (pod["restartPolicy"], spec["backoffLimit"]) == ("Never", 3), "podFailurePolicy is only allowed with Never"
    command = container["command"][2]
    assert "exec accelerate launch" in command
    for part in ("--max_restarts 3", "--num_processes 16", "--lr 1e-5", "--output_dir /data/runs/classify", "--resume"):
        assert part in command, part


def test_a_train_job_uses_the_variables_of_kubeflow_trainer(tmp_path):
    runtime, job = manifest(describe(tmp_path))
    assert job["spec"]["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "classify"}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == replicated["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert not [one["name"] for one in trainer["env"] if one["name"].startswith("PET_")], "these names are reserved"
    for option in ("machine_rank $PET_NODE_RANK", "main_process_ip $PET_MASTER_ADDR", "main_process_port $PET_MASTER_PORT"):
        assert f"--{option} " in trainer["command"][2]


def test_words_arrive_unchanged_in_a_pod(tmp_path):
    """Through YAML, the replacement of $(NAME) by Kubernetes, and the shell."""
    (tmp_path / "accelerate_configs").mkdir()
    shutil.copy(ROOT / "accelerate_configs" / "2node.yaml", tmp_path / "accelerate_configs")
    (tmp_path / "words.py").write_text("# accel_ddp")
    for program in ("accel-ddp", "accelerate"):
        (tmp_path / program).write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
        (tmp_path / program).chmod(0o755)
    objects = manifest(describe(tmp_path, env={"TEXT": "$(PATH) $$ $HOME"}), *WORDS, recipe="words.py")
    (container,) = pod_of(objects)["containers"]
    variables = {"HOSTNAME": "wrong", "PATH": "wrong", "PET_NNODES": "wrong"}
    assert [expand(one["value"], variables) for one in container["env"] if one["name"] == "TEXT"] == ["$(PATH) $$ $HOME"]
    command = [expand(word, variables) for word in container["command"]]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    words = json.loads(done.stdout)
    assert words[words.index("words.py") + 1 :][: len(WORDS)] == WORDS


def test_typing_errors_in_manifests_are_found(tmp_path):
    """The check of the tests above can fail, at every depth."""

    def all_keys(value: object, path: tuple = ()):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
            if isinstance(value, dict) and not {"labels", "requests", "limits", "selector"} & set(path):
                yield (*path, key)
            yield from all_keys(inner, (*path, key))

    file = describe(tmp_path, secrets=["wandb"], cpu=1, time_limit=60, pod={"tolerations": [{"operator": "Exists"}]})
    checked = 0
    for one in manifest(file):
        for *path, key in all_keys(one):
            if path[:1] in ([], ["metadata"]):
                continue
            wrong = copy.deepcopy(one)
            inner = wrong
            for step in path:
                inner = inner[step]
            inner[f"{key}x"] = inner.pop(key)
            assert typed_errors(wrong), f"{'.'.join(map(str, path))}.{key}x"
            checked += 1
    assert checked > 40


@pytest.mark.kubernetes
def test_pods_and_jobs_fit_the_strict_schema_of_kubernetes(tmp_path):
    from kubernetes_validate import ValidationError, validate

    file = describe(tmp_path, secrets=["wandb"], cpu=1, time_limit=60, env={"A": "1"})
    objects = manifest(file)
    spec = {**job_spec_of(objects)}
    spec["template"] = {**spec["template"], "spec": pod_of(objects)}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "classify"}, "spec": spec}
    for version in ("1.31", "1.34"):
        validate(job, version, strict=True)
        spec["template"]["spec"]["volumes"][0]["emptyDirr"] = {}
        with pytest.raises(ValidationError, match="emptyDirr"):
            validate(job, version, strict=True)
        del spec["template"]["spec"]["volumes"][0]["emptyDirr"]


SECRET_VALUE = "s3cr3t-value"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"image": None}, "the key image is missing"),
        ({"volume_claim": None, "cpu": 1}, "kubernetes.volume_claim is missing"),
        ({"nodes": [{"host": "a"}, {"host": "b", "gpus": 4}]}, "must be the number of nodes with backend: kubernetes"),
        ({"env_file": "secrets.env"}, r"create secret generic classify-env --from-env-file=\S*secrets.env .*secrets: \[classify-env\]"),
        ({"env": {"WANDB_API_KEY": SECRET_VALUE}}, r"env.WANDB_API_KEY: .*--from-literal=WANDB_API_KEY=\.\.\."),
        ({"env": {"HTTPS_PROXY": f"http://me:{SECRET_VALUE}@proxy:3128"}}, "env.HTTPS_PROXY: its value would be readable"),
        ({"grace_seconds": 10}, "kubernetes.grace_seconds 10: is too short for a checkpoint"),
        ({"shared_memory": "16 GB"}, "kubernetes.shared_memory 16 GB: must be an amount of memory, for example 64Gi"),
        ({"mount": "data"}, "kubernetes.mount data: must be an absolute path"),
        ({"output": "/elsewhere"}, "the output folder /elsewhere/classify is not on the volume, which is mounted at /data"),
        ({"output": "../up"}, "the output folder ../up/classify is not on the volume"),
        ({"name": "1st"}, "the name '1st' cannot be the name of a TrainJob"),
        ({"name": "a" * 50}, "at most 48 characters"),
        ({"env": {"PET_NNODES": "3"}}, "env PET_NNODES: is reserved for torchrun and Kubeflow Trainer"),
        ({"main_port": 29501}, "main_port 29501: has no effect on a TrainJob"),
        ({"pod": {"volumes": []}}, "kubernetes.pod volumes: is set by accel-ddp"),
        ({"secrets": "wandb"}, r"kubernetes.secrets 'wandb': must be a list of names, for example \[wandb\]"),
        ({"doctor": "full"}, "doctor 'full': has no effect with backend: kubernetes"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_description_is_refused_before_anything_is_submitted(more, message, tmp_path):
    (tmp_path / "secrets.env").write_text(f"WANDB_API_KEY={SECRET_VALUE}\n")
    file = describe(tmp_path, **more)
    if "volume_claim" in more:
        file.write_text(file.read_text().replace("  volume_claim: null\n", ""))
    with pytest.raises(UserError, match=message) as error:
        manifest(file)
    assert SECRET_VALUE not in str(error.value)


def test_names_of_recipes_become_names_of_kubernetes(tmp_path):
    objects = manifest(describe(tmp_path, name=None), recipe="own_model")
    assert {one["metadata"]["name"] for one in objects} == {"own-model"}
    assert "--output_dir /data/runs/own_model" in pod_of(objects)["containers"][0]["command"][2]


def test_options_of_the_user_are_kept(tmp_path):
    file = describe(tmp_path, env={"TOKENIZERS_PARALLELISM": "false"}, pod={"nodeSelector": {"gpu": "h100"}}, folder="~/my code")
    given = ["--output-dir=mine", "--resume=runs/other", "--preflight_wait", "60"]
    pod = pod_of(manifest(file, *given))
    command = pod["containers"][0]["command"][2]
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert "--output-dir=/data/mine" in command
    assert command.count("--resume") == command.count("--preflight_wait") == 1
    assert "cd \"$HOME\"/'my code' ||" in command


def test_the_manifest_on_the_page_is_the_one_that_is_printed(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    file = Path("accelerate_configs/clusters/kubernetes.yaml")
    assert f"```yaml\n{file.read_text().partition(chr(10))[2]}```\n" in page
    cluster = read_description(file)
    options = re.search(r"--print cluster.yaml recipes/classify.py (.*)", page)[1].split()
    text = render(cluster, make_job(cluster, "recipes/classify.py", options)).replace("from kubernetes.yaml", "from cluster.yaml")
    assert f"```text\n{text}```\n" in page


# ---- the command of a pod runs


def environments_of(objects: list[dict], nodes: list, **more: str) -> list[dict[str, str]]:
    """Return the variables of the pods, as the manifest and the controllers set them."""
    (container,) = pod_of(objects)["containers"]
    own = {one["name"]: expand(one["value"], {}) for one in container["env"]}
    name = objects[-1]["metadata"]["name"]
    found = []
    for index in range(len(nodes)):
        trainer = objects[-1]["spec"]["trainer"]
        controller = {
            "JOB_COMPLETION_INDEX": str(index), "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]), "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500",
        }  # fmt: skip
        found.append(clean_environment(**own, **controller, **more))
    return found


def hosts_of(objects: list[dict], nodes: list) -> dict[str, str]:
    """Return the names that the headless service gives to pods."""
    name = objects[-1]["metadata"]["name"]
    return {f"{name}-node-0-{index}.{name}": node.address for index, node in enumerate(nodes)}


def weights(folder: Path) -> dict[str, bytes]:
    path = folder / "step_00000012"
    return {name: (path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def start_pods(file: Path, nodes: list, *options: str, only: int | None = None) -> Running:
    """Run the command of the container in manifests on nodes, with the variables and host names that controllers set."""
    objects = manifest(file, *options, recipe=TRAINS)
    (container,) = pod_of(objects)["containers"]
    for node in nodes:
        node.hosts(hosts_of(objects, nodes))
    commands = [node.command([expand(word, {}) for word in container["command"]]) for node in nodes]
    environments = environments_of(objects, nodes, OMP_NUM_THREADS="1")
    started = slice(None) if only is None else slice(only, only + 1)
    return Running(commands[started], environments[started])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, bytes]:
    """Return the weights after a run without an interruption on one node with two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_ranks(2, ROOT / TRAINS, "--output_dir", folder).well()
    return weights(folder)


@pytest.mark.slow  # in CI, tests/test_stop.py sends SIGTERM to the launcher of one of two nodes
def test_an_evicted_pod_saves_and_pods_that_are_started_again_continue_with_the_same_result(nodes, tmp_path, uninterrupted):
    nodes.require("hosts files")
    pair = nodes.nodes[:2]
    options = ["--step_seconds", "0.5", "--save_every", "100"]
    file = describe(tmp_path, gpus_per_node=0, mount=str(tmp_path))
    running = start_pods(file, pair, *options)
    running.until("step  3/12")
    os.kill(running.processes[1].pid, signal.SIGTERM)  # as a kubelet, which signals the process of the container
    ended = running.ended()
    assert ended.codes == [75, 75], f"Kubernetes starts both pods again\n{ended.text}"
    assert "stopped: requested by SIGTERM on rank 1" in ended.text
    assert [node.pids() for node in pair] == [[], []]
    folder = tmp_path / "runs" / "classify"
    again = start_pods(file, pair, *options).ended().well()
    assert "resumed at step" in again.text
    assert [node.pids() for node in pair] == [[], []]
    assert weights(folder) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_pod_is_replaced_on_another_machine_with_another_address(lost, nodes, tmp_path, uninterrupted):
    """With `restarts`, the launchers of the other pods wait for it. Its name stays the same."""
    nodes.require("hosts files")
    first, second, spare = nodes.nodes
    file = describe(tmp_path, gpus_per_node=0, mount=str(tmp_path), restarts=1)
    options = ["--step_seconds", "0.3", "--save_every", "2"]
    running = start_pods(file, [first, second], *options)
    running.until("step  5/12")
    for process in psutil.Process(running.processes[lost].pid).children(recursive=True):
        process.kill()
    running.processes[lost].kill()
    pair = [spare, second] if lost == 0 else [first, spare]
    replacement = start_pods(file, pair, *options, only=lost)
    ended = replacement.ended().well()
    others = running.ended()
    assert others.codes[1 - lost] == 0, others.text
    assert "restart 1 of 1" in ended.text + others.text
    assert weights(tmp_path / "runs" / "classify") == uninterrupted


@pytest.mark.parametrize("lack", ["package", "recipe", "config", "folder"])
def test_an_image_without_the_package_or_the_recipe_ends_with_one_message(lack, tmp_path):
    file = describe(tmp_path, folder="missing" if lack == "folder" else None)
    (container,) = pod_of(manifest(file))["containers"]
    (tmp_path / "bin").mkdir()
    if lack != "package":
        for program in ("accel-ddp", "accelerate"):
            (tmp_path / "bin" / program).symlink_to("/bin/true")
    if lack == "config":
        (tmp_path / "recipes").mkdir()
        (tmp_path / "recipes" / "classify.py").touch()
    done = subprocess.run(container["command"], env={"PATH": str(tmp_path / "bin")}, cwd=tmp_path, capture_output=True, text=True)
    part = {
        "package": "does not contain the program accel-ddp", "recipe": "has no file recipes/classify.py in the folder",
        "config": "has no file accelerate_configs/2node.yaml", "folder": "has no folder missing",
    }[lack]  # fmt: skip
    assert done.returncode == 2
    assert f"error: the image registry.example.com/a:1 {part}" in done.stderr
    assert done.stderr.count("error:") == 1


# ---- the image


def test_the_folder_that_docker_copies_has_what_the_package_needs_and_nothing_private(tmp_path):
    """Docker copies what .dockerignore does not list. The package is built from that, and recipes and configs are there."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    in_any_folder = [pattern[3:] for pattern in patterns if pattern.startswith("**/")]

    def ignored(folder: str, names: list[str]) -> set[str]:
        is_top = Path(folder) == ROOT
        listed = lambda name: [p for p in patterns if fnmatch(str((Path(folder) / name).relative_to(ROOT)), p)]
        return {name for name in names if (listed(name) if is_top else []) or any(fnmatch(name, p) for p in in_any_folder)}

    copy_folder = tmp_path / "image"
    shutil.copytree(ROOT, copy_folder, ignore=ignored)
    assert not [path for path in copy_folder.rglob("*") if path.name in (".git", ".env", ".venv", "runs", "tests")]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist"]
    subprocess.run(build, cwd=copy_folder, check=True, timeout=300, capture_output=True)
    files = set(zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))).namelist())
    assert {"accel_ddp/launch/kubernetes.py", "accel_ddp/recipes/classify.py"} <= files
    for name in ("recipes/classify.py", "accelerate_configs/2node.yaml", "constraints.txt"):
        assert (copy_folder / name).is_file()


@pytest.mark.kubernetes
def test_hadolint_accepts_the_dockerfile_and_finds_mistakes():
    text = (ROOT / "Dockerfile").read_text()
    lint = lambda text: subprocess.run(["hadolint", "-"], input=text, capture_output=True, text=True)
    done = lint(text)
    assert (done.returncode, done.stdout) == (0, "")
    assert "DL3002" in lint(text.replace("USER 1000", "USER root")).stdout, "the last user is not root"
    assert "DL3009" in lint(text.replace(" \\\n    && rm -rf /var/lib/apt/lists/*", "")).stdout


# ---- kubectl


@pytest.fixture(scope="module")
def api():
    if not shutil.which("kubectl"):
        ends = pytest.fail if os.environ.get("CI") else pytest.skip
        ends("kubectl is not installed. Install it: apt-get install kubernetes-client")
    with Api() as made:
        yield made


@pytest.fixture
def accel_ddp(tmp_path, monkeypatch, capfd):
    """A function that runs the command line in this process, which saves the start of Python, and a kubectl with these variables."""
    monkeypatch.chdir(ROOT)

    def run(*words: object, **variables: str) -> subprocess.CompletedProcess:
        with monkeypatch.context() as patch:
            for name, value in {"KUBECONFIG": f"{tmp_path}/kubeconfig", "HOME": str(tmp_path), **variables}.items():
                patch.setenv(name, value)
            code = cli.main(list(map(str, words)))
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


@pytest.fixture
def command(api, accel_ddp, tmp_path):
    """An empty namespace with a volume claim, and a function that runs accel-ddp with a kubeconfig for it."""
    api.objects.clear(), api.requests.clear(), api.refusals.clear(), api.missing.clear()
    api.add("persistentvolumeclaims", {"metadata": {"name": "runs"}, "spec": {"accessModes": ["ReadWriteMany"]}})
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here", "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}], "users": [{"name": "u", "user": {}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    return accel_ddp


def refused(done: subprocess.CompletedProcess, message: str) -> None:
    assert (done.returncode, done.stdout) == (2, ""), done
    assert re.fullmatch(f"error: .*{message}.*\n", done.stderr), done.stderr


def pod(index: int, phase: str, name: str = "", created: str = "", **state: object) -> dict:
    labels = {"app.kubernetes.io/instance": "classify", "batch.kubernetes.io/job-completion-index": str(index)}
    status = {"phase": phase, "containerStatuses": [{"name": "node", "state": state}] if state else []}
    spec = {"nodeName": f"gpu-{index}", "containers": [{"name": "node"}]}
    metadata = {
        "name": name or f"classify-{index}",
        "namespace": "default",
        "labels": labels,
        "creationTimestamp": created or None,
    }
    return {"metadata": metadata, "spec": spec, "status": status}


def test_a_job_is_submitted_shown_followed_and_stopped_with_kubectl(api, command, tmp_path):
    file = describe(tmp_path)
    done = command("launch", file, "classify", "--lr", "1e-5")
    assert done.returncode == 0, done.stderr
    assert "submitted: TrainJob classify in the namespace default\n" in done.stdout
    assert f"accel-ddp stop {file} --name classify" in done.stdout
    assert api.names() == ["TrainingRuntime/classify", "TrainJob/classify"]
    (token,) = [one for one in api.objects.values() if one["kind"] == "Secret"]
    assert token["metadata"]["name"] == "accel-ddp-classify-token"
    value = token["stringData"]["ACCEL_DDP_TOKEN"]
    assert re.fullmatch(r"[0-9a-f]{64}", value)
    assert value not in done.stdout + done.stderr + str([one for one in api.objects.values() if one["kind"] != "Secret"])
    printed = command("launch", "--print", file, "classify", "--lr", "1e-5").stdout
    stored = [one for one in api.objects.values() if one["kind"] in ("TrainingRuntime", "TrainJob")]
    assert list(yaml.safe_load_all(printed)) == stored, "--print prints what is submitted"

    refused(
        command("launch", file, "classify"), rf"exists in the namespace default \(not finished\). `accel-ddp stop {file} --name"
    )
    message = "error: the image a has no file recipes/classify.py"
    end = {"exitCode": 2, "message": f"one\n{message}", "finishedAt": "2026-01-01T00:00:00Z"}
    replaced = pod(0, "Failed", terminated={"exitCode": 75}, name="classify-0-old", created="2026-01-01T00:00:00Z")
    api.add("pods", pod(1, "Pending", waiting={"reason": "ImagePullBackOff", "message": "no such image"}))
    api.add("pods", pod(0, "Failed", terminated=end, created="2026-01-01T00:00:09Z"))
    api.add("pods", replaced)
    assert command("status", file, "--name", "classify").stdout.splitlines() == [
        "TrainJob classify in the namespace default: not finished",
        "node 0: pod classify-0 on gpu-0: Failed, exit code 2", "    one", f"    {message}",
        "node 1: pod classify-1 on gpu-1: Pending, ImagePullBackOff", "    no such image",
    ]  # fmt: skip
    api.logs |= {"classify-0": "step 1\n", "classify-1": "step 1\n", "classify-0-old": "step 1\n"}
    assert command("logs", file).stdout == "[pod/classify-0/node] step 1\n", (
        "only pods that have started, and the newest of each node"
    )

    def end_job() -> None:
        """The second pod starts after `logs -f` has begun, and the job fails."""
        api.wait_for("/pods/classify-0/log?container=node&follow=true")
        api.add("pods", pod(1, "Running", running={}))
        api.wait_for("/pods/classify-1/log?container=node&follow=true")
        one = next(one for one in api.objects.values() if one["kind"] == "TrainJob")
        one["status"] = {
            "conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 2"}]
        }

    with ThreadPoolExecutor() as pool:
        ending = pool.submit(end_job)
        followed = command("logs", "-f", file)
        ending.result()
    assert followed.returncode == 2, "the exit code of the job"
    assert sorted(followed.stdout.splitlines()) == [f"[pod/classify-{index}/node] step 1" for index in (0, 1)]
    assert followed.stderr.splitlines() == [
        "waiting: pod classify-1: Pending, ImagePullBackOff: no such image", "classify: Failed (PodFailurePolicy: exit code 2)",
    ]  # fmt: skip

    stopped = command("stop", file)
    assert stopped.returncode == 0, stopped.stderr
    assert "its ranks have 300 s to save a checkpoint" in stopped.stdout
    assert api.names() == []
    deletions = [request.split("?")[0].split("/")[-2] for request in api.requests if request.startswith("DELETE")]
    assert deletions == ["secrets", "trainjobs", "trainingruntimes", "secrets"], "an old secret, and later the job first"
    refused(command("stop", file), "there is no trainjob.*/classify in the namespace default")


def test_faults_of_the_cluster_are_explained_and_leave_nothing(api, command, tmp_path):
    """One test for all of them, because each takes a moment."""
    file = describe(tmp_path, secrets=["wandb"])
    launch = lambda **more: command("launch", file, "classify", **more)
    refused(launch(), "kubernetes.secrets wandb: there is no such secret .*create secret generic wandb --from-env-file=FILE")
    api.refusals["GET secrets"] = (403, "Forbidden", 'secrets "wandb" is forbidden: User "me" cannot get resource "secrets"')
    assert launch().returncode == 0, "users who may not read secrets may start jobs"
    assert command("stop", file).returncode == 0
    file = describe(tmp_path)
    api.missing.add(TRAINER)
    refused(launch(HOME=str(tmp_path / "other")), "the cluster has no Kubeflow Trainer.*Install it, https")
    api.missing.clear()
    api.refusals["POST trainjobs"] = (422, "Invalid", 'TrainJob "classify" is invalid: spec.trainer: denied by a webhook')
    refused(launch(), "the cluster has refused it: .*denied by a webhook")
    assert api.names() == [], "the TrainingRuntime, which was created first, is deleted again"
    late = (
        'denied: TrainingRuntime "classify" not found: specified trainingRuntime must be created before the TrainJob is created'
    )
    api.refusals["POST trainjobs"] = (403, "Forbidden", f"admission webhook {late}")
    with ThreadPoolExecutor() as pool:
        posted = len([one for one in api.requests if one.startswith("POST") and "trainjobs" in one])

        def see_runtime() -> None:
            """The cache of the webhook is updated after two attempts."""
            while len([one for one in api.requests if one.startswith("POST") and "trainjobs" in one]) < posted + 2:
                time.sleep(0.05)
            api.refusals.clear()

        seeing = pool.submit(see_runtime)
        assert launch().returncode == 0, "the webhook sees the TrainingRuntime a moment later"
        seeing.result()
    assert command("stop", file).returncode == 0
    api.refusals["POST trainjobs"] = (403, "Forbidden", 'admission webhook "quota" denied the request: no GPUs left')
    refused(launch(), "the cluster has refused it: .*no GPUs left")
    api.refusals["POST trainjobs"] = (403, "Forbidden", 'trainjobs is forbidden: User "me" cannot create resource "trainjobs"')
    refused(launch(), "you may not do this in the namespace default")
    api.refusals["POST trainjobs"] = (409, "AlreadyExists", 'trainjobs "classify" already exists')
    refused(launch(), "a job of this name exists")
    assert api.names() == []
    api.refusals.clear()
    file = describe(tmp_path, pod={"nodeSelectr": {"gpu": "h100"}})
    refused(launch(), 'unknown field "spec.template.spec.replicatedJobs.*nodeSelectr"')
    file = describe(tmp_path, volume_claim="lost")
    refused(launch(), "kubernetes.volume_claim lost: there is no such PersistentVolumeClaim in the namespace default")
    api.add("persistentvolumeclaims", {"metadata": {"name": "lost"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    refused(launch(), "its access modes are ReadWriteOnce. Several nodes need ReadWriteMany")
    file = describe(tmp_path, context="elsewhere")
    refused(launch(), "kubernetes.context is not a context of kubectl")
    (tmp_path / "secret.env").write_text(f"WANDB_API_KEY={SECRET_VALUE}\n")
    file = describe(tmp_path, env_file="secret.env")
    done = launch()
    refused(done, "env_file .*secret.env: its values would be readable in the manifest")
    advised = re.search(r"Run: (kubectl .*?)  Then", done.stderr)[1]
    subprocess.run(
        advised, shell=True, check=True, env={**os.environ, "KUBECONFIG": f"{tmp_path}/kubeconfig", "HOME": str(tmp_path)}
    )
    secrets = [one["data"] for one in api.objects.values() if one["kind"] == "Secret"]
    assert secrets == [{"WANDB_API_KEY": base64.b64encode(SECRET_VALUE.encode()).decode()}]
    file = describe(tmp_path, secrets=["classify-env"])
    assert launch().returncode == 0
    assert SECRET_VALUE not in str([one for one in api.objects.values() if one["kind"] != "Secret"])
    assert command("stop", file).returncode == 0
    file = describe(tmp_path)
    api.add("trainingruntimes", {"metadata": {"name": "classify"}, "spec": {}})
    refused(launch(), r"trainingruntime.*exists .*\(without a job\). `accel-ddp stop .* --name classify` deletes it")
    assert command("stop", file).returncode == 0
    assert api.names() == []
    assert launch().returncode == 0
    api.add("pods", pod(0, "Running", running={}))
    assert command("stop", "--now", file).returncode == 0
    assert [one["kind"] for one in api.objects.values()] == ["PersistentVolumeClaim"] * 2 + ["Secret"]


def test_kubectl_that_is_missing_or_has_no_server_is_explained(tmp_path, api, accel_ddp):
    file = describe(tmp_path)
    refused(accel_ddp("launch", file, "classify", PATH=str(tmp_path)), "kubectl is not installed, or not on PATH")
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "a", "contexts": [{"name": "a", "context": {"cluster": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{free_port()}"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"  # kubectl asks for a user before it connects
    (tmp_path / "no_user").write_text(json.dumps(config))
    done = accel_ddp("launch", file, "classify", KUBECONFIG=str(tmp_path / "no_user"))
    refused(done, "kubectl has no valid credentials for the cluster")
    for words in (("launch", file, "classify"), ("status", file), ("stop", file)):
        refused(accel_ddp(*words), "the Kubernetes API server cannot be reached. Check `kubectl cluster-info`")
