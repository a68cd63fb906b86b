"""Preferences: rows with a better and a worse answer or with a labeled answer, the losses that learn them, and their metrics.

A pair becomes one item of two texts, its chosen and its rejected answer behind the same prompt. For KTO an item is a labeled answer.
Its second text is its prompt with the answer of another row, from which `z` is estimated.
"""

import copy
import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ddp import phases
from accel_ddp.config.choices import choose
from accel_ddp.engine.rows import Collate, Rows
from accel_ddp.errors import UserError
from accel_ddp.phases import SYNC
from accel_ddp.ranks.team import Team
from accel_ddp.records.eval_tables import Table
from accel_ddp.sources.data import is_missing, row_numbers, with_row_numbers
from accel_ddp.sources.tokenization import SOURCE, map_once
from accel_ddp.tasks import chat, tables
from accel_ddp.tasks.chat_rows import ANSWER, PROMPT, UnusableRow, choose_preference_columns, role_of, text_of, without_none
from accel_ddp.tasks.preference_losses import LABELED, LOSSES, compute
from accel_ddp.tasks.reference import COLUMN

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)
LogpsOf = Callable[[nn.Module, Any], Tensor]  # of a model and a micro-batch: (items, texts of an item)
TRUE, FALSE = ("1", "1.0", "true"), ("0", "0.0", "false")
DISTANCE = 0.382  # of the other row of KTO, as a part of the table: neither the neighbor nor the other half has the same prompt
METRICS = {  # of an evaluation, by the names of a step
    "rewards/accuracies": "reward_accuracy", "rewards/margins": "reward_margin", "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected", "logps/chosen": "logp_chosen", "logps/rejected": "logp_rejected",
}  # fmt: skip


