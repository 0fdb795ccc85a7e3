"""Generate docs/reference/run.md: all that a loop of the user's own calls of a Run."""

from __future__ import annotations

from class_pages import markdown
from trainer_page import arguments, attributes, sections

from torchhal import Run


def text(made: str) -> str:
    """Return the page; ``made`` is the comment that says by what it was made."""
    about = (Run.__doc__ or "").partition("Args:")[0]
    parts = [
        "# Run\n", f"{made}\n", f"{markdown(about)}\n",
        "[Keep your own loop](../how-to/loop-of-your-own.md) shows it in use.\n",
        "## Arguments\n", "All are given by name.\n", *arguments(Run),
        "\n## Methods\n", *sections(Run),
        "## Attributes\n", *attributes(Run),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"
