"""Render a report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from torchhal_conformance._check import CHECKS
from torchhal_conformance._report import follows

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .3rem .6rem; }
tr { border-top: 1px solid #ddd; } pre { white-space: pre-wrap; margin: .3rem 0; }
.passed, .conformant { color: #176b2c; } .failed { color: #b3261e; } .skipped, .partial, .incomplete { color: #7a5b00; }
"""


def page(report: Mapping[str, Any]) -> str:
    """Return HTML with the verdict, the versions, and each check with its contract and reason."""
    title = escape(f"{report['kind'].replace('_', ' ')} {report['alias']}")
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style></head><body>",
            f'<h1>{title}: <span class="{report["verdict"]}">{report["verdict"]}</span></h1>',
            *_facts(report),
            "<table><thead><tr><th>id</th><th>level</th><th>outcome</th><th>contract</th></tr></thead><tbody>",
            *_rows(report),
            "</tbody></table></body></html>\n",
        ]
    )


def _facts(report: Mapping[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    facts = {
        "from": report["plugin"],
        "versions": versions,
        "device": report["device"],
        "features": ", ".join(report["features"]) or "none declared",
        "seed": report["seed"],
    }
    yield "<ul>"
    for name, value in facts.items():
        yield f"<li>{name}: {escape(str(value))}</li>"
    for level, counts in report["levels"].items():
        yield f"<li>{level}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}</li>"
    yield "</ul>"


def _rows(report: Mapping[str, Any]) -> Iterator[str]:
    for one in report["checks"]:
        known = CHECKS.get(one["id"])
        contract = "" if known is None else escape(known.contract)
        reason = f"<pre>{escape(follows(one) + one['reason'])}</pre>" if one["reason"] else ""
        fix = f"<p>{escape(known.fix)}</p>" if known is not None and one["outcome"] == "failed" else ""
        if one.get("follows_from"):
            fix = ""
        if trace := one.get("traceback"):  # the rule itself may be that nothing is raised: its fix is beside the error
            fix = f"<details><summary>traceback</summary><pre>{escape(trace)}</pre>{fix}</details>"
        yield (
            f'<tr><td>{one["id"]}</td><td>{one["level"]}</td><td class="{one["outcome"]}">{one["outcome"]}</td>'
            f"<td>{contract}{reason}{fix}</td></tr>"
        )
