"""What self.log collects, against plain computations."""

import contextlib
import copy
import io
import math
import pathlib
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass

import hardware
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchhal.errors import CheckpointMismatchError, ConfigurationError
from torchhal.strategies.single_device import SingleDeviceStrategy
from torchhal.trainer.logging._log_options import HOOKS, batch_size_of
from torchhal.trainer.logging._logged_metrics import Results

pytestmark = pytest.mark.usefixtures("on_device")


class OneDevice(SingleDeviceStrategy):
    def __init__(self):
        super().__init__()
        self.devices = [hardware.device()]


@pytest.fixture
def on_device(accelerator):
    """What is logged lies on the device."""
    with hardware.device():
        yield


@pytest.fixture
def results(on_device):
    return Results(OneDevice())


def log_batches(results, batches, name="loss", hook="training_step", **options):
    for value, size in batches:
        results.start_batch((torch.zeros(size, 3), torch.zeros(size)))
        results.log(name, value, hook, **options)


batches = st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 64)), min_size=1, max_size=20)


class TestValues:
    @settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.differing_executors])
    @given(batches, st.sampled_from(["number", "tensor", "parameter", "vector"]))
    def test_reductions_equal_plain_ones(self, logged, kind):
        results = Results(OneDevice())
        make = {
            "number": float,
            "tensor": torch.tensor,
            "parameter": lambda value: nn.Parameter(torch.tensor(value)),  # a subclass: the path of other devices
            "vector": lambda value: torch.tensor([value]),
        }[kind]
        for reduction in ("mean", "sum", "min", "max"):
            log_batches(
                results, [(make(value), size) for value, size in logged], reduction, on_epoch=True, reduce_fx=reduction
            )
        results.finalize_epoch()
        values = [value for value, _ in logged]
        expected = {
            "mean": math.fsum(value * size for value, size in logged) / sum(size for _, size in logged),
            "sum": math.fsum(values),
            "min": min(values),
            "max": max(values),
        }
        for name, value in expected.items():
            got = results.callback_metrics[name]
            assert got.dim() == 0 and not got.requires_grad
            assert float(got) == pytest.approx(value, rel=1e-6, abs=1e-4)

    def test_a_number_is_read_back_as_it_was(self, results):
        results.log("lr", 0.1, "training_step")
        assert float(results.callback_metrics["lr"]) == 0.1
        results.log("tokens", 2**53 - 1, "on_train_epoch_end", reduce_fx="sum")
        results.finalize_epoch()
        assert int(results.callback_metrics["tokens"]) == 2**53 - 1

    @pytest.mark.parametrize("value", [torch.tensor(1.5), torch.tensor([1.5]), nn.Parameter(torch.tensor(1.5))])
    def test_later_changes_in_place_are_not_followed(self, results, value):
        value = copy.deepcopy(value).to(hardware.device())
        results.log("loss", value, "training_step", prog_bar=True)
        with torch.no_grad():
            value += 1
        assert float(results.callback_metrics["loss"]) == 1.5
        assert results.progress_bar_metrics == {"loss": 1.5}

    def test_a_mean_over_a_long_epoch_loses_nothing(self, results):
        log_batches(results, [(torch.tensor(0.1), 7)] * 20_000, on_epoch=True)
        results.finalize_epoch()
        assert results.callback_metrics["loss_epoch"] == torch.tensor(0.1)

    def test_an_empty_batch_has_no_say(self, results):
        log_batches(results, [(torch.tensor(2.0), 3), (torch.tensor(float("nan")), 0)], on_epoch=True)
        log_batches(
            results, [(nn.Parameter(torch.tensor(2.0)), 3), (torch.tensor(float("nan")), 0)], "b", on_epoch=True
        )
        results.finalize_epoch()
        assert results.callback_metrics["loss_epoch"] == results.callback_metrics["b_epoch"] == 2.0

    @pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
    @pytest.mark.parametrize("make", [torch.tensor, lambda value: nn.Parameter(torch.tensor(value))])
    def test_nan_is_not_hidden(self, results, reduction, make):
        for order in ([1.0, float("nan"), 2.0], [float("nan"), 1.0]):
            log_batches(results, [(make(value), 2) for value in order], reduce_fx=reduction, on_epoch=True)
            results.finalize_epoch()
            assert math.isnan(results.callback_metrics["loss_epoch"])

    def test_values_under_inference_mode_go_on_outside(self, results):
        with torch.inference_mode():
            log_batches(results, [(torch.tensor(1.0), 1)], "cpu", on_epoch=True)
            log_batches(results, [(nn.Parameter(torch.tensor(1.0)), 1)], on_epoch=True)
        log_batches(results, [(nn.Parameter(torch.tensor(3.0)), 1)], on_epoch=True)
        with torch.inference_mode():
            metric = Mean()
            metric(2.0)
            results.log("metric", metric, "training_step", on_epoch=True)
            results.finalize_epoch()
        assert results.callback_metrics["loss_epoch"] == 2.0
        for value in results.callback_metrics.values():
            (value * nn.Parameter(torch.ones(()))).backward()  # an inference tensor would refuse

    def test_batch_size_of_logged_values(self, results):
        """A given batch size has priority, and epoch hooks have none."""
        results.start_batch(torch.zeros(100))
        results.log("a", 1.0, "validation_step", batch_size=1)
        results.log("a", 4.0, "validation_step", batch_size=3)
        results.start_batch(None)
        results.log("b", 1.0, "on_validation_epoch_end")
        results.log("b", 4.0, "on_validation_epoch_end")
        results.stage = "validate"
        results.finalize_epoch()
        assert results.callback_metrics["a"] == 3.25 and results.callback_metrics["b"] == 2.5

    def test_functions_name_reductions(self, results):
        for name, function in (("a", torch.max), ("b", sum), ("c", min), ("d", torch.mean)):
            log_batches(results, [(1.0, 1), (2.0, 3)], name, on_step=False, on_epoch=True, reduce_fx=function)
        results.finalize_epoch()
        assert [float(results.callback_metrics[name]) for name in "abcd"] == [2.0, 3.0, 1.0, 1.75]


