"""Keep plain data about a run, such as its id at the service, in a file of the run's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class RunState:
    """A dict of plain data in a JSON file.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Return what was kept, also by an earlier process; an empty dict where there is nothing that can be read."""
        try:
            state = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def update(self, **values: Any) -> None:
        """Keep values beside those that are there, in one step.

        Raises:
            OSError: the file can't be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**self.read(), **values}), encoding="utf-8")
        os.replace(temporary, self.path)
