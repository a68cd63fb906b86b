"""Tests of options: which source has precedence, messages for mistakes, and how batches are split."""

import dataclasses
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from accel_ddp.config.options import GROUPS, option, properties_of
from accel_ddp.config.other_names import INSTEAD, NO_EQUIVALENT, NOTES, OTHER_NAMES
from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import (
    RecipeConfig,
    TrainConfig,
    as_plain_dict,
    options_that_keep_the_result,
    options_that_must_match,
)
from accel_ddp.doctor.check_options import load_recipe
from accel_ddp.doctor.findings import FIXES
from accel_ddp.errors import UserError
from accel_ddp.sources.data import mixture_weights
from tests.conftest import ROOT


@dataclass(kw_only=True)
class Config(TrainConfig):
    name: str = option("x", "an option of the recipe", group="data", affects_result=False)
    lr: float = 1e-3


def parse(*argv: str) -> Config:
    return parse_config(Config, list(argv))


def test_the_command_line_overrides_the_file_and_the_file_overrides_the_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "lr: 3e-4\nsteps: 7\ntf32: false\nfreeze: [embeddings, layer.0]\nmixed_precision: no\npadding_free: off\ncompile: on\nname:\n"
        "balance: off\ntuned: off\n"
    )
    cfg = parse("--config", str(file), "--steps", "9")
    assert (cfg.lr, cfg.steps, cfg.tf32, cfg.freeze, cfg.mixed_precision) == (3e-4, 9, False, ("embeddings", "layer.0"), "no")
    assert (cfg.padding_free, cfg.compile) == ("off", "on"), "YAML reads off and on as false and true"
    assert (cfg.balance, cfg.tuned) == ("off", "off")
    assert parse("--steps", "9", f"--config={file}").steps == 9, "the position of --config does not matter"
    assert parse().steps == TrainConfig().steps


def recipe_configs() -> list[type[TrainConfig]]:
    """Return the config classes of all recipes."""
    folder = Path(__file__).parents[1] / "recipes"
    sys.path.insert(0, str(folder))  # own_loop imports classify
    found = []
    for path in sorted(folder.glob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module.Config)
    sys.path.remove(str(folder))
    return found


def test_every_option_has_help_and_a_group():
    for cls in recipe_configs():
        for name, properties in properties_of(cls).items():
            assert properties.help, f"{cls.__module__}: --{name} has no help"
            assert properties.group in GROUPS, f"{cls.__module__}: --{name} has no group"


def test_no_name_from_another_toolkit_stands_for_two_options():
    for cls in recipe_configs():
        spellings = [spelling for name, found in properties_of(cls).items() for spelling in (name, *found.also)]
        assert len(spellings) == len(set(spellings)), [spelling for spelling in spellings if spellings.count(spelling) > 1]


def test_a_misspelt_group_is_an_error_and_not_a_lost_option():
    @dataclass(kw_only=True)
    class Wrong(TrainConfig):
        width: int = option(1, "units", group="modle")

    with pytest.raises(ValueError, match="the group of --width is none of model, data"):
        parse_config(Wrong, ["--width", "2"])


def test_an_overridden_option_keeps_the_properties_that_are_not_given():
    assert properties_of(Config)["lr"] == properties_of(TrainConfig)["lr"]
    assert Config().lr == 1e-3
    assert "name" in options_that_keep_the_result(Config)
    assert "seed" not in options_that_keep_the_result(Config)
    assert "lr" in options_that_must_match(Config())
    assert "output_dir" not in options_that_must_match(Config())


