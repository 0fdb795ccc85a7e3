"""The loop of run_straight.py as a function that torchhal.Run launches."""

import json
import sys

import torch
from run_parts import F, Net, make_loader, make_optimizer, misbehave, record, run_options

import torchhal


def train(run, config):
    torch.manual_seed(config.get("seed", 0))
    model = Net(config.get("dropout", 0.0))
    optimizer = make_optimizer(model)
    model, optimizer, loader = run.setup(model, optimizer, make_loader(config), ckpt_path=config.get("ckpt_path"))
    for epoch in range(run.current_epoch, config.get("epochs", 2)):
        for x, y, index in run.batches(loader):
            misbehave(config, run.global_rank, run.global_step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            record(config, run.global_rank, epoch, loss, index)
    return {"steps": run.global_step, "world": run.world_size, "weights": model.body[0].weight.detach().sum()}


if __name__ == "__main__":
    config = json.loads(sys.argv[1])
    told = torchhal.Run(**run_options(config)).launch(train, config)
    print("told", told["steps"], told["world"], told["weights"].item())
