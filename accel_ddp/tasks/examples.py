"""Rows of the user's data: as the model receives them, and in code to try a trained model, which survives every shell."""

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from accel_ddp.doctor.findings import supports_color

if TYPE_CHECKING:
    import datasets

    from accel_ddp.engine.rows import Rows

MAX_LENGTH = 160  # characters of a text; longer texts would fill the terminal


def literal(value: Any) -> str:
    """Return a value as Python code that no shell changes between single quotes. Placeholders of `command` are escaped."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(name)}: {literal(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if not isinstance(value, str):
        return repr(value)
    body = repr('"' + value)[2:-1]  # a text that contains a double quote is always written between single quotes
    body = body.replace(r"\\", r"\x5c").replace(r"\'", r"\x27").replace('"', r"\"")
    return '"' + re.sub(r"\{(?=(?:folder|model)\})", r"\\x7b", body) + '"'


def shorten(text: str) -> str:
    """Return the text, or its first words if it is long."""
    if len(text) <= MAX_LENGTH:
        return text
    return text[:MAX_LENGTH].rsplit(None, 1)[0] or text[:MAX_LENGTH]


def first_texts(rows: "datasets.Dataset", columns: list[str]) -> list[str]:
    """Return the texts of the first row that has a text in each of the columns, shortened. At most 100 rows are read."""
    for row in rows.select(range(min(len(rows), 100))):
        texts = [row[column] for column in columns]
        if all(isinstance(text, str) and text.strip() for text in texts):
            return [shorten(text) for text in texts]
    return ["YOUR TEXT" for _ in columns]


def command(code: str, folder: str, model: str = "{folder}") -> str:
    """Return a shell command that runs the code. {folder} in it becomes a text, and {model} becomes the code `model`."""
    code = code.replace("'{folder}'", "{folder}").replace("{model}", model).replace("{folder}", literal(folder))
    return f"python -c {shlex.quote(code)}"


def system_option(code: str) -> str:
    """Return " --system PROMPT" of `accel-ddp chat` for code whose chat begins with a system prompt, and otherwise ""."""
    found = re.search(r'\[\{"role": "system", "content": ("(?:[^"\\]|\\.)*")', code)
    text = ast.literal_eval(found[1]) if found else ""
    # The code has only the first words of a long prompt.
    return f" --system {shlex.quote(text) if len(text) < MAX_LENGTH - 40 else 'TEXT'}" if text else ""


def show_rows(task: Any, cfg: Any) -> str:
    """Return the first rows of step 1 as the model receives them, for `--show_example`. It draws what training draws for them."""
    has_colors, items = supports_color(), task.train.items(cfg.seed)
    mark = lambda text: f"\x1b[1;32m{text}\x1b[0m" if has_colors else f"⟦{text}⟧"
    verb = "compares" if hasattr(cfg, "chosen_column") else "learns"
    lines = [f"the first rows of step 1, as the model receives them; it {verb} what is {mark('marked')}:"]
    for place, index in enumerate(task.train.order(cfg.seed).items(0, cfg.show_example)):
        batch = task.train.collate(items.__getitems__([(place, index)]))
        if isinstance(batch, list | tuple):
            batch = dict(enumerate(batch))
        batch = batch if isinstance(batch, Mapping) else _of_rows(batch)
        lines += [f"--- row {place + 1}", *_describe_batch(batch, task, mark, getattr(cfg, "chosen_column", ""))]
    return "\n".join([*lines, "---"])


def _of_rows(rows: "Rows") -> dict[str, Any]:
    """Return the texts of rows as a padded batch, and their labels in the places of the tokens that are learned."""
    import torch.nn.functional as F

    from accel_ddp.engine.rows import PLACES

    found = {name: value for name, value in rows.columns.items() if name not in PLACES}
    labels, of_labels = (rows["target"]["labels"], rows["target"]) if "target" in rows else (rows.get("labels"), rows)
    if "labelled" in of_labels:
        found["labels"] = of_labels.pad(labels, -100)
        if rows.is_causal:
            found["labels"] = F.pad(found["labels"][:, :-1], (1, 0), value=-100)
    return found | {"input_ids": rows.pad(rows.tokens), "attention_mask": rows.grid.mask}


def _describe_batch(batch: Mapping[Any, Any], task: Any, mark: Callable[[str], str], chosen: str) -> Iterator[str]:
    config, decode = getattr(task.model, "config", None), getattr(task.processor, "decode", None)
    ids, labels, names = batch.get("input_ids") if decode else None, batch.get("labels"), getattr(config, "id2label", None) or {}
    has_targets = getattr(config, "is_encoder_decoder", False)  # labels are a text of their own
    per_token = ids is not None and labels is not None and labels.shape == ids.shape and not labels.is_floating_point()
    per_token = per_token and not has_targets
    tags = names if getattr(task, "model_class", "").endswith("TokenClassification") else {}
    for i, row in enumerate(ids if ids is not None else ()):
        is_there = batch["attention_mask"][i].bool() if "attention_mask" in batch else row >= 0
        targets = labels[i][is_there].tolist() if per_token else [-100] * len(row)
        if chosen and len(ids) == 2:
            yield "rejected:" if i else "chosen:"
        yield _mark_tokens(row[is_there].tolist(), targets, decode, tags, mark)
    if labels is not None and not per_token:
        label = labels[0].tolist()
        if has_targets and decode:
            yield mark(_visible(decode([token for token in label if token != -100])))
        else:
            found = [i for i, value in enumerate(label) if value] if isinstance(label, list) else [label]
            yield "label: " + mark(", ".join(str(names.get(one, one)) for one in found))
    known = {"input_ids", "labels", "attention_mask", "token_type_ids", "position_ids"}
    known |= {"keys", "reference"}
    for name, value in batch.items():
        if name not in known and hasattr(value, "shape") and value.numel():
            yield f"{name}: {value.dtype} {[*value.shape]}, {value.min():.4g} to {value.max():.4g}"


def _mark_tokens(ids: list[int], labels: list[int], decode: Any, tags: dict[int, str], mark: Callable[[str], str]) -> str:
    """Return the text of tokens. Those with a label are marked: with the label, or together if the label is the token itself."""
    groups = [
        0 if label == -100 else 1 if label == token and not tags else 2 + i for i, (token, label) in enumerate(zip(ids, labels))
    ]
    text, before, end = "", "", 0
    for group, some in groupby(groups):
        end += len(list(some))
        until = decode(ids[:end])  # spaces between tokens depend on the tokens before
        part, before = _visible(until[len(before) :]), until
        if group > 1:
            target = tags.get(labels[end - 1], "") if tags else _visible(decode([labels[end - 1]]))
            text, part = text + part[: len(part) - len(part.lstrip())], f"{part.lstrip()} → {target}"
        text += mark(part) if group else part
    return text


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
