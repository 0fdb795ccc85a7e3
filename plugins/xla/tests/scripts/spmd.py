"""Checks under SPMD over four CPU devices, in one process: SPMD stays on where it has been.

    python spmd.py RESULTS FOLDER

writes ``{check: traceback or ""}``. Each function whose name begins with ``check_`` is one.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # a deprecation of XLA's own for each graph
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch_xla
from torch import nn
from torch.utils.data import DataLoader
from xla_training import CountSteps, Net, assert_close, assert_equal, batches, plain, trainer

from torchhal import Module, seed_everything
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal_xla.spmd import SPMDStrategy

BOTH = ("xla_spmd", "xla_fsdp")
FOLDER = Path(sys.argv[2])


def raises(error, text, function):
    try:
        function()
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(f"no {error.__name__}")


def sharding(tensor):
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def check_no_single_device_after_spmd():
    trainer("xla_spmd").fit(Net(), batches(2))
    for strategy in ("single_xla", "xla"):
        raises(
            ConfigurationError, "SPMD is switched on", lambda s=strategy: trainer(s, devices=1).fit(Net(), batches(1))
        )


def check_ten_steps_equal_the_plain_loop():
    for strategy in BOTH:
        for accumulate, clip, optimizer in ((1, None, "adamw"), (2, 0.1, "sgd")):
            data = batches(10 * accumulate)
            model, reference = (Net(optimizer=optimizer, schedule=True, norm=True) for _ in range(2))
            options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
            trainer(strategy, **options).fit(model, data, data[:3])
            plain(reference, data, accumulate=accumulate, clip=clip)
            assert_close(model, reference)


def check_batches_that_do_not_divide():
    for strategy in BOTH:
        data = [batch for size in (6, 3, 1, 8) for batch in batches(2, size)]
        model, reference = Net(), Net()
        run = trainer(strategy)
        run.fit(model, data)
        plain(reference, data)
        assert_close(model, reference)
        for output, batch in zip(run.predict(model, data), data, strict=True):
            torch.testing.assert_close(output, reference.net(batch[0]).detach(), rtol=1e-4, atol=1e-5)


class Odd(Module):
    """Tied, frozen, unused, 0-d and empty parameters, sizes that four doesn't divide, a layer that puts out its own
    parameter; of an embedding XLA can't divide a backward unevenly, and would end the process."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.queries = nn.Embedding(4, 6)
        self.queries.forward = lambda: self.queries.weight
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.frozen, self.unused = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(5, 3))

    def loss(self, batch):
        words = self.embed(batch)
        mixed = (words @ self.queries().T).softmax(-1) @ self.queries()
        return nn.functional.cross_entropy(self.head(words + mixed) * self.scale + self.frozen.sum(), batch)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def check_parameters_of_all_kinds_and_batches_that_do_not_divide():
    for strategy in BOTH:
        data = [torch.arange(size) % 10 for size in (8, 10, 3, 10)]
        model, reference = Odd(), Odd()
        trainer(strategy).fit(model, data)
        plain(reference, data)
        assert_close(model, reference)
        assert model.head.weight is model.embed.weight


def check_batches_ahead():
    data = [sample for x, y in batches(4) for sample in zip(x, y, strict=True)]
    models = []
    for prefetch in (0, 2):
        models.append(Net())
        trainer(SPMDStrategy(prefetch=prefetch)).fit(models[-1], DataLoader(data, batch_size=6))
    assert_equal(*models)


class Sees(Net):
    def training_step(self, batch, batch_idx):
        self.batch_is = sharding(batch[0])
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        self.weights_are = [sharding(parameter) for parameter in self.parameters()]
        state = self.trainer.optimizers[0].state
        self.moments_are = [sharding(state[parameter]["exp_avg"]) for parameter in self.parameters()]


