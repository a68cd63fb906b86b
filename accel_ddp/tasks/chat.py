"""Rows for causal language models: chats, instructions and plain texts as tokens, with labels for the answers."""

import logging
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import compress, count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from accel_ddp import phases
from accel_ddp.config.choices import choose, reasons
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import broadcast_object
from accel_ddp.sources import models
from accel_ddp.sources.data import drop_broken, lacking, place_of, row_numbers, with_row_numbers
from accel_ddp.sources.places import warn
from accel_ddp.sources.tokenization import SOURCE, map_once
from accel_ddp.tasks import chat_rows, chat_template
from accel_ddp.tasks.chat_rows import Chat, Pair, UnusableRow
from accel_ddp.tasks.chat_template import CONTROL, LEFT_OUT, NO_END, NO_PREFIX, SPLIT, THOUGHTS, Rendered, Template, unmarked
from accel_ddp.tasks.examples import shorten
from accel_ddp.text import counted, listed

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)
TOKENS = ("input_ids", "attention_mask", "labels")
TABLES = ("training", "evaluation")
MOST_CUT = 0.05  # of the rows may lose a part of their answer without a --max_length of the user
TEXT_LENGTH = 2048  # tokens of a row of plain text, if the model accepts as many


def _add_tokens(tokenizer: Any, template: str) -> None:
    """Add the tokens of a template that a base model lacks; the last one ends turns. `models.load` gives them embeddings."""
    if missing := chat_template.missing_tokens(tokenizer, template):
        end = chat_template.TEMPLATES[template][1][-1]
        tokenizer.add_tokens(missing, special_tokens=True)
        tokenizer.eos_token, tokenizer.new_token_ids = end, tokenizer.convert_tokens_to_ids(missing)
        log.info(f"--chat_template {template}: {', '.join(missing)} are new tokens. {end} is now the end token")


