"""PRE-60 and PRE-61: torch's switches as the user has set them, and a loss scale that grows in a resumed run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import torch

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._torch_globals import restore, torch_state
from torchhal_conformance.checks._precision_run import PrecisionRun

_CHOICES: Final[dict[str, Callable[[], None]]] = {
    "a default dtype of float64": lambda: torch.set_default_dtype(torch.float64),
    "a default dtype of bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "a matmul precision of 'medium'": lambda: torch.set_float32_matmul_precision("medium"),
    "a matmul precision of 'high'": lambda: torch.set_float32_matmul_precision("high"),
    "float16 as the dtype of autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
}
"""What a user may have chosen before a run, each other than torch's own default."""
_LONGEST: Final = 2200
"""Steps after which a loss scale has grown, if it ever does: torch's GradScaler takes 2000."""


@check("PRE-60", since="0.2", needs=["device"], after=("PRE-24",))
def switches_of_the_user(context: CheckContext) -> None:
    """After teardown() torch's switches are as the user had set them before setup(), not as torch has them by default.

    That holds of each life of one object, where the user has set them since the last one.

    Why: a user's choice of "medium" was gone after the first run, and the second one took twice as long.
    Fix: keep in each setup() what was set, and restore that.
    """
    for told, choose in _CHOICES.items():
        untouched = torch_state()
        try:
            accelerator, device = context.setup_accelerator()
            precision = context.create()
            for life in (1, 2, 3):
                if life == 2:
                    choose()
                before = torch_state()
                precision.setup(accelerator, device)
                precision.convert_module(torch.nn.Linear(2, 2))
                with precision.forward_context():
                    pass
                precision.teardown()
                for name, value in torch_state().items():
                    same(
                        f"{name} after teardown() of life {life}, where the user has {told} from life 2 on",
                        value,
                        before[name],
                    )
        finally:
            restore(untouched)


@check("PRE-61", since="0.2", needs=["device"], after=("PRE-13",))
def growing_scale(context: CheckContext) -> None:
    """A resumed run raises the loss scale at the step at which the uninterrupted one does.

    Why: a run that is resumed each day never has enough good steps in a row, and small gradients stay zero.
    Fix: keep the number of good steps since the last change in state_dict().
    """
    whole = PrecisionRun(context, lr=0.0)
    whole.require_scaling()
    grown = _steps_to_growth(whole)
    if grown < 2:
        raise NotApplicable(
            f"the loss scale didn't grow in {_LONGEST} steps" if grown == 0 else "it grows at each step"
        )
    first = PrecisionRun(context, lr=0.0)
    for _ in range(grown // 2):
        _step(first)
    other = PrecisionRun(context, lr=0.0)
    other.precision.load_state_dict(copy.deepcopy(first.precision.state_dict()))
    got = _steps_to_growth(other, limit=grown)
    require(
        got == grown - grown // 2,
        f"the loss scale grew after {grown} steps, and, with a resume after {grown // 2}, "
        f"{f'after {got} more' if got else f'not in {grown} more'}, expected {grown - grown // 2}",
    )


def _steps_to_growth(run: PrecisionRun, limit: int = _LONGEST) -> int:
    """Return the number of steps after which the loss scale is greater; 0 where it isn't after ``limit``."""
    scale = _step(run)
    for number in range(1, limit + 1):
        scale, before = _step(run), scale
        if scale > before:
            return number
    return 0


def _step(run: PrecisionRun) -> float:
    """Make one step whose gradients are finite, and return the factor by which it had scaled its loss."""
    weight = run.model.weight
    run.optimizer.zero_grad()
    run.precision.backward(weight.sum() * 2.0**-12)
    scale = float(weight.grad.flatten()[0]) * 2.0**12
    run.precision.unscale_gradients(run.optimizer)
    run.precision.optimizer_step(run.optimizer)
    return scale
