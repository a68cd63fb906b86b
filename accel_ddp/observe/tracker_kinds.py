"""The trackers, through Accelerate: what each of them does besides scalars. Every method is called in the thread of the tracker."""

import contextlib
import os
import secrets
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, WandBTracker

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.records.eval_tables import Table
from accel_ddp.records.redaction import redact
from accel_ddp.text import first_line, shorten

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
        kind = LOGGER_TYPE_TO_CLASS[self.name]
        folder = [self.folder] if kind.requires_logging_directory else []
        self.tracker = kind(self.project, *folder, **self.options(step))
        self.tracker.start()
        self.store_config(config, facts)
        trackers.append(self.tracker)

    def options(self, step: int) -> dict[str, Any]:
        """Return the options of Accelerate's tracker."""
        return {}

    def store_config(self, config: dict[str, Any], facts: dict[str, Any]) -> None:
        self.tracker.store_init_configuration(config)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.tracker.log(values, step=step)

    def summarize(self, values: dict[str, Any], step: int) -> None:
        """Store values that describe the run as a whole, such as the best metric."""
        self.log(values, step)

    def log_tables(self, tables: dict[str, Table], step: int) -> None:
        """Show tables. Only some trackers can."""

    def log_media(self, tables: dict[str, Table], step: int, **options: Any) -> None:
        """Log tables, and confusion matrices as images, with the classes `Table` and `Image` of the package."""
        package = import_module(self.name)
        values: dict[str, Any] = {}
        for name, table in tables.items():
            if image := draw_matrix(table):
                values[f"tables/{name}_image"] = package.Image(image, caption=table.title)
            rows = as_rows(table)
            values[f"tables/{name}"] = package.Table(columns=rows.columns, data=rows.rows, **options)
        self.log(values, step)

    def log_model(self, folder: Path) -> None: ...
    def finish(self) -> None:
        if hasattr(self, "tracker"):
            self.tracker.finish()

    def how_to_upload_later(self) -> str:
        return ""


class TensorBoard(Tracker):
    def load(self) -> None:
        import_module("torch.utils.tensorboard")

    def options(self, step: int) -> dict[str, Any]:
        # A resumed run repeats the steps after its checkpoint. TensorBoard hides what the attempt before has written for them.
        return {"purge_step": step + 1} if self.cfg.resume else {}

    def log_tables(self, tables: dict[str, Table], step: int) -> None:
        writer = self.tracker.tracker
        for name, table in tables.items():
            if image := draw_matrix(table):
                writer.add_image(f"tables/{name}", np.asarray(image), global_step=step, dataformats="HWC")
            if table.kind != "points":
                writer.add_text(f"tables/{name}", as_markdown(as_rows(table)), global_step=step)
        writer.flush()


class Trackio(Tracker):
    log_tables = Tracker.log_media

    def options(self, step: int) -> dict[str, Any]:
        more = {"resume": "allow"} if self.cfg.resume else {}
        return {"name": self.run_name} | more | ({"group": self.group} if self.group else {})


