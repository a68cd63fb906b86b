"""The trackers, through Accelerate: what each of them does besides scalars. Every method is called in the thread of the tracker."""

import contextlib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, WandBTracker

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.records.eval_tables import Table
from accel_ddp.records.redaction import redact

INIT_SECONDS = 30  # for the server of wandb; the default of wandb is 90
FLUSH_SECONDS = 0.2  # between writes to the file of wandb; the default of wandb is 15
MOST_COLUMNS = 50  # of a matrix; a larger one becomes rows of true class, predicted class and number


class Tracker:
    """A tracker that Accelerate knows. It gets scalars and the options."""

    name = ""

    def __init__(self, name: str, cfg: TrainConfig, folder: str):
        self.name, self.cfg, self.folder = name, cfg, folder
        self.run_name = redact(cfg.run_name or Path(cfg.output_dir).name)
        self.project, self.group, self.tags = redact(cfg.project), redact(cfg.run_group), [redact(tag) for tag in cfg.run_tags]
        self.tracker: GeneralTracker

    def load(self) -> None:
        """Import the package, which takes seconds, while the model is loaded."""
        import_module(self.name)

    def start(self, config: dict[str, Any], facts: dict[str, Any], step: int, trackers: list[Any]) -> None:
        """Open the run of this tracker, and append its object to `trackers`, which `accelerator.log` uses."""
        self.tracker = self.make(step)
        self.tracker.start()
        self.store_config(config, facts)
        trackers.append(self.tracker)

    def make(self, step: int) -> GeneralTracker:
        kind = LOGGER_TYPE_TO_CLASS[self.name]
        return kind(self.project, self.folder) if kind.requires_logging_directory else kind(self.project)

    def store_config(self, config: dict[str, Any], facts: dict[str, Any]) -> None:
        self.tracker.store_init_configuration(config)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.tracker.log(values, step=step)

    def summarize(self, values: dict[str, Any], step: int) -> None:
        """Store values that describe the run as a whole, such as the best metric."""
        self.log(values, step)

    def log_tables(self, tables: dict[str, Table], step: int) -> None: ...
    def log_model(self, folder: Path) -> None: ...
    def finish(self) -> None:
        if hasattr(self, "tracker"):
            self.tracker.finish()

    def how_to_upload_later(self) -> str:
        return ""


class TensorBoard(Tracker):
    def load(self) -> None:
        import_module("torch.utils.tensorboard")

    def make(self, step: int) -> GeneralTracker:
        # A resumed run repeats the steps after its checkpoint. TensorBoard hides what the attempt before has written for them.
        more = {"purge_step": step + 1} if self.cfg.resume else {}
        return LOGGER_TYPE_TO_CLASS["tensorboard"](self.project, self.folder, **more)

    def log_tables(self, tables: dict[str, Table], step: int) -> None:
        import numpy as np

        writer = self.tracker.tracker
        for name, table in tables.items():
            if image := draw_matrix(table):
                writer.add_image(f"tables/{name}", np.asarray(image), global_step=step, dataformats="HWC")
            if table.kind != "points":
                writer.add_text(f"tables/{name}", as_markdown(as_rows(table)), global_step=step)
        writer.flush()


class Trackio(Tracker):
    def make(self, step: int) -> GeneralTracker:
        more: dict[str, Any] = {"resume": "allow"} if self.cfg.resume else {}
        more |= {"group": self.group} if self.group else {}
        return LOGGER_TYPE_TO_CLASS["trackio"](self.project, name=self.run_name, **more)

    def log_tables(self, tables: dict[str, Table], step: int) -> None:
        trackio = import_module("trackio")
        values: dict[str, Any] = {}
        for name, table in tables.items():
            if image := draw_matrix(table):
                values[f"tables/{name}_image"] = trackio.Image(image, caption=table.title)
            rows = as_rows(table)
            values[f"tables/{name}"] = trackio.Table(columns=rows.columns, data=rows.rows)
        self.log(values, step)


