"""In a rank of a test's world: what Colossal-AI itself does, without a strategy of torchhal's around it."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

from torchhal import Trainer
from torchhal.strategies import DDPStrategy


def in_group(function, *args):
    """Call ``function`` in the process group of this world's ranks, as a run would; return its result, or its error."""
    return _in_group(True, False, function, *args)


def without_streams(function, *args):
    """Call it without the accelerator for the CPU that a run has."""
    return _in_group(False, False, function, *args)


def with_the_check(function, *args):
    """Call it with ZeRO's check of the device."""
    return _in_group(True, True, function, *args)


def _in_group(accelerator, checks_device, function, *args):
    from contextlib import ExitStack

    from torchhal_colossalai import _sdk as sdk

    trainer = Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(), logger=False, enable_checkpointing=False)
    strategy = trainer.strategy
    strategy.make_launcher()
    strategy.setup_environment()
    try:
        sdk.load()
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if accelerator:
                stack.enter_context(sdk.session("cpu"))
            if not checks_device:
                stack.enter_context(sdk.unchecked_device())
            try:
                return function(*args)
            except (RuntimeError, AssertionError, IndexError, KeyError, ValueError, NotImplementedError) as error:
                return f"{type(error).__name__}: {error}"
    finally:
        strategy.teardown()


def boost(module, optimizer, **options):
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin

    options = {"precision": "fp32", "master_weights": False, "overlap_communication": False, **options}
    booster = Booster(plugin=LowLevelZeroPlugin(**options))
    boosted, zero, *_ = booster.boost(module, optimizer)
    return booster, boosted, zero


def boosted(build=None, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(1)
    module = nn.Linear(4, 4) if build is None else build()
    return boost(module, optimizer(module.parameters(), lr=0.1), **options)


def made(build=None, optimizer=torch.optim.SGD, options=None):
    boosted(build, optimizer, **(options or {}))
    return "made"


def frozen():
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(False)
    *_, zero = boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return sum(map(len, zero._working_param_groups.values()))


def users_groups():
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    boost(module, optimizer)
    own = {id(parameter) for parameter in module.parameters()}
    return [id(each) in own for each in optimizer.param_groups[0]["params"]]


def first_group_is_empty():
    module = nn.Linear(4, 4)
    boost(module, torch.optim.SGD([{"params": []}, {"params": list(module.parameters())}], lr=0.1))
    return "made"


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3).t())


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(0, 3))


def double_weights():
    """Return the dtypes of float64 weights that ZeRO steps, by its default."""
    *_, zero = boosted(lambda: nn.Linear(4, 4).double(), master_weights=True)
    return {each.dtype for each in zero.master_to_working_param and zero.working_to_master_param.values()}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))


def other_branches():
    """Let each rank use another parameter; return the gradients that the rank ends with."""
    module = Branches()
    booster, _, zero = boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
    used = (module.first, module.second)[dist.get_rank()]
    booster.backward((used * (dist.get_rank() + 1)).sum(), zero)
    whole = [zero.get_param_grad(each) for each in (module.first, module.second) if each is used]
    return [each.tolist() for each in whole], module.first.grad is None


def state_of_nadam():
    booster, boosted_module, zero = boosted(optimizer=torch.optim.NAdam)
    booster.backward(boosted_module(torch.ones(2, 4)).sum(), zero)
    zero.step()
    zero.state_dict()
    return "told"


def backward_without_sync():
    booster, boosted_module, zero = boosted(stage=2)
    with zero.no_sync():
        booster.backward(boosted_module(torch.ones(2, 4)).sum(), zero)
    return "went back"


def closure():
    *_, zero = boosted()
    zero.step(lambda: None)
    return "stepped"


def plugins_name():
    from colossalai.booster.plugin import LowLevelZeroPlugin

    LowLevelZeroPlugin.__name__ = before = "LowLevelZeroPlugin"
    LowLevelZeroPlugin(stage=2, precision="fp32")
    return before, LowLevelZeroPlugin.__name__


def coordinator():
    """Return whether the ranks' coordinator is another object in a session of its own."""
    from colossalai.cluster import DistCoordinator

    from torchhal_colossalai import _sdk as sdk

    first = DistCoordinator()
    kept = DistCoordinator() is first
    with sdk.session("cpu"):
        inside = DistCoordinator() is first
    return kept, inside, DistCoordinator() is first


def cast():
    """Return whether an optimizer of Colossal-AI's keeps its state where a plugin exchanges it."""
    from colossalai.nn.optimizer import Lamb, cast_to_distributed

    parameter = nn.Parameter(torch.ones(4))
    optimizer = Lamb([parameter], lr=0.1)
    optimizer.state[parameter]["exp_avg"] = torch.ones(4)
    other = cast_to_distributed(optimizer)
    return other is optimizer, dict(other.state)


def batch_norms(patched):
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchDDPPlugin

    from torchhal_colossalai import _sdk as sdk

    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if patched:
        with sdk.unconverted_batchnorms():
            Booster(plugin=TorchDDPPlugin()).boost(module)
    else:
        Booster(plugin=TorchDDPPlugin()).boost(module)
    return type(module[1]).__name__


def gemini():
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.booster.plugin import gemini_plugin as own
    from colossalai.nn.optimizer import CPUAdam, FusedAdam, HybridAdam
    from colossalai.zero.gemini import gemini_optimizer

    assert own.SUPPORTED_PRECISION == ["fp16", "bf16"]
    assert {FusedAdam, CPUAdam, HybridAdam} == gemini_optimizer._AVAIL_OPTIM_LIST
    module = nn.Linear(4, 4)
    plugin = GeminiPlugin(precision="bf16", pin_memory=True)
    Booster(plugin=plugin).boost(module, torch.optim.Adam(module.parameters()))
    return "boosted"


def hybrid():
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    module = nn.Linear(4, 4)
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32")
    Booster(plugin=plugin).boost(module, torch.optim.Adam(module.parameters()))
    return "boosted"
