"""Define the precision contract: the dtypes of the model, its inputs and its arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal._rank_state import refuse_resharding
from torchhal._replaced_declarations import warn_replaced
from torchhal.accelerators import Accelerator
from torchhal.composition import Composable
from torchhal.errors import ConfigurationError
from torchhal.precision._derived_needs import DerivedNeeds


class Precision(Composable):
    """One choice of dtypes for weights and arithmetic.

    Every method is an identity by default, so a subclass overrides only what it changes. A caller decides once, before
    its loop, which methods a subclass overrides and never calls the others. Every method is called on every rank. The
    order within one optimizer step is: :meth:`forward_context` around the step function, :meth:`backward` (once per
    micro-batch), then once per step :meth:`unscale_gradients`, :meth:`clip_gradients`, :meth:`optimizer_step`.

    Checks: PRE-15, PRE-20, PRE-21, PRE-25, PRE-26, PRE-46.
    """

    alias: str = "32-true"
    """Alias by which users name the precision.

    Checks: PRE-01.
    """

    param_dtype: torch.dtype = torch.float32
    """dtype in which the weights are trained; 32-true, the default, leaves it to the user to make them so.

    Checks: PRE-01, PRE-20.
    """

    compute_dtype: torch.dtype = torch.float32
    """dtype of most of the arithmetic.

    Checks: PRE-01.
    """

    wraps_autocast: bool = False
    """True if :meth:`forward_context` enters ``torch.autocast`` to :attr:`compute_dtype`.

    Checks: PRE-29.
    """

    features: frozenset[str] = frozenset()
    """Capabilities that a strategy has to take into account.

    ``"scales_loss"``: :meth:`backward` scales the loss, and :meth:`unscale_gradients` undoes it and may skip a step. A
    strategy whose ranks have different gradients, and would decide differently, refuses such a precision.

    Checks: PRE-45.
    """

    needs: frozenset[str] = DerivedNeeds()  # type: ignore[assignment]
    """Capabilities that the accelerator must have and the strategy be able to carry, from ``torchhal.capabilities``.

    The default follows from :attr:`param_dtype` (``store``), :attr:`compute_dtype` (``compute``),
    :attr:`wraps_autocast` (``autocast``) and ``"scales_loss"`` in the :attr:`features` (``loss_scaling``). A precision
    that needs more says so in its class or in ``__init__``, such as a word of the vendor's::

        self.needs = self.needs | {"fp8:e4m3"}

    Checks: ACC-16, STR-37, PRE-29.
    """

    accelerators: ClassVar[frozenset[str] | None] = None
    """Names of the accelerators it works on, which :attr:`needs` replace; None: those that have what it needs.

    A class that sets it gets a FutureWarning, and works on these accelerators only, whatever it needs.
    """

    _names_accelerators: ClassVar[bool] = False
    """True if the class that declares nearest sets ``accelerators`` instead of ``needs``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "needs" in vars(cls):
            cls._names_accelerators = False
        elif vars(cls).get("accelerators") is not None:
            warn_replaced(
                cls,
                "accelerators",
                "declare 'needs', with a capability of your own that your accelerator has where it is bound to that",
            )
            cls._names_accelerators = True

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        """Prepare this process for the precision, after the device is set up and before the model is touched.

        Called once per process. Does nothing by default.

        Args:
            accelerator: the accelerator of the run.
            device: the root device of this rank.
        """

    def connect(
        self, model: Any = None, optimizers: Sequence[Any] = (), lr_schedulers: Sequence[Any] = ()
    ) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Return the model, optimizers and schedulers to train with, for vendors whose library needs all three at once.

        Called before training, with the model that the strategy has wrapped. The identity by default.

        Args:
            model: the model or its wrapper.
            optimizers: the run's optimizers.
            lr_schedulers: the run's scheduler configurations, each with an attribute ``scheduler``.

        Returns:
            What is used from then on: as many optimizers, and schedulers of the same kind, in their places; and the
                model,
            or one in its place that has its steps, or a module around it, through whose forward each ``training_step``
            then runs. A replacement model should share its parameters: the user's own object is no longer trained.
        """
        return model, optimizers, lr_schedulers

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise an error for an optimizer that can't work in this precision.

        Args:
            optimizer: one of the run's optimizers, before training.

        Raises:
            TypeError: it can't; names the optimizer, e.g. one that evaluates a closure or a fused one.

        Checks: PRE-18, PRE-19.
        """

    # -- dtypes ----------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with floating-point parameters in :attr:`param_dtype`.

        Args:
            module: the user's module; converted in place.

        Returns:
            The same module: parameters stay the objects that they were, tied ones stay tied, and integer, boolean and
            complex buffers are left unchanged.

        Checks: PRE-02, PRE-03.
        """
        return module

    def convert_input(self, batch: Any) -> Any:
        """Return ``batch`` with its floating-point tensors in the dtype of the model's input.

        Args:
            batch: tensors at any depth of containers; labels and other integers are left unchanged, and so is a tensor
                that has the right dtype.

        Checks: PRE-07, PRE-62.
        """
        return batch

    def convert_output(self, output: Any) -> Any:
        """Return the step's output with its floating-point tensors in torch's default dtype, or a wider one.

        Args:
            output: tensors at any depth of containers; everything else is left unchanged, and so may be what is wider.

        Checks: PRE-08.
        """
        return output

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which the model builds its parameters, in :attr:`param_dtype`.

        Leaving it restores what it changed, after an error too.

        Checks: PRE-04, PRE-05.
        """
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context for one training, validation, test or predict step.

        One object can be entered several times, inside of itself too, which those of ``contextlib.contextmanager``
        can't. Leaving it restores what it changed, after an error too.

        Checks: PRE-05, PRE-06, PRE-23, PRE-43.
        """
        return nullcontext()

    # -- one optimizer step ----------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, *args: Any, through: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        """Accumulate the gradients of ``loss``, scaled if this precision scales.

        Args:
            loss: a 0-d tensor.
            *args: passed on to the backward function.
            through: a function to call with the (scaled) loss and the other arguments in place of ``loss.backward``,
                such as a model's own ``backward``.
            **kwargs: passed on to the backward function.

        Checks: PRE-09, PRE-42.
        """
        if through is not None:
            through(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, once per step however often it is called.

        A step that is given up afterwards ends with the next :meth:`backward`.

        Args:
            optimizer: the optimizer whose parameters' gradients are changed in place.

        Checks: PRE-09, PRE-12, PRE-63.
        """

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Clip the unscaled gradients of ``optimizer`` in place.

        Args:
            optimizer: the one whose parameters are clipped.
            clip_val: greatest global 2-norm (``"norm"``) or greatest absolute value (``"value"``).
            algorithm: ``"norm"`` or ``"value"``.

        Returns:
            The global norm before clipping, 0-d, for ``"norm"``; None for ``"value"``. Strategies that shard parameters
            compute it over all shards in their own ``clip_gradients``.

        Raises:
            ValueError: ``algorithm`` is neither.

        Checks: PRE-10, PRE-11, PRE-40, PRE-50, PRE-63.
        """
        if algorithm not in ("norm", "value"):
            raise ValueError(f"'algorithm' must be 'norm' or 'value' (got {algorithm!r})")
        parameters = list(self.main_params(optimizer))
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            return _clip_with_sparse(parameters, clip_val, algorithm)
        if algorithm == "norm":
            return nn.utils.clip_grad_norm_(parameters, clip_val)
        nn.utils.clip_grad_value_(parameters, clip_val)
        return None

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """Yield each parameter of ``optimizer`` exactly once, over all of its groups.

        Args:
            optimizer: one of the run's optimizers.

        Checks: PRE-22, PRE-41.
        """
        seen: set[int] = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Call ``optimizer.step``, or skip it where the gradients overflowed.

        It updates the weights that the module has, whatever has written them since the last step.

        Args:
            optimizer: the optimizer to step.
            closure: runs inside ``optimizer.step(closure)``: forward, backward and clipping included.

        Returns:
            True if the parameters were updated, False if the step was skipped.

        Checks: PRE-13, PRE-14, PRE-47, PRE-51, PRE-64.
        """
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def optimizer_state_dtype(self, parameter: torch.Tensor, name: str) -> torch.dtype | None:
        """Return the dtype in which an optimizer keeps a part of its state; None for torch's own way.

        torch casts all loaded state but ``step`` to the parameter's dtype. A precision whose :meth:`optimizer_step`
        keeps float32 moments of bfloat16 weights overrides this, or a resumed run begins with rounded ones. State is
        cast when it is loaded, and after the step in which the optimizer has created it: that step itself, and each
        one that combines dtypes, is :meth:`optimizer_step`'s to make. An engine that stores the optimizer's state by
        rules of its own refuses a precision that overrides this.

        .. versionadded:: 0.2

        Args:
            parameter: a parameter of the optimizer, or the part of it that this rank has.
            name: the key in the parameter's state, such as ``"exp_avg"`` or ``"momentum_buffer"``; never ``"step"``.

        Returns:
            A floating-point dtype; tensors of integers and booleans are left unchanged.

        Checks: PRE-30.
        """
        return None

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`load_state_dict` continues from, bit for bit.

        Rank 0's is saved. What differs between ranks belongs into :meth:`rank_state_dict`.

        Returns:
            What a ``weights_only`` load reads; empty where the precision keeps no state.

        Checks: PRE-16, PRE-17, PRE-61.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another instance; a step that was begun before counts no more.

        Args:
            state: what :meth:`state_dict` returned. One that is empty, of a run that had none, changes nothing, and so
                does one of another precision, for which a CheckpointMismatchError may be raised as well.

        Checks: PRE-16, PRE-44, PRE-52.
        """

    def rank_state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of this rank alone, such as the generator of a stochastic rounding.

        Called on every rank; every rank's is saved. Where all are empty, nothing is sent and nothing is saved.

        .. versionadded:: 0.2

        Returns:
            Tensors and plain data that a ``weights_only`` load reads; empty for a precision without such state.

        Checks: PRE-27, PRE-28.
        """
        return {}

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's saved state, on every rank if any has saved one.

        It isn't called with the state of another class of precision, which is dropped with a warning.

        .. versionadded:: 0.2

        Args:
            state: what :meth:`rank_state_dict` returned on this rank, or :meth:`reshard_rank_state` for it; its tensors
                are on the CPU.

        Checks: PRE-27.
        """

    def reshard_rank_state(
        self, states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int
    ) -> Mapping[str, Any]:
        """Return the state with which a rank continues where another number of ranks has saved.

        Called on every rank before anything of the checkpoint is restored; it changes nothing.

        .. versionadded:: 0.2

        Args:
            states: what :meth:`rank_state_dict` returned on each of the ranks that saved, in their order.
            rank: the global rank that continues.
            world_size: number of ranks that continue.

        Returns:
            What :meth:`load_rank_state_dict` is called with. By default nothing, if all ``states`` are empty.

        Raises:
            CheckpointMismatchError: the states can't be shared out, the default for any that isn't empty; it names the
                precision, both numbers of ranks, and what to do.

        Checks: PRE-28.
        """
        return refuse_resharding(self, "precision", states, world_size=world_size)

    def teardown(self) -> None:
        """Undo every global change, to what was set before :meth:`setup`: default dtype, matmul precision, patches.

        Idempotent. Inside of an entered context it restores what that changed.

        Checks: PRE-24, PRE-53, PRE-60.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.alias!r})"