class TestCost:
    @pytest.mark.one_accelerator
    def test_step_values_cost_no_operation(self, results):
        """A value of a step costs no tensor operation."""

        class Count(TorchDispatchMode):
            calls = []

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                self.calls.append(str(function))
                return function(*args, **(kwargs or {}))

        loss = torch.zeros((), requires_grad=True) * 2
        results.log("loss", loss, "training_step", True)
        with Count() as count:
            results.log("loss", loss, "training_step", True)
        assert count.calls == ["aten._local_scalar_dense.default"]

    def test_a_device_is_never_waited_for(self, results):
        class OnDevice(torch.Tensor):
            """Refuses whatever would bring its value to the host."""

            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                name = getattr(function, "__name__", "")
                if name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy", "__int__"):
                    raise AssertionError(f"{name} waits for the device")
                return super().__torch_function__(function, types, args, kwargs or {})

        for _ in range(3):
            log_batches(results, [(torch.tensor(2.0).as_subclass(OnDevice), 4)], prog_bar=True, on_epoch=True)
        results.step_metrics()
        results.finalize_epoch()
        kept = results.callback_metrics["loss_epoch"]
        assert float(kept.as_subclass(torch.Tensor)) == 2.0


@pytest.mark.one_accelerator
class TestRules:
    @pytest.mark.parametrize(
        "hook",
        [None, "setup", "on_fit_end", "on_train_end", "on_validation_end", "predict_step", "configure_optimizers"],
    )
    def test_hooks_without_step_or_epoch_are_named(self, results, hook):
        with pytest.raises(ConfigurationError, match=f"{hook or 'outside the hooks'}.*training_step"):
            results.log("x", 1.0, hook)

    @pytest.mark.parametrize("hook", list(HOOKS))
    def test_defaults_follow_the_hook(self, results, hook):
        results.log("x", 1.0, hook)
        results.stage = HOOKS[hook].stage
        step = results.step_metrics()
        results.finalize_epoch()
        epoch = results.epoch_metrics()
        of_training_batches = HOOKS[hook].stage == "train" and hook not in (
            "on_train_start",
            "on_train_epoch_start",
            "on_train_epoch_end",
        )
        assert (list(step), list(epoch)) == ((["x"], []) if of_training_batches else ([], ["x"]))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"reduce_fx": "median"}, "'reduce_fx' must be one of 'mean'.*'max'.*median"),
            ({"reduce_fx": []}, "'reduce_fx' must be"),
            ({"prog_bar": 1}, "'prog_bar' must be a bool"),
            ({"on_step": "yes"}, "'on_step' must be a bool or None"),
            ({"on_step": False, "on_epoch": False}, "one of 'on_step' and 'on_epoch' must be True"),
            ({"batch_size": True}, "'batch_size'.*must be an int"),
            ({"batch_size": -1}, "'batch_size'.*must be 0 or more"),
            ({"sync_dist": True, "rank_zero_only": True}, "'sync_dist' must not be True"),
        ],
    )
    def test_wrong_options(self, results, options, message):
        with pytest.raises((TypeError, ValueError), match=message):
            results.log("x", 1.0, "training_step", **options)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"a": 1}, "log_dict"),
            (torch.zeros(2), r"one element.*\(2,\)"),
            (torch.zeros((), dtype=torch.complex64), "real"),
            ("1", "must be a number"),
            (None, "must be a number"),
            ([1.0], "must be a number"),
        ],
    )
    def test_wrong_values(self, results, value, message):
        with pytest.raises((TypeError, ValueError), match=message):
            results.log("x", value, "training_step")

    def test_a_later_wrong_shape_is_explained_too(self, results):
        results.log("x", torch.zeros(()), "training_step")
        with pytest.raises(ValueError, match=r"'x'.*\(3,\)"):
            results.log("x", torch.zeros(3), "training_step")

    @pytest.mark.parametrize("name", ["", None, 3])
    def test_wrong_names(self, results, name):
        with pytest.raises(TypeError, match="'name' must be"):
            results.log(name, 1.0, "training_step")

    def test_options_of_a_key_do_not_change(self, results):
        results.log("x", 1.0, "training_step", prog_bar=True)
        with pytest.raises(ConfigurationError, match=r"'x'.*same options.*prog_bar=True, then prog_bar=False"):
            results.log("x", 1.0, "training_step")

    def test_on_step_needs_steps(self, results):
        with pytest.raises(ConfigurationError, match="'on_step' must not be True in on_train_epoch_end"):
            results.log("x", 1.0, "on_train_epoch_end", on_step=True)


