"""Models that some strategy can't carry."""

import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn  # which torch.distributed alone doesn't have
from models import ConvNet, Transformer
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from torchhal import Module


class Tied(Transformer):
    """The head is the embedding."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class TiedPlan(Tied):
    """The same, with both in the plan, divided alike."""

    tensor_parallel_plan = {**Transformer.tensor_parallel_plan, "embed": "rowwise_rep", "head": "colwise_rep"}


class SparseEmbedding(Transformer):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 32, sparse=True)


class Newton(Transformer):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Foreach(Transformer):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=True)


class NoPlan(Transformer):
    tensor_parallel_plan = None


class Misspelt(Transformer):
    tensor_parallel_plan = {"layers.*.attn.q_proj": "colwise", "layers.*.attention.o_proj": "rowwise"}


class Open(Transformer):
    tensor_parallel_plan = {"head": "colwise"}


class HeadLeftOpen(Transformer):
    """Rowwise layers there are, but none that takes what the head gives."""

    tensor_parallel_plan = {**Transformer.tensor_parallel_plan, "head": "colwise"}


class OpenBesideOne(Transformer):
    """Of three layers of one size, two are closed by the rowwise one beside them, and the third by nobody."""

    tensor_parallel_plan = {**Transformer.tensor_parallel_plan, "layers.*.side": "colwise"}

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.side = nn.Linear(32, 96)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x) + layer.side(x).mean(-1, keepdim=True)
        return self.head(self.norm(x))


class SummedByHand(OpenBesideOne):
    """Right, gradients too: those of a sum go to each rank as they are."""

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x) + self.summed(layer.side(x).square().sum(-1, keepdim=True)) / 96
        return self.head(self.norm(x))

    def summed(self, own):
        mesh = getattr(self.trainer.strategy, "mesh", None)
        if mesh is None:
            return own
        parts = DTensor.from_local(own, mesh["tensor"], [Partial()])
        return parts.redistribute(placements=[Replicate()]).to_local()


class ClosedByHand(SummedByHand):
    """Right: each rank's part of the third layer is summed over the ranks, in place or not."""

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for index, layer in enumerate(self.layers):
            own = layer.side(x).square().sum(-1, keepdim=True)
            if index == 0:
                seen = own.detach().clone()
                dist.all_reduce(seen)
                x = x * (1 + 0 * seen)
            if index == 1:
                kept = torch.zeros_like(own)
                kept.copy_(own.detach())  # what stands in it is of the ranks only until it is overwritten
                x = x + kept.zero_()
            x = layer(x) + self.summed(own) / 96
        return self.head(self.norm(x))


class SummedWithGradients(OpenBesideOne):
    """Each rank has the gradient of the whole sum, and gets those of all."""

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x) + dist.nn.functional.all_reduce(layer.side(x).square().sum(-1, keepdim=True)) / 96
        return self.head(self.norm(x))


class OverwrittenInPart(OpenBesideOne):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        own = self.layers[0].side(x).clone()
        own[..., :1].zero_()
        return self.head(self.norm(x + own.mean(-1, keepdim=True)))


class OpenInTheLoss(OpenBesideOne):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        penalties = torch.zeros(())
        penalties += self.layers[0].side(self.embed(batch[0])).square().mean()  # in place, into what was no part
        return super().training_step(batch, batch_idx) + penalties


class Between(Transformer):
    """Something stands between the layers that a rank has parts of."""

    def __init__(self, between):
        super().__init__()
        for layer in self.layers:
            layer.forward = lambda x, layer=layer: x + layer.down(between(layer.up(x)))


class SoftmaxBetween(Between):
    def __init__(self):
        super().__init__(lambda parts: parts.softmax(-1))


class MeanBetween(Between):
    def __init__(self):
        super().__init__(lambda parts: parts - parts.mean(-1, keepdim=True))


class NormBetween(Between):
    """And the weights behind it are zero, so that the first loss is right."""

    def __init__(self):
        super().__init__(lambda parts: nn.functional.normalize(parts, dim=-1))
        for layer in self.layers:
            nn.init.zeros_(layer.down.weight)


