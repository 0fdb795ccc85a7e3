"""A loop on torchhal.Run whose second checkpoint finds no space, on the rank that writes; it goes on without."""

import errno
import json
import os
import sys

import torch
from run_parts import F, Net, make_loader, make_optimizer, run_options

import torchhal
from torchhal.errors import CheckpointError

config = json.loads(sys.argv[1])
torch.manual_seed(0)
model = Net()
optimizer = make_optimizer(model)
run = torchhal.Run(**run_options(config))
model, optimizer, loader = run.setup(model, optimizer, make_loader(config))
fsync = os.fsync


def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


for x, y, _ in run.batches(loader):
    optimizer.zero_grad()
    run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    if run.global_step == 4:
        run.save_checkpoint()
    if run.global_step == 6:
        os.fsync = full
        try:
            run.save_checkpoint()
        except CheckpointError as error:
            reason = "No space left on device" if "No space left on device" in str(error) else str(error)
            sys.stderr.write(f"rank {run.global_rank}: {type(error).__name__} {reason}\n")
        os.fsync = fsync
