"""A training loop of the user's own on torchhal.Run, as a straight script: no function, no ``with``."""

import json
import sys

import torch
from run_parts import F, Net, make_loader, make_optimizer, misbehave, record, run_options

import torchhal

config = json.loads(sys.argv[1])
torch.manual_seed(config.get("seed", 0))
model = Net(config.get("dropout", 0.0))
optimizer = make_optimizer(model)
loader = make_loader(config)

run = torchhal.Run(**run_options(config))
model, optimizer, loader = run.setup(model, optimizer, loader, ckpt_path=config.get("ckpt_path"))
misbehave(config, run.global_rank, 0, "after_setup")
for epoch in range(run.current_epoch, config.get("epochs", 2)):
    for x, y, index in run.batches(loader):
        misbehave(config, run.global_rank, run.global_step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        optimizer.step()
        record(config, run.global_rank, epoch, loss, index)
        if config.get("save_at") == run.global_step:
            print("saved", run.save_checkpoint(config.get("filepath")), flush=True)
        misbehave(config, run.global_rank, run.global_step, "after_step")
    if config.get("saves_epochs"):
        run.save_checkpoint()
if config.get("ends"):
    run.end()
misbehave(config, run.global_rank, run.global_step, "at_the_end")
run.print("done", run.global_step, run.current_epoch)