def test_help_shows_groups_and_examples_as_typed(capsys):
    classify = next(cls for cls in recipe_configs() if cls.__module__ == "classify")
    with pytest.raises(SystemExit) as end:
        parse_config(classify, ["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    positions = [text.index(f"{group} options") for group in GROUPS]
    assert positions == sorted(positions), "model and data come first"
    assert "recipes/classify.py \\\n        --model FacebookAI/roberta-base" in text, "the continued line is shown as typed"
    assert "None" not in text


def test_switches_accept_several_spellings():
    assert parse("--tf32", "false").tf32 is parse("--no_tf32").tf32 is False
    assert (
        parse("--gradient_checkpointing").gradient_checkpointing
        is parse("--gradient-checkpointing", "True").gradient_checkpointing
        is True
    )
    (sft,) = (cls for cls in recipe_configs() if cls.__module__ == "sft")  # its switch may be `auto` too
    given = lambda *words: parse_config(sft, list(words)).gradient_checkpointing
    assert given("--gradient_checkpointing") is given("--gradient-checkpointing", "true", "--steps", "3") is True
    assert given("--no_gradient_checkpointing") is given("--gradient_checkpointing", "off") is False
    assert given() == given("--gradient_checkpointing", "auto") == "auto"
    with pytest.raises(UserError, match=r"--gradient_checkpointing maybe: must be one of true, false, auto"):
        given("--gradient_checkpointing", "maybe")
    assert parse("--broadcast_buffers", "true").broadcast_buffers == "on"
    assert parse("--pin_memory", "False").pin_memory == "off"
    assert parse("--resume").resume == parse("--resume", "--steps", "3").resume == "auto"
    assert parse("--resume", "runs/a/step_00000003").resume == "runs/a/step_00000003"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rat: 3", "run.yaml: learning_rat: there is no such option. Did you mean --lr "),
        ("learning_rate: 3", "Did you mean --lr "),
        ("stepz: 3", "Did you mean --steps "),
        ("quux: 3", "See --help"),
        (
            "stepz: 3\nlr: 1\nlearning_rat: 3",
            r"run.yaml: 2 lines have to change.*:\n  stepz: Did you mean --steps .*\n  learning_rat: Did you mean --lr ",
        ),
        ("tf32: maybe", "must be true or false"),
        ("lr: [1, 2]", "is a list"),
        ("lr: {a: 1}", "has nested lines"),
        ("- a", "must contain lines of `option: value`"),
        ("a: b: c", r"run.yaml: is not valid YAML in line 1: mapping values are not allowed here\.$"),
        ("lr: high", r"run.yaml: --lr high: must be a number\."),
        ("optimizer: adam", r"run.yaml: --optimizer adam: must be one of .*\. Did you mean --optimizer adamw\?"),
        ("steps:", r"run.yaml: steps: needs a value\."),
    ],
)
def test_a_mistake_in_the_file_is_reported(tmp_path, line, message):
    file = tmp_path / "run.yaml"
    file.write_text(line)
    with pytest.raises(UserError, match=message):
        parse("--config", str(file))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "nowhere.yaml"], "no such file"),
        (["--config"], "needs a file"),
        (["--global_batch_size", "0"], "must be 1 or more"),
        (["--micro_batch_tokens", "500", "--micro_batch_size", "2"], "--micro_batch_size 2: both are the size of a batch"),
        (["--global_batch_tokens", "500", "--global_batch_size", "2"], "--global_batch_size 2: both are the size of a batch"),
        (["--lr", "nan"], "must be 0 or more"),
        (["--epochs", "0"], "above 0"),
        (["--epochs", "inf"], "above 0"),
        (["--warmup_ratio", "3"], "from 0 to 1"),
        (["--tuned", ""], "--tuned : must be auto, off, or settings"),
        (["--tuned", "on"], "--tuned on: must be auto, off, or settings"),
        (["--tuned", "NCCL_ALGO=Ring XNCCL_PROTO=LL"], "XNCCL_PROTO=LL is no setting of NCCL that a run may have"),
        (["--tuned", "NCCL_ALGO=Ring NCCL_NET_PLUGIN=x"], "NCCL_NET_PLUGIN=x is no setting"),
    ],
)
def test_an_impossible_value_is_refused(argv, message):
    with pytest.raises(UserError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--steps many", "--steps many: must be a whole number."),
        ("--steps 1e3", "--steps 1e3: must be a whole number. Use --steps 1000."),
        ("--lr=high", "--lr high: must be a number. For example: --lr 2e-05."),
        ("--lr --steps 3", "--lr: needs a value: a number. For example: --lr 2e-05."),
        ("--output_dir", "--output_dir: needs a value."),
        ("--micro_batch_size few", "--micro_batch_size few: must be a whole number or auto. For example: --micro_batch_size 8."),
        (
            "--optimizer adam",
            "--optimizer adam: must be one of adamw, adamw8bit, adafactor, muon, sgd. Did you mean --optimizer adamw?",
        ),
        ("--preflight never", "--preflight never: must be one of on, off."),
        ("--no_tf32 false", "--no_tf32 false: --no_tf32 takes no value. Use --no_tf32 or --tf32."),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_to_type(typed, message):
    with pytest.raises(UserError) as error:
        parse_config(TrainConfig, typed.split())
    assert str(error.value) == message


def test_values_of_several_types_are_accepted():
    words = ["--micro_batch_size", "auto", "--lr", "1e1", "--steps=5", "--compile", "true", "--run_tags", "a", "1", "--no_tf32"]
    cfg = parse_config(TrainConfig, words)
    assert (cfg.micro_batch_size, cfg.lr, cfg.steps, cfg.compile, cfg.run_tags, cfg.tf32) == (
        "auto",
        10,
        5,
        "on",
        ("a", "1"),
        False,
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--stepz", "--steps"), ("--learning_rate", "--lr"), ("--learning-rate", "--lr"),
        ("--per_device_train_batch_size", "--micro_batch_size"),
        ("--num_train_epochs", "--epochs"), ("--max_steps", "--steps"), ("--logging_steps", "--log_every"),
        ("--save_total_limit", "--keep_last"), ("--lr_scheduler_type", "--lr_schedule"), ("--bf16", "--mixed_precision"),
        ("--resume_from_checkpoint", "--resume"), ("--torch_compile", "--compile"), ("--ddp_timeout", "--ddp_timeout_seconds"),
        ("--dataloader_num_workers", "--num_workers"), ("--metric_for_best_model", "--best_metric"), ("--no_tf3", "--tf32"),
        ("--logging_steps_interval", "--log_every"),
    ],
)  # fmt: skip
def test_a_wrong_option_suggests_the_right_one(typed, meant):
    with pytest.raises(UserError, match=f"Did you mean {meant} "):
        parse(typed, "3")


