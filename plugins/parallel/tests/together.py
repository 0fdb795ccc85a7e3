"""In a rank of a test's world: code that looks at all parameters, or at all samples of a batch, together."""

import copy
import io
import logging
import warnings
from collections import deque

import staged
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal_parallel.hybrid import HybridStrategy

# -- over all parameters -------------------------------------------------------------------------------------


class Clipped(staged.Stack):
    """Reads the norm of all gradients in a hook, and clips by it itself."""

    def __init__(self):
        super().__init__()
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(self.trainer.strategy.grad_norm(optimizer)))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.norms.append(float(self.clip_gradients(optimizer, 0.05)))


class Bounded(staged.Stack):
    """Each parameter by itself: clamped, decayed, followed by a copy that nobody saves."""

    def on_train_start(self):
        self.followers = [parameter.detach().clone() for parameter in self.parameters()]

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.01, 0.01)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for parameter, follower in zip(self.parameters(), self.followers, strict=True):
            parameter.mul_(0.999).clamp_(-0.4, 0.4)
            follower.lerp_(parameter, 0.1)
            if parameter.dim() == 2:
                parameter.div_(parameter.norm(dim=1, keepdim=True).clamp(min=1.0))


class Averaged(staged.Stack):
    """A moving average of its parameters, in whatever parts these are."""

    def on_train_start(self):
        self.average = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, parameter in self.named_parameters():
            self.average[name].lerp_(parameter, 0.1)

    def on_train_end(self):
        parts = self.average.items()
        self.whole = {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in parts}


def averaged(strategy):
    module = Averaged()
    staged.trainer(strategy).fit(module, DataLoader(staged.samples(), staged.BATCH // (1 + (strategy == "zero3"))))
    return module.whole


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def compiled(strategy):
    """(weights, what dynamo had to say) of a fit of a model that was compiled by an eager backend."""
    records, logger = Records(), logging.getLogger("torch._dynamo.variables.tensor")
    logger.addHandler(records)
    try:
        seen, module = Seen(), staged.Stack()
        module.compile(backend="eager")
        run = staged.trainer(strategy, callbacks=seen)
        run.fit(module, DataLoader(staged.samples(), staged.BATCH // (1 + (strategy == "zero3"))))
    finally:
        logger.removeHandler(records)
    return seen.state, records.messages


class ClipsAllParameters(staged.Stack):
    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class ClipsAfterBackward(staged.Stack):
    def on_after_backward(self):
        nn.utils.clip_grad_norm_([parameter for parameter in self.parameters() if parameter.requires_grad], 0.05)


class ClipsTheGroups(staged.Stack):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.05)


class ClipsInAStepHook(staged.Stack):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.clip)
        return optimizer

    @staticmethod
    def clip(optimizer, args, kwargs):
        nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.05)


class BoundsInStepHooks(staged.Stack):
    """Each parameter by itself."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.bound)
        optimizer.register_step_post_hook(self.bound)
        return optimizer

    @staticmethod
    def bound(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.01, 0.01)
                with torch.no_grad():
                    parameter.clamp_(-0.3, 0.3)


class AddsUpSquares(staged.Stack):
    def on_before_optimizer_step(self, optimizer):
        squares = [p.grad.pow(2).sum().item() for p in self.parameters() if p.grad is not None]
        self.log("norm", sum(squares) ** 0.5)


class DividesByTheNorm(staged.Stack):
    def on_before_optimizer_step(self, optimizer):
        norm = sum(p.grad.pow(2).sum() for p in self.parameters()).sqrt()
        for p in self.parameters():
            p.grad /= norm


class ScalesParameters(staged.Stack):
    """In place, which torch would let Python do by another tensor."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer):
        total = sum(p.sum() for p in self.parameters())
        for p in self.parameters():
            p *= 1 + 0.01 * total


class AssignsGradients(staged.Stack):
    def on_before_optimizer_step(self, optimizer):
        norm = sum(p.grad.pow(2).sum() for p in self.parameters()).sqrt()
        for p in self.parameters():
            p.grad = p.grad / norm


class OfInputs(staged.Stack):
    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        output = self(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, batch[1]) + gradient.square().mean()


class OfWeights(staged.Stack):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in gradients)


class LogsTheNorm(staged.Stack):
    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())


class Penalized(staged.Stack):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * sum(p.square().sum() for p in self.parameters())


