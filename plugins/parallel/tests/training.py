"""In a rank of a test's world: train one of the models under a strategy, with a Trainer."""

import logging
import multiprocessing
import os
import warnings

import models
import torch
import wrong
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from torchhal import Callback, ModelCheckpoint, Trainer
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import ModelError
from torchhal_parallel.hybrid import HybridStrategy


class Losses(Callback):
    """The loss of each batch, as this rank logged it."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        value = trainer.callback_metrics.get("loss_step")
        self.values.append(None if value is None else float(value))


class Remarks(logging.Handler):
    """What torch says to nobody in particular."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def build(strategy, arguments):
    if not arguments or not isinstance(strategy, str):
        return strategy
    from torchhal_parallel.fsdp import FSDPStrategy
    from torchhal_parallel.hybrid import HybridStrategy
    from torchhal_parallel.zero1 import ZeRO1Strategy

    classes = {"fsdp": FSDPStrategy, "hybrid": HybridStrategy, "zero1": ZeRO1Strategy}
    return classes[strategy](**arguments)


def loader(trainer, model, batches=models.BATCHES):
    """Each rank's share of the global batches, in order."""
    share = trainer.strategy.distributed_sampler_kwargs or {"num_replicas": 1}
    return DataLoader(TensorDataset(*models.data(model, batches)), models.BATCH // share["num_replicas"])


def train(strategy, devices, model_name, arguments=None, *, folder=None, ckpt_path=None, **options):
    """(losses, final weights, optimizer state of rank 0, callback metrics, census) after a fit."""
    model = getattr(models, model_name)
    losses = Losses()
    callbacks = [losses, *options.pop("callbacks", ())]
    if folder is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder, save_top_k=-1, every_n_train_steps=5))
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "gradient_clip_val": models.CLIP,
        "accumulate_grad_batches": models.ACCUMULATE,
        "logger": False,
        "enable_checkpointing": folder is not None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer = Trainer(
        strategy=build(strategy, arguments), devices=devices, callbacks=callbacks, **{**settings, **options}
    )
    module = model()
    watch = Watch(trainer)
    trainer.callbacks.append(watch)
    # the sampler's share is known once the processes are, so the loader is made then
    module.train_dataloader = lambda: loader(trainer, model)
    remarks = Remarks()
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(remarks)
    try:
        trainer.fit(module, ckpt_path=ckpt_path)
    finally:
        logging.getLogger("torch.distributed.tensor._redistribute").removeHandler(remarks)
    return {
        "remarks": remarks.texts,
        "losses": losses.values,
        "state": watch.state,
        "optimizer": watch.optimizer,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "bytes": watch.bytes,
        "step": trainer.global_step,
        "data_leader": watch.data_leader,
    }


def train_in(precision, strategy, devices, model_name, arguments=None):
    return train(strategy, devices, model_name, arguments, precision=precision)


def train_synced(strategy, devices, model_name, arguments=None):
    return train(strategy, devices, model_name, arguments, sync_batchnorm=True)


def cut_short(strategy, devices, model_name, arguments=None):
    return train(strategy, devices, model_name, arguments, limit_train_batches=23)


def by_hand(strategy, devices, arguments=None):
    """The weights after a fit whose training_step steps two optimizers itself."""
    trainer = Trainer(
        accelerator="cpu", strategy=build(strategy, arguments), devices=devices, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = wrong.TwoOptimizers()
    module.train_dataloader = lambda: loader(trainer, models.Transformer, batches=8)
    trainer.fit(module)
    return {name: value.clone() for name, value in module.state_dict().items()}


def adversarial_samples():
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(24, 5, generator=generator) + 2, torch.randn(24, 3, generator=generator))


