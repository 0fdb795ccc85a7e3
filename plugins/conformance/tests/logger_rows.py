"""Read the rows that core's loggers have written, for ``conformance_suite(read=...)``."""

import csv
import json
from pathlib import Path


def read_csv(logger):
    folder, rows = Path(logger.log_dir), []
    if (folder / "metrics.csv").exists():
        with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                step = row.pop("step")
                metrics = {name: float(value) for name, value in row.items() if value}
                rows.append({"step": int(step) if step else None, "metrics": metrics})
    if (folder / "hparams.json").exists():
        rows.append({"params": json.loads((folder / "hparams.json").read_text(encoding="utf-8"))})
    return rows


def read_tensorboard(logger):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    rows = []
    for path in sorted(Path(logger.log_dir).glob("events.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                plugin = value.metadata.plugin_data
                if plugin.plugin_name == "hparams":
                    given = HParamsPluginData.FromString(plugin.content).session_start_info.hparams
                    rows.append({"params": {name: str(one) for name, one in given.items()}})
                else:
                    rows.append({"step": event.step, "metrics": {value.tag: value.simple_value}})
    return rows