def check_what_is_divided():
    devices = "0,1,2,3}"
    for strategy in BOTH:
        model = Sees()
        trainer(strategy).fit(model, batches(3))
        assert model.batch_is == "{devices=[4,1]" + devices
        if strategy == "xla_fsdp":
            # (8, 4), (8,), (2, 8), (2,)
            wanted = ["{devices=[4,1]" + devices, "{devices=[4]" + devices, "{devices=[1,4]" + devices, "{replicated}"]
            assert model.weights_are == model.moments_are == wanted, (model.weights_are, model.moments_are)
        else:
            assert not any("devices" in each for each in model.weights_are), model.weights_are
        assert not any(module._forward_hooks for module in model.modules())  # nothing is left on the user's module


def check_one_graph_per_step_and_nothing_read():
    for strategy in BOTH:
        counting = CountSteps()
        trainer(strategy, callbacks=[counting], gradient_clip_val=0.1).fit(Net(schedule=True, dropout=0.1), batches(9))
        one = {"compiled": 0, "run": 1, "read": 0, "items": 0, "fallbacks": 0}
        assert counting.steps[4:] == [one] * 5, counting.steps


class Normed(Net):
    def __init__(self):
        super().__init__(optimizer="sgd")
        self.net[1] = nn.BatchNorm1d(8)


def check_a_batch_norm_sees_the_whole_batch():
    model, reference = Normed(), Normed()
    trainer("xla_spmd").fit(model, batches(6))
    plain(reference, batches(6))
    torch.testing.assert_close(model.net[1].running_mean, reference.net[1].running_mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.net[3].weight, reference.net[3].weight, rtol=1e-3, atol=1e-3)


def check_bf16():
    losses = []
    for precision in ("bf16-mixed", "bf16-true", "32-true"):
        run = trainer("xla_fsdp", precision=precision, max_epochs=3)
        run.fit(Net(optimizer="sgd"), batches())
        losses.append(float(run.callback_metrics["loss_epoch"]))
    assert max(losses) - min(losses) < 2e-2, losses


class Saves(Net):
    path = ""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.fit_loop.total_batches == 5 and self.path:
            self.trainer.save_checkpoint(self.path)


def check_a_resumed_run_is_equal_to_the_bit():
    for strategy in BOTH:
        models = []
        path = str(FOLDER / f"{strategy}.ckpt")
        for model, seed, resume in ((Saves(dropout=0.5), 3, None), (Saves(dropout=0.5), 9, path)):
            model.path = "" if resume else path
            seed_everything(seed)
            loader = DataLoader(batches(8), batch_size=None, shuffle=True)
            trainer(strategy, max_epochs=2).fit(model, loader, ckpt_path=resume)
            models.append(model)
        assert_equal(*models)


def check_a_checkpoint_is_whole_and_goes_anywhere():
    """Host copies of the parts' whole: torch's distributed checkpoint would write none of a divided tensor."""
    reference = Net()
    plain(reference, batches(8))
    for strategy in BOTH:
        for plugins in ([], ["dcp"]):
            path = str(FOLDER / f"{strategy}{len(plugins)}")
            run, model = trainer(strategy, max_steps=4, plugins=plugins), Net()
            model.on_train_end = lambda run=run, path=path: run.save_checkpoint(path)
            run.fit(model, batches(8))
            going_on = Net(seed=5)
            trainer("auto", accelerator="cpu", max_steps=8, plugins=plugins).fit(going_on, batches(8), ckpt_path=path)
            assert_close(going_on, reference)
            back = Net(seed=6)
            trainer(strategy, max_steps=8, plugins=plugins).fit(back, batches(8), ckpt_path=path)
            assert_close(back, reference)


def check_an_error_leaves_nothing_behind():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no such luck")

    model = Fails()
    raises(RuntimeError, "no such luck", lambda: trainer("xla_fsdp").fit(model, batches(1)))
    assert next(model.parameters()).device.type == "cpu"
    assert not any(module._forward_hooks for module in model.modules())


def check_all_devices_or_an_error():
    raises(ConfigurationError, "must be all 4", lambda: trainer("xla_spmd", devices=2).fit(Net(), batches(1)))
    raises(UnsupportedCombinationError, "2 processes", lambda: trainer("xla_spmd", devices=4, num_nodes=2))


def main(results):
    found = {}
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
