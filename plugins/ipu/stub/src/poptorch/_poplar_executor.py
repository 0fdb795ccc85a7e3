"""A model on the device: compiled at its first call, with weights of its own there."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn

from poptorch import enums
from poptorch.optim import SGD, Optimizer
from poptorch.options import Options, PipelinedExecution, ShardedExecution
from poptorch_stub import batching, following, machine, structure, updates
from poptorch_stub.graph import Graph
from poptorch_stub.machine import Error

_log = logging.getLogger("poptorch")
_UNCOMPILED = "there is no executable: the model was not compiled, or it was destroyed"
_END = "; the graph was compiled for the first call: destroy() it, or make another executor, for other inputs"


class PoplarExecutor:
    def __init__(
        self,
        model: nn.Module,
        options: Options | None,
        training: bool,
        poptorch_version: str,
        optimizer: torch.optim.Optimizer | None = None,
        user_model: nn.Module | None = None,
    ) -> None:
        if options is not None and not isinstance(options, Options):
            raise Error(f"'options' must be poptorch.Options (got {options!r})")
        if options is not None:
            options._freeze()
        self._options = Options() if options is None else options.clone()
        self._model = model
        self._user_model = user_model if user_model is not None else model
        self._training = training
        self._take_options()
        self._arguments = inspect.signature(model.forward)
        self._graph: Graph | None = None
        self._compiled: tuple[list[Any], dict[str, Any]] | None = None
        self._is_attached = False
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._random: torch.Tensor | None = None
        self._optimizer: Any = None
        self._told: dict[str, Any] = {}
        if training:
            self.setOptimizer(optimizer or SGD(self._user_model.parameters(), lr=0.01))
            try:
                following.follow(self._user_model, self)
            except TypeError as error:
                raise Error(str(error)) from error
        self._options._freeze()

    def _take_options(self) -> None:
        options = self._options
        if options.defaultOutputMode():
            options.outputMode(enums.OutputMode.Final if self._training else enums.OutputMode.All)
        if not self._training and options.Training.gradient_accumulation != 1:
            raise Error(
                "inference knows no gradients: Training.gradientAccumulation must be 1 for inferenceModel (got "
                f"{options.Training.gradient_accumulation})"
            )
        self._sizes = batching.Sizes(
            iterations=options.device_iterations,
            accumulation=options.Training.gradient_accumulation,
            replicas=options.replication_factor,
            group=options.input_group_size,
        )

    # -- the user's module -----------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._user_model

    @property
    def options(self) -> Options:
        return self._options

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_user_model"], name)

    # -- weights ---------------------------------------------------------------------------------------------

    def _host(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return dict(self._model.named_parameters()), dict(self._model.named_buffers())

    def _need_executable(self) -> Graph:
        if self._graph is None:
            raise Error(_UNCOMPILED)
        return self._graph

    def copyWeightsToHostIfNeeded(self) -> bool:
        if not self._dirty_host_weights:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToHost(self) -> None:
        self._need_executable()
        self._dirty_host_weights = False
        parameters, buffers = self._host()
        with torch.no_grad():
            for host, device in ((parameters, self._weights), (buffers, self._buffers[0])):
                for name, tensor in host.items():
                    tensor.copy_(device[name])
        self._host_weights_version += 1

    def copyWeightsToDevice(self) -> None:
        self._need_executable()
        self._dirty_host_weights = False
        parameters, buffers = self._host()
        for name, parameter in parameters.items():
            self._weights[name].copy_(parameter.detach())
        for replica in self._buffers:
            for name, buffer in buffers.items():
                replica[name].copy_(buffer.detach())

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], strict: bool = True) -> Any:
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    # -- optimizer -------------------------------------------------------------------------------------------

    def setOptimizer(self, optimizer: Any) -> None:
        told = updates.settings(optimizer)
        before, self._optimizer, self._told = self._optimizer, optimizer, told
        if isinstance(before, Optimizer) and before is not optimizer:
            before.state_dict()  # the last it gets from here
            before._fetch = None
        if isinstance(optimizer, Optimizer):
            optimizer._fetch = self._fetch_state
        if self._is_attached:
            self._updates.tell(told)
            self._send_state()

    def _fetch_state(self) -> dict[str, Any]:
        """Return what an optimizer of poptorch keeps on the host: the device's state, where there is one."""
        kept: dict[str, Any] = self._optimizer._kept
        return self._updates.state() if self._is_attached else kept

    def _send_state(self, *, again: bool = False) -> None:
        """Bring what was loaded, or with ``again`` what is kept, to the device."""
        optimizer = self._optimizer
        if isinstance(optimizer, Optimizer) and (optimizer._unsent or again):
            if optimizer.has_state():
                self._updates.load(optimizer._kept)
            optimizer._unsent = False

    def _bring_home(self) -> None:
        """Weights and state are on the host, where they stay while others have the IPUs."""
        self.copyWeightsToHostIfNeeded()
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.state_dict()

    # -- device ----------------------------------------------------------------------------------------------

    def isCompiled(self) -> bool:
        return self._graph is not None

    def isAttachedToDevice(self) -> bool:
        return self._graph is not None and self._is_attached

    def attachToDevice(self) -> None:
        graph = self._need_executable()
        self._must_not_be_offline()
        if self._is_attached:
            raise Error("the model is attached to a device already")
        per_replica = machine.rounded(graph.ipus, allowed=self._options.auto_round_num_ipus)
        machine.attach(self, per_replica * self._options.replication_factor)
        self._is_attached = True
        self.copyWeightsToDevice()
        if self._training:
            self._updates.tell(self._told)
            self._send_state(again=True)

    def _must_not_be_offline(self) -> None:
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "with ConnectionType.Never a model can be compiled, not run"
        )

    def detachFromDevice(self) -> None:
        self._need_executable()
        if not self._is_attached:
            raise Error("the model is not attached to a device")
        if self._training:
            self._bring_home()
        machine.detach(self)
        self._is_attached = False

    def destroy(self) -> None:
        if self._graph is None:
            return  # and a module that was never compiled keeps its class
        if self._training:
            self._bring_home()
            following.leave(self._user_model)
        machine.detach(self)
        self._graph, self._is_attached = None, False

    @property
    def rng_state(self) -> list[int]:
        self._need_executable()
        assert self._random is not None
        return [0, *self._random.tolist()]

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._need_executable()
        self._random = torch.tensor(state[1:], dtype=torch.uint8)

    # -- calls -----------------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        if self._graph is not None:
            _log.warning("compile() changes nothing: there is an executable")
            return
        self._compile(*self._parsed(args, kwargs))

    def _parsed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        bound = self._arguments.bind(*args, **kwargs)
        bound.apply_defaults()
        return structure.transform((list(bound.args), bound.kwargs), torch.Tensor.contiguous)  # type: ignore[no-any-return]

    def _compile(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        def narrow(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                _log.warning("an input requires gradients, and gets none: it is detached")
            return self._sizes.micro(tensor.detach())

        micro_args, micro_kwargs = structure.transform((args, kwargs), narrow)
        parameters, buffers = self._host()
        self._weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        device_buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        trained = (
            [name for name, parameter in parameters.items() if parameter.requires_grad] if self._training else None
        )
        graph = Graph(self._model, self._weights, device_buffers, micro_args, micro_kwargs, trained=trained)
        replicas = self._options.replication_factor
        if graph.writes and replicas > 1 and self._options.broadcast_buffers:
            raise Error(
                f"the model writes to {', '.join(map(repr, graph.writes))}, and buffers are not kept alike on "
                "replicas: where each may have its own, use Options.broadcastBuffers(False)"
            )
        self._buffers = [{name: buffer.clone() for name, buffer in device_buffers.items()} for _ in range(replicas)]
        self._check_pipeline(graph.ipus)
        if self._training:
            assert self._optimizer is not None
            names = {id(parameter): name for name, parameter in parameters.items()}
            self._updates = updates.Updates(self._optimizer, names, self._weights, self._told)
        self._graph, self._compiled = graph, (args, kwargs)
        seed = self._options.random_seed if self._options.exists("random_seed") else 42
        self._random = torch.Generator().manual_seed(seed).get_state()
        if self._options.connection_type != enums.ConnectionType.Never:
            try:
                self.attachToDevice()
            except Error:
                self._graph = None
                raise

    def _check_pipeline(self, stages: int) -> None:
        strategy = self._options._execution_strategy
        if stages == 1 or isinstance(strategy, ShardedExecution) or not isinstance(strategy, PipelinedExecution):
            return
        if self._training and self._sizes.accumulation < 2 * stages - 1:
            raise Error(
                f"Training.gradientAccumulation must be at least {2 * stages - 1} to fill a pipeline of {stages} "
                f"stages and their backward (got {self._sizes.accumulation})"
            )
        if not self._training and self._sizes.iterations < stages:
            raise Error(
                f"deviceIterations must be at least {stages} to fill a pipeline of {stages} stages (got "
                f"{self._sizes.iterations})"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._must_not_be_offline()
        args_given, kwargs_given = self._parsed(args, kwargs)
        if self._graph is None:
            self._compile(args_given, kwargs_given)
        if not self._is_attached:
            self.attachToDevice()
        graph = self._need_executable()
        if not self._training and isinstance(self._user_model, following.OnDevice):
            self._take_newer_weights()
        assert self._compiled is not None
        _validate("arguments", self._compiled[0], args_given)
        _validate("named arguments", self._compiled[1], kwargs_given)
        if self._training:
            self._send_state()
        results = self._run(structure.flatten((args_given, kwargs_given)))
        if self._training:
            self._dirty_host_weights = True
        mode = enums.OutputMode(self._options.output_mode).name
        outputs = [
            batching.returned(list(column), mode, self._options.output_return_period, self._options.replication_factor)
            for column in results
        ]
        for output in outputs:
            output.backward = _no_backward  # type: ignore[method-assign]
        return structure.rebuild(graph.outputs, iter(outputs))

    def _take_newer_weights(self) -> None:
        """Go on with what the module has learned in training elsewhere."""
        trained = self._user_model.executor()  # type: ignore[operator]
        trained.copyWeightsToHostIfNeeded()
        if self._host_weights_version != trained._host_weights_version:
            self.copyWeightsToDevice()
            self._host_weights_version = trained._host_weights_version

    def _run(self, tensors: list[torch.Tensor]) -> list[list[list[torch.Tensor]]]:
        """All iterations; for each output, for each micro-batch in time, the tensor of each replica."""
        graph = self._need_executable()
        scale = self._told.get("loss_scaling", 1.0)
        mean = self._options.Training.accumulation_and_replication_reduction_type == enums.ReductionType.Mean
        rows: list[list[list[torch.Tensor]]] = []
        before = torch.get_rng_state()
        assert self._random is not None
        torch.set_rng_state(self._random)
        try:
            for iteration in self._sizes.steps([tensor.detach() for tensor in tensors]):
                total: dict[str, torch.Tensor] = {}
                for replicas in iteration:
                    row = []
                    for index, micro in enumerate(replicas):
                        outputs, gradients = graph.run(self._weights, self._buffers[index], micro, scale)
                        row.append([tensor.clone() for tensor in outputs])
                        for name, gradient in gradients.items():
                            gradient = gradient.float()
                            total[name] = total[name] + gradient if name in total else gradient
                    rows.append(row)
                if self._training:
                    count = self._sizes.accumulation * self._sizes.replicas if mean else 1
                    self._updates.step({name: gradient / count for name, gradient in total.items()})
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(before)
        outputs_count = len(rows[0][0])
        return [[[replica[index] for replica in row] for row in rows] for index in range(outputs_count)]


def _no_backward(*args: Any, **kwargs: Any) -> None:
    raise Error("there is no backward() of what a model on the device returned: a trainingModel's call has run it")


def _validate(name: str, compiled: Any, given: Any) -> None:
    """Raise Error unless an argument is what the graph was compiled for."""
    if isinstance(compiled, torch.Tensor) and isinstance(given, torch.Tensor):
        was, now = (compiled.shape, compiled.dtype), (given.shape, given.dtype)
        if was != now:
            raise Error(f"{name} must be a tensor of shape and dtype {was} (got {now}){_END}")
    elif type(compiled) is not type(given):
        raise Error(f"{name} must be a {type(compiled).__name__} (got a {type(given).__name__}){_END}")
    elif isinstance(compiled, dict | list | tuple):
        keys, others = (list(each) if isinstance(each, dict) else list(range(len(each))) for each in (compiled, given))
        if keys != others:
            raise Error(f"{name} must have the items {keys} (got {others}){_END}")
        for key in keys:
            _validate(f"{name}[{key!r}]", compiled[key], given[key])
    elif compiled != given:
        raise Error(f"{name} must be {compiled!r} (got {given!r}){_END}")
