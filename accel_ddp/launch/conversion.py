"""`accel-ddp convert`: a file of axolotl or LLaMA-Factory as options of a recipe, with what differs and what is lost."""

import argparse
import json
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel_ddp.config.optimizer_options import OPTIMIZERS
from accel_ddp.config.options import properties_of
from accel_ddp.config.other_names import INSTEAD, NO_EQUIVALENT, NOTES, OTHER_NAMES, TABLES
from accel_ddp.config.train_config import TABLE_FILES
from accel_ddp.doctor.check_options import load_recipe, load_recipe_config
from accel_ddp.doctor.facts import count_visible
from accel_ddp.errors import UserError
from accel_ddp.nodes.recipe_files import recipe_path
from accel_ddp.text import counted, shorten

TITLES = {"axolotl": "axolotl", "llama_factory": "LLaMA-Factory"}
RECIPES = {"sft": "sft", "pt": "sft", "rm": "reward"}  # and the preference losses
DEFAULTS, SCHEDULES, COLUMNS, USUAL = (TABLES[name] for name in ("defaults", "schedules", "columns", "usual"))
ROLES, FORMATS, ELSEWHERE = ({*TABLES["data_words"][name].split()} for name in ("roles", "formats", "elsewhere"))


class Conversion:
    def __init__(self, toolkit: str, values: dict[str, Any], gpus: int, file: Path, info: str):
        self.toolkit, self.gpus, self.file, self.info = toolkit, gpus, file, info
        self.left = {str(name): _number(value) for name, value in values.items() if value not in (None, "", [], {})}
        for name, value in self.left.items():
            if re.search("_(size|len|steps|epochs?|limit|ratio|r|rank)$", name) and not isinstance(value, int | float):
                raise UserError(f"{file}: {name}: must be a number, and not {value!r}.")
        self.names = {*self.left}
        self.has_chats = False
        self.empty = sorted({*map(str, values)} - {*self.left})
        self.columns: dict[str, Any] = {}  # those of the first dataset, by option
        self.options: dict[str, Any] = {}
        self.notes: dict[str, str] = {}  # by option: what is different
        self.not_needed: dict[str, str] = {}  # by their name: why it needs no option
        self.replaced: dict[str, str] = {}  # by their name: what does nearly the same
        self.lost: dict[str, str] = {}  # by their name: why it has no equivalent
        self.recipe = self._choose_recipe()
        packings = {name: self.take(name) for name in ("sample_packing", "packing", "neat_packing")}
        self.is_packed = any(packings.values())
        self.replaced |= {f"{name}: true": "global_batch_tokens, and no padding" for name, is_on in packings.items() if is_on}
        self._convert_model()
        self._convert_data()
        self._convert_batch()
        self._convert_schedule()
        self._convert_saving()
        self.is_sharded = self._is_sharded()
        self._convert_others()
        self._check()

    def take(self, *names: str) -> Any:
        """Return the value of the first of these keys that the file has, else its default there, and remove all of them."""
        found = [self.left.pop(name) for name in names if name in self.left]
        return found[0] if found else next((d[n] for d in [DEFAULTS[self.toolkit]] for n in names if n in d), None)

    def put(self, option: str, value: Any, note: str = "") -> None:
        if value is not None:
            self.options[option] = value
            self.notes[option] = note

    def lose(self, name: str, value: Any, reason: str) -> None:
        shown = value if isinstance(value, str | int | float) else json.dumps(value, default=str)
        self.lost[shorten(" ".join(f"{name}: {shown}".split()), 100)] = " ".join(reason.split())

    def _choose_recipe(self) -> str:
        key = "stage" if self.toolkit == "llama_factory" else "rl"
        method = self.take(key) or ("rm" if self.toolkit == "axolotl" and self.take("reward_model") else "sft")
        losses = load_recipe(recipe_path("dpo")).Config.losses
        if method not in (*RECIPES, *losses) or self.left.get("process_reward_model"):
            raise UserError(
                f"{self.file}: {key}: {method} has no recipe here. `convert` knows {', '.join((*RECIPES, *losses))}. "
                f"{TITLES[self.toolkit]} can export what it trains, and sft, dpo and reward train that model further."
            )
        self.is_text = method == "pt" or bool(self.left.get("pretraining_dataset"))
        if method in losses:
            given = self.take("pref_loss", "dpo_loss_type") if method == "dpo" else method
            word = given[0] if isinstance(given, list) else given or "dpo"
            loss = next((name for name, one in losses.items() if word in (name, *one.also)), "")
            self.put("loss", loss or "dpo")
            if not loss:
                self.lose("pref_loss", given, "the loss is dpo; see docs/preferences.md")
            beta, usual = "rl_beta" if self.toolkit == "axolotl" else "pref_beta", losses[loss or "dpo"]
            if usual.beta != DEFAULTS[self.toolkit][beta]:
                self.put("beta", self.take(beta))
            for option, (name, default) in usual.elsewhere.get(self.toolkit, {}).items():
                self.put(option, self.left.pop(name, default))
        return RECIPES.get(method, "dpo")

    def _convert_model(self) -> None:
        self.put("model", self.take("base_model", "model_name_or_path"))
        if "model" not in self.options:
            raise UserError(f"{self.file}: has neither base_model nor model_name_or_path.")
        adapters = self.take("lora_model_dir", "adapter_name_or_path")
        of_adapters = [name for name in self.left if name.startswith("lora_") or name in ("load_in_4bit", "load_in_8bit")]
        method = self.take("adapter", "finetuning_type") or ("lora" if self.toolkit == "llama_factory" else "")
        rank, alpha, dropout = self.take("lora_r", "lora_rank") or 8, self.take("lora_alpha"), self.take("lora_dropout")
        targets, all_linear = self.take("lora_target_modules", "lora_target"), self.take("lora_target_linear")
        in_4, in_8, bits = self.take("load_in_4bit"), self.take("load_in_8bit"), self.take("quantization_bit")
        if method not in ("lora", "qlora", "full", ""):
            self.lose("adapter", method, "only LoRA and QLoRA are adapters here; this file trains all weights")
        is_lora = method in ("lora", "qlora")
        quantize = "4bit" if in_4 or bits == 4 or method == "qlora" else "8bit" if in_8 or bits else None
        if adapters:
            self.put("model", adapters, "adapters, which are trained further; their adapter_config.json names the base model")
            self.put("lora_r", rank if quantize else None, "quantize needs it; it must be the rank of the adapters")
            used = {*self.left, "load_in_4bit", "load_in_8bit", *(("lora_r", "lora_rank") if quantize else ())}
            settings = [name for name in of_adapters if name not in used]
            self.not_needed |= dict.fromkeys(settings, "the adapters keep their adapter_config.json")
        elif is_lora:
            self.put("lora_r", rank)
            self.put("lora_alpha", alpha or (2 * rank if self.toolkit == "llama_factory" else 8))
            self.put("lora_dropout", dropout)
            names = targets.replace(",", " ").split() if isinstance(targets, str) else targets or []
            all_linear = all_linear or names in (["all"], ["all-linear"]) or (not names and self.toolkit == "llama_factory")
            self.put("lora_targets", ["all-linear"] if all_linear else names or None)
        else:
            self.not_needed |= dict.fromkeys(of_adapters, "the file has no adapter")
            if self.toolkit == "axolotl" and not self.left.get("bfloat16"):
                self.notes["model"] = "float32 weights, computed in bf16; axolotl trains bf16 weights, as dtype: bfloat16 does"
        self.put("quantize", quantize if is_lora or adapters else None)
        if self.take("pure_bf16", "bfloat16"):
            self.put("dtype", "bfloat16", "16 bits lose small updates")
        fp16, bf16 = self.take("fp16"), self.take("bf16")
        if "auto" in (fp16, bf16):
            self.not_needed["bf16: auto" if bf16 == "auto" else "fp16: auto"] = "mixed_precision auto is the default"
        self.put("mixed_precision", "fp16" if fp16 is True else "bf16" if bf16 is True else None)
        if self.left.get("chat_template") == "jinja":  # the file is in chat_template_jinja
            del self.left["chat_template"]
        if "template" in self.left or str(self.left.get("chat_template")).startswith("tokenizer_default"):
            self.not_needed[f"template: {self.take('template', 'chat_template')}"] = NOTES["template"].partition("; ")[2]
        elif "chat_template" in self.left:
            note = "the tokenizer must have its tokens, which base models may lack; else use plain or a .jinja file"
            self.put("chat_template", self.take("chat_template"), note)

    def _convert_batch(self) -> None:
        length = self.take("sequence_len", "cutoff_len")
        drops = self.toolkit == "axolotl" and self.take("excess_length_strategy") in (None, "drop")
        note = "longer rows are refused; skip_broken: true leaves them out" if self.recipe == "reward" else ""
        self.put("max_length", length, note or (NOTES["sequence_len"] if drops else ""))
        micro = self.take("micro_batch_size", "per_device_train_batch_size")
        per_gpu = self.take("batch_size") or micro  # of axolotl: another way to write the accumulation
        parts = self.take("gradient_accumulation_steps") or max(1, per_gpu // micro)
        shared = self.left.get("context_parallel_size", 1) * self.left.get("tensor_parallel_size", 1)  # GPUs with the same rows
        total = micro * parts * (copies := max(1, self.gpus // shared))
        sizes = f"{micro} per GPU x {counted(parts, 'micro-batch')} x {counted(copies, 'GPU')}"
        if self.is_packed or self.is_text:
            self.put("global_batch_tokens", total * length, f"{sizes} x {length} tokens: its items are full packs of rows")
            self.put("micro_batch_tokens", micro * length)
        else:
            self.put("global_batch_size", total, sizes)
            self.put("micro_batch_size", micro)

    def _convert_schedule(self) -> None:
        self.put("lr", self.take("learning_rate"))
        given = str(self.take("lr_scheduler", "lr_scheduler_type"))
        schedule = SCHEDULES.get(given, "cosine" if "cosine" in given else "linear")
        self.put("lr_schedule", schedule)
        if given not in SCHEDULES:
            self.lose("lr_scheduler", given, f"the schedule is {schedule}")
        is_zero = self.toolkit == "axolotl" and "warmup_steps" in self.left  # in transformers, 0 steps leave the ratio
        steps, ratio = self.left.pop("warmup_steps", 0), self.take("warmup_ratio")
        if given == "constant" or steps or is_zero:  # transformers: `constant` has no warm-up, and a number below 1 is a ratio
            ratio = steps if 0 < steps < 1 and given != "constant" else 0
        self.put("warmup_steps", steps if steps >= 1 and given != "constant" else None)
        self.put("warmup_ratio", ratio if ratio or self.recipe != "sft" else None)
        kwargs = self.take("lr_scheduler_kwargs") or {}
        self.put("min_lr_ratio", kwargs.pop("min_lr_rate", None) or self.take("cosine_min_lr_ratio"))
        for name, value in kwargs.items():
            self.lose(f"lr_scheduler_kwargs.{name}", value, "the schedule has no such setting")
        self.put("epochs", self.take("num_epochs", "num_train_epochs"))
        if (steps := self.take("max_steps") or 0) > 0:
            self.put("steps", steps)
        self.put("weight_decay", self.take("weight_decay") or 0.0)
        self.put("seed", self.left.pop("seed", 42))
        optimizer = str(self.take("optimizer", "optim") or "adamw_torch")
        known = next((ours for ours, entry in OPTIMIZERS.items() if re.search(entry.others, optimizer)), "")
        if known not in ("", "adamw"):
            self.put("optimizer", known)
        if not known:
            self.lose("optimizer", optimizer, "adamw is used")
        elif "paged" in optimizer:
            self.replaced[f"optimizer: {optimizer}"] = f"{known}, without paging"

    def _convert_saving(self) -> None:
        for kind, other in (("eval", "evaluation_strategy"), ("save", "save_strategy")):
            ours, per_epoch, strategy, steps = f"{kind}_every", f"{kind}s_per_epoch", f"{kind}_strategy", f"{kind}_steps"
            times, how, every = self.take(per_epoch), self.take(strategy, other), self.take(steps)
            if isinstance(every, float) and every < 1:
                self.lose(steps, every, f"a fraction of the run: write {ours}: N with the number of updates")
            else:
                self.put(ours, every if how in (None, "steps") and not times else 0 if how else None)
            if times and times > 1:
                self.lose(per_epoch, times, f"once per epoch here; {ours}: N is a number of updates")
            if how in ("no", False):
                self.not_needed[f"{strategy}: no"] = NOTES[strategy].partition("; ")[2]
        if limit := self.take("save_total_limit"):
            self.put("keep_last", max(2, limit))
        if self.take("load_best_model_at_end"):
            self.put("keep_best", True, NOTES["load_best_model_at_end"].partition(";")[0])
        best, greater = self.take("metric_for_best_model"), self.take("greater_is_better")
        if best:
            name = str(best).removeprefix("eval_")
            self.put("best_metric", name if greater is None or name == "loss" else f"{name}:{'max' if greater else 'min'}")
        known = ("wandb", "tensorboard", "mlflow")
        uses = [name for name in known if self.take(f"use_{name}") or self.left.get(f"{name}_project")]
        given = self.take("report_to")
        trackers = [given] if isinstance(given, str) else given or uses
        self.put("report_to", ",".join(trackers) if trackers not in ([], ["none"]) else None)
        if log := self.take("wandb_log_model"):
            self.put("log_model", str(log).lower() not in ("false", "none"))

    def _is_sharded(self) -> bool:
        names = [name for name in self.left if name == "deepspeed" or name.startswith("fsdp")]
        given = {name: value for name in names if (value := self.take(name))}
        if re.search("offload(?!_params': (False|'false'))", str(given)):
            self.lose("offload", "true", "weights stay on the GPUs; fsdp_offload_params in a copy of fsdp.yaml changes that")
        if re.search("activation_checkpointing': (True|'true')", str(given)):
            self.left.setdefault("gradient_checkpointing", True)
        if given and self.options.get("quantize"):
            reason = "quantized weights are not sharded here: every GPU holds them, and the command uses DDP"
            self.lose(min(given), given[min(given)], reason)
            return False
        self.not_needed |= dict.fromkeys(given, "the command shards the model with FSDP2, which needs no further settings")
        return bool(given)

    def _convert_data(self) -> None:
        key = "val_set_size" if self.toolkit == "axolotl" else "val_size"
        fraction = self.take(key) or 0
        self._put_rows("train", self.take("datasets", "pretraining_dataset", "dataset"))
        if tests := self.take("test_datasets", "eval_dataset"):
            self._put_rows("eval", tests)
        self.take("dataset_dir")
        if {"eval_file", "eval_split"} & {*self.options}:
            return
        if fraction >= 1:
            self.put("max_eval_items", int(fraction), "a sample of the rows that are set aside, a tenth")
        elif fraction:
            self.put("eval_fraction", fraction)
        else:
            reason = "here a tenth of the rows, at most 2,000, is evaluated and not trained; eval_fraction: 0.01 takes fewer"
            self.lose(key, 0, reason)

    def _put_rows(self, kind: str, given: Any) -> None:
        found = list(self._entries(given))
        kept = [one for one in found if one[2]] or found[: kind == "train"]
        reason = "one Hub dataset per run: save the others as files, and list all in train_file"
        if kind == "eval":
            reason = "only a split of the same dataset, or a file next to train_file, is evaluated"
            kept = kept if "train_file" in self.options else [one for one in found if one[1] == self.options["dataset"]][:1]
        for _, path, _, _ in (one for one in found if one not in kept):
            self.lose(f"{kind} dataset", path, reason)
        if len(kinds := {str(entry.get("type") or entry.get("formatting")): path for _, path, _, entry in kept}) > 1:
            self.lose(f"{kind} datasets", kinds, "all files need rows of one format; docs/chats.md describes them")
        for where, path, files, entry in kept:
            split, part, _ = str(entry.get("split") or "train").partition("[")
            if files:
                self.put(f"{kind}_file", self.options.get(f"{kind}_file", []) + files)
            elif kind == "eval":
                self.put("eval_split", split)
            else:
                self.put("dataset", path)
                self.put("train_split", split if split != "train" else None)
            if part and not files:
                self.lose("split", entry["split"], f"the whole split is used; max_{kind}_items: N draws a sample")
            self._put_columns(where, entry)

    def _entries(self, given: Any) -> Iterable[tuple[str, str, list[str], dict[str, Any]]]:
        if not given:
            raise UserError(f"{self.file}: has no datasets, and a run needs one.")
        if self.toolkit == "axolotl":
            for entry in given if isinstance(given, list) else [given]:
                if not isinstance(entry, dict) or not entry.get("path"):
                    raise UserError(f"{self.file}: datasets: must be a list of entries with a path, and not {entry!r}.")
                path, part, files = str(entry["path"]), entry.get("name"), entry.get("data_files") or []
                ending = Path(path.removesuffix(".gz").removesuffix(".zst")).suffix
                is_local = ending in (*TABLE_FILES.split(), ".txt") or path.startswith(("/", ".", "~")) or Path(path).exists()
                if files and not is_local and path not in FORMATS:
                    self.lose("datasets data_files", files, f"all of {path} is read; or download the files, for train_file")
                    files = []
                files = [files] if isinstance(files, str) else files or [path] * is_local
                yield "datasets", f"{path}:{part}" if part else path, files, entry
            return
        folder = self.left.get("dataset_dir") or "data"
        usual = (base / folder / "dataset_info.json" for base in (Path(), *self.file.parents))
        place = next((place for place in ([Path(self.info)] if self.info else usual) if place.is_file()), None)
        if self.info and not place:
            raise UserError(f"--dataset_info {self.info}: there is no such file.")
        known = read_yaml(place) if place else {}
        for name in given if isinstance(given, list) else [one.strip() for one in str(given).split(",")]:
            if not isinstance(name, str):
                raise UserError(f"{self.file}: datasets of LLaMA-Factory are names, and not {name!r}. Is it a file of axolotl?")
            entry = known.get(name)
            if entry is None:
                reason = f"{place} does not have it" if place else f"there is no {folder}/dataset_info.json (--dataset_info FILE)"
                self.lose("dataset", name, f"{reason}: correct its path in train_file")
            entry = dict(entry or {"file_name": f"{name}.json"})
            if hub := entry.get("hf_hub_url") or entry.get("ms_hub_url") or entry.get("script_url"):
                yield f"dataset {name}", f"{hub}:{entry['subset']}" if entry.get("subset") else hub, [], entry
            elif not entry.get("file_name"):
                raise UserError(f"{place}: {name} has neither file_name nor hf_hub_url.")
            else:
                path = str((place.parent if place else Path(folder)) / entry["file_name"])
                yield f"dataset {name}", path, [path], entry

    def _put_columns(self, where: str, entry: dict[str, Any]) -> None:
        kind = entry.get("type")
        flat = {**entry, **(entry.get("columns") or {}), **(entry.get("tags") or {}), **(kind if isinstance(kind, dict) else {})}
        flat |= flat.pop("message_property_mappings", None) or {}
        flat |= {f"roles.{role}": names for role, names in (flat.pop("roles", None) or {}).items()}
        self.has_chats |= not self.is_text and not str(kind).startswith(("completion", "pretrain"))
        if str(kind).startswith("completion") and not self.is_packed:
            self.put("packing", "off")
        if isinstance(kind, str) and not kind.startswith(("chat_template", "completion", "pretrain")):
            reason = "rows are read by their columns, see docs/chats.md"
            self.lose(f"{where} type", kind, f"{reason}; the model's chat template writes the prompt, or chat_template: plain")
        columns = {f"{name}_column": name for name in COLUMNS} | {"prompt_column": "instruction", "answer_column": "output"}
        columns["messages_column"] = "messages" if self.toolkit == "axolotl" else "conversations"
        for name, value in flat.items():
            column = next((ours for ours, names in COLUMNS.items() if name in names.split()), "")
            option = "text_column" if self.is_text and name == "prompt" else column and f"{column}_column"
            if option == "messages_column" and self.recipe != "sft" and self.options.get("loss") != "kto":
                option = "prompt_column"
            is_usual = value in USUAL.get(name, ()) or value in (None, "", [], {}) or name in ELSEWHERE
            is_role = name.endswith("_tag") or name.startswith("roles.")
            is_usual = is_usual or (is_role and {*([value] if isinstance(value, str) else value)} <= ROLES)
            if option:
                columns[option] = value
                self.put(option, None if self.columns else value)
            elif not is_usual:
                self.lose(f"{where} {name}", value, "has no option; see docs/chats.md for the rows that are read")
        self.columns = self.columns or columns
        for option, here in columns.items():
            if here != self.columns[option]:
                reason = f"all files need the same columns, and the first one has {self.columns[option]}"
                self.lose(f"{where} {option}", here, reason)

    def _convert_others(self) -> None:
        known = properties_of(type(load_recipe_config([str(recipe_path(self.recipe))])))
        ours = {name: option for option, found in known.items() for name in (option, *found.also)}
        reasons = {name: text for text, names in NO_EQUIVALENT.items() for name in names.split()}
        instead = {name: text for text, names in INSTEAD.items() for name in names.split()}
        for name, value in list(self.left.items()):
            option = ours.get(name)
            if name == "ddp_timeout" or option in ("attn_implementation", "cache_dir"):
                note = NOTES.get(name, "padding-free is the default")
                self.not_needed[f"{name}: {value}"] = note.removeprefix("leave it out; ")
            elif option == "resume":
                self.lose(name, value, "checkpoints of other toolkits cannot be resumed")
            elif value is False and (name in reasons or name in instead or option is None):
                self.empty.append(name)
            elif value is True and (use := re.match(r"use --(\w+) ([\w-]+)", instead.get(name, ""))) and use[1] in known:
                self.put(use[1], use[2])
            elif instead.get(name, "").startswith("leave"):
                shown = value if isinstance(value, str | int | float) else "..."
                self.not_needed[f"{name}: {shown}"] = instead[name].partition("; ")[2]
            elif option and option not in self.options:
                self.put(option, value == "true" or value, NOTES.get(name, "") if option != name else "")
            else:
                is_known = any(name in names.split() for names in OTHER_NAMES.values())
                other = f"{self.recipe} has no such option" if is_known else "`convert` does not know it"
                other = f"{option} is set already" if option else other
                self.lose(name, value, reasons.get(name) or instead.get(name) or other)

    def _check(self) -> None:
        """Parse the file as a run does. An option that the recipe refuses is removed and listed."""
        while message := self._refused(""):
            words = [*re.findall(r"--(\w+)", message), *re.findall(r"\w+", message)]
            named = (word for word in words if word in self.options and word != "model")
            option = next((word for word in named if self._refused(word) != message), "")
            if not option:
                raise UserError(f"{self.file}: cannot be converted: {message}")
            self.lose(option, self.options.pop(option), message)

    def _refused(self, left_out: str) -> str:
        lines = [line for line in self.text("").splitlines() if not left_out or not line.startswith(f"{left_out}:")]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write("\n".join(lines))
            file.flush()
            try:
                cfg = load_recipe_config([str(recipe_path(self.recipe)), "--config", file.name])
                if cfg and self.is_sharded:
                    cfg.validate_sharded()
                    cfg.check_installed(is_sharded=True)
            except UserError as error:
                return str(error).replace(file.name, str(self.file))
        return ""

    def text(self, out: str) -> str:
        import yaml

        lines = [f"# From {self.file.name} of {TITLES[self.toolkit]}, for {counted(self.gpus, 'GPU')}. Run it:"]
        lines += [f"#   {self.command(out)}", f"recipe: {self.recipe}"]
        for name, value in self.options.items():
            line = yaml.safe_dump({name: value}, default_flow_style=True, width=10_000, allow_unicode=True).strip()[1:-1]
            lines.append(line + (f"  # {self.notes[name]}" if self.notes.get(name) else ""))
        return "\n".join([*lines, *(f"# {line}" for line in self.summary())]) + "\n"

    def summary(self) -> list[str]:
        lines = [*self.differences(), *_listed("Not needed:", self.not_needed)]
        listed = {word for line in lines for word in re.findall(r"^ +(?:\w+ )?(\w+)", line)} | {*self.empty, *self.options}
        read = sorted(name for name in self.names if name not in listed)
        lines += textwrap.wrap(f"Other names or defaults here: {', '.join(read)}", 128, subsequent_indent="  ") if read else []
        return [*lines, f"Empty or off: {', '.join(sorted(self.empty))}"] if self.empty else lines

    def differences(self) -> list[str]:
        more = [OPTIMIZERS[self.options.get("optimizer", "adamw")].package, *self.options.get("report_to", "").split(",")]
        wanted = ["bitsandbytes"] * ("quantize" in self.options) + [name for name in more if name not in ("", "all")]
        lines = [f"Needs: pip install {' '.join(wanted)}"] if wanted else []
        if self.has_chats and "chat_template" not in self.options:
            lines.append("If the model has no chat template, the run stops: add chat_template: chatml, llama3 or gemma.")
        lines += _listed(f"No equivalent ({len(self.lost)}):", self.lost)
        return lines + _listed(f"Replaced ({len(self.replaced)}):", self.replaced)

    def command(self, out: str) -> str:
        more = " --config_file fsdp.yaml" * self.is_sharded + f" --num_processes {self.gpus}" * (self.gpus > 1)
        return f"accel-ddp run {self.recipe} --config {shlex.quote(out or 'FILE')}{more}"

    def launch_command(self, out: str) -> str:
        more = "--set accelerate_config=2node_fsdp.yaml " * self.is_sharded
        return f"accel-ddp launch {more}cluster.yaml {self.recipe} --config {shlex.quote(out or 'FILE')}"


def _listed(title: str, reasons: dict[str, str]) -> list[str]:
    return [title, *(f"  {name}: {why}" for name, why in reasons.items())] if reasons else []


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d*)?[eE][+-]?\d+", value) else value


def read_yaml(file: Path) -> dict[str, Any]:
    import yaml

    if not file.is_file():
        raise UserError(f"{file}: is a folder. Give the YAML file." if file.is_dir() else f"{file}: there is no such file.")
    kind, read = ("JSON", json.loads) if file.suffix == ".json" else ("YAML", yaml.safe_load)
    try:
        values = read(file.read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file}: is not valid {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: must contain lines of `name: value`, as files of axolotl and LLaMA-Factory do.")
    return values


# ---- the command


def detect(file: Path, values: dict[str, Any]) -> str:
    if "base_model" in values:
        return "axolotl"
    if "model_name_or_path" in values:
        return "llama_factory"
    if "distributed_type" in values or "compute_environment" in values:
        raise UserError(f"{file}: is a config of accelerate. Use it as it is: accel-ddp run RECIPE --config_file {file}.")
    if "model" in values or "train_file" in values:
        recipe = values.get("recipe", "RECIPE")
        raise UserError(f"{file}: is already a file of accel_ddp. Run it: accel-ddp run {recipe} --config {file}.")
    raise UserError(
        f"{file}: is neither a file of axolotl (it has no base_model) nor of LLaMA-Factory (it has no model_name_or_path). If it "
        "is, add --from axolotl or --from llama_factory."
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accel-ddp convert",
        description="Write the options of a recipe that do what a YAML file of axolotl or LLaMA-Factory does. What has no "
        "equivalent is listed in the file and on stderr.",
    )
    parser.add_argument("file", help="the YAML file of the other toolkit")
    parser.add_argument("--out", default="", metavar="FILE", help="the file to write (default: stdout); it must not exist")
    parser.add_argument("--from", dest="toolkit", choices=tuple(TITLES), help="its toolkit (default: found out)")
    help = "GPUs that the file ran on; with its batch per GPU they give --global_batch_size (default: this machine's, or 1)"
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help=help)
    help = "dataset_info.json of LLaMA-Factory (default: in dataset_dir below this folder, next to the file or above it)"
    parser.add_argument("--dataset_info", default="", metavar="FILE", help=help)
    return parser


def main(words: list[str]) -> int:
    given = build_parser().parse_args(words)
    file, gpus = Path(given.file), given.gpus or count_visible() or 1
    if gpus < 1:
        raise UserError(f"--gpus {gpus}: must be a whole number, 1 or more.")
    values = read_yaml(file)
    try:
        done = Conversion(given.toolkit or detect(file, values), values, gpus, file, given.dataset_info)
    except (TypeError, AttributeError) as error:
        raise UserError(f"{file}: a value has a wrong type: {error}") from error
    text = done.text(given.out)
    if given.out:
        try:
            with Path(given.out).open("x") as out:
                out.write(text)
        except OSError as error:
            raise UserError(f"--out {given.out}: cannot be written: {error.strerror}. Choose another name.") from error
    else:
        print(text, end="")
    told = "" if given.gpus else f" ({'the GPUs of this machine' if gpus > 1 else 'the default'}; --gpus N for another number)"
    lines = [*done.differences(), f"for {counted(gpus, 'GPU')}{told}", f"run it: {done.command(given.out)}"]
    lines += [f"on several machines: {done.launch_command(given.out)}"] * (gpus > 1)
    print(*lines, sep="\n", file=sys.stderr)
    return 0
