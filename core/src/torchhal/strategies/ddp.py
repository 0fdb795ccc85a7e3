"""Data parallel: a replica per process, gradients averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from torchhal.distributed import collectives
from torchhal.errors import DistributedError, ModelError, message_of
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.step_memory import MemoryByPhase, StepMemory
from torchhal.strategies._comm_hook_state import registered_state
from torchhal.strategies._ddp_state import DDPState
from torchhal.strategies._forward_through import forward_through
from torchhal.strategies._sparse_gradients import MISSING, copy_sparse_gradients, names_of_unused, sparse_weights
from torchhal.strategies._steps import around_call
from torchhal.strategies.parallel import PARALLEL_ARGUMENTS

_requires_grad = attrgetter("requires_grad")
_DDP_OPTIONS = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module", "device_ids"}


class DDPStrategy(DDPState):
    """``torch.nn.parallel.DistributedDataParallel`` over one process per device.

    Each rank trains on its share of the data; gradients are averaged, so the loss of each rank must be a mean over a
    batch of the same size for the result to equal one process on the joined batch. A layer that changes weights on
    each rank by its own batch, ``nn.Embedding(max_norm=...)``, is refused; when a fit ends, the ranks compare checksums
    of their weights.

    Args:
        find_unused_parameters: allow parameters that a step does not use (costs a walk over the graph per step). What
            is frozen stays in the wrapper, its gradients sent as zeros, to the end of the first epoch that doesn't
            train it, so that alternating freezing needs no new wrapper.
        static_graph: promise that every step uses the same parameters in the same order.
        comm_hook: a DDP communication hook, called with ``comm_state``. It may let replicas differ by design, as a
            local SGD does, so with one they are not compared after a fit; where they differ, a checkpoint has each
            rank's own weights and optimizer state.
        comm_state: see ``comm_hook``. Each rank's is in a checkpoint: torch's PowerSGD and local SGD states, a dict,
            and an object with ``state_dict`` and ``load_state_dict``.
        options: ``start_method``, ``process_group_backend``, ``timeout`` and the parts, as in
            :class:`.ParallelStrategy`; anything else goes to DistributedDataParallel (``bucket_cap_mb``, ...).
    """

    compares_replicas: ClassVar[bool] = True
    synchronizes_batchnorms: ClassVar[bool] = True

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        comm_hook: Callable[..., Any] | None = None,
        comm_state: Any = None,
        **options: Any,
    ) -> None:
        own = {name: options.pop(name) for name in PARALLEL_ARGUMENTS if name in options}
        _check_ddp_options(options)
        super().__init__(**own)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.comm_hook = comm_hook
        self.comm_state = comm_state
        self.ddp_options = options
        self._parameters: list[torch.nn.Parameter] = []
        """The module's, when the model was wrapped."""
        self._is_averaged: list[bool] = []
        """True for those that the wrapper averages: those that were trained then, or may be again."""
        self._was_trained: list[bool] = []
        """True for those that were trained at the last comparison."""
        self._trained_in_epoch: list[bool] = []
        """True for those that were trained at any time of this epoch."""
        self._same_values = False
        """True if the ranks have the same weights when the model is wrapped."""
        self._registered_state = comm_state
        self._sparse: dict[torch.Tensor, str] = {}
        """The weights whose gradients are sparse, with their names, when the model was wrapped."""
        self._sparse_hooks: list[Any] = []

    def wrap_model(self, *, training: bool) -> None:
        assert self.module is not None
        if not training:
            return
        before = dict(zip(self._parameters, self._is_averaged, strict=True))
        self._parameters = list(self.module.parameters())
        self._bucket_order = None
        self._was_trained = list(map(_requires_grad, self._parameters))
        self._trained_in_epoch = list(self._was_trained)
        self._is_averaged = list(self._was_trained)
        self._sparse = sparse_weights(self.module)
        if self._may_leave_out:  # averaged too: they may be unfrozen again, alternating with others
            self._is_averaged = [
                now or (before.get(each, False) and each not in self._sparse)
                for each, now in zip(self._parameters, self._was_trained, strict=True)
            ]
        if any(self._is_averaged):  # torch refuses to wrap a module with nothing to train; there is nothing to average
            frozen = [each for each in self._averaged if not each.requires_grad]
            for parameter in frozen:
                parameter.requires_grad_(True)
            try:
                self.configure_ddp()
            finally:
                for parameter in frozen:
                    parameter.requires_grad_(False)
            self._remove_sparse_hooks()
            if self.world_size > 1:
                self._sparse_hooks = copy_sparse_gradients(self._sparse)
            if isinstance(self.model, DistributedDataParallel):
                _free_group_last(self.model)
                self._has_hook = self.comm_hook is not None or bool(getattr(self.model, "_comm_hooks", ()))
                self._registered_state = registered_state(self.model, self.comm_state)

    def _remove_sparse_hooks(self) -> None:
        for hook in self._sparse_hooks:
            hook.remove()
        self._sparse_hooks = []

    @property
    def _averaged(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients the wrapper averages."""
        return [parameter for parameter, there in zip(self._parameters, self._is_averaged, strict=True) if there]

    def on_train_epoch_start(self) -> None:
        """Wrap again where parameters were frozen or unfrozen, or were replaced.

        A wrapper averages what was trained when it was created.
        """
        super().on_train_epoch_start()
        if self.model is not None:
            if not self._has_same_parameters:
                self._wrap_again()
            elif self._trained_others:
                self._follow_trained()
            self._leave_out_idle()
        self._saved_order = None  # a wrapper that comes later is new in the run that is continued, too

    @property
    def _has_same_parameters(self) -> bool:
        """True if the module has the parameter objects with which it was wrapped."""
        assert self.module is not None
        parameters = list(self.module.parameters())
        return len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))

    def _leave_out_idle(self) -> None:
        """Wrap again without what no step of the last epoch has trained: its gradients are sent as zeros."""
        pairs = list(zip(self._is_averaged, self._trained_in_epoch, strict=True))
        self._trained_in_epoch = list(self._was_trained)
        if self.model_is_connected:  # the precision's wrapper around it would keep it
            return
        if self._may_leave_out and any(averaged and not trained for averaged, trained in pairs):
            self._is_averaged = [averaged and trained for averaged, trained in pairs]
            self._wrap_again()

    @property
    def _trained_others(self) -> bool:
        """True if parameters were frozen or unfrozen since the last comparison; 0.05 ms for 1000 parameters."""
        return list(map(_requires_grad, self._parameters)) != self._was_trained

    def _follow_trained(self) -> None:
        """Average the parameters trained now, with a new wrapper if the present one can't."""
        now = list(map(_requires_grad, self._parameters))
        averaged = all(
            there if trained else not (there and each in self._sparse)  # which the wrapper would wait for
            for each, there, trained in zip(self._parameters, self._is_averaged, now, strict=True)
        )
        if not (averaged and self._may_leave_out and isinstance(self.model, DistributedDataParallel)):
            self._wrap_again()
            return
        self._compare_trained()
        self._was_trained = now
        self._trained_in_epoch = [one or other for one, other in zip(self._trained_in_epoch, now, strict=True)]

    def _compare_trained(self) -> None:
        if self.world_size > 1:
            self.check_same_trained(self._changed())
            with self.guard("averaging of the gradients"):
                # during an accumulation, the wrapper averages from here on the gradients of the trained parameters
                collectives.average_gradients(self._frozen_since(), frozen=True)

    def _changed(self) -> list[torch.nn.Parameter]:
        """Return what was frozen or unfrozen since the last comparison."""
        pairs = zip(self._parameters, self._was_trained, strict=True)
        return [parameter for parameter, trained in pairs if trained != parameter.requires_grad]

    def _wrap_again(self) -> None:
        assert self.module is not None
        if self.model_is_connected:
            raise ModelError(
                f"parameters were frozen or unfrozen while {type(self.module).__name__} was trained, and what "
                f"{type(self.precision).__name__}.connect has put around the model holds a wrapper that averages "
                "those of before: do it before fit, or leave that precision out"
            )
        paused = getattr(self.model, "require_backward_grad_sync", True) is False
        self._compare_trained()
        self.model = self.module
        gc.collect()  # frees the old wrapper, which is part of a cycle, with its hooks on the parameters
        self._same_values = self._has_same_parameters
        try:
            self.wrap_model(training=True)
        finally:
            self._same_values = False
        self._restore_buckets()
        if paused and self.model is not self.module:
            self.model.require_backward_grad_sync = False

    def _frozen_since(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._changed() if not parameter.requires_grad]

    def configure_ddp(self) -> None:
        """Replace ``self.model`` by its distributed wrapper; override to use another one."""
        self.model = DistributedDataParallel(
            self.model,  # on its device, as is every batch: DDP has nothing to move, so it gets no device_ids
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            **({"init_sync": False} if self._same_values and "init_sync" in _DDP_OPTIONS else {}) | self.ddp_options,
        )
        if self.comm_hook is not None:
            self.model.register_comm_hook(self.comm_state, self.comm_hook)

    def module_step(self, name: str) -> Callable[..., Any]:
        if name != "training_step" or not self.automatic_optimization:
            return super().module_step(name)
        return self.through_wrapper(getattr(self.module, name))

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        if not training or not self.automatic_optimization:
            return super().module_call(forward, training=training)
        return around_call(forward, self.through_wrapper)

    def through_wrapper(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` of the module as the forward of a wrapper that averages what is trained when called."""
        through = forward_through(self, self.module, step)

        def call(*args: Any) -> Any:
            if self._trained_others:  # a hook between two batches has frozen or unfrozen parameters
                self._follow_trained()
            return step(*args) if self.model is self.module else through(*args)

        return call

    def no_backward_sync(self) -> AbstractContextManager[Any] | None:
        # static_graph asserts inside torch when its first backward is under no_sync: averaging each time is correct too
        pauses = self.model is self.module or hasattr(self.model, "no_sync")  # what is bare now may be wrapped later
        return _Paused(self) if pauses and not self.static_graph else None

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        late: list[torch.nn.Parameter] = []
        if self.automatic_optimization and self._trained_others:
            late = self._unfrozen_in_step()
        passes = 0

        def count(_: torch.Tensor) -> None:
            nonlocal passes
            passes += 1

        if "through" in kwargs:  # the module's own backward, which may run several through this graph
            loss.register_hook(count)  # type: ignore[no-untyped-call]
        try:
            super().backward(loss, *args, **kwargs)
        except RuntimeError as error:
            if self._sparse and MISSING in message_of(error):
                averaged = set(self._averaged)
                sparse = {weight: name for weight, name in self._sparse.items() if weight in averaged}
                raise self._unused_sparse(names_of_unused(sparse, loss)) from error
            raise
        averages = "through" in kwargs and self._averages_plainly()
        if averages and self.reduce_boolean_decision(passes > 1, all=False):
            # DistributedDataParallel has averaged what the first pass computed, and no more
            assert self.module is not None
            ignored, averaged = set(self.parameters_to_ignore()), set(self._averaged)
            named = self.module.named_parameters()
            late += [each for name, each in named if each in averaged and name not in ignored]
        if late:
            with self.guard("averaging of the gradients"):
                collectives.average_gradients(late)
        # Here and not at the next forward, where torch checks: a parameter left out on this rank only keeps the
        # others waiting in the averaging, and this rank's next collective would be matched with it.
        if isinstance(self.model, DistributedDataParallel) and hasattr(self.model, "_check_reducer_finalized"):
            self.model._check_reducer_finalized()  # type: ignore[no-untyped-call]

    def _averages_plainly(self) -> bool:
        """Return whether DistributedDataParallel averages the gradients of this backward, without a hook."""
        wrapper = self.model
        if not isinstance(wrapper, DistributedDataParallel) or not wrapper.require_backward_grad_sync:
            return False
        return self.comm_hook is None and not getattr(wrapper, "_comm_hooks", ())

    def _unfrozen_in_step(self) -> list[torch.nn.Parameter]:
        """Return parameters that the step unfroze after the wrapper's forward began, which nothing averages yet.

        The next step has a wrapper that does.
        """
        assert self.module is not None
        if isinstance(self.model, DistributedDataParallel) and not self.model.require_backward_grad_sync:
            return []  # averaged with the rest of the accumulation
        if (frozen := self._frozen_since()) and not self.find_unused_parameters:
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            raise ModelError(
                f"{', '.join(repr(names.get(each, 'a parameter')) for each in frozen[:3])}"
                f"{' and others' if len(frozen) > 3 else ''} of {type(self.module).__name__} were frozen while a step "
                "ran, and the ranks average what was trained when it began: freeze parameters between the steps, in "
                f"on_train_batch_start or on_train_epoch_start, or use strategy={self._allowing_unused()}"
            )
        self.check_same_trained(self._changed())
        ignored = set(self.parameters_to_ignore())
        before = set(self._averaged)
        named = self.module.named_parameters()
        return [each for name, each in named if each.requires_grad and each not in before and name not in ignored]

    def release_model(self) -> None:
        super().release_model()
        self._remove_sparse_hooks()
        self._sparse = {}
        self._parameters, self._is_averaged, self._was_trained, self._trained_in_epoch = [], [], [], []

    def check_replicas(self) -> None:
        """Compare the replicas where DistributedDataParallel itself averages in each step.

        A hook or another wrapper may average only occasionally, as local SGD does.
        """
        wrappers = [part for part in self.model.modules() if isinstance(part, DistributedDataParallel)]
        if wrappers and self.comm_hook is None and not getattr(wrappers[0], "_comm_hooks", ()):
            super().check_replicas()

    def parameters_to_ignore(self) -> Collection[str]:
        """Return the names that ``DistributedDataParallel`` was given to ignore."""
        names: Collection[str] = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return names

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        estimate = super().memory_per_rank(model, world_size)
        if world_size == 1 or self.ddp_options.get("gradient_as_bucket_view"):
            return estimate
        return estimate.plus(estimate.gradients, "gradients are sent in buckets of their size: gradient_as_bucket_view")

    def memory_by_phase(self, step: StepMemory, model: ModelMemory, world_size: int) -> MemoryByPhase:
        """Return the phases with the buckets, which stay, or which the gradients are views of."""
        if world_size > 1 and self.ddp_options.get("gradient_as_bucket_view"):
            # the buckets are there in the forward too, and a gradient adds nothing to them
            moments = tuple(moment._replace(gradients=step.gradients) for moment in step.moments)
            step = replace(step, moments=moments)
        found = super().memory_by_phase(step, model, world_size)
        return found if self.comm_hook is None else found.plus(0, "without what the comm_hook allocates")

    def explain(self, error: BaseException) -> BaseException:
        """Return DDP's message for an unused parameter, with its name and the remedy here."""
        said = message_of(error)
        if "Expected to have finished reduction in the prior iteration" in said:
            names = self._unused(said)
            if sparse := [name for name in names if name in self._sparse.values()]:
                return self._unused_sparse(sparse)
            which = f"the parameters {_listed(names)} were" if names else "some parameters were"
            return DistributedError(
                f"{which} not used by training_step on rank {self.global_rank}, and their gradients "
                f"are waited for: use strategy={self._allowing_unused()}, or freeze them with requires_grad_(False)"
            )
        return super().explain(error)

    def _unused_sparse(self, names: list[str]) -> DistributedError:
        """Return the error for sparse gradients that a step doesn't compute, which torch can't leave out."""
        which = f"the sparse embeddings {_listed(names)} were" if names else "a sparse embedding was"
        return DistributedError(
            f"{which} not used by training_step on rank {self.global_rank}, and DistributedDataParallel leaves out "
            "none whose gradient is sparse, with find_unused_parameters neither: use it in every step, give it "
            "sparse=False, or freeze it between the steps with requires_grad_(False)"
        )

    def _allowing_unused(self) -> str:
        """Return this strategy with unused parameters allowed: an alias of the core, or the object to create."""
        if type(self) is not DDPStrategy:
            return f"{type(self).__name__}(find_unused_parameters=True)"
        start = self.alias.split("_find_unused_parameters_")[0]
        return repr(f"{start if start.startswith('ddp') else 'ddp'}_find_unused_parameters_true")

    def _unused(self, message: str) -> list[str]:
        match = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", message)
        if match is None or self.module is None:
            return []
        known = {parameter: name for name, parameter in self.module.named_parameters()}
        wrapped = zip(self._parameters, self._is_averaged, strict=True)
        trained = [known.get(parameter, "a parameter of before") for parameter, was_trained in wrapped if was_trained]
        return [trained[index] for index in map(int, match.group(1).split()) if index < len(trained)]


def _listed(names: list[str]) -> str:
    return f"{', '.join(map(repr, names[:8]))}{' and others' if len(names) > 8 else ''}"


def _free_group_last(wrapper: DistributedDataParallel) -> None:
    """Free the wrapper's reducer before the process group, even if the wrapper is kept.

    The reducer is freed under the GIL. Were it the last to hold the group, it would join the group's thread, which
    may itself be waiting for the GIL to release a finished collective: the process would hang. The attributes of
    an object are released in the order in which they were set, and the group, as a Python object, frees itself
    without the GIL.
    """
    wrapper.__dict__["_torchhal_last"] = wrapper.process_group


class _Paused:
    """``no_sync()`` of the current wrapper, which can be entered many times, inside of itself too."""

    def __init__(self, strategy: DDPStrategy) -> None:
        self.strategy = strategy
        self.entered: list[tuple[bool, AbstractContextManager[Any] | None]] = []
        """Of each time that it was entered, whether gradients were averaged before, and another wrapper's context."""

    def __enter__(self) -> None:
        model = self.strategy.model
        context: AbstractContextManager[Any] | None = None
        synced = True
        if isinstance(model, DistributedDataParallel):
            synced, model.require_backward_grad_sync = model.require_backward_grad_sync, False
        elif hasattr(model, "no_sync"):  # another wrapper's, made anew each time it is entered
            context = model.no_sync()
            context.__enter__()
        self.entered.append((synced, context))

    def __exit__(self, *exc_info: Any) -> None:
        synced, context = self.entered.pop()
        if isinstance(self.strategy.model, DistributedDataParallel):
            self.strategy.model.require_backward_grad_sync = synced
        if context is not None:
            context.__exit__(*exc_info)


def _check_ddp_options(options: dict[str, Any]) -> None:
    if unknown := sorted(set(options) - _DDP_OPTIONS):
        raise TypeError(
            f"DDPStrategy takes no argument {', '.join(map(repr, unknown))}: beside its own it passes on "
            f"{', '.join(sorted(_DDP_OPTIONS))}"
        )
