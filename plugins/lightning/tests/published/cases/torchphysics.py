"""A physics-informed network of torchphysics, whose Solver is a module with loaders of its own, by two optimizers."""

import noted
import pytorch_lightning as pl
import torch
import torchphysics as tp

PACKAGES = ["torchphysics", "pytorch-lightning"]

noted.seed()
X, U = tp.spaces.R1("x"), tp.spaces.R1("u")
interval = tp.domains.Interval(X, 0, 1)
for optimizer, options in ((torch.optim.Adam, {}), (torch.optim.LBFGS, {"optimizer_args": {"max_iter": 3}})):
    model = tp.models.FCN(input_space=X, output_space=U, hidden=(12, 12))
    inside = tp.conditions.PINNCondition(
        module=model,
        sampler=tp.samplers.RandomUniformSampler(interval, n_points=40),
        residual_fn=lambda u, x: tp.utils.grad(u, x) - torch.cos(3 * x),
    )
    left = tp.conditions.PINNCondition(
        module=model,
        sampler=tp.samplers.GridSampler(interval.boundary_left, n_points=4).make_static(),
        residual_fn=lambda u: u,
        weight=10,
    )
    setting = tp.OptimizerSetting(optimizer_class=optimizer, lr=0.01, **options)
    solver = tp.solver.Solver(train_conditions=[inside, left], val_conditions=[left], optimizer_setting=setting)
    noted.trainer(pl, max_steps=10, val_check_interval=5).fit(solver)
