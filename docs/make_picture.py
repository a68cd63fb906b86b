"""Draw the output of a run as a terminal window, for the README.

    script -qc "stty cols 120 rows 50; accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py" first_run.txt
    python docs/make_picture.py first_run.txt docs/first_run.svg

`script` runs a command in a terminal and records what it writes. The text is what a user sees at the end of the run, without the
long lines after `model saved in`.
"""

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import pyte

COMMAND = "$ accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py"
CHARACTER, LINE, MARGIN, BAR = 8.43, 20, 18, 34  # pixels; the first is the advance of a 14 px monospace font
PLAIN, DIM, GREEN, BLUE, YELLOW = "#d4d4d4", "#8b949e", "#7ee787", "#79c0ff", "#e3b341"
COLUMNS, LINES = 120, 50  # of the terminal that `script` has recorded


def shown_lines(output: bytes) -> list[str]:
    """Return the lines of the picture: the command, and what the terminal shows at the end."""
    screen = pyte.Screen(COLUMNS, LINES)
    recorded = output.partition(b"\n")[2]  # `script` begins with a line about itself
    pyte.ByteStream(screen).feed(re.sub(rb"\nScript done on [^\n]*\n?$", b"", recorded))
    text = "\n".join(row.rstrip() for row in screen.display).partition("\ntry: ")[0]
    return [COMMAND, *text.rstrip().split("\n")]


def parts(line: str) -> list[tuple[str, str]]:
    """Return (text, colour) of the parts of a line."""
    if line == COMMAND:
        return [("$ ", GREEN), (line[2:], PLAIN)]
    if line.startswith(("╭", "╰")):
        return [(line, DIM)]
    if found := re.fullmatch(r"│( ━+─* )│", line):
        return [("│", DIM), (found[1], GREEN), ("│", DIM)]
    if found := re.fullmatch(r"│( done )(.*)│", line):
        return [("│", DIM), (found[1], GREEN), (found[2], PLAIN), ("│", DIM)]
    if found := re.fullmatch(r"│(.*)│", line):
        return [("│", DIM), (found[1], PLAIN), ("│", DIM)]
    if found := re.fullmatch(r"(accuracy|macro_f1|loss)( +[\d.]+)( +[\d.]+)", line):
        return [(found[1] + found[2], PLAIN), (found[3], GREEN)]
    if found := re.fullmatch(r"(.* = )(.*?)(   \(.*\))", line):  # the batch arithmetic
        return [(found[1], PLAIN), (found[2], BLUE), (found[3], DIM)]
    if "evaluation:" in line:
        return [(line, BLUE)]
    if found := re.fullmatch(r"(model saved in )(.*)", line):
        return [(found[1], PLAIN), (found[2], YELLOW)]
    return [(line, PLAIN)]


def draw(lines: list[str]) -> str:
    """Return an SVG document."""
    width = round(max(map(len, lines)) * CHARACTER + 2 * MARGIN)
    height = BAR + len(lines) * LINE + MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(COMMAND[2:])}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#161b22"/>',
        *(f'<circle cx="{22 + 20 * i}" cy="18" r="6" fill="{c}"/>' for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))),
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="14">',
    ]
    for number, line in enumerate(lines):
        column = 0
        for text, colour in parts(line):
            # textLength keeps columns aligned in whatever font the viewer has.
            x, y, length = MARGIN + column * CHARACTER, BAR + (number + 0.8) * LINE, len(text) * CHARACTER
            place = f'x="{x:.2f}" y="{y:.0f}" textLength="{length:.2f}" lengthAdjust="spacingAndGlyphs" fill="{colour}"'
            drawn.append(f'<text xml:space="preserve" {place}>{escape(text)}</text>')
            column += len(text)
    return "\n".join([*drawn, "</g>", "</svg>", ""])


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(draw(shown_lines(Path(source).read_bytes())))
