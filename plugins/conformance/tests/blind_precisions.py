"""Precisions of one defect each, written from the contract by somebody who had read no check."""

import torch
from sound_components import SameMixed16, SameMixedBf16, SameTrueBf16
from zoo import caught_by

from torchhal.precision import cast_tensors
from torchhal.precision._casting import DefaultDtype


@caught_by("PRE-21")
class OneUnscaleFlag(SameMixed16):
    """Remembers by one flag for all optimizers that a step's gradients are unscaled: the second's never are."""

    # precision.md, unscale_gradients: "Divide the gradients of optimizer by the loss scale, once per step however often
    # it is called."; clip_gradients: "Clip the unscaled gradients of optimizer in place."
    # The second optimizer's gradients are silently clipped while scaled: to nothing.
    own_alias = "one_unscale_flag"
    _done = False

    def backward(self, loss, *args, **kwargs):
        self._done = False
        super().backward(loss, *args, **kwargs)

    def unscale_gradients(self, optimizer):
        if not self._done:
            super().unscale_gradients(optimizer)
            self._done = True


@caught_by("PRE-10")
class ClipsPerGroup(SameMixedBf16):
    """Clips the gradients of each parameter group by the norm of that group."""

    # precision.md, clip_gradients: "greatest global 2-norm"
    # A model with two groups silently trains with larger and differently turned gradients.
    own_alias = "clips_per_group"

    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        if algorithm != "norm" or len(optimizer.param_groups) == 1:
            return super().clip_gradients(optimizer, clip_val, algorithm)
        norms = [torch.nn.utils.clip_grad_norm_(group["params"], clip_val) for group in optimizer.param_groups]
        return torch.stack(norms).norm()


@caught_by("PRE-14")
class SaysStepped(SameMixed16):
    """Says of a step that was skipped for an overflow that it was made."""

    # precision.md, optimizer_step: "True if the parameters were updated, False if the step was skipped."
    # Steps are counted and schedulers moved on that were none, silently.
    own_alias = "says_stepped"

    def optimizer_step(self, optimizer, closure=None):
        super().optimizer_step(optimizer, closure)
        return True


@caught_by("PRE-61")
class ForgetsGrowth(SameMixed16):
    """Leaves out of its state how many good steps there were since the scale changed."""

    # precision.md, state_dict: "Return plain data that load_state_dict continues from, bit for bit."
    # A resumed run silently has another scale than one that was never interrupted.
    own_alias = "forgets_growth"

    def state_dict(self):
        state = super().state_dict()
        return {**state, "_growth_tracker": 0} if state else state


@caught_by("PRE-02")
class CastsComplex(SameTrueBf16):
    """Converts a module by Module.to(dtype), which makes complex buffers real."""

    # precision.md, convert_module: "integer, boolean and complex buffers are left unchanged"
    # Rotary embeddings silently lose their imaginary half.
    own_alias = "casts_complex"

    def convert_module(self, module):
        return module.to(self.param_dtype)


@caught_by("PRE-06")
class OneSlotContext(SameTrueBf16):
    """Keeps one default dtype to restore, which a step inside of a step overwrites."""

    # precision.md, forward_context: "It can be entered again and inside of itself. Leaving it restores what it changed,
    # after an error too."
    # After a nested step the process silently makes bfloat16 tensors for ever.
    own_alias = "one_slot_context"

    def __init__(self):
        super().__init__()
        self._default_dtype = _OneSlot(self.param_dtype)


class _OneSlot(DefaultDtype):
    def __enter__(self):
        self._before[:] = [torch.get_default_dtype()]
        torch.set_default_dtype(self._dtype)


@caught_by("PRE-60")
class TeardownToHighest(SameMixedBf16):
    """Allows fast float32 products for a run, and sets torch's own default afterwards, not what was set before."""

    # precision.md, teardown: "Undo every global change: default dtype, matmul precision, patches."
    # What the user had chosen ("medium") is silently gone after the first run.
    own_alias = "teardown_to_highest"

    def setup(self, accelerator, device):
        super().setup(accelerator, device)
        torch.set_float32_matmul_precision("high")

    def teardown(self):
        super().teardown()
        torch.set_float32_matmul_precision("highest")


@caught_by("PRE-08")
class OutputFloat32(SameTrueBf16):
    """Returns a step's output in float32, whatever torch's default dtype is."""

    # precision.md, convert_output: "Return the step's output with its floating-point tensors in torch's default dtype."
    # Under a default of float64 what a program computes with the outputs is silently rounded.
    own_alias = "output_float32"

    def convert_output(self, output):
        return cast_tensors(output, torch.float32)


@caught_by("PRE-60")
class TeardownToFloat32(SameTrueBf16):
    """Sets the default dtype to float32 at the end, whatever it was before (TeardownToHighest with another switch)."""

    own_alias = "teardown_to_float32"

    def teardown(self):
        super().teardown()
        torch.set_default_dtype(torch.float32)