class Format:
    """How the rows of a table become tokens: `kind` is "chats", "instructions" or "texts", read from `columns`."""

    kept = TOKENS  # columns of the rows for training

    def __init__(self, rows: "datasets.Dataset", tokenizer: Any, cfg: Any, today: str = ""):
        self.tokenizer, self.train_on_prompts, self.train_on = tokenizer, cfg.train_on_prompts, cfg.train_on
        self.kind, self.columns = self._find_columns(rows, cfg)
        if self.kind != "texts":
            _add_tokens(tokenizer, cfg.chat_template)
        chat_template.set_template(tokenizer, cfg)
        self.separator = cfg.separator.replace(r"\n", "\n").replace(r"\t", "\t")
        if self.kind == "chats" and not tokenizer.chat_template:
            raise UserError(
                f"--model {cfg.model}: its tokenizer has no chat template, which chats need. Use a model that was tuned for chats, or "
                f"give a template: --chat_template plain (or {', '.join(list(chat_template.TEMPLATES)[1:])}, or a file)."
            )
        used = self.columns if self.kind == "texts" else (*self.columns, *chat_rows.OPTIONAL_COLUMNS)
        others = [column for column in rows.column_names if column not in used]
        if others:
            log.info(f"rows are {self.kind} of {', '.join(self.columns)}. These columns are not used: {', '.join(others)}.")
        uses_template = self.kind != "texts" and tokenizer.chat_template
        if cfg.separator and (uses_template or self.kind != "instructions"):
            reason = "the chat template separates prompts and answers" if uses_template else f"the rows are {self.kind}"
            raise UserError(f"--separator {cfg.separator!r}: would be ignored, because {reason}. Leave it out.")
        if cfg.packing == "on" and self.kind != "texts":
            reason = f"only plain texts share rows, and the rows are {self.kind}, which are computed without padding"
            raise UserError(f"--packing on: {reason}. Leave it out.")
        self.controls = chat_template.any_of(chat_template.special_tokens(tokenizer))
        self.first_ids, last = ([], []) if uses_template else tokens_around(tokenizer)
        if last:
            behind = f"--model {cfg.model}: its tokenizer puts {tokenizer.decode(last)} after every text."
            warn(f"{behind} Prompts are trained without it, so remove it from the end of a prompt before you generate.")
        self.template: Template | None = None
        if uses_template:
            if cfg.template_date == "auto" and "strftime_now" in str(tokenizer.chat_template):
                choose(cfg, "template_date", today or date.today().isoformat(), "the chat template writes the date")
            self.template = Template(tokenizer, cfg)
            if cfg.chat_template:
                log.info(f"{self.template.name}: answers end with {self.template.end!r}. The template is exported with the model")
        self.date = cfg.template_date

    def _find_columns(self, rows: "datasets.Dataset", cfg: Any) -> tuple[str, tuple[str, ...]]:
        given = {option: getattr(cfg, option) for option in chat_rows.USUAL_COLUMNS}
        kind, columns = chat_rows.choose_columns(rows, given)
        ignored = [f"--{option} {column}" for option, column in given.items() if column and column not in columns]
        if ignored:
            raise UserError(
                f"{' '.join(ignored)}: would be ignored, because the rows are read as {kind} ({', '.join(columns)}). "
                "Give --messages_column alone, --prompt_column with --answer_column, or --text_column alone."
            )
        return kind, columns

    def require_columns(self, test: "datasets.Dataset") -> None:
        optional = chat_rows.INPUT_COLUMNS.get(self.columns[0], ())
        for column in self.columns:
            why = lacking(test).get(column, "") if column not in optional else ""
            if why or column not in test.column_names:
                why = why or f"They have: {', '.join(test.column_names)}."
                raise UserError(
                    f"The evaluation data lack the column {column!r} of the training data. {why} Give evaluation rows in the format of "
                    "the training rows, or leave --eval_file out and use --eval_fraction 0.05."
                )

    @property
    def identity(self) -> list[Any]:
        """What the encoded rows depend on besides the vocabulary, for the cache key of tokenized data."""
        own = [self.kind, self.columns, self.first_ids, self.train_on_prompts, self.separator]
        return [*own, self.train_on, self.date, self.tokenizer.chat_template]

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        """Return `input_ids`, `attention_mask` and `labels`, which are -100 for tokens that are not learned.

        The ids of a chat are what `apply_chat_template` returns for the whole chat. `first` and `last` are the places of the first
        and behind the last token that is learned. `notes` are bits of `chat_template`. `problem` is why a row cannot be used, or "".
        """
        names = (*TOKENS, "length", "first", "last", "notes", "problem", SOURCE)
        done: dict[str, list] = {name: [] for name in names}
        examples = [(number, one) for number in range(_number(rows)) for one in self._render(rows, number)]
        for (number, _), (ids, labels, notes, problem) in zip(examples, self._tokenize([one for _, one in examples])):
            if self.kind == "texts":
                labels[:1] = [-100] * len(ids[:1])  # nothing predicts it
            first = next(compress(count(1), map((-100).__ne__, labels[1:])), 0)
            last = next((i + 1 for i in range(len(ids) - 1, 0, -1) if labels[i] != -100), 0)
            problem = problem or ("" if last else "it contains nothing to learn")
            values = (ids, [1] * len(ids), labels, len(ids), first, last, notes, problem, number)
            for name, value in zip(names, values):
                done[name].append(value)
        return done

    def encode_tables(self, tables: Sequence["datasets.Dataset"], cfg: Any) -> list["datasets.Dataset"]:
        self.require_columns(tables[1])
        depends_on = [models.tokenizer_digest(self.tokenizer), self.identity]
        return [map_once(rows, self.encode, depends_on=depends_on, cfg=cfg) for rows in tables]

    def finish(self, tables: list["datasets.Dataset"], cfg: Any) -> list["datasets.Dataset"]:
        """Return the tokens of the usable rows, with at most `--max_length` of them, which is chosen here if it is `auto`.

        Raise UserError for rows that cannot be used, see `drop_broken`. State what is special to the rows.
        """
        if cfg.max_length == "auto":
            self._choose_length(tables, cfg)
        width, is_cut = cfg.max_length, self.kind != "texts"
        if is_cut:
            longest = max(int(_column(rows, "first").max(initial=0)) for rows in tables)
            hint = "; leave --max_length out to fit the data" if "max_length" not in reasons(cfg) else ""
            reason = f"its prompt fills --max_length {width} and leaves no room for its answer (the longest prompt has "
            reason += f"{counted(longest, 'token')}{hint})"
            tables = [add_problem(rows, _column(rows, "first") >= width, reason) for rows in tables]
        tables = drop_broken(tables, cfg)
        self._report(tables)

        def cut(rows: dict[str, list]) -> dict[str, list]:
            return self._cut(rows, width)

        done = []
        for rows, name in zip(tables, TABLES):
            tokens = with_row_numbers(rows.select_columns(list(self.kept)), row_numbers(rows))
            if is_cut and (lost := int((_column(rows, "last") > width).sum())):
                warn(f"--max_length {width}: {lost:,} of {len(rows):,} {name} rows are longer and lose the end of their answer.")
            if (_column(rows, "length") > width).any():
                tokens = map_once(tokens, cut, depends_on=[width, self.kind], cfg=cfg)
            done.append(tokens)
        return done

    def _choose_length(self, tables: list["datasets.Dataset"], cfg: Any) -> None:
        usable = [np.array([not problem for problem in rows["problem"][:]], dtype=bool) for rows in tables]
        if any(len(some) and not some.any() for some in usable):
            drop_broken(tables, cfg)  # raises
        config = models.load_config(cfg)
        known = (self.tokenizer.model_max_length, getattr(config.get_text_config(), "max_position_embeddings", None))
        limit = min((number for number in known if number and 0 < number < 1e9), default=0)  # without one it is 1e30
        longest = max(int(_column(rows, "length")[some].max(initial=1)) for rows, some in zip(tables, usable))
        whole = f"the longest row has {counted(longest, 'token')}"
        if self.kind == "texts":
            choose(cfg, "max_length", min(limit or TEXT_LENGTH, TEXT_LENGTH), f"for plain texts; {whole}")
            return
        width = -(-longest // 64) * 64
        if not limit or width <= limit:
            choose(cfg, "max_length", width, whole)
            return
        for rows, some, name in zip(tables, usable, TABLES):
            lost, number = int((_column(rows, "last")[some] > limit).sum()), int(some.sum())
            if lost > MOST_CUT * number:
                raise UserError(
                    f"--max_length auto: {cfg.model} accepts at most {limit:,} tokens, and {lost:,} of {number:,} {name} rows would "
                    f"lose a part of their answer. Shorten the rows, or give --max_length {limit} to train with what is left."
                )
        choose(cfg, "max_length", limit, f"the limit of {cfg.model}; {whole}")

    def _report(self, tables: list["datasets.Dataset"]) -> None:
        notes = np.concatenate([_column(rows, "notes") for rows in tables])
        sources = np.concatenate([row_numbers(rows) + i * 2**40 for i, rows in enumerate(tables)])  # rows of both tables differ
        number = {bit: int((notes & bit > 0).sum()) for bit in (SPLIT, THOUGHTS, CONTROL, NO_PREFIX, NO_END, LEFT_OUT)}
        if number[LEFT_OUT]:
            chats = len(np.unique(sources[notes & LEFT_OUT > 0]))
            what = "begin with an answer, which is left out: the template rejects chats that do not begin with a user"
            warn(f"{chats:,} chats {what}.")
        if number[SPLIT]:
            chats = len(np.unique(sources[notes & SPLIT > 0]))
            log.info(f"the template rewrites earlier turns: {chats:,} chats become {number[SPLIT]:,} examples, one per answer")
        if number[THOUGHTS]:
            effect = f"{number[THOUGHTS]:,} examples begin without them"
            log.info(f"the template removes thoughts of earlier answers, as at inference: {effect}")
        if number[NO_PREFIX]:
            log.info(
                f"the generation prompt is not the beginning of {counted(number[NO_PREFIX], 'chat')} (the template adds or changes "
                "something, or an answer begins inside a token): their answers are trained from the first token that differs"
            )
        if number[NO_END]:
            warn(
                f"In {counted(number[NO_END], 'row')} no token that ends the answer is trained, so the model may not learn to stop."
            )
        if number[CONTROL]:
            found = [np.unique(row_numbers(rows)[_column(rows, "notes") & CONTROL > 0]).tolist() for rows in tables]
            parts = [
                f"{counted(len(some), f'{name} row')} ({listed([place_of(rows, i, short=True) for i in some[:6]], 5)})"
                for rows, some, name in zip(tables, found, TABLES)
                if some
            ]
            as_text = "are trained as ordinary text: the text is the same, and its tokens are not those that separate turns"
            what = as_text if self.template else "stay control tokens, because a text may be a formatted chat"
            warn(f"Control tokens stand in the texts of {' and '.join(parts)}. They {what}.")

    def _cut(self, rows: dict[str, list], width: int) -> dict[str, list]:
        """Return rows of at most `width` tokens. A text becomes as many rows as it needs. Other rows are truncated."""
        done: dict[str, list] = {name: [] for name in (*TOKENS, SOURCE)}
        # A part begins with the last token of the part before it, so every token but the first one is predicted.
        step = width - 1 if self.kind == "texts" else 0
        for number, (ids, mask, labels) in enumerate(zip(*(rows[name] for name in TOKENS))):
            for start in range(0, max(len(ids) - 1, 1), step or max(len(ids), 1)):
                part = slice(start, start + width)
                if start:
                    labels[start] = -100  # the context of a part
                for name, value in zip(done, (ids[part], mask[part], labels[part], number)):
                    done[name].append(value)
        return done

    def select_samples(self, rows: "datasets.Dataset", number: int, max_tokens: float) -> list["Sample"]:
        """Return the last answers of the first rows with at most `max_tokens` before it, and the tokens before them."""
        found: list[Sample] = []
        for _, rendered in self._usable(rows[: max(100, 2 * number)]):
            if len(found) == number:
                break
            if self.kind == "texts":
                words = rendered.text.removesuffix(self.tokenizer.eos_token or "").split(" ")
                prompt, answer = " ".join(words[:8]), " ".join(words[8:40])
            else:
                start, end = rendered.answers[-1]
                prompt, answer = rendered.prompt or rendered.text[:start], rendered.text[start:end]
            ids = prompt_ids(self.tokenizer, self.first_ids, prompt) if prompt else []
            if ids and len(ids) <= max_tokens:
                found.append(Sample(unmarked(prompt), unmarked(answer), ids))
        return found

    def first_prompt(self, rows: "datasets.Dataset") -> str | list[dict[str, Any]]:
        """Return what the pipeline "text-generation" takes, from the first usable row: the chat before an answer, or a text."""
        some = rows[:100]
        for i, rendered in self._usable(some):
            if self.kind == "texts":
                return unmarked(" ".join(rendered.text.removesuffix(self.tokenizer.eos_token or "").split(" ")[:8]))
            row = self._read(some, i)
            if not isinstance(row, Chat):
                return unmarked(rendered.text[: rendered.answers[0][0]])
            first = row.trained.index(True)
            return [{**message, "content": shorten(message.get("content") or "")} for message in row.messages[:first]]
        return "Hi"

    def first_texts(self, rows: "datasets.Dataset") -> "datasets.Dataset":
        """Return the first items with one text each."""
        return rows

    def _usable(self, rows: dict[str, list]) -> Iterator[tuple[int, Rendered]]:
        rendered = ((i, self._render(rows, i)[-1]) for i in range(_number(rows)))
        return ((i, row) for i, row in rendered if not row.problem)

    def _render(self, rows: dict[str, list], i: int) -> list[Rendered]:
        try:
            row = self._read(rows, i)
            if not isinstance(row, Chat) or not self.template:
                return [self._format(row)]
            more = LEFT_OUT if row.left_out else 0
            return [one._replace(notes=one.notes | more) for one in self.template.examples(row, self.train_on)]
        except UnusableRow as error:
            return [Rendered("", [], str(error))]

    def _row(self, rows: dict[str, list], i: int) -> dict[str, Any]:
        return {column: values[i] for column, values in rows.items()}

    def _read(self, rows: dict[str, list], i: int) -> Chat | Pair | str:
        template = self.template.source if self.template else ""
        found = chat_rows.read_row(self.kind, self.columns, self._row(rows, i), template)
        if isinstance(found, Chat) and self.template and self.template.begins_with_user:
            return chat_rows.leave_out_first(found)
        return found

    def _format(self, row: Chat | Pair | str) -> Rendered:
        """Return a text, or a prompt and its answer, with one end token. Control tokens stay real: it may be a formatted chat."""
        prompt, answer = ("", row) if isinstance(row, str) else (row.prompt + self.separator, row.answer)
        end = self.tokenizer.eos_token or ""
        answer = answer.removesuffix(end)
        is_noted = bool(self.controls.search((prompt + answer).removeprefix(self.tokenizer.bos_token or "")))
        text = f"{prompt}{answer}{end}"
        return Rendered(text, [] if isinstance(row, str) else [(len(prompt), len(text))], notes=CONTROL * is_noted)

    def _tokenize(self, rows: list[Rendered]) -> list[tuple[list[int], list[int], int, str]]:
        """Return ids, labels, notes and the problem of each row, with the tokens that the tokenizer puts before every text."""
        done = []
        tokenized = chat_template.tokenize(rows, self.tokenizer, learn_all=self.train_on_prompts or self.kind == "texts")
        for row, (ids, labels, is_changed) in zip(rows, tokenized):
            problem, notes = row.problem, row.notes
            if is_changed and self.template:
                notes |= NO_PREFIX
            elif is_changed:
                # In use the prompt is tokenized alone, so the model would get tokens that it was not trained on.
                ids, labels = self._tokenize_apart(row)
                problem = (
                    "" if ids else "the tokens of its prompt change if the answer follows, which often begins with white space"
                )
            first = [] if problem or ids[: len(self.first_ids)] == self.first_ids else self.first_ids
            done.append(([*first, *ids], [-100] * len(first) + labels, notes, problem))
        return done

    def _tokenize_apart(self, row: Rendered) -> tuple[list[int], list[int]]:
        """Return ids and labels of prompt and answer, tokenized apart as in use, if together they are the text; else [], []."""
        ((start, _),), whole, token = row.answers, row.text, self.tokenizer.eos_token or ""
        split = lambda text: chat_template.encode_marked(self.tokenizer, text)
        before, answer = split(whole[:start]), whole[start:]
        for after in (split(answer), split(token + answer)[len(split(token)) :]):
            if self.tokenizer.decode(before + after) == self.tokenizer.decode(split(whole)):
                return before + after, (before if self.train_on_prompts else [-100] * len(before)) + after
        return [], []


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    whole, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


def prompt_ids(tokenizer: Any, first_ids: list[int], text: str) -> list[int]:
    """Return the tokens that the model is given for this text in use, without tokens that follow a text."""
    ids = chat_template.encode_marked(tokenizer, text)
    return ids if ids[: len(first_ids)] == first_ids else [*first_ids, *ids]


def agree_on_today() -> str:
    """Return the date of rank 0. This is a collective."""
    return broadcast_object(date.today().isoformat())


class Sample(NamedTuple):
    prompt: str
    answer: str
    ids: list[int]


def _number(rows: dict[str, list]) -> int:
    return len(next(iter(rows.values())))


def _column(rows: "datasets.Dataset", name: str) -> np.ndarray:
    parts = rows.select_columns([name]).with_format("numpy").iter(10_000)  # all at once take 700 bytes a row if rows were dropped
    return np.concatenate([part[name] for part in parts])


def add_problem(rows: "datasets.Dataset", has_it: np.ndarray, problem: str) -> "datasets.Dataset":
    if not has_it.any():
        return rows
    problems = [before or problem * bool(new) for before, new in zip(rows["problem"][:], has_it)]
    return with_row_numbers(rows.remove_columns("problem").add_column("problem", problems), row_numbers(rows))


@torch.no_grad()
def generate(model: nn.Module, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    """Return a greedy continuation of each prompt, given as tokens. It uses no collectives unless the model is sharded."""
    was_training = model.training
    model.eval()
    answers = []
    for prompt in prompts:
        phases.HERE.beat()  # each answer is progress, so many of them do not look like a hang
        ids = torch.tensor([prompt], device=model.device)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            do_sample=False, pad_token_id=tokenizer.pad_token_id, use_cache=True,
        )  # fmt: skip
        answers.append(tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True))
    model.train(was_training)
    return answers