class Preferences(chat.Format):
    """How rows with preferences become tokens, with the templates and masks of `Format`."""

    kept = ("input_ids", "labels", "good")

    def _find_columns(self, rows: "datasets.Dataset", cfg: Any) -> tuple[str, tuple[str, ...]]:
        self.loss, self.learns_labels = cfg.loss, cfg.loss in LABELED
        self.prompts, self.answers, self.label = choose_preference_columns(rows, cfg)
        if self.learns_labels and not self.label:
            log.info(f"--loss {self.loss}: each pair becomes two rows: {self.answers[0]} is desirable, {self.answers[1]} is not")
        # What is read of a whole chat has no column of its own.
        used = [name for name in (*self.prompts, *self.answers, self.label) if name in rows.column_names]
        return "instructions", (*used,)

    @property
    def identity(self) -> list[Any]:
        return [*super().identity, self.prompts, self.answers, self.label, self.learns_labels]

    def first_prompt(self, rows: "datasets.Dataset") -> str | list[dict[str, Any]]:
        return chat.Format.first_prompt(self._sides()[0], rows)

    def first_texts(self, rows: "datasets.Dataset") -> "datasets.Dataset":
        some = rows[:1000]
        return type(rows).from_dict({name: [item[0] for item in some[name]] for name in ("input_ids", "labels")})

    def _sides(self) -> list["Preferences"]:
        """Return the formats of the chosen and of the rejected answer, or of the labeled one."""
        made = [copy.copy(self) for _ in self.answers]
        for side, answer in zip(made, self.answers):
            side.columns = (*(self.prompts or (PROMPT,)), answer)
        return made

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        """Return `input_ids` and `labels` with a list for each text of an item, `good` (0: not desirable), and what `finish` reads."""
        sides = [_by_row(chat.Format.encode(side, rows)) for side in self._sides()]
        names = (*Preferences.kept, "length", "first", "last", "notes", "problem", SOURCE)
        done: dict[str, list] = {name: [] for name in names}
        for i, texts in enumerate(zip(*sides)):
            problems, good = [text["problem"] for text in texts], [1, 0]
            if self.label:
                found, problem = read_label(rows[self.label][i], self.label)
                good, problems = [found], [*problems, problem]
            elif not any(problems) and texts[0]["input_ids"] == texts[1]["input_ids"]:
                problems = [f"its {self.answers[0]} and {self.answers[1]} are the same"]
            problem = "\n".join(dict.fromkeys(filter(None, problems)))
            for one, item in zip(good, [[text] for text in texts] if self.learns_labels else [texts]):
                parts = [[text[name] for text in item] for name in ("input_ids", "labels")]
                most = [max(text[name] for text in item) for name in ("length", "first", "last")]
                for name, value in zip(names, (*parts, one, *most, item[0]["notes"] | item[-1]["notes"], problem, i)):
                    done[name].append(value)
        return done

    def finish(self, given: list["datasets.Dataset"], cfg: Any) -> list["datasets.Dataset"]:
        done = super().finish(given, cfg)
        if not self.learns_labels:
            return [with_row_numbers(rows.remove_columns("good"), row_numbers(rows)) for rows in done]
        if not cfg.evaluate_only:
            self._check_balance(np.array(done[0]["good"][:]), cfg)
        return [self._add_others(rows, cfg) for rows in done]

    def _check_balance(self, good: np.ndarray, cfg: Any) -> None:
        """Raise UserError if all training rows have the same label, and print the advice of KTO's authors for unequal numbers."""
        number, others = int(good.sum()), int((1 - good).sum())
        if not number or not others:
            what = f"all {len(good):,} training rows are {'desirable' if number else 'undesirable'}"
            raise UserError(f"--loss {self.loss}: {what}. {self.loss.upper()} compares both kinds: add rows of the other.")
        least = cfg.undesirable_weight * others / number
        if not least <= cfg.desirable_weight <= 4 / 3 * least:
            advice = f"--desirable_weight {least:.3g} to {4 / 3 * least:.3g}, so that both kinds weigh about the same"
            log.info(f"{number:,} rows are desirable and {others:,} are not. KTO's authors advise {advice}")

    def _cut(self, rows: dict[str, list], width: int) -> dict[str, list]:
        cut = {name: [[text[:width] for text in item] for item in rows[name]] for name in ("input_ids", "labels")}
        return {**cut, "good": rows["good"], SOURCE: [*range(len(rows["good"]))]}

    def _add_others(self, rows: "datasets.Dataset", cfg: Any) -> "datasets.Dataset":
        """Return rows with a second text: the tokens of the prompt, and of the answer of the row DISTANCE further on."""
        number, width = len(rows), cfg.max_length
        distance = max(1, int(DISTANCE * number))

        def add(some: dict[str, list]) -> dict[str, list]:
            others = rows[[(place + distance) % number for place in some["place"]]]
            for ids, labels, *other in zip(some["input_ids"], some["labels"], others["input_ids"], others["labels"]):
                first, begin = (next(i for i, label in enumerate(one[0]) if label != -100) for one in (labels, other[1]))
                ids.append((ids[0][:first] + other[0][0][begin:])[:width])
                labels.append(([-100] * first + other[1][0][begin:])[:width])
            return {name: some[name] for name in self.kept}

        placed = with_row_numbers(rows.add_column("place", np.arange(number)), row_numbers(rows))
        return map_once(placed, add, depends_on=[width, distance], cfg=cfg)

    def _row(self, rows: dict[str, list], i: int) -> dict[str, Any]:
        """Return a row with a prompt and answers, also if these are parts of whole chats. Raise UnusableRow if the prompts differ."""
        row = super()._row(rows, i)
        if self.label and self.answers == (ANSWER,) and ANSWER not in row:
            messages = _whole_chat(row[self.prompts[0]])
            last = max((i for i, message in enumerate(messages) if role_of(message) == "assistant"), default=0)
            return {**row, self.prompts[0]: messages[:last], ANSWER: messages[last:]}
        chats = [_whole_chat(row[answer]) for answer in self.answers]
        if not any(role_of(message) == "user" for messages in chats for message in messages):
            if not self.prompts:
                raise UnusableRow(f"its {self.answers[0]} is no chat with a user's message, and there is no column of prompts")
            return row
        shortest = min(map(len, chats)) - 1
        same = next((i for i in range(shortest) if chats[0][i] != chats[-1][i]), shortest)
        if any(role_of(message) == "user" for messages in chats for message in messages[same:]):
            raise UnusableRow(
                f"the prompts of its {' and '.join(self.answers)} differ (they must be the same up to the last answer)"
            )
        prompt = row[self.prompts[0]] if self.prompts else None
        if isinstance(prompt, str) and not any(prompt.strip() == str(text_of(one)).strip() for one in chats[0][:same]):
            raise UnusableRow(f"its {self.prompts[0]} is not the prompt in its {self.answers[0]}")
        parts = dict(zip(self.answers, (messages[same:] for messages in chats)))
        return {**row, **parts, (*self.prompts, PROMPT)[0]: chats[0][:same]}