class JoinedGate(Transformer):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.down = nn.Linear(48, 32)
            layer.forward = lambda x, layer=layer: x + layer.down(nn.functional.glu(layer.up(x), -1))

    tensor_parallel_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class FixedHeads(Transformer):
    """Four heads on each rank, of half the width."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.attention.forward = lambda x, own=layer.attention: self.attend(own, x)

    def attend(self, own, x):
        q, k, v = (
            projection(x).view(*x.shape[:2], 4, -1).transpose(1, 2)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        return own.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Objects(SoftmaxBetween):
    tensor_parallel_plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


class InTheStep(Transformer):
    tensor_parallel_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 20)

    def training_step(self, batch, batch_idx):
        logits = self.down(self.up(self.embed(batch[0])).softmax(-1))
        return nn.functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten()) + 0 * self(batch[0]).sum()


class PenaltyOverAll(Transformer):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(weight.square().sum() for weight in self.parameters())


class LoggedPenalty(PenaltyOverAll):
    def training_step(self, batch, batch_idx):
        self.log("penalty", sum(weight.square().sum() for weight in self.parameters()))
        return super().training_step(batch, batch_idx)


class ClippedByTorch(Transformer):
    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class GroupedHeads(Transformer):
    """Right: two heads of keys for four of queries."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            own = layer.attention
            own.k_proj, own.v_proj = nn.Linear(32, 16, bias=False), nn.Linear(32, 16)
            own.forward = lambda x, own=own: self.attend(own, x)

    def attend(self, own, x):
        q, k, v = (
            projection(x).unflatten(-1, (-1, 8)).transpose(1, 2) for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return own.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OneKeyHead(GroupedHeads):
    """Of which two ranks would have half a head each."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.attention.k_proj, layer.attention.v_proj = nn.Linear(32, 8, bias=False), nn.Linear(32, 8)


class WholeKeys(OneKeyHead):
    """Every rank has the keys: the outputs are right, their gradients are not."""

    tensor_parallel_plan = {
        name: style for name, style in Transformer.tensor_parallel_plan.items() if name[-6:] not in ("k_proj", "v_proj")
    }


class HeadNorms(Transformer):
    """Queries are normed within each head, all with one weight."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            own = layer.attention
            own.norm = nn.RMSNorm(8)
            own.forward = lambda x, own=own: self.attend(own, x)

    def attend(self, own, x):
        q, k, v = (projection(x).unflatten(-1, (-1, 8)) for projection in (own.q_proj, own.k_proj, own.v_proj))
        q, k, v = (each.transpose(1, 2) for each in (own.norm(q), k, v))
        return own.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HeadNormsInPlan(HeadNorms):
    """Right: the ranks add up the weights' gradients."""

    tensor_parallel_plan = {
        **Transformer.tensor_parallel_plan,
        "layers.*.attention.norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    }


class DropsBetween(Between):
    """Right, but for the random numbers."""

    def __init__(self):
        super().__init__(lambda parts: nn.functional.dropout(parts, 0.5) + 0.1 * torch.randn_like(parts))


class WithHandWrittenNorm(Between):
    """Right: the squares of all parts are added up."""

    def __init__(self):
        super().__init__(self.norm_of_parts)

    @staticmethod
    def norm_of_parts(parts):
        squares = parts.square().sum(-1, keepdim=True)
        if dist.is_initialized():
            squares = dist.nn.functional.all_reduce(squares)
        return parts / squares.sqrt()


class DropsOut(Transformer):
    """Dropout in the residual stream, between the layers that are divided."""

    def forward(self, tokens):
        x = nn.functional.dropout(self.embed(tokens) + self.position, 0.2, self.training)
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.2, self.training)
        return self.head(self.norm(x))


class Counting(DropsOut):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("count", torch.zeros((), dtype=torch.int64))
            layer.forward = lambda x, layer=layer: self.counted(layer, x)

    @staticmethod
    def counted(layer, x):
        layer.count += 1
        return x + layer.down(nn.functional.gelu(layer.up(layer.norm2(x))))


class RowwiseOnly(Transformer):
    tensor_parallel_plan = {"layers.*.down": "rowwise"}


class RowwiseOfAWhole(Transformer):
    """What gives the row-wise layer its input is not the column-wise one beside it."""

    tensor_parallel_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.last": "rowwise"}

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.last = nn.Linear(32, 32)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer.last(layer(x))
        return self.head(self.norm(x))


class NewHead(Transformer):
    def on_train_epoch_start(self):
        self.head = nn.Linear(32, 20)


class Unused(Transformer):
    def __init__(self):
        super().__init__()
        self.aside = nn.Linear(2, 2)


class Marked(Transformer):
    """Shuffled batches, random numbers in one stage, and a loss with weights that no stage has."""

    def __init__(self):
        super().__init__()
        # not its own mean, which is over the weights: microbatches have other sums of them
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 20), reduction="none")
        self.layers[0].noise = nn.Dropout(0.5)

    def forward(self, tokens):
        x = self.layers[0].noise(self.embed(tokens)) * 0 + self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        loss = self.criterion(self(batch[0]).flatten(0, -2), batch[1].flatten()).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Uneven(Transformer):
    tensor_parallel_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.up, layer.down = nn.Linear(32, 33), nn.Linear(33, 32)


