"""What the bridge puts in the place of torch's functions: other signatures and, in lazy mode, other files.

The seeds are the simulator's own affair: ``torch.manual_seed``, ``torch.seed`` and ``fork_rng`` reach its device.
"""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Callable
from functools import wraps
from typing import IO, Any

import torch
import torch.distributed as dist
from habana_frameworks.torch.utils.internal import is_lazy
from torch.distributed.constants import default_pg_timeout
from torch.serialization import DEFAULT_PROTOCOL

LAZY_DEFAULT_PROTOCOL = 4


def overwrite_torch_functions() -> None:
    for replace in (_process_groups, _default_device, _printing, _files):
        replace()


def _process_groups() -> None:
    init, new = dist.init_process_group, dist.new_group

    @wraps(init)
    def init_process_group(
        backend: str,
        init_method: str | None = None,
        timeout: datetime.timedelta = datetime.timedelta(seconds=1800),
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
    ) -> None:
        init(backend, init_method, timeout, world_size, rank, store, group_name, pg_options)

    @wraps(new)
    def new_group(
        ranks: list[int] | None = None,
        timeout: datetime.timedelta = default_pg_timeout,
        backend: str | None = None,
        pg_options: Any = None,
    ) -> Any:
        return new(ranks, timeout, backend, pg_options)

    for function in (init_process_group, new_group):
        del function.__wrapped__  # its signature would hide this one
        setattr(dist, function.__name__, function)


def _default_device() -> None:
    of_group = dist.distributed_c10d._get_pg_default_device

    @wraps(of_group)
    def default_device(group: Any = None) -> torch.device:
        name = group._get_backend_name() if group is not None else dist.get_backend()
        return torch.device("hpu") if name == "hccl" else of_group(group)

    dist.distributed_c10d._get_pg_default_device = default_device


def _printing() -> None:
    """Torch formats the numbers in float64. On Gaudi that is float32 under another name; the stub has neither."""
    of_tensor = torch._tensor_str._tensor_str

    @wraps(of_tensor)
    def tensor_str(self: torch.Tensor, indent: int) -> str:
        return str(of_tensor(self.cpu() if self.device.type == "hpu" else self, indent))  # type: ignore[no-untyped-call]

    torch._tensor_str._tensor_str = tensor_str


def _on_cpu(value: Any) -> Any:
    """Tensors copied, one by one; containers of other kinds than these are left, named tuples become tuples."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().cpu()
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_on_cpu(item) for item in value]
    return tuple(_on_cpu(item) for item in value) if isinstance(value, tuple) else value


def _files() -> None:
    if not is_lazy():
        return
    save_file, load_file = torch.save, torch.load

    def save(
        obj: object,
        f: str | os.PathLike[str] | IO[bytes],
        pickle_module: Any = pickle,
        pickle_protocol: int = LAZY_DEFAULT_PROTOCOL,
        _use_new_zipfile_serialization: bool = True,
        _disable_byteorder_record: bool = False,
    ) -> None:
        # weights_only reads protocol 2; the vendor has put a reader for 4 in its place
        protocol = DEFAULT_PROTOCOL if pickle_protocol == LAZY_DEFAULT_PROTOCOL else pickle_protocol
        save_file(_on_cpu(obj), f, pickle_module, protocol, _use_new_zipfile_serialization, _disable_byteorder_record)

    def load(
        f: str | os.PathLike[str] | IO[bytes],
        map_location: Any = None,
        pickle_module: Any = pickle,
        weights_only: bool = False,
        mmap: bool | None = None,
        **pickle_load_args: Any,
    ) -> Any:
        loaded = load_file(
            f,
            map_location="cpu",
            pickle_module=None if weights_only else pickle_module,
            weights_only=weights_only,
            mmap=mmap,
            **pickle_load_args,
        )
        if map_location is None or map_location == "cpu" or isinstance(map_location, dict):
            return loaded
        return _on(loaded, map_location)

    torch.save, torch.load = save, load  # type: ignore[assignment]


def _on(value: Any, where: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return where(value, value.device) if isinstance(where, Callable) else value.to(where)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return {key: _on(item, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_on(item, where) for item in value]
    return tuple(_on(item, where) for item in value) if isinstance(value, tuple) else value
