"""Test the set-up and teardown of strategies: ranks, devices, process groups, failures on the way."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import unittest.mock
from datetime import timedelta

import hardware
import pytest
import torch
import torch.distributed as dist
from regression import Regression, batches, sgd, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import compose, joined, rank, size

from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import TorchElasticEnvironment
from torchhal.distributed import failures
from torchhal.errors import (
    ConfigurationError,
    DistributedError,
)
from torchhal.precision import SinglePrecision
from torchhal.strategies import DDPStrategy, ParallelStrategy, Strategy

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("accelerator")]


def ranks_and_devices():
    r, n = rank(), size()
    strategy = compose(DDPStrategy())
    strategy.devices = [torch.device("meta", index) for index in range(n)]
    before = (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size)
    assert before == (r, r, 0, n) and strategy.is_global_zero == (r == 0)
    assert strategy.root_device == torch.device("meta", r)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": n, "rank": r}
    assert not dist.is_initialized()
    with joined() as strategy:
        assert before == (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size)
        assert strategy.reduce(int(strategy.is_global_zero), "sum") == 1
        data = torch.utils.data.DistributedSampler(range(10), **strategy.distributed_sampler_kwargs, shuffle=True)
        first = strategy.all_gather_object(list(data))
        data.set_epoch(1)
        assert strategy.all_gather_object(list(data)) != first  # another order
        indices = [index for part in first for index in part]
        assert set(indices) == set(range(10)) and len(indices) == -(-10 // n) * n  # padded with repetitions


def test_ranks_devices_and_shares(world):
    """Ranks, devices and shares of the data fit together.

    Checks: STR-12, STR-27, STR-28.
    """
    world.run(ranks_and_devices)


def rank_prefixes():
    """How often an uncaught error's lines would say which rank they are of."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), unittest.mock.patch.object(failures, "uncaught", []):  # nobody is told
        sys.excepthook(ValueError, ValueError("here"), None)
    return error.getvalue().count(f"[rank{rank()}]")


def lives():
    sgd([torch.ones(1, requires_grad=True)]).step()  # imports what torch imports late, and the variables that sets
    environment, threads, torch_threads = dict(os.environ), threading.active_count(), torch.get_num_threads()
    strategy = compose(DDPStrategy(timeout=timedelta(seconds=20)))
    strategy.teardown()  # before any set-up
    model, prefixes = Regression(seed=rank()), []
    for _ in range(3):
        assert not strategy.is_set_up
        strategy.setup_environment()
        strategy.setup_environment()  # idempotent within a life
        assert dist.is_initialized() and strategy.is_set_up
        prefixes.append(rank_prefixes())
        assert train(strategy, model, sgd, batches(2, 2, size()))
        strategy.barrier("end")
        strategy.teardown()
        strategy.teardown()
        assert not dist.is_initialized() and strategy.model is strategy.module is model
    assert prefixes[0] == prefixes[1] == prefixes[2], prefixes
    assert threading.active_count() == threads and torch.get_num_threads() == torch_threads
    assert set(os.environ.items()) ^ set(environment.items()) == set()


def test_repeated_setup_and_teardown(world):
    """A strategy can be set up and torn down again and again.

    Checks: STR-29, STR-31.
    """
    world.run(lives)


def wrapper_outlives_the_group():
    for _ in range(15):
        with joined() as strategy:
            train(strategy, Regression(), sgd, batches(1, 2, size()))
            wrapper = strategy.model
            strategy.all_gather_object("the group's thread is still letting go of this")
        assert isinstance(wrapper, DistributedDataParallel)
        del wrapper, strategy


def test_a_wrapper_may_outlive_its_process_group(world3):
    """Freed last and under the GIL, the group would wait for a thread of its own that waits for the GIL."""
    world3.run(wrapper_outlives_the_group, timeout=60)


