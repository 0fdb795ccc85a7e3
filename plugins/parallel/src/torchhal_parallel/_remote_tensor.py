"""Parameters, buffers and gradients of another stage of a pipeline: shapes without values, and what may be done so.

Each rank has the whole model by name, with these in the places of what it lacks. Code that treats every parameter by
itself runs as it is, as the rank that has the values computes the same with them. Code that uses all parameters
together would give another result without an error: here it raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Set
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from torchhal.errors import ModelError, TorchhalError
from torchhal_parallel._random_operators import draws, draws_for_each_element

_READING = ("aten::_local_scalar_dense", "aten::equal")
"""Operators that give a number of the host; ``item``, ``bool`` and ``allclose`` end in one of them."""


INSTEAD: Final = (
    "code over all parameters has those of one stage alone. For the norm of all gradients call "
    "trainer.strategy.grad_norm(optimizer); to clip by it set Trainer(gradient_clip_val=...), or call "
    "self.clip_gradients(...) in configure_gradient_clipping. A penalty over parameters, a copy of the model that "
    "follows it (EMA), or another number made of all of them needs a strategy under which each rank has the model, "
    "such as 'ddp' or 'zero1'"
)
"""What to do where code would use all parameters."""


class RemoteWriteError(TorchhalError, RuntimeError):
    """Values of another rank were to be written into a tensor of this one: a ModelError that is no TypeError.

    In ``parameter *= number`` torch takes a TypeError for a reason to let Python make a new tensor, and the parameter
    would stay what it was.
    """


class RemoteTensor(torch.Tensor):
    """A tensor on the meta device whose values are on another rank.

    What is computed from one is another. To read a value raises ModelError; to write one into a tensor that this rank
    has, RemoteWriteError.
    """

    __slots__ = ("home", "what")
    what: str
    """Of which parameter or buffer, or of whose gradient, it was computed."""
    home: torch.device
    """Of the kind that the values are on, on their rank."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        source = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RemoteTensor))
        namespace_and_name = func._schema.name
        name = namespace_and_name.partition("::")[2]
        if name.startswith("new_") or name.endswith("_like"):  # of its shape, on whichever device
            if draws(func):
                source._draw(func, args, kwargs)
            with torch._C._DisableTorchDispatch():
                made = func(*args, **kwargs)
            return source._like(made) if made.is_meta else made
        device = kwargs.get("device")
        if namespace_and_name in _READING or (device is not None and torch.device(device).type != "meta"):
            source.refuse("read")
        if any(not leaf.is_meta for leaf in written(func, args, kwargs)):
            raise RemoteWriteError(source.reason("written into a tensor of this rank"))
        if draws(func):
            source._draw(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            args, kwargs = tree_map_only(torch.Tensor, _shape_of, (args, kwargs))
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                source.refuse(f"computed with ({type(error).__name__}: {error})")
        return tree_map_only(torch.Tensor, source._like, result)

    def _like(self, result: torch.Tensor) -> torch.Tensor:
        return result if isinstance(result, RemoteTensor) else _remote(RemoteTensor, result, self.what, self.home)

    def _draw(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Draw what the rank with the values draws, so that generators which are alike stay so."""
        if kwargs.get("device") is not None:  # into a tensor that this rank has
            return
        if not draws_for_each_element(operator):
            self.refuse(f"given to {operator.name()}, which draws random numbers by its values")

        with torch._C._DisableTorchDispatch():
            operator(*tree_map_only(RemoteTensor, _zeros, args), **tree_map_only(RemoteTensor, _zeros, kwargs))

    def refuse(self, done: str) -> NoReturn:
        """Raise ModelError with what was to be ``done`` with it, and what to call instead."""
        raise ModelError(self.reason(done))

    def reason(self, done: str) -> str:
        """Return why nothing can be ``done`` with it here, and what to call instead."""
        what = f"{self.what} is in another stage of the pipeline, where its values are"
        return f"{what}, and was to be {done} here: {INSTEAD}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.what}, in another stage of the pipeline, of shape {tuple(self.shape)}>"

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() else self.refuse("read")

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        if id(self) not in memo:
            memo[id(self)] = _remote(type(self), self, self.what, self.home, self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("saved")

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse("read")

    def tolist(self) -> NoReturn:
        self.refuse("read")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse("read")


class RemoteParameter(RemoteTensor, nn.Parameter):
    """A parameter whose values are on another rank."""

    __slots__ = ()


def remote(tensor: torch.Tensor, name: str, home: torch.device | None = None) -> RemoteTensor:
    """Return what stands for ``tensor``, the parameter or buffer ``name``, on the ranks of other stages.

    ``home`` is the device on which ranks have such values; None: that of ``tensor``.
    """
    _let_init_draw()
    kind = RemoteParameter if isinstance(tensor, nn.Parameter) else RemoteTensor
    return _remote(kind, tensor, repr(name), home or tensor.device, tensor.requires_grad)


def replace_with_remote(module: nn.Module, kept: Set[int], home: torch.device) -> None:
    """Free the parameters and buffers of ``module`` whose ids are not in ``kept``: they keep their names and shapes.

    Args:
        module: the whole model; changed in place.
        kept: ids of the tensors that stay.
        home: the device of such tensors on the ranks that have them.
    """
    made: dict[int, Any] = {}  # tied ones stay tied, or an optimizer would count them twice
    for path, owner in module.named_modules():
        for members in (owner._parameters, owner._buffers):
            for name, tensor in members.items():
                if tensor is not None and id(tensor) not in kept:
                    if id(tensor) not in made:
                        made[id(tensor)] = remote(tensor, f"{path}.{name}" if path else name, home)
                    members[name] = made[id(tensor)]


def remote_gradient(parameter: RemoteParameter) -> RemoteTensor:
    """Return what stands for the gradient of ``parameter`` between its backward, on another rank, and the next."""
    return _remote(RemoteTensor, parameter, f"the gradient of {parameter.what}", parameter.home)


def _remote(
    kind: Any, tensor: torch.Tensor, what: str, home: torch.device, requires_grad: bool = False
) -> RemoteTensor:
    with torch._C._DisableTorchDispatch():
        made: RemoteTensor = torch.Tensor._make_subclass(kind, _shape_of(tensor), requires_grad)
    made.what, made.home = what, home
    return made


def _zeros(tensor: RemoteTensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.home).zero_()


@functools.cache
def _let_init_draw() -> None:
    """Let functions of ``nn.init`` that draw nothing on the meta device do so for what stands for other values."""

    def drawing(inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            inner(_zeros(tensor) if isinstance(tensor, RemoteTensor) else tensor, *args, **kwargs)
            return tensor

        return call

    for name in ("_no_grad_trunc_normal_", "orthogonal_", "sparse_"):
        if hasattr(nn.init, name):
            setattr(nn.init, name, drawing(getattr(nn.init, name)))


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself if it has no values here, else one on the meta device of its shape and strides."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes in place."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
