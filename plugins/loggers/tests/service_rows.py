"""Return what a service's library has of a logger's run, for the conformance checks, by the format that it keeps.

SwanLab keeps the first value of a metric at a step, so that what is logged twice can't be found there.
"""

import json
import sqlite3
import zipfile
from contextlib import closing


def of_mlflow(logger):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(logger.options()["tracking_uri"])
    data = client.get_run(logger.run_id).data
    points = [point for name in data.metrics for point in client.get_metric_history(logger.run_id, name)]
    rows = [{"step": point.step, "metrics": {point.key: point.value}} for point in points]
    return [*rows, {"params": data.params}]


def of_wandb(logger):
    from wandb.proto import wandb_internal_pb2 as messages

    from torchhal_loggers._wandb_file import Records

    rows = []
    for path in sorted(logger.service_dir.parents[2].glob(f"wandb/offline-run-*-{logger.run_id}/*.wandb")):
        for content in Records(path).read():
            record = messages.Record()
            record.ParseFromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {
                    (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
                }
                step = row.pop("trainer/global_step", None)
                numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
                rows.append({"step": step, "metrics": numbers})
            elif kind == "config":
                rows.append({"params": {item.key: item.value_json for item in record.config.update}})
    return rows


def of_comet(logger):
    rows = []
    for path in (logger.service_dir / "offline").glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            for line in archive.read("messages.json").decode().splitlines():
                payload = json.loads(line)["payload"]
                if metric := payload.get("metric"):
                    rows.append({"step": metric["step"], "metrics": {metric["metricName"]: metric["metricValue"]}})
                elif param := payload.get("param"):
                    rows.append({"params": {param["paramName"]: param.get("paramValue") or param.get("paramValues")}})
    return rows


def of_trackio(logger):
    from trackio.sqlite_storage import SQLiteStorage

    name = logger.run_state()["trackio_name"]
    with closing(sqlite3.connect(SQLiteStorage.get_project_db_path(logger.name))) as database:
        logged = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (name,)).fetchall()
        configs = database.execute("SELECT config FROM configs WHERE run_name = ?", (name,)).fetchall()
    rows = [{"step": step, "metrics": _numbers(json.loads(metrics))} for step, metrics in logged]
    return [*rows, *({"params": json.loads(config)} for (config,) in configs)]


def _numbers(metrics):
    texts = ("NaN", "Infinity", "-Infinity")  # JSON has no numbers for these
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) or value in texts}