class WithTeacher(staged.Stack):
    """A copy that follows the weights, whole on each rank as no stage has it."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer):
        for slow, fast in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)


class WithFusedTeacher(WithTeacher):
    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer):
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.layers.parameters()), 0.1)


class SavesItself(staged.Stack):
    def on_before_optimizer_step(self, optimizer):
        torch.save(self.state_dict(), io.BytesIO())


class GlobalNorm(torch.optim.AdamW):
    """Clips inside of its step."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.5)
        return super().step(closure)


class LateNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients after a warm-up of fourteen steps."""

    steps = 0

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = nn.utils.get_total_norm([each.grad for each in parameters]) if self.steps > 14 else 1.0
        for parameter in parameters:
            parameter.sub_(0.01 * parameter.grad / norm)


class CountedNorm(torch.optim.Optimizer):
    """Divides by a norm that it adds up as a number of Python."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = sum(each.grad.square().sum().item() for each in parameters) ** 0.5
        for each in parameters:
            each.sub_(each.grad / max(1.0, norm), alpha=self.defaults["lr"])


class LayerNorms(CountedNorm):
    """LAMB and LARS: the norm of each parameter by itself, compared in Python."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and (size := each.grad.norm()) > 0:
                    each.sub_(each.grad * (each.norm().item() / size), alpha=group["lr"])


class Around(torch.optim.Optimizer):
    """Wraps another optimizer, whose groups are its own."""

    def __init__(self, params, inner):
        self.inner = inner(list(params))
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


class SharesTheRate(torch.optim.SGD):
    """Divides its rate by the number of parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=0.1 / len(parameters))


class AddsNoise(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad + 0.01 * torch.randn_like(parameter), alpha=0.1)


class LateNoise(torch.optim.SGD):
    """From its third step on."""

    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.steps > 2:
                    parameter.add_(torch.empty_like(parameter).normal_(), alpha=0.01)
                parameter.sub_(parameter.grad, alpha=0.1)


OPTIMIZERS = {
    "LateNoise": LateNoise,
    "SharesTheRate": SharesTheRate,
    "AddsNoise": AddsNoise,
    "LateNorm": LateNorm,
    "GlobalNorm": GlobalNorm,
    "CountedNorm": CountedNorm,
    "LayerNorms": LayerNorms,
    "AroundGlobalNorm": lambda parameters: Around(parameters, GlobalNorm),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "Rprop": torch.optim.Rprop,
    "AroundLayerNorms": lambda parameters: Around(parameters, LayerNorms),
}


def stack_with(optimizer):
    module = staged.Stack()
    module.configure_optimizers = lambda: OPTIMIZERS[optimizer](module.parameters())
    return module


class Seen(staged.Callback):
    """The whole weights at the end."""

    def on_train_end(self, trainer, module):
        self.state = {name: value.clone() for name, value in trainer.strategy.module_state_dict().items()}


def fitted(strategy, model, optimizer=None):
    """(weights on rank 0, the module) after a fit."""
    seen = Seen()
    module = stack_with(optimizer) if optimizer else globals()[model]()
    run = staged.trainer(strategy, callbacks=seen)
    run.fit(module, DataLoader(staged.samples(), staged.BATCH))
    return seen.state, getattr(module, "norms", None)


def refused(strategy, model, optimizer=None, data=None, schedule=None):
    """(kind of error, message, optimizer steps before it) of a fit that can't be right."""
    if schedule is not None:
        strategy = HybridStrategy(pipeline=2, schedule=schedule, microbatches=4)
    module = stack_with(optimizer) if optimizer else globals()[model]()
    run = staged.trainer(strategy, max_epochs=4)
    try:
        run.fit(module, DataLoader(globals()[data]() if data else staged.samples(), staged.BATCH))
    except Exception as error:
        return type(error).__name__, str(error), run.global_step
    return "nothing", "", run.global_step


# -- over all samples ----------------------------------------------------------------------------------------


class MeanOverTokens(staged.Stack):
    """A loss that is a mean over the tokens that are no padding, of which samples have other numbers."""

    def __init__(self):
        super().__init__()
        self.calls = deque()

    def losses(self, batch):
        x, y, mask = batch
        squares = (self(x).squeeze(-1) - y).square()
        self.calls.append(len(x))
        return squares, mask

    def training_step(self, batch, batch_idx):
        squares, mask = self.losses(batch)
        loss = (squares * mask).sum() / mask.sum()
        self.log("loss", loss, on_epoch=True)
        return loss


class SumOverTokens(MeanOverTokens):
    """The same loss, divided by what the batch says of itself: right under any schedule."""

    def training_step(self, batch, batch_idx):
        squares, mask = self.losses(batch[:3])
        loss = (squares * mask).sum() / (len(mask) * batch[3])
        self.log("loss", loss, on_epoch=True)
        return loss


