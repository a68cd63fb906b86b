"""Commands, options, links, excerpts and generated tables in README.md and docs/ are right.

The word after ```bash states what is done with a block:

    bash              it runs, with `runs/` replaced by a temporary folder
    bash node0/node1  both run at the same time, with this machine as both nodes
    bash every node   it runs on two nodes at the same time
    bash in order     it runs after the blocks of this kind above it on its page, in one empty folder
    bash parsed       its options are parsed, because it needs files, names or machines that are not here

The options of all blocks are parsed. A block that several pages show runs once. By default only blocks of DEFAULT_PAGES run,
because other tests run what the others do: `pytest -m "slow or not slow" tests/test_docs.py` runs all of them.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from accel_ddp import cli
from accel_ddp.config.commands import parser_of
from accel_ddp.config.options import properties_of
from accel_ddp.doctor.check_options import load_recipe_config
from accel_ddp.doctor.doctor_command import add_options
from accel_ddp.doctor.findings import FIXES
from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR
from accel_ddp.launch import conversion
from accel_ddp.launch.description import read_description
from accel_ddp.measure import scaling_plan as scaling_options
from accel_ddp.measure.tune_options import build_parser
from accel_ddp.memory.estimate_command import build_parser as build_estimate_parser
from accel_ddp.nodes import recipe_files
from accel_ddp.report.report_command import build_parser as build_report_parser
from accel_ddp.words import find_options, without
from tests.conftest import ROOT, clean_environment, free_port, run_all

USER_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [ROOT / "recipes" / "README.md", *ROOT.glob("accelerate_configs/*.md")]
OTHER_PAGES += [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
DEFAULT_PAGES = {"README.md", "troubleshooting.md"}
CODE_FOLDERS = "accel_ddp|recipes|tests|benchmarks|accelerate_configs|docs"


class Block(NamedTuple):
    kind: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(.*)\n((?:.*\n)*?)```$", page.read_text(), flags=re.MULTILINE)]


def prose_of(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*\n(?:.*\n)*?```$", "", page.read_text(), flags=re.MULTILINE)


def blocks(kind: str) -> list[str]:
    """Return the texts of all blocks of one kind in README and docs/, each of them once."""
    return list(dict.fromkeys(block.text for page in USER_PAGES for block in blocks_of(page) if block.kind == kind))


# ---- commands run

SET_UP_AND_TRAIN, SET_UP_AND_TEST = blocks("bash")[:2]


def test_the_first_command_sets_up_trains_and_prints_what_to_try_next():
    """In a clone that has its .venv, as CI's has, everything is already installed.

    On several workers the package is not installed again, because it would be missing in other tests for a moment. CI has just
    installed it with the same command and more extras.
    """
    command = SET_UP_AND_TRAIN.rstrip()
    _, activate, install, train = command.split(" && ")
    assert install == "pip install -q --no-compile -c constraints.txt -e '.[demo]'"
    assert install.replace("--no-compile ", "").replace("demo", "test") in (ROOT / ".ci" / "run").read_text()
    if "PYTEST_XDIST_WORKER" in os.environ:
        command = f"{activate} && {train}"
    ended = run_all([["bash", "-ec", command]], [clean_environment()], timeout=1500).well()  # beside other tests
    before, accuracy = map(float, ended.text.split("\naccuracy ")[1].split()[:2])
    assert accuracy > 0.6, "one answer for all items scores 0.575"
    assert accuracy > before + 0.1
    assert "model saved in runs/classify/" in ended.text
    assert "next: train on your own data with --train_file" in ended.text
    tried = re.search(r"^try:  (.*)$", ended.text, flags=re.MULTILINE)[1]
    tried = run_all([["bash", "-ec", f". .venv/bin/activate && {tried}"]], [clean_environment()]).well()
    assert re.search(r"'label': '(positive|negative)'", tried.text)


def test_the_test_command_is_what_ci_runs():
    assert SET_UP_AND_TEST.strip() in (ROOT / ".ci" / "run").read_text()


def by_page(commands: list[str]) -> list:
    """Return the commands as parameters. Those that are on none of DEFAULT_PAGES are slow."""
    default = {block.text for page in USER_PAGES if page.name in DEFAULT_PAGES for block in blocks_of(page)}
    return [pytest.param(command, marks=[] if command in default else [pytest.mark.slow]) for command in commands]


@pytest.mark.parametrize("command", by_page(blocks("bash")[2:]))
def test_a_command_runs(command, tmp_path, request):
    if re.search(r"--num_processes|1node\.yaml|torchrun|accel-ddp launch", command):
        request.getfixturevalue("default_port")
    command = command.replace("runs/", f"{tmp_path}/")
    if re.search(r"1node\.yaml|verify", command):  # a model that is loaded in no time; README has `classify` on two ranks
        command = command.replace("recipes/classify.py", "recipes/own_model.py").replace(" --max_eval_items 50", "")
    run_all([["bash", "-ec", command]], [clean_environment()], timeout=600).well()


@pytest.mark.slow
def test_the_tutorial_runs_in_order(tmp_path):
    script = "".join(block.text for block in blocks_of(ROOT / "docs" / "chat_model.md") if block.kind == "bash in order")
    activate = f". {ROOT}/.venv/bin/activate" if (ROOT / ".venv").is_dir() else "true"
    ended = run_all([["bash", "-ec", f"cd {tmp_path}; {activate}; {script}"]], [clean_environment()], timeout=600).well()
    chat = ended.text.split("model saved in runs/chat/model")[1].splitlines()
    assert "Every GPU holds the whole model and trains on its own part of each batch." in chat, "an answer by heart"
    predicted = json.loads((tmp_path / "answers.jsonl").read_text())
    assert predicted["prediction"] == "Small adapters are trained, and the base model stays as it is."
    assert (tmp_path / "runs" / "merged" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in blocks("bash") if "accel-ddp verify" in command])
def test_verify_runs_as_typed(command):
    run_all([["bash", "-ec", command]], [clean_environment()], timeout=600).well()


@pytest.mark.slow  # in CI, tests/test_classify.py launches two nodes with the same config
def test_the_two_node_commands_run(tmp_path):
    """With this machine as both nodes."""
    more = f"--main_process_port {free_port()} recipes/classify.py --steps 2 --max_eval_items 50 --output_dir {tmp_path}/run"
    (node0,), (node1,) = blocks("bash node0"), blocks("bash node1")
    scripts = [text.replace("10.0.0.1", "127.0.0.1").replace("recipes/classify.py", more) for text in (node0, node1)]
    ended = run_all([["bash", "-ec", script] for script in scripts], [clean_environment(GLOO_SOCKET_IFNAME="lo")] * 2).well()
    assert "2 nodes x 1 rank" in ended.texts[0]


@pytest.mark.slow  # in CI, other tests start the doctor and a recipe on two nodes
def test_commands_for_every_node_run_there(tmp_path):
    """`tune` runs for a smaller model and in less time. The last command uses the files that it writes."""
    ends = {"doctor": "verdict: healthy", "tune": "tuned.yaml", "launch": "step 2/2"}
    found = dict(zip(ends, blocks("bash every node"), strict=True))
    for word, end in ends.items():
        command = found[word]
        assert f" {word} " in command
        command = command.replace("10.0.0.1", "127.0.0.1").replace("accelerate_configs/tuned", f"{tmp_path}/tuned")
        options = f"--main_process_port {free_port()}"
        if word == "tune":
            options += f" --minutes 0.1 --trial_seconds 20 --out {tmp_path}"
        recipe = {"doctor": "classify", "tune": "sft", "launch": "own_model"}[word]
        command = command.replace("recipes/classify.py", f"{options} recipes/{recipe}.py")
        if word == "launch":
            command = f"{command.rstrip()} --steps 2 --output_dir {tmp_path}/run"
        environments = [clean_environment(NODE_RANK=str(node)) for node in (0, 1)]
        ended = run_all([["bash", "-ec", command]] * 2, environments).well()
        assert end in ended.text, ended.text[-3000:]


# ---- options are parsed


def commands_in(text: str) -> list[list[str]]:
    """Return the commands of a script, each as its words. Variables become numbers."""
    text = re.sub(r"<<'(\w+)'\n(?:.*\n)*?\1$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", " ", text)
    text = re.sub(r"^#.*$|\s# .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\$\(\(.*?\)\)", "16", text)
    text = re.sub(r"\$\(.*?\)|\$\w+|(?<= )%a\b", "1", text)  # %a: the number of a task of an array
    reader = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t", True, ""
    commands: list[list[str]] = [[]]
    for word in reader:
        if word and set(word) <= set(";&|\n"):
            commands.append([])
        else:
            commands[-1].append(word)
    found = []
    for words in filter(None, commands):
        if len(words) > 1 and words[0].startswith("CUDA_VISIBLE_DEVICES="):
            words = words[1:]
        if words[:1] == ["srun"]:
            found += commands_in(words[words.index("-c") + 1])
        elif words[0] == "mpirun":
            found.append(words[next(at for at, word in enumerate(words) if word in ("python", "accel-ddp")) :])
        else:
            found.append(words[1:] if words[0] == "exec" else words)
    return found


@cache
def launcher_parsers() -> dict:
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    return {"accelerate": launch_command_parser(), "torchrun": get_args_parser()}


@cache
def _is_valid(*words: str) -> bool:
    return load_recipe_config([*words]) is not None


def is_valid(words: list[str]) -> bool:
    """Parse a recipe's options, once for commands that differ in unimportant ones only: a recipe's parser takes 0.1 s."""
    return _is_valid(*without(words, find_options(words, ["output_dir"])))


def parse(words: list[str]) -> bool:
    """Parse the options of a command. Return whether it is one of ours. Wrong options end in UserError or SystemExit."""
    program, rest = words[0], words[1:]
    if program == "accel-ddp":
        command, rest = rest[0] if rest else "", rest[1:]
        assert command in cli.COMMANDS, words
        rest = recipe_files.place_example(rest)
        if command == "run":
            launch, recipe, options = cli.split_run(rest)
            return parse(["accelerate", "launch", *cli.with_config(launch), str(recipe_files.recipe_path(recipe)), *options])
        if command == "launch":
            names = recipe_files.recipe_names()
            rest = [str(recipe_files.recipe_path(word)) if word in names else word for word in rest]
        at = next((i for i, word in enumerate(rest) if word.endswith(".py")), len(rest))
        if command == "doctor":
            import argparse

            add_options(argparse.ArgumentParser()).parse_args(rest[:at])
        elif command == "tune":
            build_parser().parse_args(rest[:at])
        elif command == "report":
            build_report_parser().parse_args(rest)
        elif command == "estimate":
            at = next(i for i, word in enumerate(rest) if word.endswith(".py") or word in recipe_files.recipe_names())
            given = build_estimate_parser().parse_args(rest[:at])
            assert not given.config_file or recipe_files.config_path(given.config_file)
            rest[at] = str(recipe_files.recipe_path(rest[at]))
        elif command == "scaling":
            scaling_options.read_options(rest)
        elif command == "verify":
            names = recipe_files.recipe_names()
            words = [str(recipe_files.recipe_path(word)) if word in names else word for word in rest if word != "--fsdp"]
            return parse(["accelerate", "launch", *words])
        elif command == "evaluate":
            own = find_options(rest[1:], ["recipe", "output"])
            run = rest[0].split("/")[1]
            named = run if run in recipe_files.recipe_names() else "sft"  # the folder of the tutorial is runs/chat
            recipe = next((option.value for option in own if option.name == "recipe"), named)
            return parse(["accel-ddp", "run", recipe, *without(rest[1:], own), "--train_file", "rows.csv"])
        elif command in ("predict", "chat", "export", "convert"):
            (conversion.build_parser() if command == "convert" else parser_of(command)).parse_args(rest)
            return True
        elif command == "copy":
            assert rest[0] in recipe_files.examples() or recipe_files.recipe_path(rest[0])
        if rest[at:]:
            assert is_valid(rest[at:])
        return True
    if program == "python" and rest[0].startswith("recipes/"):
        assert is_valid(rest)
    elif program in ("accelerate", "torchrun"):
        given = launcher_parsers()[program].parse_args(rest[1:] if program == "accelerate" else rest)
        assert not getattr(given, "config_file", None) or Path(ROOT, given.config_file).is_file(), words
        assert is_valid([given.training_script, *given.training_script_args]), words
    else:
        return False
    return True


def test_all_commands_have_options_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "tuned.yaml").write_text("bucket_cap_mb: 100\n")
    (tmp_path / "my_run.yaml").write_text("lr: 3e-4\n")
    texts = [
        (page, block.text) for page in [*USER_PAGES, *OTHER_PAGES] for block in blocks_of(page) if block.kind.startswith("bash")
    ]
    for page in USER_PAGES:  # a manifest of Kubernetes has one command in lines of its own
        manifests = [block.text for block in blocks_of(page) if block.kind == "yaml" and "accelerate launch" in block.text]
        texts += [(page, " ".join(text[text.index("accelerate launch") :].split())) for text in manifests]
    for name in recipe_files.recipe_names():
        path = recipe_files.recipe_path(name)
        examples = ast.get_docstring(ast.parse(path.read_text())).replace("\\\n", " ")
        texts += [(path, line.strip()) for line in examples.splitlines() if line.startswith("    accelerate launch")]
    known = {"mkdir", "printf", "set", ".", "export", "test", "trap", "if", "tail", "grep", "then", "fi", "pip", "pytest", "python3",
             "make", "scontrol", "kubectl", "docker", "SOAK_SECONDS=600", "salloc", "apt-get", "exit", "git", "cd"}  # fmt: skip
    known |= {"{", "}", "aws", "files=1", "while", "do", "done", "sort", "sed", "head", "rsync", "xargs", "ssh"}  # on pages
    known |= {"at=http://169.254.169.254/latest", "get", "get()", "token", "token()", "until", "sleep", "pkill", "curl", "for"}
    known |= {"wandb", "tensorboard", "trackio", "vllm", "cat", "hf", "llama-quantize", "llama-server", "ollama"}
    ours, seen = 0, set()
    for page, text in texts:
        for words in commands_in(re.sub(r"\b(?:accelerate_configs/)?(tuned|my_run)\.yaml", rf"{tmp_path}/\1.yaml", text)):
            if "--help" in words or tuple(words) in seen:
                continue
            seen.add(tuple(words))
            try:
                is_ours = parse(words)
            except (Exception, SystemExit) as error:
                pytest.fail(f"{page.name}: {' '.join(words)}\n{type(error).__name__}: {error}")
            ours += is_ours
            assert is_ours or words[0] in known, f"{page.name}: {words[0]} is not a command that this test knows"
    assert ours > 30, "most commands are found"


def test_options_in_the_text_exist():
    names = {"config", "help"}
    sys.path.insert(0, str(ROOT / "recipes"))
    for recipe in recipe_files.recipe_names():
        options = properties_of(__import__(recipe).Config)
        names |= {*options, *(f"no_{name}" for name in options)}
    names |= {
        word.lstrip("-").replace("-", "_") for parser in launcher_parsers().values() for word in parser._option_string_actions
    }
    names |= set(re.findall(r"^\| (?:`-\w.*?`, )?`--(\w+)", (ROOT / "docs" / "commands.md").read_text(), flags=re.MULTILINE))
    names |= {"recipe", "output"}  # of evaluate
    names |= {"learning_rate"}  # an example of a name that is not an option
    names |= {"max_lora_rank", "template"}  # of vllm, ollama
    names |= {"short", "before"}  # of benchmarks/vs_trainer.py
    names |= {"gpu_reset", "shm_size", "list_all", "ulimit", "signal", "no_deps", "kill_on_bad_exit"}  # of other programs
    names |= {
        "partition",
        "account",
        "qos",
        "gres",
        "cpus_per_task",
        "mem",
        "array",
        "exclusive",
        "gpus_per_node",
        "gpus_per_task",
    }  # of sbatch
    for page in [*USER_PAGES, *OTHER_PAGES]:
        text = prose_of(page)
        for name in re.findall(r"(?<![\w-])--([a-z][\w-]+)", text):
            assert name.replace("-", "_") in names, f"{page.name}: --{name}"


# ---- pages agree with the code and with each other


def test_every_block_has_a_kind_that_this_test_knows():
    kinds = {"bash", "bash node0", "bash node1", "bash every node", "bash in order", "bash parsed", "text", "yaml", "python"}
    for page in USER_PAGES:
        for block in blocks_of(page):
            assert block.kind in kinds or re.fullmatch(r"python recipes/\w+\.py", block.kind), f"{page.name}: {block.kind}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_generated_pages_are_current():
    done = subprocess.run([sys.executable, ROOT / "docs" / "make_reference.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_example_of_an_options_file_is_valid(tmp_path):
    (example,) = (block.text for block in blocks_of(ROOT / "docs" / "options.md") if block.kind == "yaml")
    (tmp_path / "my_run.yaml").write_text(example)
    cfg = load_recipe_config(["recipes/sft.py", "--config", str(tmp_path / "my_run.yaml"), "--epochs", "3"])
    assert (cfg.lora_r, cfg.lr, cfg.epochs, cfg.gradient_checkpointing) == (16, 2e-4, 3, True)


def test_the_cluster_files_on_the_pages_are_valid(tmp_path):
    found = [block.text for page in USER_PAGES for block in blocks_of(page) if block.kind == "yaml" and "\nnodes:" in block.text]
    assert len(found) >= 5
    for text in found:
        (tmp_path / "cluster.yaml").write_text(text)
        for name in re.findall(r"^ *env_file: (\S+)", text, flags=re.MULTILINE):
            (tmp_path / name).write_text("NAME=value\n")
            (tmp_path / name).chmod(0o600)
        assert read_description(tmp_path / "cluster.yaml").nodes, text


def test_every_code_is_on_the_page_of_codes():
    text = (ROOT / "docs" / "codes.md").read_text()
    assert [name for name in FIXES if not re.search(rf"^\| `{name}` \| .*\. \| ", text, flags=re.MULTILINE)] == []  # a sentence
    assert [code for code in (0, 1, USER_ERROR, UNSAVED, STOPPED, INTERRUPTED) if f"\n| {code} | " not in text] == []


@pytest.mark.slow
def test_memory_tables_are_what_the_estimate_says():
    done = subprocess.run([sys.executable, ROOT / "docs" / "make_memory.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pages_have_the_same_memory_table():
    sys.path.insert(0, str(ROOT / "docs"))
    import make_memory

    cells = make_memory.read_cells()
    assert [*cells] == [(model, method) for model in make_memory.MODELS for method in make_memory.METHODS]
    assert f"| {' | '.join(make_memory.SHORT)} |" in (ROOT / "README.md").read_text()
    assert not make_memory.out_of_date(cells)


def test_excerpts_are_in_their_files():
    """Lines may be left out, but their order is that of the file."""
    plain = lambda text: [line.removesuffix("  # fmt: skip") for line in text.splitlines() if line.strip()]
    for page in USER_PAGES:
        for block in blocks_of(page):
            if block.kind.startswith("python "):
                rest = iter(plain((ROOT / block.kind.split()[1]).read_text()))
                for line in plain(block.text):
                    assert line in rest, f"{page.name}: {line!r} is not in {block.kind.split()[1]}, or not in this order"
            elif block.kind == "python":
                ast.parse(textwrap.dedent(block.text))


def test_messages_in_the_table_are_messages_of_the_code():
    """Words in capitals stand for values."""
    files = [*(ROOT / "accel_ddp").rglob("*.py")]
    code = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)  # strings over several lines
    section = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Frequent messages")[1].split("\n## ")[0]
    messages = re.findall(r"^\| `(.*?)` \|", section, flags=re.MULTILINE)
    assert len(messages) > 5
    for message in messages:
        for part in re.split(r"\b[A-Z]+\b|\.\.\.|`, `", message):
            assert part in code, f"no message contains {part!r}: {message}"


def test_files_in_the_text_exist():
    """tests/test_site.py checks links."""
    for page in [*USER_PAGES, *OTHER_PAGES]:
        for name in re.findall(rf"(?<![\w/.-])((?:{CODE_FOLDERS})/[\w./-]*\w)", page.read_text()):
            is_written_by_tune = name.startswith("accelerate_configs/tuned.")
            assert is_written_by_tune or (ROOT / name).exists(), f"{page.name}: {name}"
        for name in re.findall(r"`((?:training|saving|ranks|speed|sources|tasks|doctor|tune)/[\w./]*)`", page.read_text()):
            assert (ROOT / "accel_ddp" / name).exists(), f"{page.name}: {name}"


def test_contributing_names_functions_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(r"`(\w+)`(?: and `(\w+)`)? in `(accel_ddp/[\w/]+\.py|tests/\w+\.py)`", text)
    assert len(found) > 8
    for *names, file in found:
        for name in filter(None, names):
            assert re.search(rf"^(def|class) {name}\b|^{name}\b.*=", (ROOT / file).read_text(), flags=re.MULTILINE), (
                f"{name} in {file}"
            )


def test_every_recipe_is_in_the_tables():
    readme, data = ((ROOT / name).read_text() for name in ("README.md", "docs/own_data.md"))
    for name in recipe_files.recipe_names():
        assert f"| `{name}` |" in readme, name
        assert name.startswith("own_") or f"| `{name}` |" in data, name
