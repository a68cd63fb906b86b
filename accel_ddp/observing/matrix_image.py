"""Draws a confusion matrix for trackers, with pillow."""

from typing import Any

from accel_ddp.records.tables import Table

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