class Contrastive(staged.Stack):
    """Each sample against all others of its batch; what the loss says of the batch is part of the result."""

    def training_step(self, batch, batch_idx):
        output = self(batch[0]).squeeze(-1)
        loss = F.cross_entropy(-(output[:, None] - batch[1].squeeze(-1)).square(), torch.arange(len(output)))
        return {"loss": loss, "outputs": output}


class Centred(staged.Stack):
    """Subtracts the mean over the batch between two layers, which a microbatch has another one of."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(torch.tanh(self.layers[1](self.layers[0](x))))
        x = x - x.mean(0)
        return self.head(self.layers[3](self.layers[2](x)))


class CentredIn(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class CentredLayer(staged.Stack):
    """The same in a module of the second stage that is called whole."""

    def __init__(self):
        super().__init__()
        self.layers.append(CentredIn())


class BatchNormed(staged.Stack):
    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(4))


class SpectralNormed(staged.Stack):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.layers[0])


class Counted(staged.Stack):
    """A layer counts its calls in a buffer that it assigns anew."""

    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.calls = self.calls + 1
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers[1] = Counted.Layer()


class NoisyForward(staged.Stack):
    """Draws random numbers in evaluation, too, so that nothing can be compared."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Noisy(staged.Stack):
    """Labels with noise, drawn after the forward: another loss each time."""

    def training_step(self, batch, batch_idx):
        output = self(batch[0])
        return F.mse_loss(output, batch[1] + torch.randn_like(output))


SIZES = []
"""Samples of each call of a step; where no comparison puts back what a step leaves."""


class NoisyOnceAgain(Noisy):
    def training_step(self, batch, batch_idx):
        SIZES.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def compared(model):
    """(the warnings of this rank, the sizes of the batches that its steps have seen) of a fit of two batches."""
    SIZES.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        staged.trainer("pipeline", max_epochs=1, limit_train_batches=2).fit(
            globals()[model](), DataLoader(staged.samples(), staged.BATCH)
        )
    return [str(each.message) for each in found if "mean over samples" in str(each.message)], list(SIZES)


def warned(model, schedule):
    """The warnings of this rank in a fit, and how many modules were in evaluation at each batch's end."""
    module = globals()[model]()
    modes = []
    module.on_train_start = module.layers[3].eval
    module.on_train_batch_end = lambda *_: modes.append([each.training for each in module.modules()].count(False))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy = HybridStrategy(pipeline=2, schedule=schedule, microbatches=4)
        staged.trainer(strategy, max_epochs=1).fit(module, DataLoader(staged.samples(), staged.BATCH))
    return [str(each.message) for each in found if "microbatch" in str(each.message)], modes


def padded(count=staged.SAMPLES, equal=0):
    """Samples of 1 to 5 tokens, the first ``equal`` of three each."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, 4, generator=generator)
    lengths = torch.randint(1, 6, (count,), generator=generator)
    lengths[:equal] = 3
    return TensorDataset(x, x.sum(2), (torch.arange(5) < lengths[:, None]).float())


def padded_later():
    return padded(equal=staged.BATCH)


def padded_in_the_last():
    """Of each batch the last sample alone is shorter than the others."""
    x, y, _ = padded().tensors
    mask = torch.ones_like(y)
    mask[staged.BATCH - 1 :: staged.BATCH, 1:] = 0
    return TensorDataset(x, y, mask)


def padded_in_whole():
    """The first of four microbatches has no token at all: its own loss is NaN."""
    x, y, _ = padded().tensors
    mask = torch.ones_like(y)
    mask[: staged.BATCH // 4] = 0
    return TensorDataset(x, y, mask)


def with_mean_length(items):
    x, y, mask = (torch.stack(column) for column in zip(*items, strict=True))
    return x, y, mask, mask.sum() / len(mask)


def trained(strategy, model, schedule=None, microbatches=4):
    """(epoch's loss, weights on rank 0, sizes of the batches that steps have seen)."""
    if strategy == "pipeline":
        strategy = HybridStrategy(pipeline=2, schedule=schedule, microbatches=microbatches)
    seen = Seen()
    module = globals()[model]()
    run = staged.trainer(strategy, callbacks=seen)
    data = staged.samples() if model in ("Contrastive", "Noisy") else padded()
    collate = with_mean_length if model == "SumOverTokens" else None
    run.fit(module, DataLoader(data, staged.BATCH, collate_fn=collate))
    return float(run.callback_metrics.get("loss", 0.0)), seen.state, list(getattr(module, "calls", ()))
