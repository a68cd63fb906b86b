"""The progress of a run: what the live panel in a terminal shows, and plain lines elsewhere."""

import contextlib
import io
import locale
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import ASCII, ROUNDED
from rich.console import COLOR_SYSTEMS, Console, OverflowMethod
from rich.segment import Segment
from rich.text import Text

from accel_ddp import phases
from accel_ddp.config.option_values import BestMetric
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook
from accel_ddp.engine.step_numbers import Numbers, Pace, RankSample, Split, splits_between
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import Moment, ending
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.saving.checkpoints import Metrics
from accel_ddp.text import format_clock, shorten

LONGEST = 160  # characters of a text that a line shows


def panel() -> Any:
    """Return the `Display` of this process, or None if lines are printed."""
    return ending.find(Moment.MESSAGES)


class Progress(Hook):
    """Updates the panel that `start` has opened. If there is none, it prints a line every `--log_every` steps."""

    def __init__(self, cfg: TrainConfig):
        self.cfg, self.steps_per_epoch = cfg, 0.0

    def on_describe(self, facts):
        self.steps_per_epoch = facts.get("items", 0) / facts.get("batch", {}).get("global", self.cfg.global_batch_size)

    def on_start(self, step, total_steps, evaluations):
        self.state, self.rows = panel().state if panel() else State(), {}
        state = self.state
        state.first_step, state.began, state.numbers = step, time.monotonic(), None
        state.evaluations, state.total_steps, state.steps_per_epoch = dict(evaluations), total_steps, self.steps_per_epoch
        with contextlib.suppress(UserError):  # a direction that is not known matters only with --keep_best or early stopping
            state.metric = self.cfg.best()

    def on_warm_up(self, step, seconds):
        print(f"warm-up: {seconds:.1f} s")
        self._begin_steps(step)

    def on_update(self, numbers, pace):
        self.rows = {name[5:]: int(number) for name, number in numbers.means.items() if name.startswith("rows/")}
        state, total = self.state, self.state.total_steps
        state.numbers, state.pace, state.updated = numbers, pace, time.monotonic()
        if numbers.ranks:
            state.samples = state.samples[1], numbers.ranks
        is_due = numbers.step % self.cfg.log_every == 0 or numbers.step == total
        if is_due and not panel():
            seconds = state.seconds_left()  # on a GPU, numbers of the step before a warm-up arrive after it
            print(
                f"step {numbers.step:>{len(str(total))}}/{total}  loss {numbers.loss:.4f}  grad {numbers.grad_norm:.3f}  "
                f"lr {numbers.lr:.2e}  {''.join(map('%s %s  '.__mod__, _first_mean(numbers)))}{pace}"
                + ("" if seconds is None else f"  {format_clock(seconds)} left")
            )

    def on_evaluate(self, step, metrics):
        self.state.evaluations[step] = metrics
        when = f"step {step}" if step else "before training"
        print(f"{when}  evaluation: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if self.rows:
            print(f"{when}  rows trained: {', '.join(f'{number:,} of {name}' for name, number in self.rows.items())}")
        if step == self.state.first_step:
            self._begin_steps(step)

    def on_tables(self, step, tables):
        table, number = tables.get("predictions"), getattr(self.cfg, "samples", 0)
        names = ("prompt", "reference", "prediction")
        for row in table.rows[:number] if table and {*names} <= {*table.columns} else ():
            prompt, wanted, answer = (" ".join(str(row[table.columns.index(name)]).split()) for name in names)
            more = "…" if len(prompt) > LONGEST else ""  # a question is at the end of its prompt
            print(
                f"prompt  {more}{prompt[-LONGEST:]}\n  wanted  {shorten(wanted, LONGEST)}\n  answer  {shorten(answer, LONGEST)}"
            )

    def on_end(self, step, summary):
        if display := panel():
            display.finish("stopped" if "stopped" in summary else "done")
        evaluations = self.state.evaluations
        before = evaluations.get(0, {})
        both = {name: (before[name], summary[name]) for name in before if name in summary}
        if step and both:
            width, after = max(map(len, both)), f"step {summary['best_step']}" if "best_step" in summary else "after"
            print("\n".join([f"{'':{width}}  {'before':>10}  {after:>10}"] + [
                f"{name:{width}}  {a:10.4f}  {b:10.4f}" for name, (a, b) in both.items()
            ]))  # fmt: skip
            for text in () if "stopped" in summary else find_worse(self.cfg, evaluations, summary):
                warn_on_main(text, step=step)

    def _begin_steps(self, step: int) -> None:
        """Estimate the remaining time from the steps after this one: a warm-up may be in the middle of a run."""
        self.state.began, self.state.first_step = time.monotonic(), step


def _first_mean(numbers: Numbers) -> list[tuple[str, str]]:
    return [(name, f"{mean:.4g}") for name, mean in numbers.means.items() if not name.startswith("rows/")][:1]


def find_worse(cfg: TrainConfig, evaluations: dict[int, Metrics], after: Metrics) -> Iterator[str]:
    """Yield a line for `--best_metric` and for the loss if the exported weights, whose metrics are `after`, are worse than at step 0.

    With `--keep_best` they are those of the best checkpoint, and a line says if it is not better.
    """
    known = [BestMetric("loss", "min")]
    with contextlib.suppress(UserError):  # whether a lower or a higher value is better is not known
        known.insert(0, cfg.best())
    for number, metric in enumerate(dict.fromkeys(known)):
        name, before, is_best = metric.name, evaluations[0].get(metric.name), cfg.keep_best and number == 0
        if before is None or math.isnan(before) or (now := after.get(name)) is None or metric.is_better(now, before):
            continue
        if is_best:
            what = f"--keep_best: no checkpoint was better than the model before training ({name} {before:.4g}, then {now:.4g})"
        elif f"{before:.4g}" == f"{now:.4g}":
            continue
        else:
            what = f"{name} {'fell' if now < before else 'rose'} from {before:.4g} before training to {now:.4g}"
        best = next(iter(metric.rank(evaluations)), 0)
        advice = f"Step {best} was better: --keep_best --best_metric {name} keeps it" if best else "Use a lower --lr or more data"
        yield f"warning: WORSE: {what}. {advice}."


WIDEST = 110  # columns; a wider panel is harder to read
NARROW = 50  # columns; a narrower panel has no frame
_SHORT_WAIT = 1.0  # seconds; ranks wait for each other in most phases, and a short wait is part of the phase around it
_LABELS = {
    phases.START: "start", phases.LOAD: "load", phases.TOKENIZE: "tokenize", phases.COMPILE: "compile", phases.EVAL_DATA: "evaluate",
    phases.EVALUATE: "evaluate", phases.METRICS: "evaluate", phases.SAVE: "save", phases.END: "finish", phases.EXPORT: "export",
    phases.WAIT: "wait for other ranks",
}  # fmt: skip


@dataclass
class State:
    """The run as it is known. The training thread replaces values, and the thread of the panel reads them."""

    title: str = ""
    opened: float = field(default_factory=time.monotonic)
    total_steps: int = 0  # 0: the training has not begun
    first_step: int = 0
    began: float = 0.0  # when the first step began
    steps_per_epoch: float = 0.0
    numbers: Numbers | None = None  # of the last update
    updated: float = 0.0  # when `numbers` arrived
    pace: Pace | None = None
    samples: tuple[Sequence[RankSample], Sequence[RankSample]] = ((), ())  # the last two
    metric: BestMetric | None = None
    evaluations: dict[int, Metrics] = field(default_factory=dict)
    bar: str = ""  # of a library
    phase: str = "start"

    @property
    def step(self) -> int:
        return self.numbers.step if self.numbers else max(self.first_step, phases.HERE.step)

    def seconds_left(self) -> float | None:
        """Return the time that the remaining steps take at the mean speed of those so far. None: it is not known."""
        if not self.numbers or self.numbers.step <= self.first_step:
            return None
        seconds = (self.updated - self.began) / (self.numbers.step - self.first_step) * (self.total_steps - self.numbers.step)
        return max(seconds - (time.monotonic() - self.updated), 0.0)

    def observe_phase(self) -> None:
        heartbeat = phases.HERE
        phase, (done, total) = heartbeat.phase, heartbeat.progress
        if phase == phases.WAIT and (time.monotonic_ns() - heartbeat.since) * 1e-9 < _SHORT_WAIT:
            return
        self.phase = _LABELS.get(phase, "train" if self.total_steps or heartbeat.step else "start")
        if self.phase == "evaluate" and total:
            self.phase += f" {done / total:.0%} ({done:,} of {total:,} batches)"
        if self.phase != "save" and phases.read(heartbeat.memory).writing:
            self.phase += ", writing a checkpoint"


def shows_unicode(encoding: str | None) -> bool:
    """Return whether the terminal shows box characters: the locale and the stream use UTF-8."""
    named = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    is_utf8 = lambda name: (name or "").lower().replace("-", "").endswith("utf8")
    return is_utf8(encoding) and (is_utf8(named.partition("@")[0]) if named else is_utf8(locale.getpreferredencoding(False)))


class Renderer:
    """Turns a state into rows. rich reads COLORTERM and NO_COLOR, and draws frames in the characters that `encoding` has.

    rich.panel.Panel and Console.print, which also measure and wrap, would take 3 times as long.
    """

    def __init__(self, encoding: str = "utf-8"):
        self.console = Console(file=io.StringIO(), force_terminal=True, legacy_windows=False)
        self.color_system = COLOR_SYSTEMS.get(self.console.color_system or "")
        self.is_ascii = not encoding.startswith("utf")
        self.box = ASCII if self.is_ascii else ROUNDED
        self.overflow: OverflowMethod = "crop" if self.is_ascii else "ellipsis"

    def rows(self, state: State, columns: int, lines: int) -> list[str]:
        """Return at most `lines` rows, each narrower than `columns`, because terminals differ in what follows the last column."""
        width, has_frame = max(min(columns - 1, WIDEST), 1), columns > NARROW and lines >= 8
        inner = width - 4 if has_frame else width
        first, *others = [_flow(items, inner, self.overflow) for items in _groups(state)]
        content = [*first]
        if state.total_steps:
            content.append(self._bar(state.step / state.total_steps, inner))
        content += [row for rows in others for row in rows]
        if state.bar:
            content += _flow([_plain(state.bar, "dim")], inner, self.overflow)
        content = content[: max(lines - 2 * has_frame, 1)]
        return list(self._framed(content, state.title, inner)) if has_frame else [*map(self._draw, content)]

    def _framed(self, rows: Sequence[Text], title: str, inner: int) -> Iterator[str]:
        box = self.box
        name = _plain(f" {title} " if title else "", "bold")
        name.truncate(inner, overflow=self.overflow)
        top, rest = box.top_left + box.top, box.top * (inner + 1 - name.cell_len) + box.top_right
        yield self._draw(_plain(top, "dim")) + self._draw(name) + self._draw(_plain(rest, "dim"))
        left, right = self._draw(_plain(f"{box.mid_left} ", "dim")), self._draw(_plain(f" {box.mid_right}", "dim"))
        for row in rows:
            yield f"{left}{self._draw(row)}{' ' * (inner - row.cell_len)}{right}"
        yield self._draw(_plain(box.bottom_left + box.bottom * (inner + 2) + box.bottom_right, "dim"))

    def _draw(self, row: Text) -> str:
        segments = row.render(self.console)
        if self.console.no_color:
            segments = Segment.remove_color(segments)
        render = lambda text, style: style.render(text, color_system=self.color_system) if style else text
        return "".join(render(segment.text, segment.style) for segment in segments)

    def _bar(self, done: float, width: int) -> Text:
        filled = round(min(done, 1.0) * width)
        full, empty = ("=", "-") if self.is_ascii else ("━", "─")  # they also differ without colors
        return Text.assemble((full * filled, "green" if done >= 1 else "cyan"), (empty * (width - filled), "bright_black"))


def _groups(state: State) -> Iterator[list[Text]]:
    now = time.monotonic()
    items = [_plain(state.phase, "bold cyan")]
    if state.total_steps:
        items.append(_item("step", f"{state.step:,}/{state.total_steps:,}"))
        if state.steps_per_epoch:
            items.append(_item("epoch", f"{state.step / state.steps_per_epoch:.2f}"))
    elif state.step:  # a loop of the user
        items.append(_item("step", f"{state.step:,}"))
    items.append(_item("elapsed", format_clock(now - state.opened)))
    if (left := state.seconds_left()) is not None and state.step < state.total_steps:
        items.append(_item("left", format_clock(left)))
    yield items
    if state.numbers and state.pace:
        numbers = state.numbers
        rates = [_plain(rate) for rate in str(state.pace).split("  ")]
        yield [
            _item("loss", f"{numbers.loss:.4f}"), _item("grad", f"{numbers.grad_norm:.3f}"), _item("lr", f"{numbers.lr:.2e}"),
            *(_item(*mean) for mean in _first_mean(numbers)), *rates,
        ]  # fmt: skip
    if state.evaluations:
        yield list(_evaluation_items(state))
    if splits := splits_between(*state.samples):
        yield list(_time_items(splits))


def _evaluation_items(state: State) -> Iterator[Text]:
    """Yield the metric that is compared, of the last and of the best evaluation. Without one, yield the first metrics."""
    last = max(state.evaluations)
    metrics, metric = state.evaluations[last], state.metric
    yield _plain("evaluation", "dim")
    when = f"at step {last:,}" if last else "before training"
    if metric and metric.name in metrics:
        yield _item(metric.name, f"{metrics[metric.name]:.4f}", when)
        if ranking := metric.rank(state.evaluations):
            best = ranking[0]
            yield _item("best", f"{state.evaluations[best][metric.name]:.4f}", f"at step {best:,}" if best else "before training")
    else:
        for name, value in list(metrics.items())[:3]:
            yield _item(name, f"{value:.4f}", when)


def _time_items(splits: Sequence[Split]) -> Iterator[Text]:
    mean = Split(*(sum(values) / len(splits) for values in zip(*splits)))
    seconds = max(sum(mean), 1e-9)
    compute = mean.forward + mean.backward + mean.optimizer
    parts = {"data": mean.data, "compute": compute, "communication": mean.communication, "other": mean.other}
    yield _item("time per step", f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms")
    yield from (_item(name, f"{value / seconds:.0%}") for name, value in parts.items())


def _item(name: str, value: str, more: str = "") -> Text:
    return Text.assemble((f"{name} ", "dim"), value, (f" {more}" if more else "", "dim"))


def _plain(text: str, style: str = "") -> Text:
    """Return a text of one row. Control characters in it would move the cursor."""
    return Text.assemble(("".join(c if c.isprintable() else " " for c in text), style))  # `Text.render` uses only spans


def _flow(items: Iterable[Text], width: int, overflow: OverflowMethod) -> list[Text]:
    """Return rows that are filled with items. An item that is wider than a row is cut."""
    rows: list[Text] = []
    for item in items:
        item.truncate(width, overflow=overflow)
        if rows and rows[-1].cell_len + 3 + item.cell_len <= width:
            rows[-1].append("   ").append_text(item)
        else:
            rows.append(Text(no_wrap=True, overflow="crop").append_text(item))
    return rows
