"""Log to Comet, online or offline, with CometLogger."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from torchhal.errors import ConfigurationError
from torchhal.vendor_package import VendorPackage
from torchhal_loggers._options import check_further_options, check_name, without_secrets
from torchhal_loggers._outbox import Record
from torchhal_loggers._single_run import SingleRun
from torchhal_loggers._values import flatten
from torchhal_loggers.service import ServiceLogger

_turn: Final = SingleRun()
_OWN_ARGUMENTS: Final = {"offline_directory"}


class CometLogger(ServiceLogger):
    """Logger that sends to an experiment of Comet; needs the package ``comet_ml``.

    What comet_ml logs by itself, such as the output of the program, is switched off; ``config_options`` switches it on.
    Comet's experiment ends with each call of the Trainer and is continued by the next. Offline it writes a zip file for
    each of these, in ``<log folder>/comet``, for ``comet upload``; it has a zip file only when it has ended, so after a
    kill the next run with the same ``version`` writes everything again.

    Comet has one experiment per process: one that the program has begun is an error, and of two loggers that are used
    in turn each ends the other's.

    Args:
        project: the project.
        name: what people see as the experiment's name; None for ``version_N``.
        experiment_key: go on in this experiment, or begin it: 32 to 50 letters and digits.
        workspace: the workspace; None for the default one.
        online: False to write files alone.
        tags: of the experiment.
        save_dir: where records wait and checkpoints are kept: ``save_dir/project/version_N``.
        version: the run there, a number or a name; None for a new one.
        prefix, log_model, on_error, timeout: as for :class:`ServiceLogger`.
        **config_options: for ``comet_ml.ExperimentConfig``.

    Raises:
        ConfigurationError: comet_ml is not installed, or too old; or there is no API key, and ``online`` is not False.
    """

    service = "comet"
    package: ClassVar[VendorPackage] = VendorPackage(
        "comet_ml",
        versions=">=3.49",
        distributions=("comet_ml", "comet-ml"),
        plugin="torchhal-loggers",
        install="pip install 'torchhal-loggers[comet]'",
        needed_by="logger 'comet'",
    )
    writes_at_end = True

    def __init__(
        self,
        project: str = "torchhal_logs",
        *,
        name: str | None = None,
        experiment_key: str | None = None,
        workspace: str | None = None,
        online: bool = True,
        tags: Sequence[str] | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: int | str | None = None,
        prefix: str = "",
        log_model: bool | str = False,
        on_error: str = "warn",
        timeout: float = 30.0,
        **config_options: Any,
    ) -> None:
        if not isinstance(online, bool):
            raise TypeError(f"'online' must be True or False (got {online!r})")
        self._online = online
        super().__init__(
            save_dir,
            check_name("project", project),
            version,
            prefix=prefix,
            log_model=log_model,
            on_error=on_error,
            timeout=timeout,
        )
        if config_options:
            check_further_options(type(self), config_options, self.package.load().ExperimentConfig, _OWN_ARGUMENTS)
        self._display_name = name
        self._key = experiment_key
        self._workspace = workspace
        self._tags = list(tags or ())
        self._config_options = config_options

    def check_credentials(self) -> None:
        if not self._online or os.environ.get("COMET_API_KEY"):
            return
        self.package.load()
        import comet_ml

        if not comet_ml.get_config()["comet.api_key"]:
            raise ConfigurationError(
                "logger 'comet' needs an API key to log online, and there is none: run 'comet login', set "
                "COMET_API_KEY, or write online=False to keep the experiment here for 'comet upload'"
            )

    @property
    def experiment_key(self) -> str | None:
        """Comet's key of the experiment; None before it has begun."""
        return self._key or self.run_state().get("experiment_key")

    # -- in the thread -----------------------------------------------------------------------------------------

    def connect(self) -> Any:
        with _turn.beginning(self):
            return self._begin()

    def _begin(self) -> Any:
        import comet_ml

        running = comet_ml.get_running_experiment()
        if running is not None and not running.ended:  # which comet_ml.start would end
            raise RuntimeError(
                "Comet has one experiment per process, and this one has begun another: end it with its end(), or leave "
                "comet_ml.start to the logger"
            )
        key = self.experiment_key
        quiet: dict[str, Any] = {
            "auto_output_logging": False, "auto_param_logging": False, "auto_metric_logging": False,
            "auto_histogram_tensorboard_logging": False, "log_graph": False, "parse_args": False,
            "display_summary_level": 0,
        }  # fmt: skip
        folder = self.service_dir / "offline"
        if not self._online:
            folder.mkdir(parents=True, exist_ok=True)
            quiet["offline_directory"] = str(folder)
        is_known = "experiment_key" in self.run_state()
        if not is_known:
            quiet |= {"name": self._display_name or self.run_name, "tags": self._tags}
        key = key or uuid.uuid4().hex
        experiment = comet_ml.start(
            project_name=self.name,
            workspace=self._workspace,
            experiment_key=key,
            mode="get" if is_known else "get_or_create" if self._online else "create",
            online=self._online,
            experiment_config=comet_ml.ExperimentConfig(**{**quiet, **self._config_options}),
        )
        if not experiment.alive:  # it would take everything, and send nothing
            raise ConnectionError("Comet doesn't answer, or doesn't take the API key")
        self.update_run_state(experiment_key=experiment.get_key())
        return experiment

    def send(self, experiment: Any, records: Sequence[Record]) -> None:
        if not experiment.alive:
            self.disconnect()
            raise ConnectionError("Comet doesn't answer any more")
        for record in records:
            step = record.get("step")
            if metrics := record.get("metrics"):
                experiment.log_metrics(metrics, step=step, epoch=metrics.get("epoch"))
            elif params := record.get("params"):
                experiment.log_parameters(flatten(params))
            for name, text in record.get("text", {}).items():
                experiment.log_text(text, step=step, metadata={"name": name})
            for name, path in record.get("image", {}).items():
                experiment.log_image(path, name=name, step=step)
            if checkpoint := record.get("checkpoint"):
                self._send_checkpoint(experiment, checkpoint)

    def _send_checkpoint(self, experiment: Any, checkpoint: Mapping[str, Any]) -> None:
        path = Path(checkpoint["path"])
        if path.exists():  # else a newer one has taken its place
            experiment.log_model(path.stem, str(path), overwrite=True)

    def end(self, experiment: Any, status: str) -> None:
        if self._online and not experiment.flush():
            raise ConnectionError("Comet doesn't take everything")
        try:
            experiment.end()
        finally:
            self.disconnect()

    def options(self) -> dict[str, Any]:
        return {
            "project": self.name,
            "name": self._display_name,
            "experiment_key": self._key,
            "workspace": self._workspace,
            "online": self._online,
            "tags": self._tags,
            **without_secrets(self._config_options),
        }