class NormInPlan(Transformer):
    tensor_parallel_plan = {"norm": "colwise"}


class DropoutInPlan(Transformer):
    tensor_parallel_plan = {"layers.0.noise": "sequence_parallel"}

    def __init__(self):
        super().__init__()
        self.layers[0].noise = nn.Dropout(0.1)


class BadStyle(Transformer):
    tensor_parallel_plan = {"head": "columns"}


class ByHand(Transformer):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))


class TwoOptimizers(Transformer):
    """Right under every strategy but a pipeline: steps two optimizers by hand, each with a backward of its own."""

    automatic_optimization = False

    def configure_optimizers(self):
        head = set(self.head.parameters())
        rest = [parameter for parameter in self.parameters() if parameter not in head]
        return [torch.optim.AdamW(rest, lr=3e-3, eps=1e-6), torch.optim.SGD(list(head), lr=0.1)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]).flatten(0, -2), batch[1].flatten()))
            optimizer.step()


class Late(Transformer):
    """Builds its layers in configure_model, with values of its own. ``held``: bytes of real parameters, over time."""

    def __init__(self, held=()):
        torch.nn.Module.__init__(self)
        self.held = held

    def configure_model(self):
        Transformer.__init__(self)
        self.set_values()
        for module in self.modules():  # what any rank draws is noted
            if hasattr(module, "reset_parameters"):
                module.reset_parameters = Noting(self, module.reset_parameters)

    def set_values(self):
        with torch.no_grad():
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            self.layers[1].up.bias.fill_(0.25)
        self.register_buffer("steps", torch.arange(4) * 3, persistent=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_end(self):
        self.held.append(bytes_held(self))


class LateOnMeta(Late):
    """The same for a model that no rank has room for: the values come from methods."""

    def configure_model(self):
        with torch.device("meta"):
            super().configure_model()

    def init_weights(self):
        nn.init.normal_(self.position, std=0.1)
        self.set_values()
        self.strength.fill_(1.25)
        self.unused = torch.arange(3)

    def _init_weights(self, module):
        if isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.bias, 0.5)


class Forgotten(LateOnMeta):
    """Nobody gives values to what the model holds itself, whose own buffers are among it."""

    init_weights = None


class Pretrained(LateOnMeta):
    """Some of it has values, which no initialisation may touch."""

    def configure_model(self):
        super().configure_model()
        self.layers[2].down = nn.Linear(96, 32)
        self.embed.weight = nn.Parameter(torch.full((20, 32), 0.125))

    def init_weights(self):
        super().init_weights()
        for parameter in self.layers[2].down.parameters():
            nn.init.zeros_(parameter)


def bytes_held(module):
    tensors = [parameter.detach() for parameter in module.parameters() if not parameter.is_meta]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)


class Noting:
    """``reset_parameters`` that notes how much memory the model's parameters have."""

    def __init__(self, model, reset):
        self.model, self.reset = model, reset

    def __call__(self):
        self.reset()
        self.model.held.append(bytes_held(self.model))


