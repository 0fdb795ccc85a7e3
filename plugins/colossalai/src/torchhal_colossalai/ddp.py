"""Data parallel through Colossal-AI's TorchDDPPlugin, which wraps the model in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchhal.strategies import DDPStrategy
from torchhal_colossalai import _sdk as sdk
from torchhal_colossalai._base import ColossalAIStrategy

_BOOSTED = "_torchhal_boosted"


class ColossalAIDDPStrategy(ColossalAIStrategy, DDPStrategy):
    """:class:`ColossalAIStrategy` with the booster's plugin ``torch_ddp``.

    Everything is as under ``ddp``. Batch norms stay those of the model unless the Trainer has ``sync_batchnorm=True``;
    the plugin itself would convert them all.
    """

    default_plugin: ClassVar[str] = "torch_ddp"
    arguments_of_base: ClassVar[tuple[str, ...]] = ("find_unused_parameters", "static_graph")

    def __init__(
        self,
        *,
        plugin: str | None = None,
        options: Mapping[str, Any] | None = None,
        find_unused_parameters: bool | None = None,
        **arguments: Any,
    ) -> None:
        given = dict(options) if isinstance(options, Mapping) else {}
        super().__init__(
            plugin=plugin,
            options=options,
            find_unused_parameters=given.get("find_unused_parameters", False)
            if find_unused_parameters is None
            else find_unused_parameters,
            static_graph=given.get("static_graph", False),
            **arguments,
        )

    def configure_ddp(self) -> None:
        options = {**self.plugin_options, "find_unused_parameters": self.find_unused_parameters}
        self.booster = self.make_booster(**options)
        with sdk.unconverted_batchnorms():
            boosted, *_ = self.booster.boost(self.model)
        self.model = boosted.module
        # held by the wrapper alone, which is freed as a whole where a new one takes its place
        self.model.__dict__[_BOOSTED] = boosted

    @property
    def boosted_module(self) -> Any:
        """What the booster has returned for the module, as its methods for checkpoints take it; None without a run."""
        return getattr(self.model, "__dict__", {}).get(_BOOSTED)
