"""DeviceStats: readings of device and host in the loggers."""

import sys
from types import SimpleNamespace

import pytest
import torch
from minimal_net import Net
from quiet_trainer import make

from torchhal.accelerators import CPUAccelerator
from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import DeviceStats
from torchhal.trainer.loggers import Logger

HOST = {"cpu_percent": 12.0, "cpu_vm_percent": 34.0, "cpu_swap_percent": 5.0}
BATCHES = [torch.ones(2, 1)] * 6


@pytest.fixture(autouse=True)
def psutil(monkeypatch):
    memory, swap = SimpleNamespace(percent=34.0), SimpleNamespace(percent=5.0)
    fake = SimpleNamespace(
        cpu_percent=lambda: 12.0, virtual_memory=lambda: memory, swap_memory=lambda: swap, __spec__=object()
    )
    monkeypatch.setitem(sys.modules, "psutil", fake)


class Lines(Logger):
    def __init__(self):
        self.lines = []

    def log_metrics(self, metrics, step):
        self.lines.append((step, metrics))

    def finalize(self, status):
        pass

    def log_hyperparams(self, params):
        pass


def fit(callback, **options):
    logger = Lines()
    trainer = make(callback, logger=logger, **{"log_every_n_steps": 2, **options})
    trainer.fit(Net(), BATCHES)
    found = [(step, metrics) for step, metrics in logger.lines if any("DeviceStats" in name for name in metrics)]
    return [(step, next(iter(metrics)).split("/")[0].rpartition(".")[2], metrics) for step, metrics in found]


def test_logs_the_host_on_the_cpu():
    lines = fit(DeviceStats())
    assert [line[:2] for line in lines] == [
        (0, "on_train_batch_start"), (2, "on_train_batch_end"), (2, "on_train_batch_start"),
        (4, "on_train_batch_end"), (4, "on_train_batch_start"), (6, "on_train_batch_end"),
    ]  # fmt: skip
    assert lines[0][2] == {f"DeviceStats.on_train_batch_start/{name}": value for name, value in HOST.items()}


def test_counts_optimizer_steps():
    """Several batches of one step are logged once."""
    lines = fit(DeviceStats(), accumulate_grad_batches=3, log_every_n_steps=1)
    assert [step for step, _, _ in lines] == [0, 1, 1, 2]


def test_logs_the_device(monkeypatch):
    monkeypatch.setattr(CPUAccelerator, "device_stats", lambda self, device: {"power_watts": 65.0})
    monkeypatch.setattr(CPUAccelerator, "memory_stats", lambda self, device: {"allocated": 10, "peak": 20})
    (_, _, readings), *_ = fit(DeviceStats(cpu_stats=False))
    assert {name.partition("/")[2]: value for name, value in readings.items()} == {
        "power_watts": 65.0, "memory_allocated_bytes": 10, "memory_peak_bytes": 20,
    }  # fmt: skip


def test_warns_of_a_device_without_sensors():
    with pytest.warns(UserWarning, match="DeviceStats logs nothing: no sensor of cpu can be read"):
        assert fit(DeviceStats(cpu_stats=False)) == []


def test_no_interval_logs_nothing():
    assert fit(DeviceStats(), log_every_n_steps=0) == []


def test_needs_a_logger():
    with pytest.raises(ConfigurationError, match="DeviceStats needs a logger"):
        make(DeviceStats()).fit(Net(), BATCHES)


def test_needs_psutil(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="needs psutil to read the host: pip install psutil"):
        fit(DeviceStats())


def test_refuses_what_is_no_bool():
    with pytest.raises(ConfigurationError, match="'cpu_stats' must be a bool"):
        DeviceStats(cpu_stats=1)