class WithMark(Transformer):
    def __init__(self):
        super().__init__()
        self.head.bias.no_decay = True

    def configure_optimizers(self):
        self.seen = [name for name, parameter in self.named_parameters() if hasattr(parameter, "no_decay")]
        return super().configure_optimizers()


class Normed(ConvNet):
    """Batch norms, buffers that the forward assigns, parameters of no dimension."""

    def __init__(self):
        super().__init__()
        self.body[1] = nn.BatchNorm2d(6)
        # memory is laid out otherwise on one rank, and with it what is in the order of addresses
        self.other = [nn.Parameter(torch.zeros(())) for _ in range(7)] if os.environ.get("RANK") == "1" else []
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1 + index / 10)) for index in range(10))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("positive", torch.zeros(8, dtype=torch.int64))

    def forward(self, images):
        if self.training:  # assigned, not changed in place
            self.mean = 0.9 * self.mean + 0.1 * images.mean((0, 1, 2))
            self.positive = self.positive + (images > 0).sum((0, 1, 2))
        images = (images - self.mean) * torch.stack([*self.scales[:8]]) * self.scales[8] + self.scales[9]
        return super().forward(images)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Failing(Transformer):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise RuntimeError("on purpose")
        return loss


class Twice(Transformer):
    def training_step(self, batch, batch_idx):
        self(batch[0])
        return super().training_step(batch, batch_idx)


class Never(Transformer):
    def training_step(self, batch, batch_idx):
        return self.head(self.embed(batch[0])).mean()


class Branching(Transformer):
    def forward(self, tokens):
        if tokens.float().mean() > 3:
            return super().forward(tokens)
        return super().forward(tokens) * 2


class Early(Transformer):
    """Its optimizer is made before the model is sharded."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.parameters())

    def configure_optimizers(self):
        return self.optimizer


class Remembers(Transformer):
    def __init__(self):
        super().__init__()
        self.penalised = [self.head.weight]


class TiedOutside(Transformer):
    """One weight, of which the plan names one of two places."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.Module()
        self.criterion.weight = self.layers[0].down.weight


class Factored(Transformer):
    """An optimizer whose state has other shapes than its parameters."""

    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


class Resilient(Transformer):
    def configure_optimizers(self):
        return torch.optim.Rprop(self.parameters())


class OldWeightNorm(Transformer):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.layers[0].up)


class Pruned(Transformer):
    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.layers[0].up, "weight", 0.5)


class CalledWithATuple(Transformer):
    def forward(self, tokens, pair=()):
        return super().forward(tokens)

    def __call__(self, tokens):
        return super().__call__(tokens, (tokens, 0.5))


class CopiedInAHook(Transformer):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        AveragedModel(self)


class GradientByWeights(Transformer):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in gradients)


class Transformed(Transformer):
    def training_step(self, batch, batch_idx):
        embedded = self.embed(batch[0]).detach()
        gradient = torch.func.grad(lambda x: self.layers[0](x).sum())(embedded)
        return super().training_step(batch, batch_idx) + gradient.square().mean()


class Triangular(Transformer):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.layers[0].up.weight.tril_()


class ZeroedRow(Transformer):
    """What would be lost; a divided layer's weight lies in rows of several ranks."""

    def on_before_optimizer_step(self, optimizer):
        for weight in (self.layers[0].up.weight, self.layers[0].down.weight):
            weight.grad[0].zero_()
            weight.grad[:, 3] *= 0


class WrittenByOut(Transformer):
    def on_before_optimizer_step(self, optimizer):
        row = self.layers[0].up.weight.grad[0]
        torch.mul(row, 0.5, out=row)


class WrittenActivation(Transformer):
    """Under ``no_grad`` an activation has no ``grad_fn`` either; what is written to is used, and so is right."""

    def validation_step(self, batch, batch_idx):
        row = (self.layers[0].up.weight * 2)[0]
        assert row.mul_(2).full_tensor().equal(self.layers[0].up.weight.full_tensor()[0] * 4)


