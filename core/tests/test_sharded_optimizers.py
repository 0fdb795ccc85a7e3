"""What lets an optimizer step some of its parameters alone, and tells whether it can."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchhal.accelerators import CPUAccelerator
from torchhal.errors import ConfigurationError
from torchhal.strategies._optimizer_trials import MOST_STEPS
from torchhal.strategies.sharded_optimizers import (
    check_separable,
    copy_optimizer,
    deferred_step_hooks,
    step_copy,
    with_parameters,
)


def test_hooks_of_the_step_come_and_go_within_one():
    calls = []

    def once(optimizer, args, kwargs):
        calls.append([len(group["params"]) for group in optimizer.param_groups])
        optimizer.register_step_post_hook(lambda *_: calls.append("late"))
        handle.remove()

    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    sgd = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1)
    handle = sgd.register_step_pre_hook(once)
    sgd.register_step_post_hook(lambda *_: calls.append("after"))
    for expected in ([[2, 1], "after", "late"], ["after", "late"]):
        calls.clear()
        with with_parameters(sgd, [weights[:1], []]):
            assert [len(group["params"]) for group in sgd.param_groups] == [1, 0]
            sgd.step()
        assert calls == expected
        assert [len(group["params"]) for group in sgd.param_groups] == [2, 1]


def test_optimizer_drawing_after_trials_refused():
    """An optimizer that draws after all that is tried is refused."""
    late = type("LateNoise", (torch.optim.SGD,), {})([nn.Parameter(torch.ones(2))])
    trial = check_separable(late, "zero1", CPUAccelerator(), torch.device("cpu"))
    trial.tried = trial.done = MOST_STEPS
    with trial.watched(late, 2 * MOST_STEPS):
        pass
    with pytest.raises(ConfigurationError, match="LateNoise draws random numbers"), trial.watched(late, 2 * MOST_STEPS):
        torch.rand(2)
    late.register_step_post_hook(lambda *_: None)
    with trial.watched(late, 2 * MOST_STEPS), trial.watched(late, 2 * MOST_STEPS + 1):
        torch.rand(2)  # by a hook, which sees all parameters


def test_late_global_optimizer_refused():
    """An optimizer that looks at all parameters later is refused before that step."""

    class Late(torch.optim.SGD):
        steps = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.steps += 1
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm() if self.steps > 20 else 1.0
            for parameter in parameters:
                parameter.sub_(parameter.grad / norm)

    late = Late(nn.Linear(3, 2).parameters())
    trial = check_separable(late, "pipeline", CPUAccelerator(), torch.device("cpu"))
    generator = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match=r"Late looks at all of them together"):
        for _ in range(21):
            trial.before_step()
    assert trial.done <= 21 and late.steps == 0 and torch.equal(generator, torch.get_rng_state())


def test_optimizer_refusing_empty_group_tried():
    """An optimizer that takes no empty group is still tried."""

    class NormPerGroup(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                norm = torch.stack([each.grad.norm() for each in group["params"]]).norm()
                for each in group["params"]:
                    each.sub_(each.grad / norm)

    weights = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = NormPerGroup([{"params": some} for some in (weights[:1], weights[1:2], weights[2:])])
    with pytest.raises(ConfigurationError, match="NormPerGroup looks at all of them"):
        check_separable(optimizer, "pipeline", CPUAccelerator(), torch.device("cpu"))


def test_number_of_tried_steps():
    """Steps are tried before they are done up to a number."""
    sgd = type("Own", (torch.optim.SGD,), {})(nn.Linear(3, 2).parameters(), lr=0.1)
    trial = check_separable(sgd, "pipeline", CPUAccelerator(), torch.device("cpu"))
    for done in range(1, 2 * MOST_STEPS):
        trial.before_step()
        assert trial.tried >= min(done, MOST_STEPS)
    assert trial.tried == MOST_STEPS


def test_untriable_optimizer_warns():
    """An optimizer that cannot be tried is told of."""

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no copies")

    with pytest.warns(UserWarning, match="Odd treats each parameter by itself could not be tried .*no copies"):
        check_separable(Odd([nn.Parameter(torch.ones(2))]), "pipeline", CPUAccelerator(), torch.device("cpu"))


def test_post_hooks_run_when_the_context_is_left():
    calls = []
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    sgd = torch.optim.SGD(weights, lr=0.1)
    sgd.register_step_pre_hook(lambda *_: calls.append("before"))

    def once(optimizer, args, kwargs):
        calls.append(("after", [len(group["params"]) for group in optimizer.param_groups]))
        handle.remove()
        optimizer.register_step_post_hook(lambda *_: calls.append("late"))

    handle = sgd.register_step_post_hook(once)
    for expected in (["before", "sent", ("after", [2])], ["before", "sent", "late"]):
        calls.clear()
        with deferred_step_hooks(sgd):
            with with_parameters(sgd, [weights[:1]]):
                sgd.step()
            calls.append("sent")
        assert calls == expected
    calls.clear()
    with deferred_step_hooks(sgd):  # without a step, as one that is skipped
        pass
    with pytest.raises(KeyError), deferred_step_hooks(sgd):
        sgd.step()
        raise KeyError
    assert calls == ["before"]
    with deferred_step_hooks(sgd):
        sgd.register_step_post_hook(lambda *_: calls.append("new"))
        sgd.step()
    calls.clear()
    sgd.step()
    assert calls == ["before", "late", "new"]


class ByTheNorm(torch.optim.SGD):
    """Divides the gradients by the norm of all of them."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * each.grad / norm)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_warm_up_from_zero_hides_nothing(rate):
    """With a learning rate of zero every step is that on some of the parameters."""
    optimizer = ByTheNorm(nn.Linear(3, 2).parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ConfigurationError, match="ByTheNorm looks at all of them together"):
        check_separable(optimizer, "zero1", CPUAccelerator(), torch.device("cpu"))
    assert float(optimizer.param_groups[0]["lr"]) == 0.0


def test_a_copy_shares_nothing_with_the_optimizer():
    layer, calls = nn.Linear(3, 2), []

    class Wraps(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = [inner]
            self.state = inner.state

        def step(self, closure=None):
            self.inner[0].step()

    optimizer = Wraps(torch.optim.Adam(layer.parameters(), lr=0.1))
    optimizer.inner[0].register_step_pre_hook(lambda *_: calls.append("hook"))
    for each in layer.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    before = [each.detach().clone() for each in layer.parameters()]
    own = {each: nn.Parameter(torch.zeros(2)) for each in layer.parameters()}
    copied = copy_optimizer(optimizer, own)
    assert copied.inner[0] is not optimizer.inner[0] and copied.state is copied.inner[0].state
    for each in own.values():
        each.grad = torch.ones(2)
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("of all"))
    try:
        step_copy(copied)
    finally:
        handle.remove()
    assert calls == ["hook"]  # of the step above
    assert all(map(torch.equal, layer.parameters(), before)) and all(each.abs().sum() > 0 for each in own.values())
    assert [float(each["step"]) for each in optimizer.state.values()] == [1.0, 1.0]
    assert [float(each["step"]) for each in copied.state.values()] == [2.0, 2.0]


class BelowAThreshold(torch.optim.SGD):
    """Takes smaller steps where the norm of all gradients is small."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            each.sub_(each.grad * (0.1 if norm < 1.5 else 1.0), alpha=0.1)


def test_a_threshold_of_the_norm_is_found():
    with pytest.raises(ConfigurationError, match="BelowAThreshold looks at all of them together"):
        check_separable(BelowAThreshold(nn.Linear(3, 2).parameters()), "zero1", CPUAccelerator(), torch.device("cpu"))