def failing_setup(where):
    class Failing(type(hardware.accelerator())):
        def setup_device(self, device):
            if where == "device":
                raise ValueError("boom in device")

    class FailingPrecision(SinglePrecision):
        def setup(self, accelerator, device):
            if where == "precision":
                raise ValueError("boom in precision")

        def convert_module(self, module):
            if where == "model":
                raise ValueError("boom in model")
            return module

    strategy = compose(DDPStrategy(timeout=timedelta(seconds=20)))
    strategy._accelerator, strategy._precision = Failing(), FailingPrecision()
    try:
        strategy.setup_environment()
        strategy.connect(Regression())
        strategy.setup_model()
    except ValueError as error:
        assert str(error) == f"boom in {where}"
    else:
        raise AssertionError("no error")
    finally:
        strategy.teardown()
        strategy.teardown()
    assert not dist.is_initialized() and not strategy.is_set_up
    with joined() as strategy:  # and the next life is a good one
        assert strategy.reduce(1, "sum") == size()


@pytest.mark.parametrize("where", ["device", "precision", "model"])
def test_teardown_after_a_failed_set_up(world2, where):
    """A failed set-up can be torn down.

    Checks: STR-30.
    """
    world2.run(failing_setup, where)


def rendezvous_fails():
    strategy = compose(DDPStrategy(timeout=timedelta(seconds=1.5)))
    if rank() == 0:
        try:
            strategy.setup_environment()
        except DistributedError as error:
            assert "rank 1" in str(error), error
        else:
            raise AssertionError("rank 1 never came")
        assert not strategy.is_set_up  # so that another try tries
        strategy.teardown()


def test_a_rank_that_never_comes_is_named(world2):
    world2.run(rendezvous_fails)
    world2.stop()  # the ranks have counted different lives


def teardown_of_a_broken_part():
    class Broken(SinglePrecision):
        def teardown(self):
            raise ValueError("precision is stuck")

    strategy = compose(DDPStrategy(), precision=Broken())
    strategy.setup_environment()
    strategy.connect(Regression())
    strategy.setup_model()
    try:
        strategy.teardown()
    except ValueError as error:
        assert str(error) == "precision is stuck"
    else:
        raise AssertionError("the error is swallowed")
    assert not dist.is_initialized() and strategy.model is strategy.module


def test_teardown_with_failing_component(world2):
    """A component that fails in teardown keeps no process group alive."""
    world2.run(teardown_of_a_broken_part)


def foreign_group():
    r, n = rank(), size()
    host = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    store = dist.PrefixStore(f"foreign/{hardware.name()}", host)  # the other accelerator's test has left its keys
    backend = "gloo" if hardware.name() == "cpu" else f"cpu:gloo,{hardware.name()}:{hardware.accelerator().backend}"
    dist.init_process_group(backend, store=store, rank=r, world_size=n)
    mine = dist.group.WORLD
    try:
        for _ in range(2):  # what the first life left in the store must not disturb the second
            with joined() as strategy:
                assert dist.group.WORLD is mine
                strategy.barrier("first")
                assert strategy.reduce(1, "sum") == n
                train(strategy, Regression(seed=r), sgd, batches(2, 2, n))
                strategy.barrier("last")
            assert dist.is_initialized() and dist.group.WORLD is mine
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == n
    finally:
        dist.destroy_process_group()


def test_foreign_group_is_kept(world):
    """A process group that the program has made is used and not destroyed.

    Checks: STR-39.
    """
    world.run(foreign_group)


def foreign_group_of_another_size():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with joined():
            pass
    finally:
        dist.destroy_process_group()


def test_mismatched_foreign_group_refused(world2):
    """A process group of another size that the program has made is refused."""
    for index, outcome in enumerate(world2.outcomes(foreign_group_of_another_size)):
        assert outcome.error == "ConfigurationError", outcome
        assert "a process group of 1" in outcome.message and f"rank {index} of 2" in outcome.message


def foreign_group_for_other_devices():
    host = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    store = dist.PrefixStore(f"foreign/other/{hardware.name()}", host)
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=size())
    dist.barrier()  # whoever destroys the group while another rank still connects ends it with gloo's error
    try:
        with joined() as strategy:
            assert strategy.reduce(1, "sum") == size()
    finally:
        dist.destroy_process_group()


