"""Options that are `auto`: what is chosen, that it is stored, and that resumed runs keep it, also runs of older versions."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel_ddp.config.choices import KEPT, choose, reasons, take_saved
from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import as_plain_dict
from accel_ddp.errors import UserError
from accel_ddp.memory.estimate_command import load_recipe
from accel_ddp.nodes.launcher import find_stated_precision, parse_accelerate_command, stated_precision
from tests.conftest import BIN, ROOT, clean_environment, node_environments, rank_environments, run_all, run_ranks

SFT, CLASSIFY = ROOT / "recipes" / "sft.py", ROOT / "recipes" / "classify.py"
OLD = json.loads((ROOT / "tests" / "old_sft_run.json").read_text())  # run.json of a version whose options had numbers as defaults


def options(*words: str):
    return parse_config(load_recipe(SFT).Config, list(words))


def test_a_run_of_an_older_version_keeps_the_defaults_that_it_had(capsys):
    from accel_ddp.saving.resume import _find_changes

    cfg = options()
    assert _find_changes(cfg, OLD, None, set()), "the defaults have changed since then"
    take_saved(cfg, OLD)
    assert not _find_changes(cfg, OLD, None, set())
    local = dataclasses.replace(cfg, sync_every=5)
    assert _find_changes(local, OLD, None, set()) == ["--sync_every was 0 and is now 5"]
    assert (cfg.lr, cfg.lora_targets, cfg.dtype, cfg.mixed_precision) == (2e-3, (), "float32", "no")
    assert capsys.readouterr().out.startswith(f"--resume: {KEPT}: lr 0.002, ")
    # A checkpoint of this version that continued the old run stores the same values again.
    again = options()
    take_saved(again, {"config": {**OLD["config"], "mixed_precision": "no"}, "precision": "no", "chosen": reasons(cfg)})
    assert vars(again) == vars(cfg)


def test_a_given_option_is_not_replaced_by_a_saved_one():
    cfg = options("--lr", "1e-4", "--mixed_precision", "bf16", "--lora_r", "4", "--lora_targets", "q_proj")
    take_saved(cfg, OLD)
    assert (cfg.lr, cfg.mixed_precision, cfg.lora_targets) == (1e-4, "bf16", ("q_proj",))
    assert not {"lr", "mixed_precision", "lora_targets"} & reasons(cfg).keys()


def test_a_resumed_run_keeps_its_length_unless_the_command_states_one(capsys):
    for words, expected in (([], (200, 4.0)), (["--steps", "300"], (300, 4.0)), (["--epochs", "6"], (0, 6.0))):
        cfg = options(*words)
        take_saved(cfg, {"config": {"steps": 200, "epochs": 4.0}})
        assert (cfg.steps, cfg.epochs) == expected
    assert "steps 200" in capsys.readouterr().out


def test_the_reason_of_a_choice_survives_any_number_of_resumes(capsys):
    cfg = options()
    choose(cfg, "lr", 2e-4, "LoRA adapters")
    assert capsys.readouterr().out == "lr 0.0002: LoRA adapters (--lr changes it)\n"
    for _ in range(3):
        saved = {"config": {"lr": cfg.lr, "mixed_precision": "auto"}, "chosen": reasons(cfg), "precision": "bf16"}
        cfg = options()
        take_saved(cfg, saved)
        assert (cfg.lr, cfg.mixed_precision, reasons(cfg)["lr"]) == (2e-4, "bf16", f"LoRA adapters, {KEPT}")


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        ("num_processes: 1", [], ""), ("mixed_precision: 'no'", [], "no"), ("mixed_precision: no", [], "no"),
        ("mixed_precision: bf16", [], "bf16"), ("mixed_precision:", [], ""), ("num_processes: 1", ["--mixed_precision", "no"], "no"),
        ("mixed_precision: 'no'", ["--mixed-precision=bf16"], "bf16"),
    ],
)  # fmt: skip
def test_a_precision_that_is_stated_is_told_from_one_that_is_not(tmp_path, content, words, expected):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    request = parse_accelerate_command(["accelerate", "launch", "--config_file", str(file), *words, "train.py"])
    assert stated_precision(request) == expected


def test_our_configs_state_no_precision(monkeypatch):
    for file in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert "mixed_precision" not in file.read_text()
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert find_stated_precision() == ""  # of torchrun, or of no launcher
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert find_stated_precision() == "no"  # the user has set it, because there is no `accelerate launch`


@pytest.mark.slow
def test_a_rank_knows_whether_accelerate_launch_was_asked_for_a_precision(tmp_path):
    """`accelerate launch` sets the same variable for a config without a precision and for the `no` of its wizard."""
    script = tmp_path / "prints.py"
    script.write_text(
        "import os\nfrom accel_ddp.nodes.launcher import find_stated_precision\n"
        "print(os.environ['ACCELERATE_MIXED_PRECISION'], repr(find_stated_precision()))\n"
    )
    wizard = tmp_path / "accelerate" / "default_config.yaml"
    wizard.parent.mkdir()
    wizard.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\nnum_processes: 1\n")
    launch = [BIN / "accelerate", "launch"]
    env = clean_environment(HF_HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    for words, expected in (([], "no 'no'"), (["--config_file", ROOT / "accelerate_configs" / "local.yaml"], "no ''")):
        done = subprocess.run([*launch, *words, script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip().endswith(expected), done.stdout + done.stderr


def test_the_learning_rate_and_the_type_of_weights_follow_the_model(cache):
    from transformers import AutoModelForCausalLM

    from accel_ddp.sources.builtin import locate
    from accel_ddp.sources.models import default_lr, load, weights_dtype

    rates = [default_lr("some/model", size, is_adapted)[0] for is_adapted in (False, True) for size in (5e8, 8e9, 7e10)]
    assert rates == [5e-5, 2e-5, 1e-5, 5e-4, 2e-4, 1e-4]
    sizes = {8_030_000_000: "8.03B", 134_515_008: "135M", 65_536: "65.5k"}
    for size, text in sizes.items():
        assert default_lr("some/model", size, True)[1] == f"LoRA adapters of a model with {text} parameters"
    assert default_lr("builtin:tiny-llama", 1_000_000, True)[0] == OLD["config"]["lr"]
    with pytest.raises(UserError, match=r"--optimizer sgd --lr auto: .* for example --lr 0.01"):
        load(AutoModelForCausalLM, options("--optimizer", "sgd", "--model", locate("builtin:tiny-llama", cache)))
    stored = SimpleNamespace(dtype="bfloat16")
    assert weights_dtype(options(), stored, True, "bf16")[0] == "bfloat16"
    assert weights_dtype(options(), stored, True, "no")[0] == "float32", "otherwise the run would compute in bf16"
    assert weights_dtype(options(), stored, False, "bf16")[0] == "float32", "trained weights need 32 bits"
    assert weights_dtype(options(), SimpleNamespace(dtype=None), True, "bf16") == ("float32", "")
    assert weights_dtype(options("--dtype", "float16"), stored, True, "no") == ("float16", "")


def test_names_of_layers_are_separated_by_commas_or_spaces_and_all_linear_stands_alone():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from accel_ddp.sources.models import adapt

    def adapted(*words: str) -> set[str]:
        shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**shape))
            model._new_modules = []
            model = adapt(model, options("--lora_r", "2", *words), "CAUSAL_LM")
        return {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}

    assert adapted("--lora_targets", "q_proj,v_proj") == adapted("--lora_targets", "q_proj", "v_proj") == {"q_proj", "v_proj"}
    every = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert adapted() == adapted("--lora_targets", "all-linear") == every, "all except the head"
    for words in (["all-linear", "q_proj"], ["all-linear,q_proj"]):
        with pytest.raises(UserError, match="Use it alone"):
            options("--lora_r", "2", "--lora_targets", *words)
    with pytest.raises(UserError, match="--lora_targets ,: names no layer"):
        options("--lora_r", "2", "--lora_targets", ",")
    for words in (["q_proj,v_proj"], ["q_proj v_proj"], ["q_proj,", "v_proj"]):
        assert options("--lora_r", "2", "--lora_targets", *words).lora_targets == ("q_proj", "v_proj")


def test_a_switch_that_may_be_auto_is_read_from_yaml_and_takes_no_value_after_no(tmp_path):
    for line, value in (("'true'", True), ("off", False), ("auto", "auto"), ("'False'", False)):
        (tmp_path / "run.yaml").write_text(f"gradient_checkpointing: {line}\nlora_r: 2\nlora_targets: q_proj v_proj\n")
        cfg = options("--config", str(tmp_path / "run.yaml"))
        assert (cfg.gradient_checkpointing, cfg.lora_targets) == (value, ("q_proj", "v_proj"))
    with pytest.raises(UserError, match="--no_gradient_checkpointing false: --no_gradient_checkpointing takes no value"):
        options("--no_gradient_checkpointing", "false")


def test_a_run_of_an_older_version_continues_adapters_without_names_of_layers(capsys):
    from peft import LoraConfig
    from torch import nn

    from accel_ddp.sources.adapters import Adapters, _checked_config

    model = nn.Linear(2, 2)
    model._new_modules = []
    cfg = options("--model", "adapters")
    given = Adapters("", LoraConfig(r=4, task_type="CAUSAL_LM"), "base")
    assert _checked_config(given, model, cfg, "CAUSAL_LM").r == 4
    take_saved(cfg, OLD)
    assert cfg.lora_targets == ()
    assert _checked_config(given, model, cfg, "CAUSAL_LM").r == 4


@pytest.fixture
def narrow_model(tiny_model, tmp_path) -> str:
    """Return the folder of a model in bfloat16 without a head."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = str(tmp_path / "narrow")
    AutoModel.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def test_a_new_head_on_a_16_bit_model_has_the_same_dtype_after_a_resume(narrow_model):
    import torch
    from transformers import AutoModelForSequenceClassification

    from accel_ddp.sources.models import load

    def head(saved: dict, *words: str) -> tuple[torch.dtype, dict]:
        """Return the dtype of the head of a run with these words that continues a saved one, and what this run would save."""
        given = ["--model", narrow_model, "--lora_r", "2", "--mixed_precision", "bf16", *words]
        cfg = parse_config(load_recipe(CLASSIFY).Config, given)
        if saved:
            take_saved(cfg, saved)
        dtype = load(AutoModelForSequenceClassification, cfg, num_labels=3).classifier.weight.dtype
        return dtype, {"config": as_plain_dict(cfg), "chosen": dict(reasons(cfg)), "precision": "bf16"}

    typed = ("--dtype", "bfloat16")
    for words, expected in (((), torch.float32), (typed, torch.bfloat16)):
        dtype, saved = head({}, *words)
        assert dtype == expected
        dtype, again = head(saved)
        assert dtype == head(again)[0] == head(saved, *typed)[0] == expected


