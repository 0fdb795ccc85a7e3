"""Two ranks, in the processes that the first Trainer starts: every algorithm with what a Trainer asks of it."""

import os
import sys
import time

import torch
import torch.distributed as dist
from modelling import BATCH, LR, QUIET, STEPS, Net, dataset, difference, loader, made, plain, plain_qadam, to_all
from torch import nn
from torch.optim.lr_scheduler import StepLR

from torchhal import Callback, Trainer
from torchhal.resolve import Request, resolve
from torchhal_bagua import BaguaStrategy


def trained(strategy, cls=Net, *, model=None, ckpt_path=None, validate=False, **options):
    torch.manual_seed(0)
    model = made(cls) if model is None else model
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **{"max_epochs": 2, **QUIET, **options})
    trainer.fit(model, loader(), loader() if validate else None, ckpt_path=ckpt_path)
    return trainer, model


def bagua(algorithm="gradient_allreduce", **options):
    return BaguaStrategy(algorithm=algorithm, **options)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Branched(Net):
    """A part that every third step leaves out, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        x = self.body(batch[0])
        return nn.functional.mse_loss(self.head(x if batch_idx % 3 else nn.Linear.forward(self, x)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)  # momentum would act on gradients of zero


class Replicas(Callback):
    """The weights of both ranks, at the end of training and before they are brought together."""

    def on_train_end(self, trainer, module):
        self.flats = trainer.strategy.all_gather(nn.utils.parameters_to_vector(module.parameters()).detach())


def like_ddp(folder):
    """gradient_allreduce is ddp to the bit, whatever the Trainer is asked for."""
    for cls, options, own in (
        (Net, {}, {}),
        (Net, {}, {"flatten": False}),
        (Scheduled, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 4}, {"bucket_cap_mb": 1e-4}),
        (Scheduled, {"precision": "bf16-mixed"}, {"hierarchical": True}),
        (Branched, {}, {"find_unused_parameters": True}),
        (Net, {"precision": "16-mixed"}, {}),
    ):
        reference = "ddp_find_unused_parameters_true" if cls is Branched else "ddp"
        _, expected = trained(reference, cls, **options)
        trainer, model = trained(bagua(**own), cls, **options)
        apart = difference(model.state_dict(), expected.state_dict())
        assert apart == 0, (cls, options, own, apart)
        assert trainer.global_step == (4 if "accumulate_grad_batches" in options else 2 * STEPS)
    trainer.print("like_ddp", flush=True)


class LeftAlone(Net):
    """Parameters that Bagua and ddp leave to each rank."""

    _bagua_params_and_buffers_to_ignore = (".bias",)
    _ddp_params_and_buffers_to_ignore = ("head.bias",)


class ByItself(Replicas):
    """Each rank changes its own."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with torch.no_grad():
            module.bias.add_(trainer.global_rank)
            module.head.bias.add_(trainer.global_rank)


def left_alone(folder):
    """What is each rank's own by the user's word is not compared when the fit ends."""
    replicas = ByItself()
    trainer, _ = trained(bagua(), LeftAlone, callbacks=[replicas])
    assert not torch.equal(*replicas.flats)
    trainer.print("left_alone", flush=True)


class Odd(Net):
    """Tied, frozen and 0-dim parameters, odd sizes, and running statistics."""

    def __init__(self):
        super().__init__()
        self.wide, self.tied, self.back = nn.Linear(7, 3), nn.Linear(7, 3), nn.Linear(3, 7)
        self.tied.weight = self.wide.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(7)

    def training_step(self, batch, batch_idx):
        x = self.norm(batch[0])
        x = x + self.scale * self.back(self.frozen + torch.tanh(self.wide(x) + self.tied(x)))
        return super().training_step((x, batch[1]), batch_idx)

    def flat(self):
        return torch.cat([tensor.detach().flatten() for tensor in self.state_dict().values()])


