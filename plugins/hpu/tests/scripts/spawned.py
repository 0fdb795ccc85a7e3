"""Two cards in workers of ``ddp_spawn``, in lazy mode, from a process that has trained on one card itself."""

import os

import torch
from modelling import BATCH, Net, difference, loader, plain

from torchhal import Callback, Trainer

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}


class Module(Callback):
    modules = ()

    def on_train_start(self, trainer, module):
        self.modules = trainer.strategy.all_gather_object(os.environ.get("HLS_MODULE_ID"))

    def state_dict(self):
        return {"modules": list(self.modules)}

    def load_state_dict(self, state):  # comes back from a worker
        self.modules = state["modules"]


def main():
    os.environ.update(HLS_MODULE_ID="7", TORCHHAL_HPU_MODULE_CHOSEN_BY="1")  # as in a child of a process with a module
    torch.manual_seed(0)
    model, where = Net(), Module()
    options = {"accelerator": "hpu", "devices": 2, "strategy": "ddp_spawn", "max_epochs": 2, **QUIET}
    Trainer(callbacks=where, **options).fit(model, loader(BATCH // 2), loader(BATCH // 2))
    assert where.modules == ["0", "1"], where.modules
    assert difference(model.state_dict(), plain()) < 1e-5
    print("spawned")


if __name__ == "__main__":
    main()
