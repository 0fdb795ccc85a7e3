"""Draw docs/images/digits.svg, the curves of a run of the demo, from the metrics that its CSV logger wrote.

make demo
python docs/images/digits_curve.py torchhal_runs/torchhal_logs/version_0/metrics.csv [FILE]
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path

WIDTH, HEIGHT = 920, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 856, 46, 252
"""Of the area that the curves lie in."""
LOSS, ACCURACY = "#0969da", "#bc4c00"

Point = tuple[float, float]


def read(path: Path) -> tuple[list[Point], list[Point]]:
    """Return (step, training loss) and (step, validation accuracy) of the fit."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    loss, accuracy = (
        [(float(row["step"]), float(row[name])) for row in rows if row[name]] for name in ("train_loss", "val_accuracy")
    )
    return loss, accuracy


def draw(loss: list[Point], accuracy: list[Point]) -> str:
    """Return an SVG with both curves over the optimizer steps, the loss on the left axis, the accuracy on the right."""
    last, top = max(step for step, _ in loss + accuracy), max(value for _, value in loss)
    x = scale(0, last, LEFT, RIGHT)
    y_loss, y_accuracy = scale(0, top * 1.05, BOTTOM, TOP), scale(0.75, 1, BOTTOM, TOP)
    best_step, best = max(accuracy, key=lambda point: point[1])
    grid = [f'<path d="M{LEFT} {y_accuracy(share):.1f}H{RIGHT}"/>' for share in (0.75, 0.8, 0.85, 0.9, 0.95, 1)]
    labels = [
        f'<text x="{RIGHT + 10}" y="{y_accuracy(share) + 4:.1f}" fill="{ACCURACY}">{share:.0%}</text>'
        for share in (0.75, 0.8, 0.85, 0.9, 0.95, 1)
    ]
    for value in range(int(top) + 1):
        labels.append(f'<text x="{LEFT - 18}" y="{y_loss(value) + 4:.1f}" fill="{LOSS}">{value}</text>')
    for step in range(0, int(last) + 1, 50):
        labels.append(f'<text x="{x(step):.1f}" y="{BOTTOM + 20}" text-anchor="middle" fill="#57606a">{step}</text>')
    about = (
        f"Two CPU processes train a conv net on digits: the training loss falls from {loss[0][1]:.2f} to "
        f"{loss[-1][1]:.2f}, the validation accuracy rises from {accuracy[0][1]:.0%} to {best:.1%}."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-labelledby="title" font-family="ui-sans-serif, system-ui, sans-serif" font-size="13">',
            f'  <title id="title">{about}</title>',
            f'  <rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
            f'  <g stroke="#d0d7de">{"".join(grid)}</g>',
            f"  {''.join(labels)}",
            f'  <text x="{LEFT}" y="28" font-size="15" fill="{LOSS}">training loss</text>',
            f'  <text x="{RIGHT}" y="28" font-size="15" text-anchor="end" fill="{ACCURACY}">validation accuracy</text>',
            f'  <text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle" fill="#57606a">optimizer steps</text>',
            polyline(LOSS, loss, x, y_loss),
            polyline(ACCURACY, accuracy, x, y_accuracy),
            f'  <circle cx="{x(best_step):.1f}" cy="{y_accuracy(best):.1f}" r="5" fill="{ACCURACY}"/>',
            f'  <path d="M{x(best_step):.1f} {y_accuracy(best) + 8:.1f}v46" stroke="#57606a"/>',
            f'  <text x="{x(best_step):.1f}" y="{y_accuracy(best) + 70:.1f}" text-anchor="middle" '
            f'fill="#24292f">{best:.1%}: the checkpoint that is kept</text>',
            "</svg>",
            "",
        ]
    )


def scale(low: float, high: float, at_low: float, at_high: float) -> Callable[[float], float]:
    """Return the function that maps ``low`` to ``at_low`` and ``high`` to ``at_high``."""
    return lambda value: at_low + (value - low) / (high - low) * (at_high - at_low)


def polyline(colour: str, curve: list[Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
    return f'  <polyline fill="none" stroke="{colour}" stroke-width="2.5" points="{points}"/>'


if __name__ == "__main__":
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("digits.svg")
    target.write_text(draw(*read(Path(sys.argv[1]))), encoding="utf-8")