def read_label(value: Any, column: str) -> tuple[int, str]:
    """Return whether an answer is desirable, as 1 or 0, and why the label cannot be used, or ""."""
    text = str(value).strip().lower()
    if text in TRUE or text in FALSE:
        return int(text in TRUE), ""
    return 0, f"it has no {column}" if is_missing(value) else f"its {column} is neither 0 nor 1\t{value!r:.40}"


def _by_row(made: dict[str, list]) -> list[dict[str, Any]]:
    """Return one text for each row. An answer of several turns has several, if the template rewrites earlier turns."""
    found: dict[int, dict[str, Any]] = {}
    for values in zip(*made.values()):
        text = dict(zip(made, values))
        if (row := text.pop(SOURCE)) in found:
            reason = "the chat template rewrites earlier turns, so an answer of several turns is not one text (keep its last one)"
            text = {**text, "problem": reason}
        found[row] = text
    return [*found.values()]


def _whole_chat(value: Any) -> list[Any]:
    """Return the messages of a chat, also of a text in the form of Anthropic's hh-rlhf."""
    if isinstance(value, str) and value.startswith("\n\nHuman:"):
        parts = re.split(r"\n\n(Human|Assistant): ?", value)[1:]
        roles = {"Human": "user", "Assistant": "assistant"}
        return [{"role": roles[role], "content": text} for role, text in zip(parts[::2], parts[1::2])]
    return without_none(value) if isinstance(value, list) else []


class ItemCollate(Collate):
    """Makes rows of pairs, whose texts share their prompt. For KTO, the second texts are rows of their own (`other`)."""

    def __call__(self, items: list[dict[str, Any]]) -> Rows:
        if "good" not in items[0]:
            return super().__call__(items)
        alone = Collate(self.per_token, self.multiple, is_causal=True)
        of_texts = lambda number: [{name: item[name][number] for name in ("input_ids", *self.per_token)} for item in items]
        rows = alone([item | text for item, text in zip(items, of_texts(0))])
        rows["other"] = alone(of_texts(1))
        return rows


class TextLogps:
    """Computes the summed log-probabilities of the answers of a micro-batch: (items, 2). `head` is an `OutputHead`."""

    def __init__(self, head: Any):
        self.head = head

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        own = self.of_texts(model, batch)
        return torch.stack([own, self.of_others(model, batch)], 1) if "other" in batch else own.view(-1, 2)

    def of_texts(self, model: nn.Module, batch: Any) -> Tensor:
        return self.head.text_logps(model, batch)

    def of_others(self, model: nn.Module, batch: Any) -> Tensor:
        return self.of_texts(model, batch["other"])


def answer_tokens(batch: Any) -> Tensor:
    """Return the number of tokens of each answer: (items, 2), for KTO (items, 1)."""
    return batch.sum((batch["labels"] != -100).long()).view(-1, 1 if "other" in batch else 2)


def pair_numbers(policy: Tensor, rewards: Tensor) -> dict[str, Tensor]:
    """Return what is logged about each pair. A tie counts as wrong."""
    (better, worse), (chosen, rejected) = rewards.unbind(1), policy.detach().unbind(1)
    found = {"rewards/accuracies": (better > worse).to(rewards), "rewards/margins": better - worse, "rewards/chosen": better}
    return {**found, "rewards/rejected": worse, "logps/chosen": chosen, "logps/rejected": rejected}


def label_numbers(policy: Tensor, rewards: Tensor, good: Tensor, threshold: Tensor | float) -> dict[str, tuple[Tensor, Any]]:
    """Return what is logged about labeled answers, as sums and numbers. A reward at the threshold counts as wrong."""
    found: dict[str, Any] = {"rewards/accuracies": (((2 * good - 1) * (rewards - threshold) > 0).sum(), len(good))}
    for name, part in (("chosen", good), ("rejected", 1 - good)):
        found[f"rewards/{name}"] = (rewards * part).sum(), part.sum()
        found[f"logps/{name}"] = (policy.detach() * part).sum(), part.sum()
    return found


