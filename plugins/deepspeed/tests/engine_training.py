"""In a rank of a test's world: train a small model under a strategy, with a Trainer."""

import contextlib
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import torchhal
from torchhal import Callback, ModelCheckpoint, Trainer
from torchhal.errors import ConfigurationError, ModelError
from torchhal.precision import Precision

warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # DeepSpeed's calls

BATCH = 12  # samples of one batch, all ranks together
BATCHES = 11
SIZE = 2


class Net(torchhal.Module):
    """A frozen layer, buffers, tied weights, a parameter of the module itself, two parameter groups.

    Sizes are multiples of what the processor takes at once: an element among the rest of a vector may be rounded
    otherwise, and in one flat tensor others are.
    """

    width = 16

    def __init__(self):
        super().__init__()
        self.drawn = []
        torch.manual_seed(0)
        self.build()

    def build(self):
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(3))
        self.layers[1].weight = self.layers[0].weight
        self.frozen = nn.Linear(self.width, self.width).requires_grad_(False)
        self.scale = nn.Parameter(torch.full((self.width,), 1.1))
        self.norm = nn.BatchNorm1d(self.width)
        self.head = nn.Linear(self.width, 1)

    def forward(self, x):
        x = self.norm(x)  # nothing before it: what it cancels would have a gradient of noise
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.frozen(x) * self.scale)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "extra": [batch_idx]}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        # by name: at stage 3 a parameter that zero.Init has divided has no shape of its own
        weights = [p for name, p in self.named_parameters() if name.endswith("weight")]
        others = [p for name, p in self.named_parameters() if not name.endswith("weight")]
        optimizer = torch.optim.AdamW(
            [{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=3e-3, weight_decay=0.1
        )
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Layered(Net):
    """Its batches may be divided among any number of ranks."""

    def build(self):
        super().build()
        self.norm = nn.LayerNorm(self.width)


class Borrowed(Layered):
    """Its forward computes with a layer's weight, beside calling the layer."""

    def forward(self, x):
        return super().forward(x) + F.linear(x, self.layers[2].weight).mean(1, keepdim=True)


class Odd(Net):
    width = 15


class More(Net):
    def build(self):
        super().build()
        self.more = nn.Linear(2, 2)


class Late(Net):
    """Builds in configure_model: under zero.Init at stage 3."""

    def __init__(self):
        torchhal.Module.__init__(self)
        self.held = None

    def configure_model(self):
        torch.manual_seed(0)
        self.build()
        self.held = sum(getattr(p, "ds_tensor", p).numel() for p in self.parameters())


class Once(Late):
    """Its configure_model may be called again."""

    def configure_model(self):
        if self.held is None:
            super().configure_model()


class Momentum(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class EnginesOwn(Net):
    def configure_optimizers(self):
        return None


class LikeEnginesOwn(Net):
    """DeepSpeed's WarmupLR of 4 steps, linear, as torch has it: two steps are at rate 0."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adamax(self.parameters(), lr=0.002)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 4))
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


OWN = {
    "stage": 2,
    "config": {
        "optimizer": {"type": "Adamax", "params": {"lr": 0.002}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
        "train_batch_size": "auto",
    },
}
BF16 = {"stage": 3, "config": {"data_types": {"buffer_dtype": "bf16"}}}
"""A batch norm wants its statistics in the dtype of its weights."""

SHARP = {"stage": 3, "param_persistence_threshold": 0}
"""Small parameters are divided, too."""


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = F.mse_loss(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss.detach(), on_step=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class ClippingByHand(ByHand):
    def manual_backward(self, loss):
        super().manual_backward(loss)
        self.clip_gradients(self.optimizers(), 0.5, "norm")


def data(batches=BATCHES, width=Net.width):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * BATCH, width, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(trainer, batches=BATCHES, width=Net.width):
    """Each rank's share of the global batches, in order."""
    share = trainer.strategy.distributed_sampler_kwargs or {"num_replicas": 1}
    return DataLoader(data(batches, width), BATCH // share["num_replicas"])


class Watch(Callback):
    """What a rank saw: losses, rates, and the state at the end of training."""

    def __init__(self):
        self.losses, self.rates, self.seen = [], [], {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen["computed_in"] = str(next(module.parameters()).dtype)
        self.losses.append(float(trainer.callback_metrics["loss_step"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer, module):
        strategy = trainer.strategy
        state = getattr(strategy, "state", None)
        self.seen["optimizer"] = (
            state.optimizer(stand_ins=False) if state is not None else strategy.optimizer_state(strategy.optimizers[0])
        )
        if state is not None:
            ledger = state.ledger
            self.seen["held"] = sum(flat.numel() for flat in ledger.flats) if ledger.stage else None
            self.seen["partitioned"] = sum(getattr(p, "ds_tensor", p).numel() for p in module.parameters())


def build(strategy):
    if isinstance(strategy, str):
        return strategy
    from torchhal_deepspeed.strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(**strategy)


def trainer_for(strategy, devices, **options):
    settings = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(strategy=build(strategy), devices=devices, **{**settings, **options})


def train(strategy, devices, model="Net", *, folder=None, batches=BATCHES, extra=None, **options):
    """What :class:`Watch` saw, with the module's state after the run; a checkpoint at step 4 in ``folder``."""
    watch = Watch()
    callbacks = [watch] if extra is None else [watch, extra]
    if folder is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder, save_top_k=-1, every_n_train_steps=4))
    ckpt_path = options.pop("ckpt_path", None)
    trainer = trainer_for(strategy, devices, callbacks=callbacks, enable_checkpointing=folder is not None, **options)
    module = globals()[model]()
    module.train_dataloader = lambda: loader(trainer, batches, module.width)
    trainer.fit(module, ckpt_path=ckpt_path)
    return {
        "losses": watch.losses,
        "rates": watch.rates,
        "state": {name: value.clone() for name, value in module.state_dict().items() if not hasattr(value, "ds_id")},
        "step": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "built": getattr(module, "held", None),
        **watch.seen,
    }


def write(strategy, devices, folder, io=None, model="Net"):
    return train(strategy, devices, model, folder=folder, plugins=[] if io is None else [io])


def resume(strategy, devices, path, io=None, model="Net"):
    return train(strategy, devices, model, ckpt_path=path, plugins=[] if io is None else [io])


def accumulated(strategy, devices):
    """11 batches in steps of 4: the last step of the epoch has 3."""
    return train(strategy, devices, accumulate_grad_batches=4, gradient_clip_val=0.5, max_epochs=2)


def mixed(strategy, devices, precision):
    return train(strategy, devices, precision=precision)


class Declared(Precision):
    """The dtypes of bf16-mixed, and no method of its own."""

    alias = "acme-declared"
    compute_dtype = torch.bfloat16


def declared(strategy, devices):
    return train(strategy, devices, precision=Declared())


def several(strategies, devices):
    """One process, one run after the other."""
    return [train(strategy, devices) for strategy in strategies]


def everything(strategy, devices):
    """fit with validation, then validate and predict with the trained model, and validate a fresh one."""
    trainer = trainer_for(strategy, devices)
    module = Net()
    module.train_dataloader = lambda: loader(trainer, 4)
    module.val_dataloader = lambda: loader(trainer, 3)
    trainer.fit(module)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    [validated] = trainer.validate(module)
    predictions = trainer.predict(module, loader(trainer, 2))
    [fresh] = trainer_for(strategy, devices).validate(Net(), loader(trainer, 3))
    return fitted, validated, torch.cat([part.detach().float() for part in predictions]), fresh


def one_after_the_other(strategy, model):
    """The losses of a fit, of a validation after it, and of the epoch of another fit."""
    losses = []
    module = globals()[model]()
    for fn in ("fit", "validate", "fit"):
        trainer = trainer_for(strategy, 2)
        loaders = [loader(trainer, 2)] if fn == "validate" else [loader(trainer, 3), loader(trainer, 2)]
        getattr(trainer, fn)(module, *loaders)
        losses.append(float(trainer.callback_metrics["val_loss"]))
    return losses


def unequal(strategy, model):
    """A fit, and the validation of a fresh model, in which rank 0 has four batches and rank 1 three."""
    counts = []

    class Counted(globals()[model]):
        def validation_step(self, batch, batch_idx):
            counts.append(batch_idx)
            super().validation_step(batch, batch_idx)

    watch = Watch()
    trainer = trainer_for(strategy, 2, max_epochs=3, callbacks=[watch])
    module = Counted()
    module.train_dataloader = lambda: loader(trainer, 3)
    validation = DataLoader(Subset(data(4), range(37)), BATCH // 2)
    trainer.fit(module, val_dataloaders=validation)
    fitted = float(trainer.callback_metrics["val_loss"])
    [fresh] = trainer_for(strategy, 2).validate(Counted(), validation)
    return watch.losses, fitted, fresh, counts


def gradient_norms():
    """The norm of the gradients of one plain SGD step, and that of the update it makes at lr 1."""

    class Plain(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    trainer = trainer_for("deepspeed_stage_1", 2, max_steps=1)
    module = Plain()
    before = {name: value.clone() for name, value in module.named_parameters()}
    module.train_dataloader = lambda: loader(trainer)
    norms = []

    class Norm(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            norms.append(float(trainer.strategy.engine.get_global_grad_norm()))

    trainer.callbacks.append(Norm())
    trainer.fit(module)
    update = sum(float((value.detach() - before[name]).square().sum()) for name, value in module.named_parameters())
    return {"norm": norms[0], "update": update**0.5}


def async_io_is_built():
    import os
    from pathlib import Path

    from torch.utils.cpp_extension import get_default_build_root

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return any(Path(folder).glob("**/async_io.so"))


def recomputed():
    """Losses with the activations of the linear layers recomputed at stage 3, and how often one layer ran."""
    results = {}
    for key, recompute in (("plain_calls", None), ("calls", nn.Linear)):
        watch = Watch()
        trainer = trainer_for({"stage": 3, "activation_checkpointing": recompute}, 2, callbacks=[watch])
        module = Net()
        calls = []
        forward = module.layers[2].forward
        module.layers[2].forward = lambda x, forward=forward, calls=calls: calls.append(1) or forward(x)
        module.train_dataloader = lambda trainer=trainer: loader(trainer)
        trainer.fit(module)
        results[key] = len(calls)
        results["losses"] = watch.losses
    return results


def by_hand(strategy, devices):
    trainer = trainer_for(strategy, devices)
    module = ByHand()
    module.train_dataloader = lambda: loader(trainer)
    trainer.fit(module)
    return {name: value.clone() for name, value in module.state_dict().items()}


def linear_is_torchs():
    return F.linear is torch._C._nn.linear


def write_in(strategy, folder, model, precision):
    return train(strategy, 2, model, folder=folder, precision=precision)


def resume_in(strategy, path, model, precision):
    return train(strategy, 2, model, ckpt_path=path, precision=precision)


def shaped(strategy):
    result = train(strategy, 2, "Shaped")
    result["order"] = result["state"]["image.weight"].stride()
    return result


def midst(strategy, ckpt_path, save_at):
    """A run in steps of 4 batches; with ``save_at`` a checkpoint after the sixth batch."""

    said = []

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if save_at is not None and batch_idx == 5:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    trainer.save_checkpoint(save_at)
                said.extend(str(warning.message) for warning in caught)

    return train(strategy, 2, ckpt_path=ckpt_path, accumulate_grad_batches=4, extra=Save()), said


def full_disk(stage, folder):
    """(what a save says whose rank 1 has no room, the step in the checkpoint that was there, the folder's content)."""
    import errno
    import os

    from torchhal_deepspeed import _engine_files as engine_files

    said = []

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            path = os.path.join(folder, "c.ckpt")
            if batch_idx == 0:
                trainer.save_checkpoint(path)
            if batch_idx == 1:
                fsync = os.fsync

                def full(descriptor):
                    raise OSError(errno.ENOSPC, "No space left on device")

                if trainer.global_rank == 1:
                    engine_files.os.fsync = full
                try:
                    trainer.save_checkpoint(path)
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")
                finally:
                    engine_files.os.fsync = fsync
                from torchhal_deepspeed.checkpoint import DeepSpeedCheckpointIO

                trainer.strategy.barrier("looked")
                said.append(DeepSpeedCheckpointIO().load_checkpoint(path)["global_step"])
                said.append(os.listdir(folder))
                trainer.should_stop = True

    train({"stage": stage}, 2, extra=Save())
    return said


class TwoOptimizers(Net):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.head.parameters(), lr=1.0), torch.optim.SGD(self.layers.parameters(), lr=1.0)]


class Closure(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class BoundedRows(Net):
    def build(self):
        super().build()
        self.words = nn.Embedding(4, 4, max_norm=1.0)


class SparseGradients(Net):
    def build(self):
        super().build()
        self.words = nn.Embedding(4, 4, sparse=True)


class Shaped(Layered):
    """Parameters without a dimension and of an order in memory of their own."""

    def build(self):
        super().build()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.image = nn.Conv2d(4, 8, 3, bias=False).to(memory_format=torch.channels_last)

    def forward(self, x):
        image = x.view(-1, 1, 4, 4).expand(-1, 4, 4, 4)
        return super().forward(x) + self.scalar * self.image(image).mean((1, 2, 3))[:, None]


class Double(Net):
    def build(self):
        super().build()
        self.head = self.head.double()


class Nothing(Net):
    def build(self):
        super().build()
        self.nothing = nn.Parameter(torch.zeros(0))


class Unfrozen(Net):
    def on_train_epoch_start(self):
        self.frozen.requires_grad_(self.current_epoch > 0)


class Torn(Layered):
    """Each rank computes with a layer of its own."""

    def build(self):
        super().build()
        self.own = nn.ModuleList(nn.Linear(self.width, 1) for _ in range(2))

    def forward(self, x):
        return super().forward(x) + self.own[torch.distributed.get_rank()](x)


class Failing(Net):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("on purpose")


def fit_options(strategy, options, model):
    trainer = trainer_for(strategy, 2, **options)
    module = globals()[model]()
    module.train_dataloader = lambda: loader(trainer, 2)
    trainer.fit(module)


def refused_and_mended(stage):
    """What a fit says that is refused, and the steps of the next, of the same model, with what it said to set."""
    module = Net()
    said = []
    for data_types in ({"buffer_dtype": "half a byte"}, {}, {"buffer_dtype": "bf16"}):
        trainer = trainer_for({"stage": stage, "config": {"data_types": data_types}}, 2, precision="bf16-mixed")
        module.train_dataloader = lambda trainer=trainer: loader(trainer, 2)
        try:
            trainer.fit(module)
        except (ConfigurationError, ModelError) as error:
            said.append((type(error).__name__, str(error)))
    return said, trainer.global_step


def left_behind():
    """What a run could leave in a process, before and after two; and the losses of a second fit of one model, by ddp
    and by the engine."""
    import os
    import threading

    import deepspeed
    import torch.distributed as dist

    def now():
        for thread in threading.enumerate():
            if thread.name == "torchhal-signals":
                thread.join(5)  # it is about to end
        return {
            "environment": dict(os.environ),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "group": dist.is_initialized(),
            "communication": deepspeed.comm.comm.cdb,
            "linear": F.linear is torch._C._nn.linear,
            "threads of torch": torch.get_num_threads(),
        }

    train("deepspeed_stage_3", 2)  # imports
    before = now()
    train("deepspeed_stage_2", 2)
    train("deepspeed_stage_3", 2, "Late")
    after = now()
    losses = []
    for strategy in ("ddp", "deepspeed_stage_3"):
        module = Net()
        for kind in ("deepspeed_stage_3", strategy):
            watch = Watch()
            trainer = trainer_for(kind, 2, callbacks=[watch])
            module.train_dataloader = lambda trainer=trainer: loader(trainer)
            trainer.fit(module)
        losses.append(watch.losses)
    return before, after, losses


def collected_later(broken):
    """Whether a run saves its weights although the engine of one before, which may have failed, is collected in it."""
    import gc

    class Collecting(Callback):
        def on_train_end(self, trainer, module):
            gc.collect()
            saved, own = trainer.strategy.module_state_dict(), dict(module.named_parameters())
            self.saved = all(torch.equal(saved[name], parameter) for name, parameter in own.items())

    gc.collect()
    gc.disable()
    try:
        module, watch = Net(), Collecting()
        for config in ({"scheduler": {"type": "WarmupLR", "params": {"no such": 1}}} if broken else {}, {}):
            trainer = trainer_for({"stage": 2, "config": config}, 2, callbacks=[watch], plugins=["torch"])
            module.train_dataloader = lambda trainer=trainer: loader(trainer, 2)
            said = ""
            try:
                trainer.fit(module)
            except TypeError as error:
                said = str(error)
            assert ("no such" in said) is bool(config), said
            del trainer
    finally:
        gc.enable()
    return watch.saved


def kept_alive(strategy, model, fails):
    """What of a run is still there when nobody holds it any more."""
    import gc
    import weakref

    trainer = trainer_for(strategy, 2)
    module = globals()[model]()
    module.train_dataloader = lambda trainer=trainer: loader(trainer, 2)
    if fails:
        numbers = iter([1])
        module.layers[2].register_forward_hook(lambda *_: next(numbers) and None)
    with contextlib.suppress(StopIteration, RuntimeError):
        trainer.fit(module)
    assert trainer.global_step == (1 if fails else 2)
    held = {
        "trainer": trainer, "module": module, "layer": module.layers[0], "weight": module.layers[0].weight,
        "optimizer": trainer.optimizers[0] if trainer.optimizers else trainer,
    }  # fmt: skip
    references = {name: weakref.ref(value) for name, value in held.items()}
    del trainer, module.train_dataloader, module, held
    for _ in range(3):  # a graph that nobody went back through frees Python objects of its own
        gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def fail_then_fit():
    said = []
    module = Failing()
    for stage, model in ((3, module), (3, module), (2, Failing())):
        for _ in range(2 if model is not module else 1):
            trainer = trainer_for({"stage": stage}, 2)
            model.train_dataloader = lambda trainer=trainer: loader(trainer, 2)
            try:
                trainer.fit(model)
                text = None
            except Exception as error:
                text = str(error)
            if model is not module:
                model.training_step = lambda batch, index, model=model: Net.training_step(model, batch, index)
        said.append(text)
    return said


def save_after(strategy, path, model="Net"):
    """A run of 4 batches, saved when it is over; what the save says."""
    trainer = trainer_for(strategy, 2, max_steps=4)
    module = globals()[model]()
    module.train_dataloader = lambda: loader(trainer)
    trainer.fit(module)
    try:
        trainer.save_checkpoint(path)
    except Exception as error:
        return str(error)
    return None