# Settings in the words of other toolkits, and what the message says about each of them.
AXOLOTL = {
    "base_model: me/base": "Did you mean --model ",
    "datasets: [{path: chats.jsonl, type: chat_template}, {path: more.jsonl}]": "Use --train_file chats.jsonl more.jsonl.",
    "test_datasets: [{path: held_out.jsonl}]": "Use --eval_file held_out.jsonl.",
    "val_set_size: 0.1": "Did you mean --eval_fraction ",
    "adapter: qlora": "Use --lora_r 16 for LoRA, with --quantize 4bit",
    "load_in_4bit: true": "Use --quantize 4bit",
    "lora_target_linear: true": "Use --lora_targets all-linear",
    "sequence_len: 4096": "Did you mean --max_length ",
    "sample_packing: true": "padding-free is the default",
    "gradient_accumulation_steps: 4": "it follows from --global_batch_size and --micro_batch_size",
    "num_epochs: 3": "Did you mean --epochs ",
    "optimizer: paged_adamw_8bit": "--optimizer paged_adamw_8bit: must be one of adamw, ",
    "lr_scheduler: cosine": "Did you mean --lr_schedule ",
    "train_on_inputs: false": "Did you mean --train_on_prompts ",
    "special_tokens: {pad_token: <pad>}": "the tokenizer in --model decides",
    "flash_attention: true": "Did you mean --attn_implementation ",
    "evals_per_epoch: 4": "Did you mean --eval_every ",
    "lora_model_dir:": "lora_model_dir, wandb_entity: Leave out what has no value.",
    "wandb_entity:": "lora_model_dir, wandb_entity: Leave out what has no value.",
}
LLAMA_FACTORY = {
    "model_name_or_path: me/chat": "Did you mean --model ",
    "stage: sft": "the recipe sets it",
    "finetuning_type: lora": "Use --lora_r 16 for LoRA",
    "lora_target: all": "Did you mean --lora_targets ",
    "dataset_dir: data": "Use --train_file FOLDER or FOLDER/FILE.",
    "cutoff_len: 2048": "Did you mean --max_length ",
    "overwrite_cache: true": "tokenized once and cached",
    "plot_loss: true": "accel-ddp report draws the curves",
    "per_device_train_batch_size: 1": "Did you mean --micro_batch_size ",
    "num_train_epochs: 3.0": "Did you mean --epochs ",
    "ddp_timeout: 1800": "Did you mean --ddp_timeout_seconds ",
    "quantization_bit: 4": "Did you mean --quantize ",
    "neat_packing: true": "padding-free is the default",
    "deepspeed: zero3.json": "accel-ddp run --config_file fsdp.yaml",
}


