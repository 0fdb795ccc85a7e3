"""Log to an MLflow tracking server or database, with MLflowLogger."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from torchhal.vendor_package import VendorPackage
from torchhal_loggers._options import check_name, withheld
from torchhal_loggers._outbox import Record
from torchhal_loggers._values import flatten
from torchhal_loggers.service import ServiceLogger

_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. :/]")
_METRICS_PER_CALL: Final = 1000
_PARAMS_PER_CALL: Final = 100
_LONGEST_NAME: Final = 250
_LONGEST_PARAM: Final = 6000
_STATUS: Final = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflowLogger(ServiceLogger):
    """Logger that sends to an MLflow run; needs the package ``mlflow`` or ``mlflow-skinny``.

    It speaks through a client of its own and leaves ``mlflow``'s active run and tracking URI alone. MLflow's requests
    are tried again for minutes before they fail; unless ``MLFLOW_HTTP_REQUEST_MAX_RETRIES`` is set, this logger sets it
    to 1 for the process, since records wait in a file anyway.

    Args:
        experiment_name: the experiment, which is created if there is none.
        tracking_uri: the server, ``"http://..."``, or a database, ``"sqlite:///mlflow.db"``; None for MLflow's own
            choice, which ``MLFLOW_TRACKING_URI`` and ``mlflow.set_tracking_uri`` set.
        run_name: what people see as the run's name; None for ``version_N``.
        run_id: go on in this run.
        group: a tag ``group`` of the run, for runs that belong together.
        tags: further tags of the run.
        parent_run_id: show the run below this one.
        artifact_location: where a new experiment keeps its artifacts.
        save_dir: where records wait and checkpoints are kept: ``save_dir/experiment_name/version_N``.
        version: the run there, a number or a name; None for a new one.
        prefix, log_model, on_error, timeout: as for :class:`ServiceLogger`.

    Raises:
        ConfigurationError: MLflow is not installed, or too old.
    """

    service = "mlflow"
    package: ClassVar[VendorPackage] = VendorPackage(
        "mlflow",
        versions=">=3.1,<4",
        distributions=("mlflow", "mlflow-skinny"),
        submodules=("tracking",),
        plugin="torchhal-loggers",
        install="pip install 'torchhal-loggers[mlflow]'",
        needed_by="logger 'mlflow'",
    )

    def __init__(
        self,
        experiment_name: str = "torchhal_logs",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        group: str | None = None,
        tags: Mapping[str, str] | None = None,
        parent_run_id: str | None = None,
        artifact_location: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: int | str | None = None,
        prefix: str = "",
        log_model: bool | str = False,
        on_error: str = "warn",
        timeout: float = 30.0,
    ) -> None:
        super().__init__(
            save_dir,
            check_name("experiment_name", experiment_name),
            version,
            prefix=prefix,
            log_model=log_model,
            on_error=on_error,
            timeout=timeout,
        )
        if tracking_uri is None:  # as set in this process, for those that it starts
            mlflow = sys.modules.get("mlflow")
            tracking_uri = mlflow.get_tracking_uri() if mlflow else os.environ.get("MLFLOW_TRACKING_URI")
        self._uri = _absolute(tracking_uri) if tracking_uri else None
        self._run_name = run_name
        self._run_id = run_id
        self._tags = {**(tags or {}), **({"group": group} if group else {})}
        if parent_run_id:
            self._tags["mlflow.parentRunId"] = parent_run_id
        self._artifact_location = artifact_location
        self._step = 0
        self._is_remote = True
        self._is_terminated = False
        self._params: dict[str, str] = {}
        self._spelled: dict[str, str] = {}

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None before MLflow has it."""
        return self._run_id or self.run_state().get("run_id")

    # -- in the thread -----------------------------------------------------------------------------------------

    def connect(self) -> Any:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._uri or self.run_state().get("tracking_uri"))
        self._is_remote = client.tracking_uri.startswith(("http", "databricks"))
        if (run_id := self.run_id) is not None:
            try:
                run = client.get_run(run_id)
                client.update_run(run_id, status="RUNNING")
            except MlflowException as error:
                if self._run_id is not None or not self._is_run_gone(error):
                    raise
                self.warn_later(f"has no run {run_id!r} any more, in which this one would go on: it begins another")
                run = self._create_run(client)
        else:
            run = self._create_run(client)
        self.update_run_state(run_id=run.info.run_id)
        if self._uri is None and not _has_password(client.tracking_uri):
            self.update_run_state(tracking_uri=_absolute(client.tracking_uri))
        self._is_terminated = False
        self._params = dict(run.data.params)
        return client

    def _create_run(self, client: Any) -> Any:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self.name)
        if experiment is not None:
            identity = experiment.experiment_id
        else:
            try:
                identity = client.create_experiment(self.name, artifact_location=self._artifact_location)
            except MlflowException:  # another process was faster
                if (experiment := client.get_experiment_by_name(self.name)) is None:
                    raise
                identity = experiment.experiment_id
        return client.create_run(identity, run_name=self._run_name or self.run_name, tags=self._tags)

    def send(self, experiment: Any, records: Sequence[Record]) -> None:
        try:
            self._send(experiment, records)
        except Exception as error:
            if self._is_run_gone(error):
                self.disconnect()
            raise

    def _send(self, experiment: Any, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        run_id = self.run_id
        if self._is_terminated:
            experiment.update_run(run_id, status="RUNNING")
            self._is_terminated = False
        metrics = []
        for record in records:
            stamp, step = int(record["time"] * 1000), self._step_of(record)
            for name, value in record.get("metrics", {}).items():
                metrics.append(Metric(self._spell(name), value, stamp, step))
        for part in _parts(metrics, _METRICS_PER_CALL):
            experiment.log_batch(run_id, metrics=part)
        for record in records:
            step = self._step_of(record)
            if params := record.get("params"):
                self._send_params(experiment, params)
            for name, text in record.get("text", {}).items():
                experiment.log_text(run_id, text, f"texts/{self._spell(name)}/{step}.txt")
            for name, path in record.get("image", {}).items():
                self._send_image(experiment, self._spell(name), path, step)
            if checkpoint := record.get("checkpoint"):
                self._send_checkpoint(experiment, Path(checkpoint["path"]), checkpoint["is_best"])

    def _send_params(self, client: Any, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        new = {}
        for name, value in flatten(params).items():
            key, text = self._spell(name)[:_LONGEST_NAME], str(value)[:_LONGEST_PARAM]
            if self._params.get(key, text) != text:
                self.warn_later(f"keeps the first value of a hyperparameter: {name} stays {self._params[key]!r}")
            elif key not in self._params:
                new[key] = text
        for part in _parts(list(new.items()), _PARAMS_PER_CALL):
            client.log_batch(self.run_id, params=[Param(key, text) for key, text in part])
        self._params |= new

    def _send_image(self, client: Any, name: str, path: str, step: int) -> None:
        from PIL import Image

        with Image.open(path) as image:
            client.log_image(self.run_id, image, key=name.replace(":", "_"), step=step)

    def _send_checkpoint(self, client: Any, path: Path, is_best: bool) -> None:
        if path.is_dir():
            client.log_artifacts(self.run_id, str(path), f"checkpoints/{path.name}")
        elif path.exists():
            client.log_artifact(self.run_id, str(path), "checkpoints")
        else:  # a newer one has taken its place
            return
        if is_best:
            client.set_tag(self.run_id, "best_checkpoint", f"checkpoints/{path.name}")

    def end(self, experiment: Any, status: str) -> None:
        experiment.set_terminated(self.run_id, _STATUS[status])
        self._is_terminated = True

    def is_refusal(self, error: Exception) -> bool:
        return self._answer(error) == 400

    def _is_run_gone(self, error: Exception) -> bool:
        return self._answer(error) == 404

    def _answer(self, error: Exception) -> int | None:
        """Return the status that MLflow itself has given; None where a proxy before it has answered, or nobody."""
        from mlflow.exceptions import MlflowException, RestException

        if not isinstance(error, RestException if self._is_remote else MlflowException):
            return None
        return int(error.get_http_status_code())

    def _step_of(self, record: Record) -> int:
        """Return the step of a record; MLflow has none without, so that is the one before."""
        if record.get("step") is not None:
            self._step = int(record["step"])
        return self._step

    def _spell(self, name: str) -> str:
        """Return ``name`` as MLflow allows it."""
        spelled = _NOT_IN_NAMES.sub("_", name)
        if spelled != name and not any(spelt != own for spelt, own in self._spelled.items()):
            self.warn_later(
                f"allows letters, digits and '_-. :/' in names: what was logged as {name!r} is {spelled!r} there"
            )
        if self._spelled.setdefault(spelled, name) != name:
            self.warn_later(
                f"has one name, {spelled!r}, for {self._spelled[spelled]!r} and {name!r}: rename one of them"
            )
        return spelled

    def options(self) -> dict[str, Any]:
        return {
            "experiment_name": self.name,
            "tracking_uri": withheld("MLFLOW_TRACKING_URI") if _has_password(self._uri or "") else self._uri,
            "run_name": self._run_name,
            "run_id": self._run_id,
            "tags": self._tags,
            "artifact_location": self._artifact_location,
        }


def _has_password(uri: str) -> bool:
    return "@" in uri.partition("://")[2].partition("?")[0]


def _absolute(uri: str) -> str:
    """Return the address of a database or folder as it is called from everywhere."""
    start = next((start for start in ("sqlite:///", "file://", "file:") if uri.startswith(start)), "")
    path = uri[len(start) :]
    if path in {"", ":memory:", "databricks"} or (not start and ":" in uri):
        return uri
    return start + os.path.abspath(path)


def _parts(items: list[Any], length: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), length):
        yield items[start : start + length]