Pair = namedtuple("Pair", ["ids", "mask"])


@dataclass
class Sample:
    weight: float
    image: torch.Tensor


class Graph:
    num_graphs = 6


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        (torch.zeros(()), 1),
        ([torch.zeros(4), torch.zeros(9)], 4),
        ({"flag": True, "name": "a", "x": {"y": torch.zeros(3)}}, 3),
        (Pair(None, torch.zeros(2)), 2),
        (Sample(0.5, torch.zeros(7)), 7),
        (Graph(), 6),
        (3, 1),
        ("text", None),
        (object(), None),
    ],
)
def test_batch_sizes(batch, size):
    assert batch_size_of(batch) == size


def test_unknown_batch_size_refused_for_means(results):
    """A batch without a size is an error only where a mean needs it."""
    results.start_batch(object())
    results.log("a", 1.0, "training_step")
    results.log("b", 1.0, "training_step", on_epoch=True, reduce_fx="sum")
    with pytest.raises(ConfigurationError, match=r"'c'.*batch of type object.*batch_size"):
        results.log("c", 1.0, "training_step", on_epoch=True)


class TestViews:
    def test_names_of_both_ways(self, results):
        log_batches(results, [(torch.tensor(1.0), 1), (torch.tensor(2.0), 1)], on_epoch=True, prog_bar=True)
        assert {name: float(value) for name, value in results.callback_metrics.items()} == {"loss": 2, "loss_step": 2}
        assert results.progress_bar_metrics == {"loss_step": 2.0}
        results.finalize_epoch()
        assert {name: float(value) for name, value in results.callback_metrics.items()} == {
            "loss": 1.5,
            "loss_step": 2,
            "loss_epoch": 1.5,
        }
        assert set(results.logged_metrics) == {"loss_step", "loss_epoch"}
        assert results.progress_bar_metrics == {"loss_step": 2.0, "loss_epoch": 1.5}

    def test_logger_false_is_for_callbacks_only(self, results):
        results.log("x", 1.0, "training_step", logger=False, on_epoch=True)
        results.finalize_epoch()
        assert not results.step_metrics() and not results.epoch_metrics() and not results.logged_metrics
        assert results.callback_metrics["x_epoch"] == 1.0

    def test_loggers_get_each_value_once(self, results):
        results.log("x", 1.0, "training_step")
        assert list(results.step_metrics()) == ["x"] and results.step_metrics() == {}
        results.log("y", 1.0, "on_train_epoch_end")
        results.finalize_epoch()
        assert list(results.epoch_metrics()) == ["y"] and results.epoch_metrics() == {}

    def test_dataloaders(self, results):
        results.stage = "validate"
        for index in (0, 1):
            results.start_batch(torch.zeros(index + 1), index)
            results.log("acc", float(index), "validation_step")
            results.log("all", float(index), "validation_step", add_dataloader_idx=False)
        results.finalize_epoch()
        results.reset()
        assert results.evaluation_results(2) == [
            {"acc/dataloader_idx_0": 0.0, "all": pytest.approx(2 / 3)},
            {"acc/dataloader_idx_1": 1.0, "all": pytest.approx(2 / 3)},
        ]

    def test_stages_do_not_disturb_each_other(self, results):
        log_batches(results, [(1.0, 1)], on_epoch=True)
        results.stage = "validate"
        log_batches(results, [(5.0, 1)], "val", "validation_step")
        assert results.callback_metrics["loss"] == 1.0, "readable while validation runs"
        results.finalize_epoch()
        results.reset()
        results.stage = "train"
        log_batches(results, [(3.0, 1)], on_epoch=True)
        assert results.callback_metrics["val"] == 5.0, "readable after it"
        results.finalize_epoch()
        results.reset()
        assert results.callback_metrics["loss_epoch"] == 2.0, "training went on accumulating"

    def test_an_epoch_begins_anew(self, results):
        for value in (1.0, 3.0):
            log_batches(results, [(value, 1)], on_epoch=True)
            results.finalize_epoch()
            results.finalize_epoch()
            results.reset()
            assert results.callback_metrics["loss_epoch"] == value

    def test_what_an_unfinished_evaluation_logged_is_dropped(self, results):
        results.stage = "validate"
        log_batches(results, [(100.0, 1)], "val", "validation_step")
        results.reset()
        log_batches(results, [(1.0, 1)], "val", "validation_step")
        results.finalize_epoch()
        assert results.callback_metrics["val"] == 1.0

    def test_on_train_start_counts_in_the_first_epoch(self, results):
        results.log("start", 1.0, "on_train_start")
        results.stage = "train"
        results.finalize_epoch()
        assert results.callback_metrics["start"] == 1.0

    def test_a_sanity_check_leaves_nothing(self, results):
        results.stage = "sanity_check"
        log_batches(results, [(1.0, 1)], "val", "validation_step", prog_bar=True, on_step=True)
        results.finalize_epoch()
        assert results.callback_metrics["val"] == 1.0
        results.reset()
        results.stage = "train"
        assert results.callback_metrics == {} and results.progress_bar_metrics == {} and results.epoch_metrics() == {}
        results.stage = "validate"
        assert results.step_metrics() == {}

    def test_callback_metrics_may_be_written_to(self, results):
        results.callback_metrics["mine"] = torch.tensor(1.0)
        results.log("x", 1.0, "training_step")
        assert set(results.callback_metrics) == {"mine", "x"}


