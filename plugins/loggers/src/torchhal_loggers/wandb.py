"""Log to Weights & Biases, online or offline, with WandbLogger."""

from __future__ import annotations

import multiprocessing
import os
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from torchhal.errors import ConfigurationError
from torchhal.vendor_package import VendorPackage
from torchhal_loggers._options import check_further_options, check_name, without_secrets
from torchhal_loggers._outbox import Record
from torchhal_loggers._wandb_file import RecordCounter
from torchhal_loggers.service import ServiceLogger

_STEP: Final = "trainer/global_step"
_CONNECT_S: Final = 20.0
_WRITE_S: Final = 10.0
_FLUSH_S: Final = 1.0
_OWN_ARGUMENTS: Final = {"dir", "resume", "reinit", "resume_from", "fork_from"}


def _has_key(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False, verify=False))  # asks nobody
    except TypeError:  # an older release
        return bool(wandb.api.api_key)


class _OwnRun:
    """A run that a logger has begun, what it was given, and what of that wandb's own process has written."""

    def __init__(self, run: Any, owner: WandbLogger) -> None:
        self.run = run
        self.owner = weakref.ref(owner)
        self.exit_code = 0
        self._given: Counter[str] = Counter()
        self._first_step = run.step
        file = getattr(run.settings, "sync_file", None)
        self._counter = RecordCounter(Path(file)) if file and not run.disabled else None

    def count(self, kind: str) -> None:
        """Note that the run was given a record of a kind; rows are counted by the run."""
        self._given[kind] += 1

    def wait_until_written(self) -> None:
        """Wait until wandb's own process has written everything to its file, from which it reaches W&B after a kill."""
        end = time.monotonic() + _WRITE_S
        while self._counter is not None:
            self._given["history"] = self.run.step - self._first_step
            if not self._given - self._counter.count():
                return
            if time.monotonic() > end:  # the user's own rows have steps of theirs, or the file has another format
                self._counter = None
            time.sleep(0.02)


_own_runs: dict[tuple[int, str], _OwnRun] = {}
"""The runs that loggers have begun, by process and id: wandb has each once per process."""


