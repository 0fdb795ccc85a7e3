"""PRE-62 to PRE-64: inputs that are filled again, steps that are given up, weights loaded between steps."""

from __future__ import annotations

import torch

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._precision_run import PrecisionRun, flatten
from torchhal_conformance.checks.precision_sequences import apply_clipped


@check("PRE-62", since="0.2", needs=["device"])
def inputs_filled_again(context: CheckContext) -> None:
    """convert_input gives what a tensor holds now, also where the same object was converted before.

    Why: a loader that fills one buffer with each batch trains on the first one for ever.
    Fix: keep nothing of what was converted.
    """
    trained = PrecisionRun(context)
    buffer = torch.zeros(3, device=trained.device)
    batch = {"x": buffer, "rest": [buffer[1:]]}
    for value in (1.0, 2.0, 4.0):
        buffer.fill_(value)
        for told in ("", ", converted again"):
            found = trained.precision.convert_input(batch)
            same(f"a tensor filled with {value}{told}", found["x"].tolist(), [value] * 3)
            same(f"a view of a tensor filled with {value}{told}", found["rest"][0].tolist(), [value] * 2)


@check("PRE-63", since="0.2", needs=["device"], after=("PRE-11", "PRE-14"))
def steps_given_up(context: CheckContext) -> None:
    """A step that is given up after unscale_gradients or clip_gradients leaves nothing: the next one is as the first.

    Given up is a step whose gradients are cleared in the place of optimizer_step, once or several times.

    Why: who leaves out a step because of its norm clips the next one by the norm of gradients that are still scaled.
    Fix: ask which backward the gradients are of, not whether a step was made since they were unscaled.
    """
    plain = PrecisionRun(context)
    plain.optimizer.zero_grad()
    norm = apply_clipped(plain, plain.loss())
    for times in (1, 2):
        for clipped in (False, True):
            trained = PrecisionRun(context)
            for _ in range(times):
                trained.optimizer.zero_grad()
                trained.precision.backward(trained.loss())
                trained.precision.unscale_gradients(trained.optimizer)
                if clipped:
                    trained.precision.clip_gradients(trained.optimizer, 1e-3)
            trained.optimizer.zero_grad()
            told = f"after {times} step(s) given up after {'clip' if clipped else 'unscale'}_gradients"
            trained.near(f"the norm {told}", apply_clipped(trained, trained.loss()), norm, 3)
            trained.near(f"the weights {told}", flatten(trained.weights()), flatten(plain.weights()), 3)


@check("PRE-64", since="0.2", needs=["device"])
def weights_loaded_between_steps(context: CheckContext) -> None:
    """A step trains the weights that the module has, also where they were loaded into it since the last one.

    Why: float32 copies of the weights that are made once undo what a load, an average or a user's hook has written.
    Fix: compare what the module has with what the last step wrote, and begin from it where they differ.
    """
    plain, trained = PrecisionRun(context), PrecisionRun(context)
    trained.step()
    trained.step()
    loaded = {name: torch.full_like(value, 0.5) for name, value in plain.model.state_dict().items()}
    for run in (plain, trained):
        run.model.load_state_dict(loaded)
        require(run.step() is True, "a good step must return True")
    trained.near("the weights after a load and a step", flatten(trained.weights()), flatten(plain.weights()), 3)
