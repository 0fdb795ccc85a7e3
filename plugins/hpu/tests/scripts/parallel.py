"""Two cards: the strategies in turn, in the processes that the first Trainer starts. HABANA_VISIBLE_MODULES is 5,3."""

import os
import sys

import torch
import torch.distributed as dist
from modelling import BATCH, Net, difference, loader, plain

from torchhal import Callback, Trainer
from torchhal_hpu import HPUParallelStrategy

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}


class Inside(Callback):
    """What holds while the ranks are together."""

    def on_train_start(self, trainer, module):
        rank = trainer.global_rank
        assert os.environ["HLS_MODULE_ID"] == "35"[rank], os.environ["HLS_MODULE_ID"]
        assert os.environ["ID"] == os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == "2"
        assert module.device == torch.device("hpu", 0) and dist.get_backend(dist.group.WORLD) != "gloo"
        assert trainer.strategy.mark_step is not None
        group = dist.new_group([0, 1], backend="hccl")
        number = torch.tensor(rank + 1.0, device="hpu")
        dist.all_reduce(number, group=group)
        assert number.item() == 3.0
        try:
            dist.all_reduce(number, dist.ReduceOp.AVG, group=group)
        except RuntimeError:
            pass
        else:
            raise AssertionError("HCCL has no ReduceOp.AVG")
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError:
            pass
        else:
            raise AssertionError("HCCL carries no tensors of the CPU")


def trained(strategy, **options):
    torch.manual_seed(0)
    model = Net()
    trainer = Trainer(accelerator="hpu", devices=[1, 0], strategy=strategy, callbacks=Inside(),
                      **{"max_epochs": 2, **QUIET, **options})  # fmt: skip
    ckpt_path = options.pop("ckpt_path", None)
    trainer.fit(model, loader(BATCH // 2), loader(BATCH // 2), ckpt_path=ckpt_path)
    return trainer, model


def main(folder):
    for strategy in ("ddp", HPUParallelStrategy(fused_clip_norm=True), "fsdp", "zero1"):
        options = {} if isinstance(strategy, str) else {"gradient_clip_val": 0.3}
        trainer, model = trained(strategy, **options)
        apart = difference(model.state_dict(), plain(clip=options.get("gradient_clip_val")))
        assert apart < 1e-5, (strategy, apart)
        if strategy == "ddp":
            assert type(trainer.strategy) is HPUParallelStrategy and trainer.strategy.alias == "hpu_parallel"
        trainer.print(type(trainer.strategy).__name__, flush=True)

    half, _ = trained("ddp", max_epochs=1)
    half.save_checkpoint(f"{folder}/half.ckpt")
    torch.manual_seed(7)
    resumed = Net()
    trainer = Trainer(accelerator="hpu", devices=[1, 0], strategy="ddp", max_epochs=2, **QUIET)
    trainer.fit(resumed, loader(BATCH // 2), loader(BATCH // 2), ckpt_path=f"{folder}/half.ckpt")
    assert difference(resumed.state_dict(), plain()) < 1e-5
    if "TORCHHAL_LAUNCH_ID" not in os.environ:  # the process that the user started
        left = [name for name in ("RANK", "WORLD_SIZE", "ID", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
        assert not left, left
    assert not dist.is_initialized()
    trainer.print("resumed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
