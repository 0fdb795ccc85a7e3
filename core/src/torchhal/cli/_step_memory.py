"""``torchhal explain --model --batch``: what each phase of a training step takes, and whether it fits a device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from torchhal._text_table import format_table
from torchhal.cli._model_options import find_object
from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    from torchhal.trainer.planning._measured_steps import Measured

_UNITS: Final = {
    "": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``"80GiB"``, ``"512 MiB"``, ``"16GB"`` or ``"1000000"``.

    Raises:
        ConfigurationError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    count = 0 if match is None else round(float(match[1]) * _UNITS.get(match[2].lower(), 0))
    if not count:
        raise ConfigurationError(
            f"'--memory' must be a size of more than 0 bytes, with a unit such as GiB, MiB or GB (got {text!r})"
        )
    return count


def find_batch(target: str) -> Any:
    """Return the batch that ``--batch`` names: itself, the first of a loader, or what a function returns.

    Raises:
        ConfigurationError: it can't be imported, its function can't be called, or its loader is empty.
    """
    found = find_object(target, "--batch", "package.module:name")
    try:
        if callable(found) and not _is_batch(found):
            found = found()
        if _is_batch(found):
            return found
        return next(iter(found))
    except StopIteration:
        raise ConfigurationError(f"'--batch': {target!r} has no batch") from None
    except Exception as error:
        raise ConfigurationError(
            f"'--batch' must name a batch, a loader, or a function without arguments that returns either (got "
            f"{target!r}: {type(error).__name__}: {error})"
        ) from error


def _is_batch(found: Any) -> bool:
    """Return whether ``found`` is a batch: not a function, and not a loader, which has batches in it."""
    if isinstance(found, Mapping | list | tuple | str) or hasattr(found, "shape"):
        return True
    return not callable(found) and not hasattr(found, "__iter__") and not hasattr(found, "__getitem__")


def step_row(measured: Measured, limit: int | None) -> dict[str, Any]:
    """Return what is added to a strategy's row: ``by_phase``, and with a limit ``fits`` and ``missing``."""
    from torchhal.trainer.planning._choice import with_margin

    phases, step = measured
    row: dict[str, Any] = {
        "by_phase": phases.to_dict(), "activations": step.is_known, "measured_by": step.source,
    }  # fmt: skip
    if limit is not None:
        needed = with_margin(phases.peak)
        row |= {"fits": needed <= limit if step.is_known else None, "missing": max(0, needed - limit)}
    return row


def step_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the phases as text."""
    from torchhal.memory_estimate import format_bytes

    yield (
        f"{found['model']}: {found['parameters']} parameters, {format_bytes(found['bytes'])}; a training step with "
        f"{found['batch']} ({format_bytes(found['batch_bytes'])}) on each of {found['world_size']} rank(s):"
    )
    from torchhal.trainer.planning._choice import MARGIN

    columns = ("forward", "backward", "optimizer", "save", "setup")
    limited = "limit" in found
    table: list[tuple[str, ...]] = [("strategy", *columns, "peak", "decided by", *(("fits",) if limited else ()))]
    notes: dict[str, list[str]] = {}
    for row in found["strategies"]:
        if "reason" in row:
            table.append((row["strategy"], f"not possible: {row['reason']}"))
            continue
        phases = row["by_phase"]
        sizes = ["" if (phase := phases[name]) is None else format_bytes(phase["bytes"]) for name in columns]
        decided = f"{phases['phase']}: {phases['unit']}" if phases["unit"] else phases["phase"]
        fits = (_fits(row, format_bytes),) if limited else ()
        table.append((row["strategy"], *sizes, format_bytes(phases["peak"]), decided, *fits))
        for note in filter(None, phases["note"].split("; ")):
            notes.setdefault(note, []).append(row["strategy"])
    yield from format_table(table, align="<>>>>>><" + ("<" if limited else ""))
    if limited:
        yield f"fits: the peak and {MARGIN:.0%} of it are at most {format_bytes(found['limit'])}"
    if "auto" in found:
        chosen = found["auto"]
        said = "takes the first that fits" if chosen["fits"] else "finds nothing that fits, and this needs least"
        yield f"strategy='auto' {said}: {chosen['reason']}"
    for note, strategies in notes.items():
        yield f"{', '.join(strategies)}: {note}"


def _fits(row: dict[str, Any], format_bytes: Callable[[int], str]) -> str:
    if row["fits"]:
        return "yes"
    missing = f"{format_bytes(row['missing'])} missing" if row["missing"] else ""
    return f"no, {missing}" if row["fits"] is False or row["missing"] else "unknown"
