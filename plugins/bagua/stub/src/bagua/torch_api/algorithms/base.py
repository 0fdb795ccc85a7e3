"""What an algorithm may do, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bagua_stub.buckets import Bucket, Entry, gradient


class Algorithm:
    def reify(self, process_group: Any) -> Any:
        pass

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        made: Algorithm = GlobalAlgorithmRegistry.get(name)(**kwargs)
        return made


class AlgorithmImpl:
    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self._communicated: set[str] = set()

    def need_reset(self) -> bool:
        return False

    def init_tensors(self, bagua_ddp: Any) -> list[Entry]:
        """Return the gradients, from the last parameter to the first."""
        parameters = bagua_ddp.bagua_build_params()
        self._communicated = {name for name, _ in parameters}
        return [gradient(name, parameter) for name, parameter in reversed(parameters)]

    def tensors_to_buckets(self, tensors: list[list[Entry]], do_flatten: bool) -> list[Bucket]:
        return [Bucket(each, flatten=do_flatten) for each in tensors]

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        return lambda input: None

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        def hook(parameter_name: str, parameter: nn.Parameter) -> None:
            if parameter_name in self._communicated:
                bagua_ddp._bagua_backend.mark_ready(parameter_name)

        return hook

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]:
        return lambda: None

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        return lambda optimizer: None

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        """Append the bucket's operations."""


class _AlgorithmRegistry(dict[str, Any]):
    def register(self, name: str, algorithm: Callable[..., Any], description: str | None = None) -> None:
        if name in self:
            raise ValueError(f"'{name}' is already present in the registry.")
        self[name] = {"algorithm": algorithm, "description": description or ""}

    def get(self, name: str) -> Callable[..., Any]:  # type: ignore[override]
        if name not in self:
            names = ", ".join(sorted(self)) or "none"
            raise KeyError(f"'{name}' not found in registry. Available names: {names}")
        found: Callable[..., Any] = self[name]["algorithm"]
        return found


GlobalAlgorithmRegistry = _AlgorithmRegistry()
