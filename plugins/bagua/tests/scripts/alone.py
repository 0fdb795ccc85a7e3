"""One rank: the algorithms work there too, and whatever Bagua can't do is refused with both sides named."""

import os

import torch
from modelling import QUIET, Net, dataset, difference, made
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal_bagua import BaguaStrategy


def trained(cls=Net, *, strategy=None, trainer=None, **options):
    model = made(cls)
    strategy = strategy or BaguaStrategy(**options)
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, **{"max_epochs": 1, **QUIET, **(trainer or {})})
    trainer.fit(model, DataLoader(dataset(), batch_size=8))
    return model.state_dict()


def raises(kind, *words, **options):
    function = options.pop("function", trained)
    try:
        function(**options)
    except kind as error:
        for word in words:
            assert word in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} for {options}")


def alone():
    expected = trained(strategy="single_device")
    for name in ("gradient_allreduce", "decentralized"):
        assert difference(trained(algorithm=name), expected) == 0, name
    for name in ("bytegrad", "low_precision_decentralized"):
        assert 0 < difference(trained(algorithm=name), expected) < 0.1, name
    trained(algorithm="async", sync_interval_ms=1)
    assert "BAGUA_STUB" in os.environ and "RANK" not in os.environ and "MASTER_ADDR" not in os.environ


def options():
    made = BaguaStrategy
    raises(ConfigurationError, "'algorithm'", "'bytegrad'", function=made, algorithm="byte_grad")
    raises(TypeError, "'warmup_steps'", "bytegrad", "hierarchical", function=made, algorithm="bytegrad", warmup_steps=3)
    raises(TypeError, "'sync_ms'", "sync_interval_ms", function=made, algorithm="async", sync_ms=3)
    raises(ConfigurationError, "'sync_interval_ms'", "(got 0)", function=made, algorithm="async", sync_interval_ms=0)
    raises(ConfigurationError, "'warmup_steps'", "True", function=made, algorithm="async", warmup_steps=True)
    raises(ConfigurationError, "'flatten'", "'async'", function=made, algorithm="async", flatten=False)
    raises(ConfigurationError, "'shift_one'", function=made, algorithm="decentralized", peer_selection_mode="ring")
    raises(ConfigurationError, "'hierarchical'", "a bool", function=made, hierarchical=1)
    raises(ConfigurationError, "'service_port'", "70000", function=made, service_port=70000)
    raises(ConfigurationError, "'autotune'", "2", function=made, autotune=2)
    raises(ConfigurationError, "'bucket_cap_mb'", function=made, bucket_cap_mb=0)
    raises(ConfigurationError, "'start_method'", function=made, start_method="thread")


def combinations():
    def trainer(precision="32-true", devices=2, accelerator="cpu", **options):
        Trainer(accelerator=accelerator, devices=devices, precision=precision, strategy=BaguaStrategy(**options))

    for name in ("decentralized", "low_precision_decentralized", "async", "qadam"):
        raises(UnsupportedCombinationError, repr(name), "'16-mixed'", function=trainer, precision=16, algorithm=name)
    raises(
        UnsupportedCombinationError, "'async'", "'16-true'", function=trainer, precision="16-true", algorithm="async"
    )
    raises(UnsupportedCombinationError, "Bagua", "'64-true'", function=trainer, precision="64-true")
    shift_one = {"algorithm": "decentralized", "peer_selection_mode": "shift_one"}
    raises(UnsupportedCombinationError, "even number of nodes", "hierarchical=False", function=trainer, **shift_one)
    raises(
        UnsupportedCombinationError, "even number of ranks (got 3", function=trainer, devices=3, hierarchical=False,
        **shift_one,
    )  # fmt: skip


class Manual(Net):
    automatic_optimization = False


class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)


class Double(Net):
    def __init__(self):
        super().__init__()
        self.head.double()


class Half(Net):
    def __init__(self):
        super().__init__()
        self.head.half()


class Closure(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class HeadOnly(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Adam(Net):
    def configure_optimizers(self):
        from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

        return QAdamOptimizer(self.parameters(), warmup_steps=2)


class AdamOfHead(Net):
    def configure_optimizers(self):
        from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

        return QAdamOptimizer(self.head.parameters(), warmup_steps=2)


class Frozen(Adam):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


def models():
    for options in ({"algorithm": "bytegrad"}, {"algorithm": "decentralized"}, {"average": False}):
        raises(ModelError, "Manual", "automatic_optimization=False", cls=Manual, **options)
    raises(ModelError, "'words'", "sparse=True", cls=Sparse)
    raises(ModelError, "'head.weight'", "torch.float64", cls=Double)
    raises(ModelError, "torch.float32", "torch.float16", "one for all", cls=Half)
    raises(ModelError, "'head.weight'", "'async'", cls=Half, algorithm="async")
    raises(ModelError, "LBFGS", cls=Closure)
    raises(ModelError, "'weight'", "'bias'", "optimizer", cls=HeadOnly, algorithm="low_precision_decentralized")
    raises(Exception, "'spare.weight'", "find_unused_parameters=True", cls=Unused)
    raises(ConfigurationError, "QAdamOptimizer", "(got SGD)", algorithm="qadam")
    raises(ConfigurationError, "QAdamOptimizer", "'gradient_allreduce'", "torch.optim.Adam", cls=Adam)
    raises(ConfigurationError, "QAdamOptimizer", "requires_grad", cls=AdamOfHead, algorithm="qadam")
    accumulate, clip = {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}
    raises(ConfigurationError, "'qadam'", "'accumulate_grad_batches'", cls=Adam, algorithm="qadam", trainer=accumulate)
    raises(ConfigurationError, "'qadam'", "'gradient_clip_val'", cls=Adam, algorithm="qadam", trainer=clip)
    raises(
        ConfigurationError, "'communication_interval'", "'accumulate_grad_batches' (2)", trainer=accumulate,
        algorithm="low_precision_decentralized", communication_interval=3,
    )  # fmt: skip
    raises(Exception, "BAGUA_AUTOTUNE", autotune=True, function=in_a_child)


def in_a_child(**options):
    """Where Bagua has not been initialised yet."""
    import subprocess
    import sys

    code = f"import alone; alone.trained(**{options!r})"
    path = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


def ignored():
    """Parameters that the user takes out are each rank's own, by the names that a state has."""

    class Left(Net):
        _bagua_params_and_buffers_to_ignore = ("spare.weight", "spare.bias", "bias")

        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            ddp = self.trainer.strategy.model.inner
            names = {name for name, _ in ddp.bagua_build_params()}
            assert "module.weight" in names and not names & {"module.bias", "module.spare.weight"}, names
            return loss

        trainer = None

    trained(Left)


if __name__ == "__main__":
    for check in (alone, options, combinations, models, ignored):
        check()
        print(check.__name__, flush=True)
