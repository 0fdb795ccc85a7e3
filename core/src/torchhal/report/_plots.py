"""Draw curves with matplotlib as SVG that stands in a page and takes the page's colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from html import escape
from typing import Any, Final, NamedTuple

from torchhal.report._fit_curves import Curve
from torchhal.report._run_folder import RunFolder

MAX_POINTS: Final = 600
"""Points of a curve that are drawn: of a longer one the least and the greatest value of each stretch."""
MAX_PLOTS: Final = 60
"""Plots of a page; a run with more metrics than that has logged one per parameter."""

_TEXT, _GRID = "#010203", "#010204"
"""Colours that stand for the page's own in what matplotlib writes."""
_COLORS: Final = ("#4477aa", "#ee6677", "#228833", "#b8860b", "#66ccee", "#aa3377", "#888888")
_STYLES: Final = ("-", "--", ":", "-.")
_PREFIX = re.compile(r"^(train|training|val|valid|validation|test)[_/.]")
_SUFFIX = re.compile(r"(_(step|epoch))?( \((fit \d+|evaluation|earlier)\))?$")
_ID = re.compile(r' id="[a-zA-Z0-9.]+_\d+"')


class Line(NamedTuple):
    """A curve in a plot."""

    label: str
    curve: Curve
    color: str
    style: str


def is_available() -> bool:
    """Return whether matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def plots(runs: list[RunFolder]) -> Iterator[tuple[str, str]]:
    """Yield a title and a plot, as SVG, for the metrics that belong together, such as ``loss`` and ``val_loss``.

    Args:
        runs: one, whose metrics get a colour each; or several, which get a colour each, and a metric a line style.
    """
    groups: dict[str, list[str]] = {}
    for run in runs:
        for name in run.curves:
            key = _SUFFIX.sub("", _PREFIX.sub("", name)) or name
            if name not in (group := groups.setdefault(key, [])):
                group.append(name)
    for number, (title, names) in enumerate(list(groups.items())[:MAX_PLOTS]):
        lines = []
        for at, run in enumerate(runs):
            for style, name in enumerate(names):
                if name in run.curves:
                    color = _COLORS[(style if len(runs) == 1 else at) % len(_COLORS)]
                    way = _STYLES[0 if len(runs) == 1 else style % len(_STYLES)]
                    label = name if len(runs) == 1 else run.label if len(names) == 1 else f"{run.label}: {name}"
                    lines.append(Line(label, run.curves[name], color, way))
        yield title, _draw(title, lines, number)


def _draw(title: str, lines: list[Line], number: int) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    rc: Any = {  # the type of its keys differs between versions
        "svg.fonttype": "none",
        "svg.hashsalt": f"torchhal-{number}",  # ids that differ between the plots of a page
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,  # a metric's name is no formula
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _TEXT),
    }
    with matplotlib.rc_context(rc):
        figure = Figure(figsize=(6, 3.4), layout="constrained")
        axes = figure.add_subplot()
        finite: list[float] = []
        for line in lines:
            points = thinned(line.curve)
            finite += [value for _, value in points if math.isfinite(value)]
            axes.plot(
                [step for step, _ in points],
                [value if math.isfinite(value) else math.nan for _, value in points],
                color=line.color,
                linestyle=line.style,
                linewidth=1.6,
                marker="o" if len(points) < 20 else "",
                markersize=4,
                label=line.label if not line.label.startswith("_") else f" {line.label}",  # else it has no legend
            )
        if finite and min(finite) > 0 and max(finite) > 1000 * min(finite):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # the usual one writes formulas
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(color=_GRID, linewidth=0.5)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)
        if not finite:
            axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_TEXT, "currentColor").replace(_GRID, "var(--line)")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    label = escape(f"{title}: {', '.join(line.label for line in lines)}", quote=True)
    return _ID.sub("", svg).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def thinned(curve: Curve) -> list[tuple[int, float]]:
    """Return a curve's points, at most some :data:`MAX_POINTS`, with the least and greatest of each stretch."""
    points = list(zip(curve.steps, curve.values, strict=True))
    if len(points) <= MAX_POINTS:
        return points
    width = math.ceil(2 * len(points) / MAX_POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch[:1]
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept
