"""Draw the picture of the README: a rank is killed, the run is resumed, and the model has the same bits as without the kill.

    python docs/make_picture.py docs/kill_resume.svg

It runs the commands that the picture shows, in a temporary folder, and draws lines of their output. Lines are cut, never changed.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.sax.saxutils import escape

RUN = "accel-ddp run sft --num_processes 2 --steps 60 --save_every 20"
KILL_AFTER = "step 40/60"
COLUMNS = 106
CHARACTER, LINE, MARGIN = 7.55, 19, 18  # pixels; the first is the advance of a 12.5 px monospace font
PLAIN, DIM, GREEN, RED, BLUE = "#d4d4d4", "#8b949e", "#7ee787", "#ff7b72", "#79c0ff"
TITLE = "Kill a rank, read the diagnosis, resume, and get a model with the same checksum"


def start(command: str) -> subprocess.Popen:
    return subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)


def pick(text: str, *patterns: str) -> list[str]:
    """Return the first line of the output that contains each pattern, cut where the match ends."""
    found = [re.search(rf"^(.*{pattern})(.*)$", text, flags=re.MULTILINE) for pattern in patterns]
    return [line[1] + (" …" if line[2] else "") for line in found]


def find_rank() -> int:
    """Return the process of rank 1."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, words = (Path(folder, name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
        except OSError:
            continue
        if b"RANK=1" in environment and b"runs/killed" in words and folder.joinpath("cwd").resolve() == Path.cwd():
            return int(folder.name)
    raise SystemExit("rank 1 was not found")


def record() -> list[str]:
    """Run everything, and return the lines of the picture."""
    whole, _ = start(f"{RUN} --output_dir runs/whole").communicate()
    killed, text = start(f"{RUN} --output_dir runs/killed"), ""
    for line in killed.stdout:
        text += line
        if KILL_AFTER in line:
            time.sleep(0.5)
            os.kill(rank := find_rank(), signal.SIGKILL)
    resumed, _ = start(f"{RUN} --output_dir runs/killed --resume").communicate()
    models = [Path(f"runs/{name}/model/model.safetensors") for name in ("whole", "killed")]
    end = (r"step 60/60 .* lr \S+", "model saved in .*")
    return [
        f"$ {RUN} --output_dir runs/whole",
        *pick(whole, *end),
        f"$ {RUN} --output_dir runs/killed",
        *pick(text, rf"{KILL_AFTER} .* lr \S+"),
        f"$ kill -9 {rank}                # rank 1, from another terminal",
        *pick(text, r"RANK_DIED: .*?\."),
        f"$ {RUN} --output_dir runs/killed --resume",
        *pick(resumed, "resumed at step .*", *end),
        "$ sha256sum runs/*/model/model.safetensors",
        *(f"{hashlib.sha256(model.read_bytes()).hexdigest()}  {model}" for model in sorted(models)),
    ]


def parts(line: str) -> list[tuple[str, str]]:
    """Return (text, color) of the parts of a line."""
    if line.startswith("$ "):
        command, mark, comment = line[2:].partition("#")
        return [("$ ", GREEN), (command, "#ffffff"), (mark + comment, DIM)]
    if "RANK_DIED" in line:
        return [(line, RED)]
    if found := re.fullmatch(r"([0-9a-f]{64})(  .*)", line):
        return [(found[1], GREEN), (found[2], PLAIN)]
    return [(line, BLUE if line.startswith("resumed") else PLAIN)]


def draw(lines: list[str]) -> str:
    """Return an SVG document."""
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), len(lines) * LINE + 2 * MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{TITLE}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#161b22" stroke="#30363d"/>',
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="12.5">',
    ]
    for number, line in enumerate(lines):
        column = 0
        for text, color in parts(line):
            # textLength keeps columns aligned in whatever font the viewer has.
            x, y, length = MARGIN + column * CHARACTER, MARGIN + (number + 0.75) * LINE, len(text) * CHARACTER
            place = f'x="{x:.2f}" y="{y:.1f}" textLength="{length:.2f}" lengthAdjust="spacingAndGlyphs" fill="{color}"'
            drawn += [f'<text xml:space="preserve" {place}>{escape(text)}</text>'] if text else []
            column += len(text)
    return "\n".join([*drawn, "</g>", "</svg>", ""])


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        target.write_text(draw(record()))