def adversarial(strategy, devices):
    """(val_loss, weights) of two networks after a fit of six batches in order, on each rank its share."""
    trainer, module, samples = small(strategy, devices, max_epochs=1), wrong.Generative(), adversarial_samples()
    rank = int(os.environ.get("RANK", "0"))
    share = DistributedSampler(samples, devices, rank, shuffle=False)  # every n-th sample: of each batch its share
    data = DataLoader(samples, 4 // devices, sampler=share)
    trainer.fit(module, data, DataLoader(Subset(samples, range(9)), 4))  # two batches on rank 0, one on rank 1
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return float(trainer.callback_metrics["val_loss"]), state


def built_late(strategy, devices, name):
    """A model of configure_model: its weights after a step that changes nothing, and the most a rank has held."""
    held = []
    trainer = small(strategy, devices, max_epochs=-1, max_steps=1, callbacks=Watch(None))
    module = getattr(wrong, name)(held)
    module.train_dataloader = lambda: loader(trainer, models.Transformer, batches=1)
    try:
        trainer.fit(module)
    except ModelError as error:
        return str(error)
    watch = next(callback for callback in trainer.callbacks if isinstance(callback, Watch))
    whole = sum(parameter.nbytes for parameter in models.Transformer().parameters())
    return {
        "state": watch.state, "steps": module.steps, "loss": float(trainer.callback_metrics["loss_epoch"]),
        "peak": max(held) / whole,
    }  # fmt: skip


def shuffled(strategy, devices):
    """(losses of three epochs of shuffled batches, whether they are this rank's to tell)."""
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, max_epochs=3, logger=False, callbacks=losses,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # ranks that were not seeded alike
    samples = TensorDataset(*models.data(models.Transformer, 4))
    loader = DataLoader(samples, models.BATCH, sampler=DistributedSampler(samples, 1, 0, shuffle=True, seed=0))
    trainer.fit(wrong.Marked(), DataLoader(samples, models.BATCH, shuffle=True) if devices > 1 else loader)
    return losses.values, losses.values[0] is not None


def small(strategy, devices, **options):
    settings = {
        "accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(strategy=build(strategy, None), devices=devices, **{**settings, **options})


def marked(strategy, devices):
    """Names of the parameters with a mark, as configure_optimizers sees them and after the run."""
    trainer = small(strategy, devices, max_epochs=1)
    module = wrong.WithMark()
    module.train_dataloader = lambda: loader(trainer, models.Transformer, batches=2)
    trainer.fit(module)
    return module.seen, [name for name, parameter in module.named_parameters() if hasattr(parameter, "no_decay")]


def normed(strategy, devices):
    """(val_loss of the fit, final weights and buffers) of a net with buffers and parameters that stay whole, SGD."""
    trainer = small(strategy, devices)
    module = wrong.Normed()
    module.train_dataloader = lambda: loader(trainer, models.ConvNet, batches=6)
    module.val_dataloader = lambda: loader(trainer, models.ConvNet, batches=2)
    trainer.fit(module)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return float(trainer.callback_metrics["val_loss"]), state if os.environ["RANK"] == "0" else {}


def asked_for_more(strategy, devices, model_name):
    """What a model gives in hooks, for the same input on each rank, and after the run; of two fits in a row."""
    outputs = []
    module, tokens = getattr(models, model_name)(), models.data(models.Transformer, 1)[0][:2]

    class Ask(Callback):
        def on_train_epoch_start(self, trainer, module):
            outputs.append(module(tokens).detach().clone())

        def on_train_batch_end(self, trainer, module, *rest):
            if module.training:  # with gradients, which nobody wants
                outputs.append(module(tokens).detach().clone())

        def on_validation_epoch_end(self, trainer, module):
            outputs.append(module(tokens).detach().clone())

    for _ in range(2):
        trainer = small(strategy, devices, callbacks=Ask(), num_sanity_val_steps=0, check_val_every_n_epoch=2)
        module.train_dataloader = lambda trainer=trainer: loader(trainer, models.Transformer, batches=2)
        module.val_dataloader = lambda trainer=trainer: loader(trainer, models.Transformer, batches=1)
        trainer.fit(module)
        outputs.append(module(tokens).detach().clone())
    return outputs


def augmented(strategy, devices):
    """The sum of each batch that this rank gets of a data worker."""
    sums = []

    class Note(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            sums.append(int((batch[0] * torch.arange(1, 9)).sum() * 1000 + batch[1].sum()))

    multiprocessing.current_process()._config["daemon"] = False  # a rank of a test's world may have children, too
    module = wrong.Marked()  # in which one stage draws numbers
    torch.manual_seed(int(os.environ["RANK"]))
    small(strategy, devices, callbacks=Note()).fit(
        module, DataLoader(models.RandomSamples(), models.BATCH, num_workers=1)
    )
    return sums


def resumed_with_a_worker(folder, ckpt_path):
    """The sums of this rank's batches, which a data worker has drawn, by epoch, of a run that saves each."""
    sums = {}

    class Note(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            sums.setdefault(trainer.current_epoch, []).append(float(batch[0].sum()))

    multiprocessing.current_process()._config["daemon"] = False
    module = wrong.Marked()
    torch.manual_seed(5)
    callbacks = [Note(), ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")]
    trainer = small(HybridStrategy(data=2), 2, callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder)
    loader = DataLoader(models.RandomSamples(), models.BATCH, num_workers=1)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return sums


def dropped_out(strategy, devices):
    losses = Losses()
    trainer = small(strategy, devices, callbacks=losses)
    module = wrong.DropsOut()
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    trainer.fit(module, DataLoader(TensorDataset(*models.data(models.Transformer, 4)), models.BATCH))
    return losses.values


def watched(strategy, devices):
    """The losses of a net that counts its forwards in a buffer and drops out around the divided layers."""
    losses = Losses()
    trainer = small(strategy, devices, callbacks=losses)
    module = wrong.Counting()
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    trainer.fit(module, DataLoader(TensorDataset(*models.data(models.Transformer, 4)), models.BATCH))
    return {"losses": losses.values, "count": [int(layer.count) for layer in module.layers]}


def losses_of(strategy, devices, model):
    """(the losses of a net of ``wrong``, each twice in an epoch of four batches; what was warned of)."""
    losses = Losses()
    module = getattr(wrong, model)()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # no Adam, which hides factors
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        small(strategy, devices, callbacks=losses).fit(
            module, DataLoader(TensorDataset(*models.data(models.Transformer, 4)), models.BATCH)
        )
    return losses.values, [str(each.message) for each in found]


def refused(strategy, devices, model, arguments=None):
    """(kind of the error of a fit's set-up, whether the model's parameters are as they were, whether all else is)."""
    strategy = build(strategy, arguments)
    made = getattr(wrong, model)()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in made.named_parameters()}
    samples = TensorDataset(*models.data(models.Transformer, 2))
    kind = None
    try:
        small(strategy, devices).fit(made, DataLoader(samples, models.BATCH))
    except Exception as error:
        kind = type(error).__name__
    whole = all(
        made.get_parameter(name) is parameter and torch.equal(parameter, value)
        for name, (parameter, value) in before.items()
    )
    nothing_left = not any("forward" in vars(each) for each in made.modules()) and not hasattr(
        made, "_torchhal_in_parts"
    )
    made(samples[:2][0])
    return kind, whole, nothing_left


def norms():
    """(global norm after clipping it, its dtype, the truth) of sharded and whole gradients in several dtypes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from world import joined

    from torchhal_parallel._dtensor_layout import clip_grads_with_norm_, full_tensor, get_total_norm

    found = []
    with joined():
        mesh = init_device_mesh("cpu", (2,))
        for dtypes in ([torch.float64], [torch.bfloat16], [torch.complex64], [torch.bfloat16, torch.float32]):
            torch.manual_seed(0)
            full = [torch.randn(401, 7, dtype=dtype) for dtype in dtypes for _ in range(2)]
            gradients = [
                distribute_tensor(tensor, mesh, [Shard(0)]) if index % 2 else tensor.clone()
                for index, tensor in enumerate(full)
            ]
            truth = sum(tensor.to(torch.complex128).abs().square().sum() for tensor in full).sqrt().item()
            norm = get_total_norm(gradients)
            found.append((norm.item(), str(norm.dtype), truth))
            clip_grads_with_norm_(gradients, norm, 0.5)
            assert [gradient.dtype for gradient in gradients] == [tensor.dtype for tensor in full]
            for gradient, tensor in zip(gradients, full, strict=True):
                torch.testing.assert_close(full_tensor(gradient), (tensor * (0.5 / truth)).to(tensor.dtype))
    return found


def fail_then_fit(strategy, devices):
    """What a fit says that fails in a step on every rank, and what the next fit of the same model says."""
    module, said = wrong.Failing(), []
    for _ in range(2):
        trainer = small(strategy, devices)
        module.train_dataloader = lambda trainer=trainer: loader(trainer, models.Transformer, batches=2)
        try:
            trainer.fit(module)
        except Exception as error:
            said.append(str(error))
    return said


def write(strategy, devices, model_name, folder, io):
    return train(strategy, devices, model_name, folder=folder, plugins=[io])


def resume(strategy, devices, model_name, path, io):
    return train(strategy, devices, model_name, ckpt_path=path, plugins=[io])


class SaveAndSpoil(Callback):
    """Writes a checkpoint after five steps, and at once, for as long as the save lasts, other weights to the device."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx != 5 * models.ACCUMULATE - 1:
            return
        trainer.save_checkpoint(self.path)
        parts = [_local(parameter) for parameter in module.parameters() if not parameter.is_meta]
        assert {part.device.type for part in parts} == {trainer.strategy.root_device.type}
        before = [part.clone() for part in parts]
        for part in parts:
            part.fill_(7)
        trainer.strategy.checkpoint_io.wait()
        for part, value in zip(parts, before, strict=True):
            part.copy_(value)


def train_on(accelerator, strategy, devices, arguments, io, save=None, ckpt_path=None):
    callbacks = [] if save is None else [SaveAndSpoil(save)]
    options = {"accelerator": accelerator, "plugins": [io], "callbacks": callbacks, "ckpt_path": ckpt_path}
    found = train(strategy, devices, "Transformer", arguments, **options)
    state = {name: value.cpu() for name, value in (found["state"] or {}).items()}
    return {"state": state, "losses": found["losses"], "data_leader": found["data_leader"]}


class SaveInTheMidst(Callback):
    """Writes a checkpoint by each IO, into ``folder``, when a batch of an accumulation is done and its step is not."""

    def __init__(self, folder, ios):
        self.folder, self.ios = folder, ios

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2 * models.ACCUMULATE:
            own = trainer.strategy.checkpoint_io
            for name, io in self.ios.items():
                trainer.strategy.checkpoint_io = io
                trainer.save_checkpoint(os.path.join(self.folder, f"{name}.ckpt"))
            trainer.strategy.checkpoint_io = own


def write_in_the_midst(strategy, devices, arguments, folder, ios):
    save = SaveInTheMidst(folder, ios)
    return train(strategy, devices, "Transformer", arguments, limit_train_batches=10, callbacks=[save])


def go_on(strategy, devices, arguments, path, io):
    return train(strategy, devices, "Transformer", arguments, limit_train_batches=10, ckpt_path=path, plugins=[io])


def everything(strategy, devices, model_name, arguments=None):
    """fit with validation, then validate, test and predict: (metrics of each, predictions)."""
    model = getattr(models, model_name)
    trainer = Trainer(
        accelerator="cpu", strategy=build(strategy, arguments), devices=devices, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = model()
    module.train_dataloader = lambda: loader(trainer, model, batches=4)
    module.val_dataloader = lambda: loader(trainer, model, batches=3)
    module.test_step = module.validation_step
    trainer.fit(module)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    [validated] = trainer.validate(module)
    predictions = trainer.predict(module, loader(trainer, model, batches=2))
    return fitted, validated, torch.cat([part.detach() for part in predictions])


def attempt_validation(model):
    """Fit a model under tensor_parallel with its validation: what the user reads."""
    return attempt("tensor_parallel", 2, model, validate=True)


def attempt(strategy, devices, model, arguments=None, options=None, batch=models.BATCH, validate=False):
    """Fit a model that can't be: what the user reads."""
    trainer = Trainer(
        accelerator="cpu", strategy=build(strategy, arguments), devices=devices, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **(options or {}),
    )  # fmt: skip
    made = getattr(wrong, model)() if hasattr(wrong, model) else getattr(models, model)()
    samples = TensorDataset(*models.data(models.ConvNet if model == "ConvNet" else models.Transformer, 2))
    try:
        trainer.fit(made, DataLoader(samples, batch), DataLoader(samples, batch) if validate else None)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


class Watch(Callback):
    """Looks at the strategy while its processes are still joined."""

    def __init__(self, trainer):
        self.state = self.optimizer = None
        self.bytes = {}

    def on_train_end(self, trainer, module):
        strategy = trainer.strategy
        strategy.checkpoint_io = TorchCheckpointIO()  # so that what is looked at is whole
        state = strategy.module_state_dict()
        optimizer = strategy.optimizer_state(strategy.optimizers[0])
        if trainer.is_global_zero:
            self.state = {name: value.clone() for name, value in state.items()}
            self.optimizer = optimizer
        self.data_leader = strategy.is_data_leader
        parameters = [p for p in module.parameters() if not p.is_meta]
        self.bytes = {
            "parameters": sum(_local(p).nbytes for p in parameters),
            "optimizer": sum(
                _local(value).nbytes
                for entry in strategy.optimizers[0].state.values()
                for value in entry.values()
                if isinstance(value, torch.Tensor) and value.dim()
            ),
        }


def _local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