def test_foreign_group_for_other_devices(world2, accelerator):
    """Where torch itself might hang."""
    for outcome in world2.outcomes(foreign_group_for_other_devices):
        if accelerator == "cpu":
            assert not outcome.error, outcome
        else:
            assert outcome.error == "ConfigurationError", outcome
            assert f"make it with backend='cpu:gloo,{accelerator}:" in outcome.message


def options_of_the_group():
    strategy = compose(DDPStrategy(timeout=timedelta(seconds=33), process_group_backend="cpu:gloo"))
    strategy.setup_environment()
    try:
        assert dist.get_backend() == "gloo" or "gloo" in dist.get_backend_config()
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    finally:
        strategy.teardown()


def test_backend_and_timeout_are_honoured(world2):
    """The process group has the given backend and timeout.

    Checks: STR-39.
    """
    assert world2.run(options_of_the_group) == [33.0, 33.0]


def one_batch_more():
    r = rank()
    strategy = compose(DDPStrategy(timeout=timedelta(seconds=4)))
    strategy.setup_environment()
    try:
        model = Regression()
        strategy.connect(model)
        strategy.setup_model()
        step = strategy.step_function("training_step")
        for _ in range(3 if r == 0 else 2):
            strategy.backward(step(strategy.batch_to_device((torch.ones(2, 6), torch.ones(2, 2))), 0))
        strategy.barrier("end of training")
    except Exception as error:
        raised = strategy.explain(error)
        strategy.watch.report_failure(raised)
        raise raised from error
    finally:
        strategy.teardown()


@pytest.mark.slow
def test_uneven_batches_end_all_ranks(world2):
    """A rank with one batch more ends all ranks.

    Within the timeout, on all ranks, whoever waits for whom.

    Checks: STR-48.
    """
    outcomes = world2.outcomes(one_batch_more, timeout=60)
    assert all(outcome.error for outcome in outcomes), outcomes
    world2.stop()


def test_nothing_communicates_before_the_set_up():
    """Nothing communicates before the set-up.

    All of this on one rank alone, in a world of three whose others don't exist.

    Checks: STR-38.
    """
    strategy = DDPStrategy()
    strategy.configure(
        accelerator=CPUAccelerator(), precision=SinglePrecision(), checkpoint_io=TorchCheckpointIO(),
        cluster_environment=TorchElasticEnvironment(), devices=[torch.device("cpu")] * 3, num_nodes=1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": 1,
            "LOCAL_RANK": 1,
            "WORLD_SIZE": 3,
            "GROUP_RANK": 0,
            "LOCAL_WORLD_SIZE": 3,
        }.items():
            patch.setenv(name, str(value))
        model = Regression()
        strategy.connect(model)
        with strategy.init_context():
            nn.Linear(2, 2)
        assert (strategy.global_rank, strategy.world_size, strategy.is_global_zero) == (1, 3, False)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 1}
        assert strategy.root_device == torch.device("cpu") and strategy.batch_to_device([1]) == [1]
        strategy.setup_optimizers([sgd(model.parameters())])
        strategy.optimizer_state(strategy.optimizers[0])
        strategy.teardown()


def test_unconfigured_strategy_names_missing():
    """A strategy without its components names the one that is missing."""
    strategy = DDPStrategy()
    for name in ("accelerator", "precision", "checkpoint_io"):
        with pytest.raises(ConfigurationError, match=f"DDPStrategy has no {name} yet"):
            getattr(strategy, name)
    with pytest.raises(ConfigurationError, match="DDPStrategy has no devices yet"):
        strategy.root_device  # noqa: B018
    assert strategy.is_global_zero and strategy.world_size == 1
    strategy.teardown()
    with pytest.raises(TypeError, match="abstract"):
        ParallelStrategy.__base__()
    assert ParallelStrategy.__base__ is Strategy


def group_in_default_arguments():
    with joined():
        import torch.distributed.nn.functional as functional
    return [function.__defaults__[-1] for function in (functional.broadcast, functional.all_reduce)]


def test_torch_keeps_no_process_group_in_default_arguments(world2):
    """It would never be freed, nor its connections closed, and ranks that wait for this one would wait on."""
    assert world2.run(group_in_default_arguments) == [[None, None], [None, None]]