class MLflow(Tracker):
    """Its run id is stored in OUTPUT_DIR/mlflow_id.txt, so that a resumed run continues the same run."""

    def make(self, step: int) -> GeneralTracker:
        known = _read(self._id_file) if self.cfg.resume else ""
        tags = {**({"group": self.group} if self.group else {}), **dict.fromkeys(self.tags, "true")}
        more = {"run_id": known} if known else {}
        return LOGGER_TYPE_TO_CLASS["mlflow"](self.project, run_name=self.run_name, tags=tags, **more)

    @property
    def _id_file(self) -> Path:
        return Path(self.cfg.output_dir, "mlflow_id.txt")

    def store_config(self, config: dict[str, Any], facts: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._id_file.write_text(self.tracker.tracker.info.run_id + "\n")
        versions = {f"versions.{name}": version for name, version in facts.get("versions", {}).items()}
        # MLflow refuses to change a parameter of a run, as a resumed run does with --resume.
        with contextlib.suppress(Exception) if self.cfg.resume else contextlib.nullcontext():
            self.tracker.store_init_configuration({**config, **versions})

    def log_tables(self, tables: dict[str, Table], step: int) -> None:
        mlflow = import_module("mlflow")
        for name, table in tables.items():
            path = f"tables/step_{step:08d}/{name}"
            mlflow.log_text(as_markdown(as_rows(table)), f"{path}.md")
            if image := draw_matrix(table):
                mlflow.log_image(image, f"{path}.png")

    def log_model(self, folder: Path) -> None:
        import_module("mlflow").log_artifacts(str(folder), "model")


class _WandbRun(WandBTracker):
    """Logs each row under a number of its own, with the step of the training as a value.

    wandb ignores a row whose own step is not larger than that of the row before. A resumed run repeats steps, and a checkpoint is
    reported after later steps, so that such rows would be lost. The x axis of every panel is the value `step`.
    """

    row = 0

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.row = max(self.row + 1, self.run.step)
        self.run.log(values if step is None else {**values, "step": step}, step=self.row, **more)


class Wandb(Tracker):
    def __init__(self, name: str, cfg: TrainConfig, folder: str, run_id: str):
        super().__init__(name, cfg, folder)
        self.run_id = run_id

    def start(self, config: dict[str, Any], facts: dict[str, Any], step: int, trackers: list[Any]) -> None:
        mode = {} if can_log_in() else {"mode": "offline"}
        if mode:
            print(
                f"wandb has no API key. The run is written to {self.cfg.output_dir}/wandb. {self.how_to_upload_later()}",
                flush=True,
            )
        try:
            self._open(**mode)
        except Exception as error:  # no network, a wrong key, a server that does not answer
            if mode or os.environ.get("WANDB_MODE", "online") != "online":
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            import_module("wandb").teardown()  # the service of wandb does not open a run id twice
            self._open(mode="offline")
            print(
                f"wandb cannot log to its server: {reason}. The run is written to {self.cfg.output_dir}/wandb. "
                f"{self.how_to_upload_later()}",
                file=sys.stderr,
                flush=True,
            )
        run = self.tracker.tracker
        if not run.settings._offline and run.url:
            print(f"wandb: {run.url}", flush=True)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        names = ("command", "versions", "ranks", "batch", "precision", "sharding", "model")
        described = {name: facts[name] for name in names if name in facts}
        run.config.update({**config, "run": described}, allow_val_change=True)
        if self.cfg.resume:  # an offline run begins with row 0 again; log.jsonl has a line for each row of the attempts before
            self.tracker.row = max(run.step, _count_lines(Path(self.cfg.output_dir, "log.jsonl")))
        trackers.append(self.tracker)

    def _open(self, **mode: str) -> None:
        wandb = import_module("wandb")
        more: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": INIT_SECONDS}
        # The output is not captured, because each `print` of the run would then call wandb, and wait for it.
        more |= {} if "WANDB_CONSOLE" in os.environ else {"console": "off"}
        more |= {} if {"WANDB_SILENT", "WANDB_QUIET"} & os.environ.keys() else {"silent": True}
        if "x_transaction_log_flush_interval" in wandb.Settings.model_fields:  # a killed job loses what is not flushed
            more["x_transaction_log_flush_interval"] = FLUSH_SECONDS
        self.tracker = _WandbRun(
            self.project, name=self.run_name, group=self.group or None, tags=self.tags or None,
            dir=self.cfg.output_dir, id=self.run_id, resume="allow", settings=wandb.Settings(**more), **mode,
        )  # fmt: skip
        self.tracker.start()

    def summarize(self, values: dict[str, Any], step: int) -> None:
        self.tracker.tracker.summary.update(values)

    def log_tables(self, tables: dict[str, Table], step: int) -> None:
        wandb = import_module("wandb")
        values: dict[str, Any] = {}
        for name, table in tables.items():
            if image := draw_matrix(table):
                values[f"tables/{name}_image"] = wandb.Image(image, caption=table.title)
            rows = as_rows(table)
            values[f"tables/{name}"] = wandb.Table(columns=rows.columns, data=rows.rows, allow_mixed_types=True)
        self.log(values, step)

    def log_model(self, folder: Path) -> None:
        wandb = import_module("wandb")
        artifact = wandb.Artifact(f"model-{self.run_id}", type="model", description=f"the model of {self.run_name}")
        artifact.add_dir(str(folder), policy="immutable")  # without a copy in the cache of wandb
        self.tracker.tracker.log_artifact(artifact)

    def how_to_upload_later(self) -> str:
        return f"Upload it later with: wandb sync {self.cfg.output_dir}/wandb/*run-*-{self.run_id}"


def make_tracker(name: str, cfg: TrainConfig, folder: str, wandb_id: str) -> Tracker:
    """Return the tracker of a name in `--report_to`. `folder` is that of trackers which write files."""
    if name == "wandb":
        return Wandb(name, cfg, folder, wandb_id)
    kinds: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "trackio": Trackio, "mlflow": MLflow}
    return kinds.get(name, Tracker)(name, cfg, folder)