@pytest.mark.parametrize("lines", [AXOLOTL, LLAMA_FACTORY])
def test_everything_that_has_to_change_in_a_file_of_another_toolkit_is_listed_at_once(lines, tmp_path):
    valid = ["micro_batch_size: 2", "weight_decay: 0.0", "lora_r: 8", "warmup_ratio: 0.1"]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, *valid]))
    with pytest.raises(UserError) as error:
        parse_config(load_recipe(ROOT / "recipes" / "sft.py").Config, ["--config", str(tmp_path / "run.yaml")])
    head, *found = str(error.value).splitlines()
    assert (
        f"run.yaml: {len(set(lines.values()))} lines have to change. Run accel-ddp convert {tmp_path}/run.yaml, or write" in head
    )
    for line, expected in lines.items():
        name = line.partition(":")[0]
        assert [text for text in found if expected in text and name in text], (name, found)
    assert len(found) == len(set(lines.values()))


@pytest.mark.parametrize("typed", ["--packing", "--gradient_accumulation_steps", "--load_in_4bit", "--sample-packing"])
def test_a_setting_without_a_counterpart_says_what_to_do_on_the_command_line_too(typed):
    texts = {
        "packing": "padding-free is the default",
        "steps": "it follows from --global_batch_size",
        "4bit": "Use --quantize 4bit",
    }
    expected = next(text for end, text in texts.items() if typed.endswith(end))
    with pytest.raises(UserError, match=f"there is no such option. .*{expected}"):
        parse_config(RecipeConfig, [typed, "1"])


def test_tables_in_yaml_contain_texts_and_no_key_twice():
    """YAML would silently use the last value of a key, and read `off` and `1e3` as a bool and a number."""
    files = sorted((ROOT / "accel_ddp").glob("*/*.yaml"))
    assert len(files) > 5
    for file in files:
        nodes = [yaml.compose(file.read_text())]
        for node in nodes:
            for child in node.value if isinstance(node, yaml.CollectionNode) else ():
                nodes += child if isinstance(child, tuple) else [child]
            keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
            assert len(keys) == len({*keys}), f"{file}: {keys}"
    texts = [text for table in (INSTEAD, NO_EQUIVALENT, OTHER_NAMES, NOTES, FIXES) for pair in table.items() for text in pair]
    assert not [text for text in texts if not isinstance(text, str) or text != " ".join(text.split())]


