"""What the stub keeps of Gaudi. In lazy mode without 64-bit whole numbers, or in eager mode with them."""

import os
import tempfile

import torch
import torch.distributed as dist

before = dict(os.environ)

import habana_frameworks.torch as htorch  # noqa: E402
import habana_frameworks.torch.core as htcore  # noqa: E402
import habana_frameworks.torch.hpu as hpu  # noqa: E402
from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu  # noqa: E402
from habana_frameworks_stub import trace  # noqa: E402

LAZY = os.environ.get("PT_HPU_LAZY_MODE") != "0"


def refused(kind, words, function, *args, **options):
    try:
        function(*args, **options)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


assert "+stub" in htorch.__version__ and hpu.__simulator__ and torch.hpu is hpu
assert htcore.is_lazy() is LAZY and torch.accelerator.current_accelerator().type == "hpu"
assert "MASTER_ADDR" in before or os.environ["MASTER_ADDR"] == "localhost", "as the vendor's import does"

# numbers
assert "0.2500" in str(torch.full((2,), 0.25, device="hpu"))
for dtype in (torch.float64, torch.complex64):
    refused(TypeError, "hpu has no tensors", torch.ones(2, dtype=dtype).to, "hpu")
wide = torch.tensor([5, 2**40 + 5])
assert wide.to("hpu").cpu().tolist() == ([5, 5] if LAZY else [5, 2**40 + 5])

# one device
refused(RuntimeError, "only device 0", hpu.get_rng_state, 1)
refused(RuntimeError, "states len of 1", hpu.set_rng_state_all, [hpu.get_rng_state(), hpu.get_rng_state()])
refused(ValueError, "Expected a hpu device", hpu.memory_stats, "cpu")
refused(TypeError, "", hpu.synchronize, 0)
torch.manual_seed(3)
assert hpu.initial_seed() == 3 and len(hpu.get_rng_state_all()) == 1
refused(AssertionError, "only supported device idx is 0", hpu.set_device, 1)
os.environ["HABANA_VISIBLE_MODULES"] = "6,2"
hpu.set_device(1)
assert os.environ["HLS_MODULE_ID"] == "2"
hpu.set_device(0)
assert os.environ["HLS_MODULE_ID"] == "2", "a process keeps its module"
del os.environ["HLS_MODULE_ID"]
assert initialize_distributed_hpu(world_size=2, rank=3, local_rank=0) == (2, 3, 0)
assert os.environ["HLS_MODULE_ID"] == "6" and os.environ["ID"] == os.environ["RANK"] == "3"

# marks
done = []
start = len(trace.marks())
torch.ones(2, device="hpu").add_(1)
htcore.add_step_closure(done.append, (1,))
htcore.mark_step("hpu", sync=True)
htcore.mark_step()
assert done == ([1] if LAZY else []) and trace.marks()[start + 1 :] == ([0] if LAZY else [])
assert trace.unmarked() == 0 or not LAZY

# what stands in the place of torch's functions
refused(TypeError, "device_id", dist.init_process_group, "hccl", device_id=torch.device("hpu"))
refused(TypeError, "group_desc", dist.new_group, group_desc="mine")
weight = torch.ones(3, device="hpu")
with tempfile.TemporaryFile() as file:
    torch.save({"a": weight, "b": weight}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["a"].device.type == ("cpu" if LAZY else "hpu")
    tied = loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()
    assert tied is not LAZY, "in lazy mode each tensor is copied by itself"