class MLflow(Tracker):
    """Its run id is stored in OUTPUT_DIR/mlflow_id.txt, so a resumed run continues the same run."""

    def options(self, step: int) -> dict[str, Any]:
        self.id_file = Path(self.cfg.output_dir, "mlflow_id.txt")
        known = _read(self.id_file) if self.cfg.resume else ""
        tags = {**({"group": self.group} if self.group else {}), **dict.fromkeys(self.tags, "true")}
        return {"run_name": self.run_name, "tags": tags, **({"run_id": known} if known else {})}

    def store_config(self, config: dict[str, Any], facts: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.id_file.write_text(self.tracker.tracker.info.run_id + "\n")
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

    wandb ignores a row whose own step is not larger than the step of the row before. A resumed run repeats steps, and a checkpoint is
    reported after later steps, so such rows would be lost. The x axis of every panel is the value `step`.
    """

    row = 0

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.row = max(self.row + 1, self.run.step)
        self.run.log(values if step is None else {**values, "step": step}, step=self.row, **more)


class Wandb(Tracker):
    """Its run id is stored in OUTPUT_DIR/wandb_id.txt, so a run that is resumed or restarted continues the same run."""

    def __init__(self, name: str, cfg: TrainConfig, folder: str):
        super().__init__(name, cfg, folder)
        path = Path(cfg.output_dir, "wandb_id.txt")
        self.run_id = os.environ.get("WANDB_RUN_ID") or (_read(path) if cfg.resume else "") or secrets.token_hex(4)
        with contextlib.suppress(OSError):
            path.write_text(self.run_id + "\n")

    def start(self, config: dict[str, Any], facts: dict[str, Any], step: int, trackers: list[Any]) -> None:
        mode = {} if can_log_in() else {"mode": "offline"}
        later = f"The run is written to {self.cfg.output_dir}/wandb. {self.how_to_upload_later()}"
        if mode:
            print(f"wandb has no API key. {later}", flush=True)
        try:
            self._open(**mode)
        except Exception as error:  # no network, a wrong key, a server that does not answer
            if mode or os.environ.get("WANDB_MODE", "online") != "online":
                raise
            reason = first_line(error).rstrip(".")
            import_module("wandb").teardown()  # the service of wandb does not open a run id twice
            self._open(mode="offline")
            print(f"wandb cannot log to its server: {reason}. {later}", file=sys.stderr, flush=True)
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
        self.log_media(tables, step, allow_mixed_types=True)

    def log_model(self, folder: Path) -> None:
        wandb = import_module("wandb")
        artifact = wandb.Artifact(f"model-{self.run_id}", type="model", description=f"the model of {self.run_name}")
        artifact.add_dir(str(folder), policy="immutable")  # without a copy in the cache of wandb
        self.tracker.tracker.log_artifact(artifact)

    def how_to_upload_later(self) -> str:
        return f"Upload it later with: wandb sync {self.cfg.output_dir}/wandb/*run-*-{self.run_id}"


def make_tracker(name: str, cfg: TrainConfig, folder: str) -> Tracker:
    """Return the tracker of a name in `--report_to`. Trackers that write files write into `folder`."""
    kinds: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "trackio": Trackio, "mlflow": MLflow, "wandb": Wandb}
    return kinds.get(name, Tracker)(name, cfg, folder)


def can_log_in() -> bool:
    """Return whether wandb has a key or is told what to do without one. Otherwise it would ask for a key in the terminal."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE")):
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


# ---- the image of a confusion matrix

SIZE = 640  # pixels of the longer side of a matrix, at least
MOST_LABELS = 40  # classes; with more of them neither names nor numbers are readable
DARK, LIGHT = (8, 48, 107), (247, 251, 255)  # a scale of blues, which color-blind users can read


def draw_matrix(table: Table) -> Any:
    """Return an image of a confusion matrix, or None if the table is no matrix or pillow is not installed.

    The color of a cell is the share of its row, which shows rare classes too.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        return None
    if table.kind != "matrix" or not table.rows or len(table.columns) < 2:
        return None
    counts = np.array([[value if isinstance(value, int | float) else 0 for value in row[1:]] for row in table.rows], float)
    shares = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))[:, :, None]
    cell = max(1, SIZE // max(counts.shape))
    has_labels = max(counts.shape) <= MOST_LABELS
    margin = 170 if has_labels else 30
    colors = Image.fromarray((LIGHT + (np.array(DARK) - LIGHT) * shares).round().astype(np.uint8))
    width, height = counts.shape[1] * cell, counts.shape[0] * cell
    image = Image.new("RGB", (margin + width + 10, margin + height + 10), "white")
    image.paste(colors.resize((width, height), Image.Resampling.NEAREST), (margin, margin))
    font, caption = ImageFont.load_default(size=min(16, max(9, cell // 3))), ImageFont.load_default(size=13)
    draw = ImageDraw.Draw(image)
    draw.text((margin, 4), "predicted class", fill="black", font=caption)
    for (line, column), count in np.ndenumerate(counts) if has_labels else ():
        if count:
            color = "white" if shares[line, column] > 0.5 else "black"
            draw.text((margin + (column + 0.5) * cell, margin + (line + 0.5) * cell), f"{count:g}", color, font, anchor="mm")
    for line, row in enumerate(table.rows if has_labels else ()):
        draw.text((margin - 6, margin + (line + 0.5) * cell), shorten(str(row[0]), 16, "…"), "black", font, anchor="rm")
    image = image.transpose(Image.Transpose.ROTATE_270)  # what is drawn now is read from below in the end
    draw = ImageDraw.Draw(image)
    draw.text((height + 10, 4), "true class", "black", caption, anchor="ra")
    for column, name in enumerate(table.columns[1:] if has_labels else ()):
        draw.text((height + 16, margin + (column + 0.5) * cell), shorten(str(name), 16, "…"), "black", font, anchor="lm")
    return image.transpose(Image.Transpose.ROTATE_90)
