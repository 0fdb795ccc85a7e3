"""The plain loop that each strategy of this plugin is compared with, and the comparison."""

import functools

import models
import pytest
import torch

TRANSFORMER, CONV = "Transformer", "ConvNet"


@functools.lru_cache
def plain(name, dtype=None, true=False):
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks: the number of threads decides the order of sums
    try:
        return models.plain(getattr(models, name), dtype, true)
    finally:
        torch.set_num_threads(before)


def world(request, size):
    return request.getfixturevalue(f"world{size}")


def label(case):
    alias, size, model, arguments = case
    return f"{alias}-{size}-{model}" + "".join(f"-{key}={value}" for key, value in (arguments or {}).items())


def check(results, model, dtype=None, tolerance=2e-5, true=False):
    losses, state = plain(model, dtype, true)
    ours = [r["losses"] for r in results if r["data_leader"]]
    mean = [sum(values) / len(ours) for values in zip(*ours, strict=True)]
    as_tensor = functools.partial(torch.tensor, dtype=torch.float64)
    torch.testing.assert_close(as_tensor(mean), as_tensor(losses), rtol=tolerance, atol=tolerance)
    assert list(results[0]["state"]) == list(state)
    for name, value in state.items():
        found = results[0]["state"][name]
        assert found.device.type == "cpu" and not hasattr(found, "to_local")
        report = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found, value, rtol=10 * tolerance, atol=10 * tolerance, msg=report)
    assert {r["step"] for r in results} == {12}
    assert not any(r["remarks"] for r in results), results[0]["remarks"]
    epoch = {round(r["metrics"]["loss_epoch"], 6) for r in results}
    assert len(epoch) == 1, "the value of the epoch is the same on every rank"
    assert results[0]["metrics"]["loss_epoch"] == pytest.approx(sum(losses) / len(losses), abs=10 * tolerance)