class Mean(nn.Module):
    """A metric object as libraries have them."""

    def __init__(self):
        super().__init__()
        self._defaults = {"total": torch.zeros(()), "parts": []}
        self.reset()

    def reset(self):
        self.total, self.parts, self._update_count = torch.zeros(()), [], 0
        self._forward_cache = None

    def forward(self, value):
        self.total = self.total + value
        self.parts.append(torch.tensor(value))
        self._update_count += 1
        self._forward_cache = torch.tensor(value)

    def compute(self):
        return self.total / len(self.parts)


class TestMetricObjects:
    def test_metric_computed_and_reset(self, results):
        """A metric object is computed at the end of the epoch and reset after the hooks."""
        results.stage = "validate"
        metric = Mean()
        for value in (1.0, 4.0):
            metric(value)
            results.log("m", metric, "validation_step")
        results.finalize_epoch()
        assert results.callback_metrics["m"] == 2.5
        assert metric.compute() == 2.5, "hooks at the end of the epoch still find it"
        results.reset()
        assert metric._update_count == 0

    def test_the_value_of_a_step(self, results):
        metric = Mean()
        metric(3.0)
        results.log("m", metric, "training_step", on_epoch=True)
        assert results.callback_metrics["m_step"] == 3.0

    def test_one_object_per_key(self, results):
        results.log("m", Mean(), "validation_step")
        with pytest.raises(ConfigurationError, match="same metric object"):
            results.log("m", Mean(), "validation_step")

    def test_a_collection_goes_to_log_dict(self, results):
        collection = nn.ModuleDict({"a": Mean()})
        collection.compute = collection.reset = lambda: None
        with pytest.raises(TypeError, match="log_dict"):
            results.log("m", collection, "validation_step")

    def test_state_goes_along(self, results):
        module = nn.Module()
        module.metric = Mean()
        results.module = module
        module.metric(1.0)
        results.log("m", module.metric, "validation_step")
        state = through_a_file(results.state_dict())
        other = nn.Module()
        other.metric = Mean()
        resumed = Results(OneDevice(), other)
        resumed.load_state_dict(state)
        other.metric(5.0)
        resumed.log("m", other.metric, "validation_step")
        resumed.stage = "validate"
        resumed.finalize_epoch()
        assert resumed.callback_metrics["m"] == 3.0


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class TestResume:
    @settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.differing_executors])
    @given(batches, st.integers(0, 20), st.sampled_from([torch.tensor, lambda v: nn.Parameter(torch.tensor(v))]))
    def test_equal_to_an_uninterrupted_epoch_bit_for_bit(self, logged, cut, make):
        logged = [(make(value), size) for value, size in logged]
        whole, first, second = (Results(OneDevice()) for _ in range(3))
        log_batches(whole, logged, on_epoch=True, prog_bar=True)
        log_batches(first, logged[:cut], on_epoch=True, prog_bar=True)
        second.load_state_dict(through_a_file(first.state_dict()))
        second.stage = "train"
        assert dict(second.callback_metrics) == dict(first.callback_metrics)
        log_batches(second, logged[cut:], on_epoch=True, prog_bar=True)
        whole.finalize_epoch()
        second.finalize_epoch()
        assert dict(second.callback_metrics) == dict(whole.callback_metrics)
        assert second.progress_bar_metrics == whole.progress_bar_metrics

    def test_saving_changes_nothing(self, results):
        log_batches(results, [(1.0, 1)], on_epoch=True)
        results.state_dict()
        log_batches(results, [(2.0, 1)], on_epoch=True)
        results.finalize_epoch()
        assert results.callback_metrics["loss_epoch"] == 1.5

    def test_nonsense_is_refused(self, results):
        with pytest.raises(CheckpointMismatchError):
            results.load_state_dict({})


@pytest.mark.one_accelerator  # a gloo job of its own
def test_ranks(tmp_path):
    """Two and three real processes; the script compares with plain arithmetic."""
    script = pathlib.Path(__file__).parent / "scripts" / "results_ranks.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "3", str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(errors)
