"""One card in eager mode: the checks that share a process. Beside the stand-in for the transformer engine."""

import os
import sys
from pathlib import Path

import torch
from modelling import Net, difference, plain
from single import raises, trained
from torch import nn

from torchhal import Module, Trainer
from torchhal.errors import ModelError, UnsupportedCombinationError
from torchhal_hpu import FP8Precision, HPUMixedPrecision, HPUSingleStrategy


def op_lists():
    """Named before the bridge is imported; processes that are started inherit it."""
    assert "habana_frameworks.torch" not in sys.modules, "PT_HPU_AUTOLOAD=0 was to keep it out"
    lower, full = Path("lower.txt"), Path("fp32.txt")
    lower.write_text("mm\nmatmul\n\naddmm\n")
    full.write_text("cross_entropy_loss\n")
    for wrong, words in (("a b\n", "holds the line 'a b'"), ("\n", "holds nothing")):
        Path("wrong.txt").write_text(wrong)
        raises(ValueError, words, HPUMixedPrecision, fp32_ops="wrong.txt")
    raises(ValueError, "'lower_precision_ops' must be a file", HPUMixedPrecision, "nowhere.txt")
    precision = HPUMixedPrecision(lower, fp32_ops=full)
    assert os.environ["PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST"] == str(lower.absolute())
    assert os.environ["PT_HPU_AUTOCAST_FP32_OPS_LIST"] == str(full.absolute())
    _, model = trained(precision=precision)
    assert 1e-5 < difference(model.state_dict(), plain()) < 0.1
    HPUMixedPrecision(lower)  # the one in force
    raises(UnsupportedCombinationError, "'cpu'", Trainer, accelerator="cpu", precision=precision, logger=False)
    square = torch.rand(1, 3, 3, device="hpu")
    with torch.autocast("hpu", dtype=torch.bfloat16):
        assert torch.mm(square[0], square[0]).dtype == torch.bfloat16
        assert torch.bmm(square, square).dtype == torch.float32, "the list replaces the usual one"
        half = square[0].bfloat16()
        assert nn.functional.cross_entropy(half, torch.tensor([0, 1, 2]).to("hpu")).dtype == torch.float32
        assert nn.functional.mse_loss(half, half).dtype == torch.bfloat16


def no_marks():
    from habana_frameworks_stub import trace

    trainer, model = trained()
    assert difference(model.state_dict(), plain()) < 1e-5 and trace.marks() == []
    strategy = trainer.strategy
    assert strategy.accelerator.step_marker() is None and strategy.mark_step is None


def compiled():
    from habana_frameworks_stub import trace

    _, model = trained(strategy=HPUSingleStrategy(compile={"dynamic": False}))
    assert trace.compiled and difference(model.state_dict(), plain()) < 1e-5
    assert model._compiled_call_impl is None, "compiled for the run only"

    class Formless(Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        training_step = Net.training_step
        configure_optimizers = Net.configure_optimizers

    raises(ModelError, "Formless has none", trained, Formless, strategy=HPUSingleStrategy(compile=True))


def fp8():
    import intel_transformer_engine as engine

    _, model = trained(precision="fp8")
    assert set(engine.Linear.used) == {0} and type(model.head) is engine.Linear
    apart = difference(model.state_dict(), plain())
    assert 1e-4 < apart < 0.3, apart
    Net().load_state_dict(model.state_dict())
    engine.Linear.used.clear()
    recipe = engine.recipe.DelayedScaling(margin=1)
    _, model = trained(precision=FP8Precision(recipe, replace_layers=False), max_epochs=1)
    assert not engine.Linear.used and type(model.head) is nn.Linear
    trained(precision=FP8Precision(recipe), max_epochs=1)
    assert set(engine.Linear.used) == {1}

    class Shared(Net):
        def __init__(self):
            super().__init__()
            self.again = self.head

    _, model = trained(Shared, precision="fp8", max_epochs=1)
    assert model.again is model.head


if __name__ == "__main__":
    assert os.environ["PT_HPU_LAZY_MODE"] == "0" and torch.__version__
    for check in (op_lists, no_marks, compiled, fp8):
        check()
        print(check.__name__, flush=True)
