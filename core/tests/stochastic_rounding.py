"""A precision of a user's: bfloat16 weights, rounded at random in each step, under an optimizer in float32.

And the fits that are resumed with it.
"""

from pathlib import Path

import torch
from ddp_models import SaveAt
from torch import nn
from torch.distributed.tensor import DTensor

from torchhal import Module, Trainer
from torchhal.precision import TruePrecision


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class StochasticRounding(TruePrecision):
    """Optimizers step with float32 copies; what is left of them is rounded up or down, by chance."""

    def __init__(self, seed=0, by_rank=0):
        super().__init__("bfloat16")
        self.generator = torch.Generator().manual_seed(seed)
        self.by_rank = by_rank
        """Added to the seed on each further rank, where each rounds parameters of its own."""

    def setup(self, accelerator, device):
        super().setup(accelerator, device)
        if self.by_rank and torch.distributed.is_initialized():
            self.generator.manual_seed(self.by_rank * torch.distributed.get_rank())

    def optimizer_state_dtype(self, parameter, name):
        return torch.float32

    def optimizer_step(self, optimizer, closure=None):
        wide = {}
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                copy = nn.Parameter(parameter.detach().float())
                copy.grad = None if parameter.grad is None else parameter.grad.float()
                wide[copy], group["params"][place] = parameter, copy
                if parameter in optimizer.state:
                    optimizer.state[copy] = optimizer.state.pop(parameter)
        optimizer.step()
        for group in optimizer.param_groups:
            for place, copy in enumerate(group["params"]):
                parameter = group["params"][place] = wide[copy]
                if copy in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(copy)
                self.round_into(local(parameter.detach()), local(copy.detach()))
        return True

    def round_into(self, narrow, value):
        noise = torch.randint(1 << 16, value.shape, generator=self.generator, dtype=torch.int32)
        bits = value.contiguous().view(torch.int32) + noise
        narrow.copy_((bits & -(1 << 16)).view(torch.float32))

    def rank_state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_rank_state_dict(self, state):
        self.generator.set_state(state["generator"])

    def reshard_rank_state(self, states, *, rank, world_size):
        return states[rank % len(states)]


class Net(Module):
    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return (self.layers(batch).float() - batch.float().sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def fit(optimizer, strategy, callbacks=(), ckpt_path=None, precision=None, plugins=(), **options):
    """The trainer, the weights, and the optimizer's state, of all ranks where it is gathered."""
    model = Net(optimizer)
    data = torch.randn(48, 6, generator=torch.Generator().manual_seed(9))
    watch = Watch()
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": "auto", "max_epochs": 2, **options}, callbacks=[watch, *callbacks],
        strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[precision or StochasticRounding(by_rank=0 if strategy == "ddp" else 7), *plugins],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, 4, shuffle=True), ckpt_path=ckpt_path)
    return trainer, {name: tensor.clone() for name, tensor in model.state_dict().items()}, watch


class Watch(SaveAt):
    """The local optimizer state after the first step that was made, and after the last."""

    def __init__(self):
        super().__init__("", ())
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        entries = trainer.optimizers[0].state.values()
        state = [(name, local(value)) for entry in entries for name, value in entry.items() if name != "step"]
        self.seen.append([(name, value.clone()) for name, value in state])


def resume(folder, optimizer, strategy, plugins=()):
    """Where resumed runs part from the one that wasn't interrupted, and the dtypes of all state that was seen."""
    trainer, whole, watch = fit(optimizer, strategy, [SaveAt(folder, [1, 4])], plugins=list(plugins))
    trainer.strategy.barrier()
    runs, differ = [watch], []
    for path in sorted(Path(folder).glob("*.ckpt")):
        _, state, resumed = fit(optimizer, strategy, ckpt_path=path, plugins=list(plugins))
        runs.append(resumed)
        last = zip(watch.seen[-1], resumed.seen[-1], strict=True)
        if not all(torch.equal(whole[name], state[name]) for name in whole):
            differ.append(f"weights from {path.name}")
        if not all(torch.equal(one[1], other[1]) for one, other in last):
            differ.append(f"state from {path.name}")
    dtypes = {value.dtype for run in runs for seen in run.seen for _, value in seen}
    return differ, len(runs), dtypes, {tensor.dtype for tensor in whole.values()}
