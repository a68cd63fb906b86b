"""Loss curves of several seeds, as a table and as an image. vs_trainer.py uses it."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np


def last_tenth(losses: list[float]) -> float:
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def curve_table(found: list[dict[str, Any]]) -> list[str]:
    lines = ["| job | variant | seeds | steps | first loss | training loss, last tenth | evaluation loss |", "|---" * 7 + "|"]
    for key in dict.fromkeys((r["spec"]["job"], r["spec"]["variant"]) for r in found):
        runs = [r for r in found if (r["spec"]["job"], r["spec"]["variant"]) == key]
        whole = [r for r in runs if not r["failed"]]
        if not whole:
            lines.append(f"| {key[0]} | {key[1]} | | | | failed: {runs[0]['failed'].replace('|', '/')} | |")
            continue
        spread = lambda values: f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})" if values else ""
        cells = [spread([last_tenth(r["losses"]) for r in whole]), spread([r["eval_loss"] for r in whole if "eval_loss" in r])]
        first = f"{statistics.mean(r['losses'][0] for r in whole):.4f}"
        lines.append(f"| {' | '.join([*key, str(len(whole)), str(whole[0]['steps']), first, *cells])} |")
    return lines


def draw_curves(found: list[dict[str, Any]], title: str, path: Path) -> None:
    """Write an image of the losses over steps: a thin line for each seed, and a thick one for their mean.

    It uses PIL, which is installed with the recipes.
    """
    from PIL import Image, ImageDraw, ImageFont

    zoom, width, height, left, right, top, bottom = 2, 900, 560, 70, 20, 40, 50  # scaled down for smooth lines
    image = Image.new("RGB", (width * zoom, height * zoom), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=14 * zoom)
    by_variant: dict[str, list[np.ndarray]] = {}
    for result in found:
        losses = np.array(result["losses"])
        window = max(1, len(losses) // 40)
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        by_variant.setdefault(result["spec"]["variant"], []).append(smooth)
    longest = max(len(curve) for curves in by_variant.values() for curve in curves)
    values = np.concatenate([curve for curves in by_variant.values() for curve in curves])
    low, high = float(values.min()), float(values.max())
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low) + 1e-9
    x = lambda step: (left + (width - left - right) * step / max(1, longest - 1)) * zoom
    y = lambda loss: (top + (height - top - bottom) * (high - loss) / (high - low)) * zoom
    for i in range(6):
        loss, step = low + (high - low) * i / 5, round((longest - 1) * i / 5)
        draw.line([(x(0), y(loss)), (x(longest - 1), y(loss))], fill="#dddddd", width=zoom)
        draw.text((x(0) - 6 * zoom, y(loss)), f"{loss:.2f}", fill="black", font=font, anchor="rm")
        draw.text((x(step), y(low) + 6 * zoom), str(step), fill="black", font=font, anchor="mt")
    draw.rectangle([x(0), y(high), x(longest - 1), y(low)], outline="black", width=zoom)
    draw.text((width * zoom / 2, height * zoom - 8 * zoom), "step", fill="black", font=font, anchor="mb")
    draw.text((8 * zoom, 10 * zoom), "training loss", fill="black", font=font, anchor="lt")
    draw.text((width * zoom / 2, 10 * zoom), title, fill="black", font=font, anchor="mt")
    colours = [((220, 80, 40), (245, 200, 180)), ((30, 90, 200), (180, 205, 245)), ((30, 150, 60), (185, 230, 195)),
               ((140, 60, 160), (225, 195, 235)), ((90, 90, 90), (205, 205, 205))]  # fmt: skip
    chosen = {variant: colours[i % len(colours)] for i, variant in enumerate(by_variant)}
    for variant, curves in by_variant.items():
        for curve in curves if len(curves) > 1 else []:
            draw.line([(x(step), y(loss)) for step, loss in enumerate(curve)], fill=chosen[variant][1], width=zoom)
    for i, (variant, curves) in enumerate(by_variant.items()):
        mean = np.mean([curve[: min(map(len, curves))] for curve in curves], axis=0)
        draw.line([(x(step), y(loss)) for step, loss in enumerate(mean)], fill=chosen[variant][0], width=2 * zoom)
        at = (top + 18 + 22 * i) * zoom
        draw.line([((width - 260) * zoom, at), ((width - 230) * zoom, at)], fill=chosen[variant][0], width=3 * zoom)
        words = f"{variant}, {len(curves)} seed{'s' * (len(curves) > 1)}"
        draw.text(((width - 222) * zoom, at), words, fill="black", font=font, anchor="lm")
    image.resize((width, height), Image.Resampling.LANCZOS).save(path)
