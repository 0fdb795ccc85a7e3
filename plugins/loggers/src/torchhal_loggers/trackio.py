"""Log to Trackio, a database on this machine or a Trackio server, with TrackioLogger."""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from typing import Any, ClassVar, Final

from torchhal.vendor_package import VendorPackage
from torchhal_loggers._options import check_further_options, check_name, withheld, without_secrets
from torchhal_loggers._outbox import Record
from torchhal_loggers._values import flatten
from torchhal_loggers.service import ServiceLogger

_WRITE_S: Final = 5.0
_OWN_ARGUMENTS: Final = {"resume", "embed"}


class TrackioLogger(ServiceLogger):
    """Logger that writes to a run of Trackio; needs the package ``trackio``.

    By default the run is in a database per project below ``TRACKIO_DIR``, which ``trackio show`` draws. The logger's
    run is not that of ``trackio.log``.

    Args:
        project: the project.
        name: the run's name; None for ``version_N`` and some letters, as a database has one run of a name.
        server_url: a Trackio server to send to; None for ``TRACKIO_SERVER_URL``, or the database.
        space_id: a Hugging Face Space to send to.
        group: for runs that belong together.
        save_dir: where records wait and checkpoints are kept: ``save_dir/project/version_N``.
        version: the run there, a number or a name; None for a new one.
        prefix, on_error, timeout: as for :class:`ServiceLogger`.
        **init_options: further arguments of ``trackio.init``.

    Raises:
        ConfigurationError: trackio is not installed, or too old; or ``trackio.init`` has no such argument.
    """

    service = "trackio"
    package: ClassVar[VendorPackage] = VendorPackage(
        "trackio",
        versions=">=0.40",
        plugin="torchhal-loggers",
        install="pip install 'torchhal-loggers[trackio]'",
        needed_by="logger 'trackio'",
    )

    def __init__(
        self,
        project: str = "torchhal_logs",
        *,
        name: str | None = None,
        server_url: str | None = None,
        space_id: str | None = None,
        group: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: int | str | None = None,
        prefix: str = "",
        on_error: str = "warn",
        timeout: float = 30.0,
        **init_options: Any,
    ) -> None:
        super().__init__(
            save_dir, check_name("project", project), version, prefix=prefix, on_error=on_error, timeout=timeout
        )
        if init_options:
            check_further_options(type(self), init_options, self.package.load().init, _OWN_ARGUMENTS)
        self._display_name = name
        self._init_options = {
            "project": project, "server_url": server_url, "space_id": space_id, "group": group, **init_options,
        }  # fmt: skip
        self._rows = 0
        self._database: Any = None

    # -- in the thread -----------------------------------------------------------------------------------------

    def connect(self) -> Any:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        known = self.run_state().get("trackio_name")
        name = known or self._display_name or f"{self.run_name}-{uuid.uuid4().hex[:6]}"
        run = trackio.init(name=name, resume="allow", embed=False, **self._init_options)
        self.update_run_state(trackio_name=run.name)
        is_local = not (self._init_options["server_url"] or self._init_options["space_id"]) and not (
            os.environ.get("TRACKIO_SERVER_URL") or os.environ.get("TRACKIO_SPACE_ID")
        )
        self._database = SQLiteStorage.get_project_db_path(run.project) if is_local else None
        self._rows = self._rows_written(run) or 0
        return run

    def send(self, experiment: Any, records: Sequence[Record]) -> None:
        import trackio

        has_new_config = False
        for record in records:
            row: dict[str, Any] = dict(record.get("metrics", {}))
            row |= {name: trackio.Markdown(text) for name, text in record.get("text", {}).items()}
            row |= {name: trackio.Image(path) for name, path in record.get("image", {}).items()}
            if params := record.get("params"):
                experiment.config.update(flatten(params))
                experiment._config_logged = False  # trackio sends a run's config with its first row only
                has_new_config = True
            if row:
                self._log(experiment, row, record.get("step"))
                has_new_config = False
        if has_new_config:
            self._log(experiment, {}, None)
        self._wait_until_written(experiment)

    def _log(self, run: Any, row: dict[str, Any], step: int | None) -> None:
        run.log(row, step=step)
        self._rows += 1

    def _wait_until_written(self, run: Any) -> None:
        """Wait for trackio's thread, which writes twice a second."""
        end = time.monotonic() + _WRITE_S
        while time.monotonic() < end:
            written = self._rows_written(run)
            if written is None:
                time.sleep(1.0)
                return
            if written >= self._rows:
                return
            time.sleep(0.05)
        self._database = None  # it counts otherwise

    def _rows_written(self, run: Any) -> int | None:
        """Return the number of rows in the database; None if it can't be told."""
        if self._database is None:
            return None
        try:
            with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as connection:
                rows = connection.execute("SELECT COUNT(*) FROM metrics WHERE run_name = ?", (run.name,))
                return int(rows.fetchone()[0])
        except sqlite3.Error:
            return 0 if not self._database.exists() else None

    def end(self, experiment: Any, status: str) -> None:
        try:
            experiment.finish()
        finally:
            self.disconnect()

    def options(self) -> dict[str, Any]:
        options = {"name": self._display_name, **without_secrets(self._init_options)}
        if "token" in str(options["server_url"]) or "@" in str(options["server_url"]):
            options["server_url"] = withheld("TRACKIO_SERVER_URL")
        return options
