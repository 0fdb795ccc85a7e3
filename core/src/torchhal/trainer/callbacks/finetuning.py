"""Freeze a part of a model at first and train it later, with BaseFinetuning and BackboneFinetuning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from torchhal._arguments import check_bool, check_count
from torchhal.errors import CheckpointMismatchError, ModelError
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._engines import OPTIMIZERS, refuse_engines
from torchhal.trainer.callbacks._monitor import check_number
from torchhal.trainer.callbacks._optimizer_groups import extend_schedulers
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer

Modules = nn.Module | Iterable[Any]
"""A module, or a nest of modules."""


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze parts of a model, and train them from some epoch on.

    A subclass defines :meth:`freeze_before_training` and :meth:`finetune_function`. ``configure_optimizers`` of the
    model leaves out what is frozen: ``SGD(filter(lambda p: p.requires_grad, self.parameters()))``. A scheduler takes an
    added group as one that has begun with the rate that it is added with. A resumed run adds the groups again, before
    the optimizer's state is loaded.

    Raises:
        ConfigurationError: in ``setup``, a strategy whose optimizers are an engine's own; in an epoch, a scheduler that
            can't take another group.

    .. versionadded:: 0.2
    """

    def __init__(self) -> None:
        self._reset_state()

    def _reset_state(self) -> None:
        self._added: dict[int, list[dict[str, Any]]] = {}
        """Number of an optimizer -> its groups beyond those that the model made, with the names of the parameters."""
        self._tracking: dict[str, bool] = {}
        """Name of a batch norm -> whether it keeps running statistics."""
        self._epoch = -1
        """The epoch for which :meth:`finetune_function` was called last."""

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def freeze_before_training(self, module: Any) -> None:
        """Freeze what is not to be trained at first, with :meth:`freeze`.

        Called on every rank before ``configure_optimizers``.
        """
        raise NotImplementedError

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is to be trained from this epoch on, with :meth:`unfreeze_and_add_param_group`.

        Called on every rank when an epoch begins, once for each optimizer.

        Args:
            module: the user's model.
            epoch: the number of the epoch, from 0.
            optimizer: one of the model's.
        """
        raise NotImplementedError

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the modules without children, and those with parameters of their own, in ``modules``, at any depth."""
        if isinstance(modules, nn.Module):
            found: Iterable[nn.Module] = modules.modules()
        else:
            nested = modules.values() if isinstance(modules, Mapping) else modules
            found = [leaf for each in nested for leaf in BaseFinetuning.flatten_modules(each)]
        return [each for each in found if not list(each.children()) or each._parameters]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of ``modules`` that are trained, or those that are frozen.

        Args:
            modules: a module, or a nest of modules.
            train_bn: False leaves out those of batch norms.
            requires_grad: False for the frozen ones.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad == requires_grad:
                        yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze the parameters of ``modules``; their batch norms keep running statistics again."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                module.track_running_stats = True
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters that ``module`` has itself; a batch norm stops keeping running statistics."""
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters of ``modules``, at any depth.

        Args:
            modules: a module, or a nest of modules.
            train_bn: train their batch norms all the same.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and train_bn:
                BaseFinetuning.make_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of ``params`` that ``optimizer`` doesn't have; warn if it has some."""
        present, given = _ids(optimizer), list(params)
        missing = [parameter for parameter in given if id(parameter) not in present]
        if len(missing) < len(given):
            warnings.warn(
                f"the {type(optimizer).__name__} has {len(given) - len(missing)} of the parameters to unfreeze "
                "already, which stay in their group: leave frozen ones out in configure_optimizers, as in "
                f"{type(optimizer).__name__}(filter(lambda p: p.requires_grad, self.parameters()))",
                stacklevel=3,
            )
        return missing

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze ``modules`` and add their parameters to ``optimizer``, as a group.

        Args:
            modules: a module, or a nest of modules.
            optimizer: one of the model's.
            lr: learning rate of the group; None: that of the first group, divided by ``initial_denom_lr``.
            initial_denom_lr: see ``lr``.
            train_bn: add the parameters of batch norms too.
        """
        trained = {id(each) for each in BaseFinetuning.filter_params(modules)} & _ids(optimizer)  # such as batch norms
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        unfrozen = [
            each for each in BaseFinetuning.filter_params(modules, train_bn=train_bn) if id(each) not in trained
        ]
        if added := BaseFinetuning.filter_on_optimizer(optimizer, unfrozen):
            optimizer.add_param_group({"params": added, "lr": rate})

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage == "fit":
            refuse_engines(trainer, self, OPTIMIZERS, "sets up optimizers and schedulers once for a fit")
            self.freeze_before_training(module)

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == self._epoch:  # continued in the midst of it
            return
        self._epoch = trainer.current_epoch
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        added = {}
        for index, optimizer in enumerate(trainer.optimizers):
            made = len(optimizer.param_groups) - len(self._added.get(index, ()))
            self.finetune_function(module, trainer.current_epoch, optimizer)
            extend_schedulers(trainer, optimizer)
            added[index] = [
                {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
                for group in optimizer.param_groups[made:]
            ]
        self._added = added
        self._tracking = {name: norm.track_running_stats for name, norm in _batch_norms(module)}

    # -- state -------------------------------------------------------------------------------------------------------

    def _restore_optimizers(self, trainer: Trainer, module: Any, state: Mapping[str, Any] | None) -> None:
        state = self.state_dict() if state is None else state
        parameters = dict(module.named_parameters())
        for index, groups in state["param_groups"].items():
            if not groups:
                continue
            if index >= len(trainer.optimizers):
                raise CheckpointMismatchError(f"it has added groups to optimizer {index}, which isn't there")
            optimizer = trainer.optimizers[index]
            for group in groups:
                if unknown := [name for name in group["params"] if name not in parameters]:
                    raise CheckpointMismatchError(f"it has unfrozen {unknown[0]!r}, which the model doesn't have")
                unfrozen = [parameters[name].requires_grad_(True) for name in group["params"]]
                optimizer.add_param_group({**group, "params": unfrozen})
            extend_schedulers(trainer, optimizer)
        for name, norm in _batch_norms(module):
            norm.track_running_stats = state["tracking"].get(name, norm.track_running_stats)

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": self._added, "tracking": self._tracking, "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch = int(state_dict["epoch"])
        self._added, self._tracking = dict(state_dict["param_groups"]), dict(state_dict["tracking"])


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    return ((name, each) for name, each in module.named_modules() if isinstance(each, _BatchNorm))


def _positive(name: str, value: float) -> float:
    number: float = check_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"'{name}' must be a positive finite number (got {value!r})")
    return number


def multiplicative(epoch: int) -> float:
    """Return 2: the backbone's learning rate doubles with each epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Callback that trains ``model.backbone`` from some epoch on, with a learning rate that grows with each epoch.

    Args:
        unfreeze_backbone_at_epoch: the first epoch that trains it, from 0.
        lambda_func: ``lambda_func(epoch + 1)`` is the factor by which its rate grows in ``epoch``; 2 by default.
        backbone_initial_ratio_lr: its first rate is this share of the rate of the first group.
        backbone_initial_lr: its first rate, instead of that share.
        should_align: let it grow up to the rate of the first group only, which it then follows.
        initial_denom_lr: has no effect on the backbone, whose first rate is one of the above.
        train_bn: train its batch norms with it; they keep running statistics and are trained from the start.
        verbose: print both rates when an epoch begins.
        rounding: decimals that are printed.

    Raises:
        ModelError: in ``setup``, the model has no module ``backbone``.
        ConfigurationError, TypeError, ValueError: an argument outside its domain.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        self.unfreeze_backbone_at_epoch = check_count(
            "unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, minimum=0
        )
        if not callable(lambda_func):
            raise TypeError(f"'lambda_func' must be a function of the epoch (got {lambda_func!r})")
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = _positive("backbone_initial_ratio_lr", backbone_initial_ratio_lr)
        self.backbone_initial_lr = (
            None if backbone_initial_lr is None else _positive("backbone_initial_lr", backbone_initial_lr)
        )
        self.should_align = check_bool("should_align", should_align)
        self.initial_denom_lr = _positive("initial_denom_lr", initial_denom_lr)
        self.train_bn = check_bool("train_bn", train_bn)
        self.verbose = check_bool("verbose", verbose)
        self.rounding = check_count("rounding", rounding, minimum=0)
        super().__init__()

    def _reset_state(self) -> None:
        super()._reset_state()
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage == "fit" and not isinstance(getattr(module, "backbone", None), nn.Module):
            raise ModelError(
                f"{type(module).__name__} has no module 'backbone', which {type(self).__name__} freezes: give it that "
                "name, or derive from BaseFinetuning"
            )
        super().setup(trainer, module, stage)

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        rate = optimizer.param_groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch:
            first = self.backbone_initial_lr
            self.previous_backbone_lr = rate * self.backbone_initial_ratio_lr if first is None else first
            self.unfreeze_and_add_param_group(
                module.backbone, optimizer, self.previous_backbone_lr, self.initial_denom_lr, self.train_bn
            )
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            grown = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            self.previous_backbone_lr = min(grown, rate) if self.should_align else grown
            optimizer.param_groups[-1]["lr"] = self.previous_backbone_lr

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        super().on_train_epoch_start(trainer, module)
        if self.verbose and self.previous_backbone_lr is not None:
            rates = (trainer.optimizers[0].param_groups[0]["lr"], self.previous_backbone_lr)
            first, backbone = (round(float(rate), self.rounding) for rate in rates)
            trainer.print(f"epoch {trainer.current_epoch}: learning rate {first}, of the backbone {backbone}")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        rate = check_number("previous_backbone_lr", state_dict["previous_backbone_lr"], optional=True)
        self.previous_backbone_lr = rate