def odd(folder):
    """Whatever ranks had of their own is one on all of them afterwards, and in a checkpoint."""

    class Before(Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(f"{folder}/odd.ckpt")
            self.flats = trainer.strategy.all_gather(module.flat())

    _, expected = trained("ddp", Odd)
    for name, options in (
        ("gradient_allreduce", {"flatten": False, "bucket_cap_mb": 1e-5}),
        ("bytegrad", {}),
        ("decentralized", {"hierarchical": False}),
        ("low_precision_decentralized", {"hierarchical": False}),
        ("async", {"sync_interval_ms": 1}),
    ):
        before = Before()
        _, model = trained(bagua(name, **options), Odd, callbacks=before, validate=name != "bytegrad")
        flats = strategy_of_all(model.flat(), folder)
        assert torch.equal(flats[0], flats[1]), name
        # running statistics at least, unless a validation was the last to happen
        assert torch.equal(before.flats[0], before.flats[1]) == (name == "gradient_allreduce"), name
        state = torch.load(f"{folder}/odd.ckpt", weights_only=True)["state_dict"]
        assert difference(state, model.state_dict()) < 1e-6, name
        if name == "gradient_allreduce":
            assert difference(dict(model.named_parameters()), dict(expected.named_parameters())) == 0
        elif name == "bytegrad":
            assert torch.equal(flats[0], before.flats[0])
        elif name != "async":  # which goes on until the end
            assert (flats[0] - before.flats.mean(0)).abs().max() < 1e-5, name
        assert model.tied.weight is model.wide.weight and model.frozen.tolist() == [1, 1, 1] and model.scale != 1.5


def summed(folder):
    """``average=False`` adds up: a mean of twice the gradient."""

    class Half(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR / 2, momentum=0.9)

    _, expected = trained("ddp")
    _, model = trained(bagua(average=False), Half)
    assert difference(model.state_dict(), expected.state_dict()) < 1e-6


def in_bytes(folder):
    """One step of bytegrad is off by no more than two quantizations allow, and not by nothing."""
    x, y = dataset()[:BATCH]
    model = made()
    ranges = []
    for rank in range(2):  # what a rank sends, and their mean, lie within the widest range
        model.zero_grad()
        nn.functional.mse_loss(model(x[rank::2]), y[rank::2]).backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        ranges.append((flat.max() - flat.min()).item())
    step = max(ranges) / 255
    _, exact = trained("ddp", max_steps=1)
    for hierarchical in (True, False):
        strategy = bagua("bytegrad", hierarchical=hierarchical)
        _, model = trained(strategy, max_steps=1)
        off = difference(model.state_dict(), exact.state_dict())
        assert 0 < off <= LR * 2 * step * 1.01, (hierarchical, off, LR * 2 * step)
    seen = Replicas()
    _, exact = trained("ddp")
    _, model = trained(bagua("bytegrad"), callbacks=seen, gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert torch.equal(seen.flats[0], seen.flats[1])
    print("in_bytes", flush=True)


def overflow(folder):
    """A gradient that is not finite is so on every rank after bytegrad: a scaled loss skips the step together."""

    class Burst(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 2 and self.trainer.global_rank == 1 else loss

        trainer = None

    seen = Replicas()
    trainer, _ = trained(bagua("bytegrad"), Burst, precision="16-mixed", callbacks=seen, max_epochs=1)
    assert torch.equal(seen.flats[0], seen.flats[1]) and seen.flats.isfinite().all()
    scale = trainer.strategy.precision.state_dict()["scale"]
    assert scale == 2**15, scale  # halved once, by one overflow


def momentum(folder):
    """qadam: as its own optimizer on mean gradients while it warms up, near it afterwards, and resumed to the bit."""
    from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

    class Adam(Net):
        warmup = 100

        def configure_optimizers(self):
            optimizer = QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=self.warmup)
            return [optimizer], [{"scheduler": StepLR(optimizer, 4, 0.5), "interval": "step"}]

    class Plain(Net):
        """The same steps on the mean gradients, by torch's Adam."""

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [{"scheduler": StepLR(optimizer, 4, 0.5), "interval": "step"}]

    _, expected = trained("ddp", Plain)
    _, model = trained(bagua("qadam"), Adam)
    assert difference(model.state_dict(), expected.state_dict()) < 1e-5

    class Short(Adam):
        warmup = 3

    seen = Replicas()
    trainer, whole = trained(bagua("qadam"), Short, callbacks=seen)
    assert torch.equal(seen.flats[0], seen.flats[1])
    expected, off = plain_qadam(lr=0.01, warmup=3)
    vectors = [torch.cat([state[name].flatten() for name in expected]) for state in (expected, whole.state_dict())]
    apart = (vectors[0] - vectors[1]).abs()
    assert apart.max() > 0 and (apart <= off).all(), (apart.max(), off.max())
    half, _ = trained(bagua("qadam"), Short, max_epochs=1)
    half.save_checkpoint(f"{folder}/qadam.ckpt")
    _, resumed = trained(bagua("qadam"), Short, ckpt_path=f"{folder}/qadam.ckpt")
    assert difference(resumed.state_dict(), whole.state_dict()) == 0
    trainer.print("momentum", flush=True)


def resumed(folder):
    """Exact where ranks have the same weights; in the midst of an accumulation too."""
    options = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}
    _, whole = trained(bagua(), Scheduled, **options)

    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 1:
                trainer.save_checkpoint(f"{folder}/midst.ckpt")

    trained(bagua(), Scheduled, callbacks=Saves(), **options)
    torch.manual_seed(5)
    trainer, model = trained(bagua(), Scheduled, model=Scheduled(), ckpt_path=f"{folder}/midst.ckpt", **options)
    assert difference(model.state_dict(), whole.state_dict()) < 1e-6
    # a checkpoint of one strategy is another's
    _, model = trained("ddp", Scheduled, ckpt_path=f"{folder}/midst.ckpt", **options)
    assert difference(model.state_dict(), whole.state_dict()) < 1e-6
    trainer.print("resumed", flush=True)


def own_weights(folder):
    """Ranks with weights of their own: consensus in checkpoints and at the end, also resumed and with accumulation."""
    expected = plain(to_all, 2, resumed_at=STEPS)
    for name in ("decentralized", "low_precision_decentralized"):
        trainer, model = trained(bagua(name, hierarchical=False), validate=True, max_epochs=1)
        trainer.save_checkpoint(f"{folder}/own.ckpt")
        state = torch.load(f"{folder}/own.ckpt", weights_only=True)["state_dict"]
        assert difference(state, model.state_dict()) == 0
        flats = torch.stack([torch.cat([p.flatten() for p in model.parameters()]).detach()] * 2)
        assert torch.equal(flats[0], flats[1])
        seen = Replicas()
        trainer, model = trained(bagua(name, hierarchical=False), ckpt_path=f"{folder}/own.ckpt", callbacks=seen)
        assert trainer.global_step == 2 * STEPS
        if name == "decentralized":  # it continues from the mean, where replicas of an unbroken run are a step apart
            assert difference(model.state_dict(), expected) < 1e-6
        assert not torch.equal(seen.flats[0], seen.flats[1])
        mean = nn.utils.parameters_to_vector(model.parameters())
        assert (mean - seen.flats.mean(0)).abs().max() < 1e-6
    # micro-batches of one step: the mean weights first, then the gradients of this rank alone
    _, model = trained(bagua("decentralized", hierarchical=False), accumulate_grad_batches=3, gradient_clip_val=1.0)
    trainer.print("own_weights", flush=True)


class Slow(Net):
    """Rank 1 needs longer for a batch; validation must see weights that nobody changes."""

    trainer = None

    def training_step(self, batch, batch_idx):
        time.sleep(0.02 if self.trainer.global_rank else 0.004)
        if batch_idx == 4:
            return None
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        algorithm = self.trainer.strategy.model.bagua_algorithm
        assert algorithm.status.name in ("NEW", "STOPPED"), algorithm.status
        flat = nn.utils.parameters_to_vector(self.parameters()).detach().clone()
        if batch_idx:
            assert torch.equal(flat, self.before)
        self.before = flat
        time.sleep(0.003)
        return super().validation_step(batch, batch_idx)


def background(folder):
    """async: averages run while training does, and not while it validates, saves, or is over."""

    class Rounds(Replicas):
        rounds = 0

        def on_train_end(self, trainer, module):
            super().on_train_end(trainer, module)
            self.rounds = trainer.strategy.model.bagua_buckets[0].async_op.rounds
            trainer.save_checkpoint(f"{folder}/async.ckpt")

    for warmup in (0, 3):
        seen = Rounds()
        strategy = bagua("async", sync_interval_ms=1, warmup_steps=warmup)
        trainer, model = trained(
            strategy,
            Slow,
            callbacks=seen,
            validate=True,
            max_epochs=3,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
        )
        assert seen.rounds > 3, seen.rounds
        flats = strategy_of_all(nn.utils.parameters_to_vector(model.parameters()).detach(), folder)
        assert torch.equal(flats[0], flats[1])
        state = torch.load(f"{folder}/async.ckpt", weights_only=True)["state_dict"]
        assert difference(state, model.state_dict()) < 1e-6
    # as long as it warms up it is gradient_allreduce
    _, expected = trained("ddp")
    _, model = trained(bagua("async", warmup_steps=1000), validate=True)
    assert difference(model.state_dict(), expected.state_dict()) == 0
    _, model = trained(bagua("async", sync_interval_ms=1), Slow, ckpt_path=f"{folder}/async.ckpt", max_epochs=4)
    trainer.print("background", flush=True)


def strategy_of_all(flat, folder):
    """``flat`` of both ranks, through files: no strategy is set up."""
    rank = int(os.environ.get("RANK", "0"))
    torch.save(flat, f"{folder}/rank{rank}.part")
    os.replace(f"{folder}/rank{rank}.part", f"{folder}/rank{rank}")
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{folder}/rank{1 - rank}") and time.monotonic() < deadline:
        time.sleep(0.01)
    flats = [torch.load(f"{folder}/rank{each}") for each in (0, 1)]
    open(f"{folder}/seen{rank}", "w").close()
    while not os.path.exists(f"{folder}/seen{1 - rank}"):
        time.sleep(0.01)
    time.sleep(0.2)
    for name in (f"rank{rank}", f"seen{rank}"):
        if os.path.exists(f"{folder}/{name}"):
            os.remove(f"{folder}/{name}")
    time.sleep(0.2)
    return flats


def afterwards(folder):
    """The module and its optimizer are the user's again, and nothing of the ranks stays in the environment."""
    before = {name: os.environ.get(name) for name in ("RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "BAGUA_AUTOTUNE")}
    for strategy in (bagua(autotune=False), bagua("decentralized"), bagua("low_precision_decentralized")):
        trainer, model = trained(strategy, Scheduled)
        assert {name: os.environ.get(name) for name in before} == before
        optimizer = trainer.optimizers[0]
        assert not hasattr(optimizer, "_bagua_original_step")
        if int(os.environ.get("RANK", "0")) == 0:  # this would wait for rank 1 if it were still Bagua's
            batch = dataset()[:BATCH]
            model.training_step(batch, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(made(Scheduled).state_dict())
        trained(strategy, Scheduled, model=model)  # the same module and the same strategy again
        starts = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert len(starts) == len(list(model.parameters())), "each parameter in memory of its own"
    assert not dist.is_initialized()
    trainer.print("afterwards", flush=True)


def collectives(folder):
    """reduce, broadcast and barrier go through Bagua, and what it can't send through torch."""
    strategy = resolve(Request(accelerator="cpu", strategy="bagua", devices=2)).build()
    strategy.make_launcher().launch(_collectives, strategy)
    print("collectives", flush=True)


def _collectives(strategy):
    from bagua.torch_api import communication

    strategy.setup_environment()
    try:
        rank = strategy.global_rank
        ranks = communication._default_group().get_global_communicator()

        def sent(function, *arguments):
            before = ranks.sent
            result = function(*arguments)
            return result, ranks.sent - before

        value = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t() * (rank + 1)
        for op, expected in (("mean", 1.5), ("sum", 3.0), ("min", 1.0), ("max", 2.0), ("product", 2.0)):
            result, size = sent(strategy.reduce, value, op)
            base = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
            assert torch.equal(result, base**2 * 2 if op == "product" else base * expected) and size == 16, op
        (number, wide), size = sent(strategy.reduce, (3 * rank, torch.full((2,), rank + 0.5, dtype=torch.float64)))
        assert number == 1.5 and wide.dtype == torch.float64 and wide.tolist() == [1.0, 1.0] and size == 0
        assert strategy.reduce(torch.zeros(0)).shape == (0,)
        (found, there), size = sent(strategy.broadcast, ({"a": torch.full((3,), float(rank))}, f"rank {rank}"), 1)
        assert found["a"].tolist() == [1.0] * 3 and there == "rank 1" and size > 8
        _, size = sent(strategy.barrier, "of the test")
        assert size == 4
        assert strategy.reduce_boolean_decision(rank == 0, all=False) is True
        assert strategy.all_gather(torch.tensor([rank])).tolist() == [[0], [1]]
    finally:
        strategy.teardown()


CHECKS = (
    like_ddp,
    left_alone,
    odd,
    summed,
    in_bytes,
    overflow,
    momentum,
    resumed,
    own_weights,
    background,
    afterwards,
    collectives,
)

if __name__ == "__main__":
    for check in CHECKS:
        if len(sys.argv) < 3 or check.__name__ in sys.argv[2:]:
            begin = time.time()
            check(sys.argv[1])
            print(f"# {check.__name__} {time.time() - begin:.1f} s", flush=True)