def test_what_to_do_instead_names_options_that_exist():
    """A text is left out in recipes without its options, so a wrong name in it would never be seen."""
    recipes = [properties_of(load_recipe(path).Config) for path in (ROOT / "recipes").glob("*.py")]
    known = {name for properties in recipes for name in properties}
    named = {name for text in INSTEAD for name in re.findall(r"--(\w+)", text)}
    assert named <= {*known, "config_file", "cpu"}
    others = [name for table in (INSTEAD, NO_EQUIVALENT, OTHER_NAMES) for names in table.values() for name in names.split()]
    assert not {name for name in others if others.count(name) > 1 or name in known - {"packing"}}, "sft has --packing"
    also = {name for properties in recipes for found in properties.values() for name in found.also}
    assert not {*NOTES} - {*others, *known, *also}
    assert {name for text in (*NOTES.values(), *NO_EQUIVALENT) for name in re.findall(r"--(?:no_)?(\w+)", text)} <= known


@pytest.mark.parametrize(
    ("batch", "micro", "limit", "number", "reason"),
    [
        (16, 8, 8, 8, ""),
        (18, 8, 8, 6, "--global_batch_size 18 cannot be split over 8; --global_batch_size 24 uses all"),
        (7, 8, 8, 7, "--global_batch_size 7 cannot be split over 8; --global_batch_size 8 uses all"),
        (13, 8, 8, 1, "--global_batch_size 13 cannot be split over 8; --global_batch_size 16 uses all"),
        (100, 10, 8, 5, "--global_batch_size 100 cannot be split over 8; --global_batch_size 160 uses all"),
        (100, "auto", 8, 5, "--global_batch_size 100 cannot be split over 8; --global_batch_size 104 uses all"),
        (48, 8, 4, 3, "--micro_batch_size 8 does not divide the 12 items of each; --micro_batch_size 6 uses all"),
    ],
)
def test_as_many_gpus_are_used_as_a_batch_can_be_split_over(batch, micro, limit, number, reason):
    cfg = Config(global_batch_size=batch, micro_batch_size=micro)
    assert cfg.most_ranks(limit) == (number, reason)
    changed = dict([re.search(r"--(\w+) (\d+) uses all", reason).groups()]) if reason else {}
    changed = dataclasses.replace(cfg, **{name: int(value) for name, value in changed.items()})
    assert changed.most_ranks(limit) == (limit, ""), "what the message names can be used"


@pytest.mark.parametrize(
    ("batch", "limit", "number", "reason"),
    [
        (32, 6, 4, "6 ranks cannot be divided among --local_workers 4"),
        (32, 3, 2, "3 ranks cannot be divided among --local_workers 4"),
        (30, 2, 1, "--global_batch_size 30 cannot be split over 4; --global_batch_size 32 uses all"),
        (32, 8, 8, ""),
    ],
)
def test_local_workers_are_divided_among_as_many_gpus_as_possible(batch, limit, number, reason):
    cfg = Config(global_batch_size=batch, micro_batch_size=1, sync_every=5, local_workers=4)
    assert cfg.most_ranks(limit) == (number, reason)


def test_batches_are_split_or_the_nearest_sizes_are_named():
    assert Config(global_batch_size=128, micro_batch_size=8).split(8) == (8, 2)
    assert Config(global_batch_size=16, micro_batch_size=16).split(4) == (4, 1), "a rank has less than --micro_batch_size"
    with pytest.raises(UserError, match="96 or 104"):
        Config(global_batch_size=100, micro_batch_size=4).split(8)
    with pytest.raises(UserError, match="micro_batch_size 4 or 6"):
        Config(global_batch_size=24, micro_batch_size=5).split(2)


def test_batches_of_tokens_need_not_be_divisible_by_the_ranks():
    assert Config(global_batch_size=50, micro_batch_tokens=2048).split(4) == (4, 3), "for items of 512 tokens"
    assert Config(global_batch_tokens=2**16, micro_batch_size=8).split(4) == (8, 4)
    assert Config(global_batch_tokens=2**16, micro_batch_tokens=100).split(4) == (1, 32)
    assert Config(global_batch_size=50, micro_batch_tokens=2048).most_ranks(8) == (8, "")
    with pytest.raises(UserError, match="--global_batch_size 3: 4 ranks need an item each"):
        Config(global_batch_size=3, micro_batch_tokens=2048).split(4)
    assert Config(epochs=2, global_batch_tokens=1000).total_steps(6400) == 13