class DividedBatchNorm(Module):
    tensor_parallel_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)

    def training_step(self, batch, batch_idx):
        return self.down(self.norm(self.up(batch[0].float()))).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


REMEMBERED = {}


class WritesToGlobal(Transformer):
    def __init__(self):
        super().__init__()
        REMEMBERED.update(first=self.layers[0].up.weight, last=self.head.weight)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for weight in REMEMBERED.values():
                weight.mul_(0.5)
        return super().training_step(batch, batch_idx)


class BranchingOnLoss(Transformer):
    """Of the microbatches of a batch the second goes another way, by the value of its loss."""

    calls = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        return loss * 1.0 if loss > loss.item() + (0.5 if self.calls == 2 else -0.5) else loss


class SetElement(Transformer):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.layers[0].up.weight[7, 3] = 0.5


class ByRows(torch.optim.Optimizer):
    """One number per row, as sharded as the parameter; computed without torch's help."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() == 2:
                    self.state[parameter]["rows"] = parameter.grad.abs().sum(1)


class Remembering(torch.optim.Optimizer):
    """A mean of squares of one element in one dimension, and the gradients of some steps in lists and dicts."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros(1))
                mean += parameter.grad.square().mean().item()
                past = state.setdefault("past", {"gradients": [], "mean": (mean.clone(),)})
                past["gradients"] = [*past["gradients"][-1:], parameter.grad.clone()]
                for gradient in past["gradients"]:
                    parameter.sub_(gradient, alpha=group["lr"] / (mean.sqrt().item() + 0.1))


class Masked(Transformer):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.layers[0].up.weight.mul_(torch.ones(self.layers[0].up.weight.shape).tril())


class Plain(torch.optim.SGD):
    """Its state are plain tensors, whole ones, or of no dimension where the name says so."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            self.update(self.state[parameter], parameter)

    def update(self, state, parameter):
        parameter.sub_(state.setdefault("rates", torch.full(parameter.shape, 0.1)) * parameter.grad)


class PlainNumber(Plain):
    def update(self, state, parameter):
        state.setdefault("mean", torch.zeros(())).add_(parameter.grad.square().mean())


class WithPlain(Transformer):
    def configure_optimizers(self):
        return Plain(self.parameters(), lr=0.1)


class WithPlainNumber(Transformer):
    def configure_optimizers(self):
        return PlainNumber(self.parameters(), lr=0.1)


class Fused(Transformer):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)


class Buffers(torch.optim.SGD):
    """In a list beside its groups."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.buffers = [torch.zeros_like(each) for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"]]
        torch._foreach_add_(self.buffers, [each.grad for each in parameters])
        torch._foreach_sub_(parameters, self.buffers, alpha=0.1)


class WithBuffers(Transformer):
    def configure_optimizers(self):
        return Buffers(self.parameters())


class Transposed(Transformer):
    def __init__(self):
        super().__init__()
        self.layers[0].up.weight = nn.Parameter(self.layers[0].up.weight.detach().t().contiguous().t())


class WithMemory(Transformer):
    def configure_optimizers(self):
        return Remembering(self.parameters())


class Rows(Transformer):
    def configure_optimizers(self):
        return ByRows(self.parameters())


class Generative(Module):
    """Two networks and a parameter of the module's own, trained by hand by two optimizers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.make = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 5))
        self.judge = nn.ModuleList([nn.Linear(5, 12), nn.Linear(12, 1)])
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, noise):
        return self.make(noise) + self.shift

    def verdict(self, samples):
        return self.judge[1](torch.tanh(self.judge[0](samples)))

    def losses(self, batch):
        """That of the judge, then that of the maker; each is computed when it is asked for."""
        real, noise = batch
        made = self(noise).detach()
        yield nn.functional.softplus(-self.verdict(real)).mean() + nn.functional.softplus(self.verdict(made)).mean()
        yield nn.functional.softplus(-self.verdict(self(noise))).mean()

    def training_step(self, batch, batch_idx):
        for loss, optimizer in zip(self.losses(batch), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", sum(self.losses(batch)))

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.judge.parameters(), lr=0.01),
            torch.optim.Adam([*self.make.parameters(), self.shift], lr=0.02),
        ]
