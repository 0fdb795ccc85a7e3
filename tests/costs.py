"""Say at the end of a test session which files took the most time."""

from __future__ import annotations

from collections import Counter

from _pytest.terminal import TerminalReporter

SHOWN = 10


def write_summary(reporter: TerminalReporter) -> None:
    """Write the files with the most seconds in their tests and fixtures, of all processes together."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in reporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "when"):
                file = report.nodeid.partition("::")[0]
                seconds[file] += report.duration
                tests[file] += report.when == "call"
    if not seconds:
        return
    reporter.section(f"costliest files, of {len(seconds)} in {sum(seconds.values()):.0f} s")
    for file, cost in seconds.most_common(SHOWN):
        reporter.write_line(f"{cost:7.1f} s  {tests[file]:4} tests  {file}")