class WandbLogger(ServiceLogger):
    """Logger that sends to a run of Weights & Biases; needs the package ``wandb``.

    A run that the program has begun with ``wandb.init`` is used, unless ``id`` or ``version`` says another one; what
    such a run is given reaches its file after up to 15 seconds, as wandb's own. A run that this logger begins is
    ``wandb.run``, so that ``wandb.log`` works, as long as no other run is going on. It is finished when the program
    ends, or when another logger begins a run. Metrics are drawn over ``trainer/global_step``.

    Offline, W&B keeps each process's part of a run in a folder of its own, with the same id; ``wandb sync`` puts them
    together.

    Args:
        project: the project.
        name: what people see as the run's name; None for ``version_N``.
        id: go on in this run, or begin it.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; None for ``WANDB_MODE``, or online.
        entity: the user or team; None for the default one.
        group: for runs that belong together.
        tags: of the run.
        save_dir: where records wait, checkpoints are kept (``save_dir/project/version_N``), and ``wandb`` writes.
        version: the run there, a number or a name; None for a new one.
        prefix, log_model, on_error, timeout: as for :class:`ServiceLogger`.
        **init_options: further arguments of ``wandb.init``.

    Raises:
        ConfigurationError: wandb is not installed, or too old; or there is no API key and the mode is online; or
            ``wandb.init`` has no such argument.
    """

    service = "wandb"
    package: ClassVar[VendorPackage] = VendorPackage(
        "wandb",
        versions=">=0.22",
        plugin="torchhal-loggers",
        install="pip install 'torchhal-loggers[wandb]'",
        needed_by="logger 'wandb'",
    )

    def __init__(
        self,
        project: str = "torchhal_logs",
        *,
        name: str | None = None,
        id: str | None = None,  # as wandb.init calls it
        mode: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: int | str | None = None,
        prefix: str = "",
        log_model: bool | str = False,
        on_error: str = "warn",
        timeout: float = 30.0,
        **init_options: Any,
    ) -> None:
        mode = mode or os.environ.get("WANDB_MODE") or "online"
        if mode not in {"online", "offline", "disabled"}:
            raise ConfigurationError(f"'mode' must be 'online', 'offline' or 'disabled' (got {mode!r})")
        self._mode = mode
        super().__init__(
            save_dir,
            check_name("project", project),
            version,
            prefix=prefix,
            log_model=log_model,
            on_error=on_error,
            timeout=timeout,
        )
        if init_options:
            check_further_options(type(self), init_options, self.package.load().init, _OWN_ARGUMENTS)
        self._id = id
        self._takes_users_run = id is None and version is None
        self._init_options = {
            "project": project, "entity": entity, "group": group, "tags": list(tags) if tags else None, "name": name,
            **init_options,
        }  # fmt: skip

    def check_credentials(self) -> None:
        if self._mode != "online" or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return
        self.package.load()
        import wandb

        if wandb.run is None and not _has_key(wandb):
            raise ConfigurationError(
                "logger 'wandb' needs an API key to log online, and there is none: run 'wandb login', set "
                "WANDB_API_KEY, or write mode='offline' (WANDB_MODE=offline) to keep the run here for 'wandb sync'"
            )

    @property
    def run_id(self) -> str | None:
        """The run's id at W&B; None before it has begun."""
        return self._id or os.environ.get("WANDB_RUN_ID") or self.run_state().get("run_id")

    # -- in the thread -----------------------------------------------------------------------------------------

    def connect(self) -> Any:
        import wandb

        self._finish_ended_runs()
        run_id, current = self.run_id, wandb.run
        is_users = current is not None and (os.getpid(), current.id) not in _own_runs
        if current is not None and (current.id == run_id or (run_id is None and is_users and self._takes_users_run)):
            run = current
        elif (own := _own_runs.get((os.getpid(), run_id or ""))) is not None:
            run = own.run
            own.owner = weakref.ref(self)
        else:
            run = self._begin(run_id, is_current=current is None)
        self.update_run_state(run_id=run.id)
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)
        return run

    def _begin(self, run_id: str | None, *, is_current: bool) -> Any:
        import wandb

        settings: dict[str, Any] = {"init_timeout": _CONNECT_S}
        if "x_transaction_log_flush_interval" in wandb.Settings.model_fields:
            settings["x_transaction_log_flush_interval"] = _FLUSH_S  # 15 by default, which a kill would cost
        options = {"settings": wandb.Settings(**settings), **self._init_options}
        options["name"] = options["name"] or self.run_name
        if not is_current:  # wandb.log stays with the run that is going on
            options["reinit"] = "create_new"
        Path(self.save_dir).mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            id=run_id or uuid.uuid4().hex[:12], resume="allow", dir=self.save_dir, mode=self._mode, **options
        )
        _own_runs[os.getpid(), run.id] = _OwnRun(run, self)
        return run

    def _finish_ended_runs(self) -> None:
        """Finish the runs of loggers that are gone or have ended, or a sweep would keep a hundred of them."""
        for key, own in list(_own_runs.items()):
            owner = own.owner()
            if key[0] == os.getpid() and owner is not self and (owner is None or owner.is_ended):
                del _own_runs[key]
                if owner is not None:
                    owner.disconnect()
                own.run.finish(exit_code=own.exit_code)

    def send(self, experiment: Any, records: Sequence[Record]) -> None:
        import wandb

        own = _own_runs.get((os.getpid(), experiment.id))
        for record in records:
            row: dict[str, Any] = dict(record.get("metrics", {}))
            row |= {name: wandb.Table(columns=["text"], data=[[text]]) for name, text in record.get("text", {}).items()}
            row |= {name: wandb.Image(path) for name, path in record.get("image", {}).items()}
            if row:
                if record.get("step") is not None:
                    row[_STEP] = record["step"]
                experiment.log(row)
            elif params := record.get("params"):
                experiment.config.update(params, allow_val_change=True)
                if own is not None:
                    own.count("config")
            elif checkpoint := record.get("checkpoint"):
                self._send_checkpoint(experiment, checkpoint, own)
        if own is not None:
            own.wait_until_written()

    def _send_checkpoint(self, run: Any, checkpoint: Mapping[str, Any], own: _OwnRun | None) -> None:
        import wandb

        path = Path(checkpoint["path"])
        if not path.exists():  # a newer one has taken its place
            return
        artifact = wandb.Artifact(
            f"model-{run.id}", type="model", metadata={"score": checkpoint["score"], "filename": path.name}
        )
        if path.is_dir():
            artifact.add_dir(str(path), name=path.name)
        else:
            artifact.add_file(str(path), name=path.name)
        run.log_artifact(artifact, aliases=["latest", *(["best"] if checkpoint["is_best"] else [])])
        if own is not None:
            own.count("artifact")

    def end(self, experiment: Any, status: str) -> None:
        own = _own_runs.get((os.getpid(), experiment.id))
        if own is not None:
            own.exit_code = 0 if status == "success" else 1
        # elsewhere the program may log on, and wandb ends the run when it exits; a worker ends without that
        if multiprocessing.parent_process() is not None:
            _own_runs.pop((os.getpid(), experiment.id), None)
            self.disconnect()
            experiment.finish(exit_code=0 if status == "success" else 1)

    def options(self) -> dict[str, Any]:
        return {"mode": self._mode, "id": self._id, **without_secrets(self._init_options)}
