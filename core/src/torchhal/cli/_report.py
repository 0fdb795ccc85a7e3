"""Show what a run has left, or compare several: ``torchhal report``."""

from __future__ import annotations

import argparse
import math
import os
import secrets
from contextlib import suppress
from typing import Any

from torchhal._terminal import echo
from torchhal.cli._output import output_to_stderr, print_json
from torchhal.errors import ConfigurationError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchhal report`` to its parser."""
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="the folder of a run; several are compared")
    parser.add_argument("--html", metavar="FILE", default=None, help="write one self-contained page")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    with output_to_stderr():  # of matplotlib and tensorboard
        from torchhal.report import html_page, read_runs, text_summary

        runs = read_runs(arguments.runs)
        if arguments.html is not None:
            _write(arguments.html, html_page(runs))
    if arguments.json:
        print_json({"schema": 1, "runs": [_plain(run) for run in runs]})
    elif arguments.html is not None:
        echo(f"wrote {arguments.html}")
    else:
        echo(text_summary(runs))
    return 0


def _plain(run: Any) -> dict[str, Any]:
    return {
        "folder": run.path,
        "status": run.status(),
        "fits": run.fits,
        "hparams": run.hparams,
        "metrics": {
            name: {
                "latest": curve.last if math.isfinite(curve.last) else None,
                "step": curve.steps[-1],
                "values": len(curve.values),
            }
            for name, curve in run.curves.items()
        },
        "checkpoints": run.checkpoints,
        "problems": run.problems,
    }


def _write(path: str, page: str) -> None:
    """Write the page in one step, so that an older one stays if this one can't be written.

    A link is followed, and a pipe or a device is written to.
    """
    target = os.path.realpath(path)
    is_special = os.path.exists(target) and not os.path.isfile(target)
    temporary = os.path.join(os.path.dirname(target), f".torchhal-report-{secrets.token_hex(4)}")
    try:
        with open(target if is_special else temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(page)
        if not is_special:
            os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise ConfigurationError(
            f"'--html' must be a file that can be written (got {path!r}: {error.strerror}). Name one in a folder that "
            "exists and is yours"
        ) from error