def test_a_loop_that_does_not_evaluate_refuses_to_keep_the_best_step():
    recipe = load_recipe(ROOT / "recipes" / "own_loop.py")
    with pytest.raises(UserError, match="--keep_best: this loop does not have it"):
        recipe.main(recipe.Config(keep_best=True))
    with pytest.raises(UserError, match="--balance: this loop does not have it"):
        recipe.main(recipe.Config(balance="2,1"))


@pytest.mark.slow
def test_a_run_with_a_new_head_on_a_16_bit_model_resumes_bit_identical(narrow_model, tmp_path):
    import torch
    from safetensors.torch import load_file

    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"row {i},{i % 3}\n" for i in range(24)))
    words = ["--model", narrow_model, "--lora_r", "2", "--mixed_precision", "bf16", "--train_file", tmp_path / "rows.csv"]
    words += ["--global_batch_size", "4", "--steps", "2", "--save_every", "1"]
    one, two = tmp_path / "one", tmp_path / "two"
    run_ranks(1, CLASSIFY, *words, "--output_dir", one).well()
    run_ranks(1, CLASSIFY, *words, "--resume", one / "step_00000001", "--output_dir", two).well()
    first, second = (load_file(place / "step_00000002" / "model.safetensors") for place in (one, two))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}


@pytest.mark.slow
def test_a_resumed_run_on_two_nodes_keeps_options_that_only_the_disk_of_one_knows(tmp_path):
    """The main node has a new disk, and the other node has the checkpoint of a run of one rank with another learning rate."""
    folders = [tmp_path / name for name in ("main", "other")]
    for folder in folders:
        folder.mkdir()
    words = [
        "--steps", "3", "--max_train_items", "16", "--max_eval_items", "4", "--samples", "0", "--no_eval_first", "--max_length", "64",
        "--global_batch_size", "2", "--lora_r", "2", "--output_dir", "run",
    ]  # fmt: skip
    first = [sys.executable, SFT, *words, "--lr", "3e-3", "--lora_targets", "q_proj", "v_proj", "--stop_after", "1"]
    run_all([first], rank_environments(1), cwd=folders[1:])
    again = [[sys.executable, SFT, *words, "--preflight", "off", "--resume"]] * 2
    ended = run_all(again, node_environments(2), cwd=folders).well()
    assert f"--resume: {KEPT}: lr 0.003, " in ended.texts[0]
    assert KEPT not in ended.texts[1], "one message is enough"
    assert "lr 1.00e-03" in ended.texts[0], "the last of three steps"
    stored = json.loads(Path(folders[0], "run", "config.json").read_text())
    assert (stored["lr"], stored["lora_targets"], stored["chosen"]["lr"]) == (3e-3, "q_proj v_proj", KEPT)
    assert (stored["dtype"], stored["mixed_precision"]) == ("float32", "no")
    saved = json.loads(Path(folders[0], "run", "step_00000003", "run.json").read_text())
    assert saved["config"]["lr"] == stored["lr"]
    assert saved["chosen"] == stored["chosen"]