class PairLoss:
    """The terms of pairs. `logps` and `reference` return summed log-probabilities of a micro-batch: the model's, its reference's."""

    def __init__(self, cfg: Any, logps: TextLogps, reference: LogpsOf | None):
        self.cfg, self.logps, self.reference = cfg, logps, reference

    def prepare(self, model: nn.Module, batches: Sequence[Any], team: Team, seeded: Callable[[int], Any]) -> None:
        """Add the log-probabilities of the reference, which changes weights of the model while it computes."""
        for i, batch in enumerate(batches if self.reference else ()):
            with seeded(i):
                batch[COLUMN] = self.reference(model, batch)

    def terms(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        reference = self.reference(model, batch) if self.reference else None
        policy = self.logps(model, batch)
        losses, rewards = compute(self.cfg, policy, reference, answer_tokens(batch))
        return {"loss": losses, **pair_numbers(policy, rewards)}

    def measure(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {METRICS.get(name, name): values for name, values in self.terms(model, batch).items()}

    def metrics(self, table: dict[str, np.ndarray]) -> dict[str, float]:
        return {name: float(values.mean(dtype="float64")) for name, values in table.items()}


class LabelLoss(PairLoss):
    """The terms of labeled answers. `z`, the same for all items of a step, is estimated from their second texts before the first one.

    It is max(0, mean of log p - log p_reference) over the global batch, without gradient, so it depends neither on the number of ranks
    nor on the micro-batch size.
    """

    def prepare(self, model: nn.Module, batches: Sequence[Any], team: Team, seeded: Callable[[int], Any]) -> None:
        if not torch.is_grad_enabled():  # the check before the first step compares items, each of which would have its own z
            return
        super().prepare(model, batches, team, seeded)
        total = torch.zeros(2, dtype=torch.float64, device=batches[0]["good"].device)
        for i, batch in enumerate(batches):
            with seeded(i), torch.no_grad():
                gap = self.logps.of_others(model, batch) - batch[COLUMN][:, 1]
            total += torch.stack([gap.sum(dtype=torch.float64), torch.full_like(total[0], len(gap))])
        if team.size > 1:
            with phases.phase(SYNC):
                dist.all_reduce(total, group=team.group)
        for batch in batches:
            batch["z"] = (total[0] / total[1]).clamp(min=0)

    def terms(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        reference, z = self.reference(model, batch), batch.get("z", 0.0)
        policy, good = self.logps.of_texts(model, batch), batch["good"]
        losses, rewards = compute(self.cfg, policy, reference[:, 0], answer_tokens(batch)[:, 0], good, z)
        return {"loss": losses, **label_numbers(policy, rewards, good, self.cfg.beta * z), "kl": (z * len(good), len(good))}

    def measure(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        reference, policy = self.reference(model, batch), self.logps(model, batch)
        return {"policy": policy, "reference": reference, "tokens": answer_tokens(batch), "good": batch["good"]}

    def metrics(self, table: dict[str, np.ndarray]) -> dict[str, float]:
        policy, reference, tokens, good = (torch.from_numpy(table[n]).double() for n in ("policy", "reference", "tokens", "good"))
        z = (policy - reference)[:, 1].mean().clamp(min=0)
        losses, rewards = compute(self.cfg, policy[:, 0], reference[:, 0], tokens[:, 0], good, z)
        table["reward"] = rewards.numpy()
        numbers = label_numbers(policy[:, 0], rewards, good, self.cfg.beta * z)
        found = {METRICS[name]: float(value / number) for name, (value, number) in numbers.items()}
        found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
        # Without a row of a kind there is no mean of its rewards.
        return {"loss": float(losses.mean()), **{name: value for name, value in found.items() if value == value}}


def build_loss(cfg: Any, logps: TextLogps, reference: LogpsOf | None = None) -> PairLoss:
    """Return the loss of `--loss`, for pairs or for labeled answers. `--beta auto` is set here."""
    if cfg.beta == "auto":
        choose(cfg, "beta", LOSSES[cfg.loss].beta, f"usual for --loss {cfg.loss}")
    return (LabelLoss if cfg.loss in LABELED else PairLoss)(cfg, logps, reference)


def make_tables(rows: dict[str, np.ndarray], number: int, decode: Callable[[list[int], int], list[str]]) -> dict[str, Table]:
    """Return `number` items of each group: right, wrong, and those with the lowest margin. `decode` returns texts.

    An answer of KTO is right if its reward is on the right side of the mean of all.
    """
    if not number:
        return {}
    if "good" in rows:
        margins = (rows["reward"] - rows["reward"].mean()) * (2 * rows["good"] - 1)
        describe = lambda items: {"answer": decode(items, 0), "desirable": rows["good"][items].tolist()}
    else:
        margins = rows["reward_margin"]
        describe = lambda items: {"chosen": decode(items, 0), "rejected": decode(items, 1)}
    columns = {name: rows[name] for name in ("reward", "reward_chosen", "reward_rejected") if name in rows}
    groups = {"is_correct": margins > 0, "certainty": -margins, "worst": "lowest margin"}
    return tables.of_predictions(number, describe, **groups, columns={**columns, "margin": margins})
