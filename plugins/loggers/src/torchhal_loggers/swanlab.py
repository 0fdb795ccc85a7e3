"""Log to SwanLab, online or offline, with SwanLabLogger."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from torchhal.errors import ConfigurationError
from torchhal.vendor_package import VendorPackage
from torchhal_loggers._options import check_further_options, check_name, without_secrets
from torchhal_loggers._outbox import Record
from torchhal_loggers._single_run import SingleRun
from torchhal_loggers.service import ServiceLogger

_turn: Final = SingleRun()
_OWN_ARGUMENTS: Final = {"log_dir", "resume", "reinit"}


class SwanLabLogger(ServiceLogger):
    """Logger that sends to a run of SwanLab; needs the package ``swanlab``.

    SwanLab has one run per process: a run that the program has begun with ``swanlab.init`` is an error, and of two
    loggers that are used in turn each ends the other's. The run ends
    with each call of the Trainer and is continued by the next. Offline, each of these is a folder, with the same id,
    below ``<log folder>/swanlab``, for ``swanlab sync``.

    SwanLab keeps the first value of a metric at a step, and has no checkpoints.

    Args:
        project: the project.
        name: what people see as the run's name; None for ``version_N``.
        id: go on in this run, or begin it.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; None for ``SWANLAB_MODE``, or online.
        workspace: the user or team; None for the default one.
        group: for runs that belong together.
        tags: of the run.
        save_dir: where records wait and checkpoints are kept: ``save_dir/project/version_N``.
        version: the run there, a number or a name; None for a new one.
        prefix, on_error, timeout: as for :class:`ServiceLogger`.
        **init_options: further arguments of ``swanlab.init``.

    Raises:
        ConfigurationError: swanlab is not installed, or too old; or there is no API key and the mode is online; or
            ``swanlab.init`` has no such argument.
    """

    service = "swanlab"
    package: ClassVar[VendorPackage] = VendorPackage(
        "swanlab",
        versions=">=0.10",
        plugin="torchhal-loggers",
        install="pip install 'torchhal-loggers[swanlab]'",
        needed_by="logger 'swanlab'",
    )
    writes_at_end = True

    def __init__(
        self,
        project: str = "torchhal_logs",
        *,
        name: str | None = None,
        id: str | None = None,  # as swanlab.init calls it
        mode: str | None = None,
        workspace: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: int | str | None = None,
        prefix: str = "",
        on_error: str = "warn",
        timeout: float = 30.0,
        **init_options: Any,
    ) -> None:
        mode = mode or os.environ.get("SWANLAB_MODE") or "online"
        if mode not in {"online", "offline", "disabled"}:
            raise ConfigurationError(f"'mode' must be 'online', 'offline' or 'disabled' (got {mode!r})")
        self._mode = mode
        super().__init__(
            save_dir, check_name("project", project), version, prefix=prefix, on_error=on_error, timeout=timeout
        )
        if init_options:
            check_further_options(type(self), init_options, self.package.load().init, _OWN_ARGUMENTS)
        self._id = id
        self._init_options = {
            "project": project, "workspace": workspace, "group": group, "tags": list(tags) if tags else None,
            "name": name, **init_options,
        }  # fmt: skip

    def check_credentials(self) -> None:
        if self._mode != "online" or os.environ.get("SWANLAB_API_KEY"):
            return
        netrc = Path(os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab", ".netrc")
        if not netrc.exists():
            raise ConfigurationError(
                "logger 'swanlab' needs an API key to log online, and there is none: run 'swanlab login', set "
                "SWANLAB_API_KEY, or write mode='offline' to keep the run here for 'swanlab sync'"
            )

    @property
    def run_id(self) -> str | None:
        """The run's id at SwanLab; None before it has begun."""
        return self._id or self.run_state().get("run_id")

    # -- in the thread -----------------------------------------------------------------------------------------

    def connect(self) -> Any:
        with _turn.beginning(self):
            return self._begin()

    def _begin(self) -> Any:
        import swanlab

        if swanlab.has_run():
            raise RuntimeError(
                "SwanLab has one run per process, and this one has begun another: end it with swanlab.finish(), or "
                "leave swanlab.init to the logger"
            )
        folder = self.service_dir / "offline"
        folder.mkdir(parents=True, exist_ok=True)
        run_id = self.run_id or uuid.uuid4().hex[:21]
        # without a color, SwanLab draws one from Python's generator, whose numbers are those of the training
        color = f"#{zlib.crc32(run_id.encode()) & 0xFFFFFF:06x}"
        options = {"color": color, **self._init_options, "name": self._init_options["name"] or self.run_name}
        run = swanlab.init(id=run_id, resume="allow", mode=self._mode, log_dir=str(folder), **options)
        self.update_run_state(run_id=run.id)
        return run

    def send(self, experiment: Any, records: Sequence[Record]) -> None:
        import swanlab

        for record in records:
            row: dict[str, Any] = dict(record.get("metrics", {}))
            row |= {name: swanlab.Text(text) for name, text in record.get("text", {}).items()}
            row |= {name: swanlab.Image(path) for name, path in record.get("image", {}).items()}
            if row:
                experiment.log(row, step=record.get("step"))
            elif params := record.get("params"):
                experiment.config.update(params)

    def end(self, experiment: Any, status: str) -> None:
        try:
            experiment.finish()
        finally:
            self.disconnect()

    def options(self) -> dict[str, Any]:
        return {"mode": self._mode, "id": self._id, **without_secrets(self._init_options)}