def test_epochs_become_steps_and_no_item_is_dropped():
    assert Config(epochs=3, global_batch_size=32).total_steps(101) == 10  # 303 items are 9.5 batches, rounded up
    assert Config(epochs=0.5, global_batch_size=10).total_steps(100) == 5
    assert Config(epochs=2.2, global_batch_size=10).total_steps(100) == 22, "2.2 * 100 is 220.00000000000003"
    assert Config(epochs=1, steps=7).total_steps(10**6) == 7


def test_learning_rates_are_functions_of_the_step():
    from accel_ddp.training.optim import lr_at

    def rates(**options):
        return [lr_at(step, Config(lr=1.0, **options), 10) for step in range(10)]

    assert rates(lr_schedule="constant") == [1.0] * 10
    assert rates(lr_schedule="linear") == pytest.approx([1 - s / 10 for s in range(10)])
    assert rates(lr_schedule="linear", warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates(warmup_ratio=0.4) == rates(warmup_steps=4)
    cosine = rates(lr_schedule="cosine")
    assert cosine[0] == 1
    assert cosine[5] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[a b.jsonl, c.jsonl]", ["a b.jsonl", "c.jsonl"]),
        ("'a b.jsonl'", ["a b.jsonl"]),
        ("{'a:b.jsonl': 0.7, c.jsonl: 1}", ["a:b.jsonl:0.7", "c.jsonl:1"]),
        ("[{a b.jsonl: 0.7}, {c.jsonl: 1}]", ["a b.jsonl:0.7", "c.jsonl:1"]),
        ("[[a b.jsonl, 0.7], [c.jsonl, 1]]", ["a b.jsonl:0.7", "c.jsonl:1"]),
    ],
)
def test_several_files_are_the_same_in_yaml_on_the_command_line_and_in_a_saved_run(line, words, tmp_path):
    (tmp_path / "run.yaml").write_text(f"train_file: {line}")
    cfg = parse_config(RecipeConfig, ["--config", str(tmp_path / "run.yaml")])
    assert cfg.train_file == tuple(words) == parse_config(RecipeConfig, ["--train_file", *words]).train_file
    saved = json.loads(json.dumps(as_plain_dict(cfg)))
    assert RecipeConfig(train_file=saved["train_file"]).train_file == cfg.train_file
    assert as_plain_dict(RecipeConfig(train_file="old run.csv"))["train_file"] == "old run.csv", "as older runs have stored it"
    weights = mixture_weights(cfg)
    assert weights == ((0.7, 1.0) if "1" in line else None)


def test_a_second_value_of_an_option_is_refused_with_what_to_type():
    with pytest.raises(UserError, match=r"--report_to wandb tensorboard: .* Use --report_to wandb,tensorboard\."):
        parse_config(TrainConfig, ["--report_to", "wandb", "tensorboard"])
    with pytest.raises(UserError, match=r"--run_name my run: .* Put a value with spaces into quotes\."):
        parse_config(TrainConfig, ["--run-name=my", "run"])
    assert parse_config(TrainConfig, ["--run_tags", "small", "test", "--lr", "1"]).run_tags == ("small", "test")


def test_an_option_that_only_other_recipes_have_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"--log_predictions: there is no such option. Only recipes for pretrained models"):
        parse_config(TrainConfig, ["--log_predictions", "3"])


def test_a_file_without_an_option_suggests_train_file():
    with pytest.raises(UserError, match=r"rows.csv: is not an option. Did you mean --train_file rows.csv\?"):
        parse_config(RecipeConfig, ["rows.csv", "--lr", "1"])