def can_log_in() -> bool:
    """Return whether wandb has a key or is told what to do without one. Otherwise it would ask for a key in the terminal."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    text = _read(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
    return host in text.split() or "api.wandb.ai" in text.split()


def as_rows(table: Table) -> Table:
    """Return a table that trackers can show: a matrix with many classes becomes rows of the numbers that are not 0."""
    if table.kind != "matrix" or len(table.columns) <= MOST_COLUMNS:
        return table
    rows = [[row[0], name, number] for row in table.rows for name, number in zip(table.columns[1:], row[1:]) if number]
    return Table(["true class", "predicted class", "number"], rows, "scores", table.title)


def as_markdown(table: Table) -> str:
    cell = lambda value: (
        "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")
    )
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


def _count_lines(path: Path) -> int:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    return 0


# Draws a confusion matrix for trackers, with pillow.
SIZE = 640  # pixels of the cells of a matrix, at least
MOST_LABELS = 40  # classes; with more of them neither names nor numbers are readable
DARK, LIGHT = (8, 48, 107), (247, 251, 255)  # a scale of blues, which colour-blind users can read


def draw_matrix(table: Table) -> Any:
    """Return an image of a confusion matrix, or None if the table is no matrix or pillow is not installed.

    The colour of a cell is the share of its row, so that rare classes are visible.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        return None
    names = [str(row[0]) for row in table.rows]
    predicted = table.columns[1:]
    if table.kind != "matrix" or not names or not predicted:
        return None
    has_labels = max(len(names), len(predicted)) <= MOST_LABELS
    cell = max(1, SIZE // max(len(names), len(predicted)))
    font = ImageFont.load_default(size=min(16, max(9, cell // 3))) if has_labels else None
    short = lambda name: name if len(name) <= 16 else f"{name[:15]}…"
    left = int(max(font.getlength(short(name)) for name in names)) + 34 if font else 30
    top = int(max(font.getlength(short(name)) for name in predicted)) + 34 if font else 30
    width, height = left + cell * len(predicted) + 10, top + cell * len(names) + 10
    image = Image.new("RGB", (max(width, 260), height), "white")
    draw = ImageDraw.Draw(image)
    caption = ImageFont.load_default(size=13)
    draw.text((left, 4), "predicted class", fill="black", font=caption)
    _draw_upright(image, "true class", (4, top), caption)
    for line, row in enumerate(table.rows):
        values = [value if isinstance(value, int | float) else 0 for value in row[1:]]
        total = sum(values) or 1
        for column, value in enumerate(values):
            share = min(1.0, max(0.0, value / total))
            colour = tuple(round(light + (dark - light) * share) for light, dark in zip(LIGHT, DARK))
            x, y = left + column * cell, top + line * cell
            draw.rectangle((x, y, x + cell - 1, y + cell - 1), fill=colour)
            if font and value:
                draw.text(
                    (x + cell / 2, y + cell / 2), f"{value:g}", fill="white" if share > 0.5 else "black", font=font, anchor="mm"
                )
        if font:
            draw.text((left - 6, top + (line + 0.5) * cell), short(names[line]), fill="black", font=font, anchor="rm")
    for column, name in enumerate(predicted if font else ()):
        _draw_upright(image, short(name), (int(left + (column + 0.5) * cell - font.size / 2), top - 6), font, ends=True)
    return image


def _draw_upright(image: Any, text: str, place: tuple[int, int], font: Any, ends: bool = False) -> None:
    """Draw text that is read from below. `place` is its top, or its lower end with `ends`."""
    from PIL import Image, ImageDraw

    length, height = int(font.getlength(text)) + 2, font.size + 6
    label = Image.new("RGB", (length, height), "white")
    ImageDraw.Draw(label).text((0, 0), text, fill="black", font=font)
    turned = label.rotate(90, expand=True)
    image.paste(turned, (place[0], place[1] - length if ends else place[1]))
