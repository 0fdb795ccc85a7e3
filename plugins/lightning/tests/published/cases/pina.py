"""A PINN of pina, whose Trainer is a subclass of Lightning's, for the Poisson equation on a square."""

import lightning.pytorch as pl
import noted
import torch
from pina import Condition, Trainer
from pina.domain import CartesianDomain
from pina.equation import Equation, FixedValue
from pina.model import FeedForward
from pina.operator import laplacian
from pina.problem import SpatialProblem
from pina.solver import PhysicsInformedSingleModelSolver

PACKAGES = ["pina-mathlab"]


def poisson(points, solution):
    force = torch.sin(points.extract(["x"]) * torch.pi) * torch.sin(points.extract(["y"]) * torch.pi)
    return laplacian(solution, points, components=["u"], d=["x", "y"]) - force


class Poisson(SpatialProblem):
    output_variables = ["u"]
    spatial_domain = CartesianDomain({"x": [0, 1], "y": [0, 1]})
    domains = {
        "inside": CartesianDomain({"x": [0, 1], "y": [0, 1]}),
        "edge": CartesianDomain({"x": [0, 1], "y": 0}),
    }
    conditions = {
        "inside": Condition(domain="inside", equation=Equation(poisson)),
        "edge": Condition(domain="edge", equation=FixedValue(0.0)),
    }


noted.seed()
problem = Poisson()
problem.discretise_domain(40, "random")
network = FeedForward(input_dimensions=2, output_dimensions=1, inner_size=8, n_layers=2)
solver = PhysicsInformedSingleModelSolver(problem, network)
trainer = Trainer(
    solver, max_epochs=4, batch_size=20, train_size=0.8, val_size=0.2, accelerator="cpu", devices=1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[noted.callback(pl)],
)  # fmt: skip
trainer.train()