def connected(
    precision: Precision, model: Any, optimizers: list[Any], lr_schedulers: list[Any]
) -> tuple[Any, list[Any], list[Any]]:
    """Return what ``precision.connect`` makes of the model, the optimizers and the schedulers.

    Args:
        precision: the precision of the run.
        model: the model or its wrapper.
        optimizers: the run's optimizers.
        lr_schedulers: the run's scheduler configurations.

    Raises:
        ConfigurationError: it returns something else than a model, optimizers and schedulers.
    """
    answer = precision.connect(model, optimizers, lr_schedulers)
    rule = f"{type(precision).__name__}.connect must return (model, optimizers, lr_schedulers)"
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ConfigurationError(f"{rule} (got {answer!r})")
    made, steppers, schedulers = answer[0], list(answer[1]), list(answer[2])
    if (len(steppers), len(schedulers)) != (len(optimizers), len(lr_schedulers)):
        raise ConfigurationError(
            f"{rule}, as many as it was given: {len(optimizers)} optimizer(s) and {len(lr_schedulers)} scheduler(s) "
            f"(got {len(steppers)} and {len(schedulers)})"
        )
    for before, optimizer in zip(optimizers, steppers, strict=True):
        lacks = [name for name in ("step", "zero_grad", "param_groups", "state_dict") if not hasattr(optimizer, name)]
        if lacks and optimizer is not before:
            raise ConfigurationError(f"{rule}: its {type(optimizer).__name__} is no optimizer, it has no {lacks[0]!r}")
    for before, scheduler in zip(lr_schedulers, schedulers, strict=True):
        if hasattr(before, "scheduler") and not hasattr(scheduler, "scheduler"):
            raise ConfigurationError(
                f"{rule}: a scheduler comes as a {type(before).__name__}, whose attribute 'scheduler' may be replaced "
                f"(got a {type(scheduler).__name__})"
            )
    return made, steppers, schedulers


def needs_closure(optimizer: Any) -> bool:
    """Return whether ``optimizer.step`` requires a closure, which it then evaluates any number of times (LBFGS)."""
    # The class's: a scheduler's replacement on the instance shows ``self`` as an argument.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of ``parameter``, which has one; of a sparse one its values, which share its memory."""
    if not parameter.grad.is_sparse:  # type: ignore[union-attr]
        return parameter.grad  # type: ignore[return-value]
    parameter.grad = parameter.grad.coalesce()  # type: ignore[union-attr]
    return parameter.grad._values()


def _clip_with_sparse(parameters: Sequence[nn.Parameter], clip_val: float, algorithm: str) -> torch.Tensor | None:
    """Clip gradients of which some are sparse.

    torch's own clipping does not support sparse gradients: the values of coalesced ones stand in for them here.
    """
    stand_ins = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        values = dense_gradient(parameter)
        stand_in = nn.Parameter(values, requires_grad=False)
        stand_in.grad = values
        stand_ins.append(stand_in)
    if algorithm == "norm":
        return nn.utils.clip_grad_norm_(stand_ins, clip_val)
    nn.utils.clip_grad_value_(stand_ins, clip_val)
    return None
