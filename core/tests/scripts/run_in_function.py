"""A loop on torchhal.Run in a function that returns without an end of the run, as many scripts have it."""

import gc
import json
import sys

import torch
from run_parts import F, Net, make_loader, make_optimizer, record, run_options

import torchhal


def main():
    config = json.loads(sys.argv[1])
    torch.manual_seed(0)
    model = Net()
    optimizer = make_optimizer(model)
    run = torchhal.Run(**run_options(config))
    model, optimizer, loader = run.setup(model, optimizer, make_loader(config))
    for epoch in range(run.current_epoch, 2):
        for x, y, index in run.batches(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            record(config, run.global_rank, epoch, loss, index)
    run.print("main has returned", flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    gc.collect()
    sys.exit(code)
