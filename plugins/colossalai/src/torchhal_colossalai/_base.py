"""The base of strategies around the booster's plugins: it chooses one, and holds Colossal-AI's session in a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from torchhal.composition import Composition
from torchhal.distributed.stores import Store
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.plugin import Availability
from torchhal.strategies import PARALLEL_ARGUMENTS, ParallelStrategy
from torchhal_colossalai import _options
from torchhal_colossalai import _sdk as sdk


class ColossalAIStrategy(ParallelStrategy):
    """One process per device, trained through ``colossalai.booster.Booster`` with one of its plugins.

    Args:
        plugin: ``"torch_ddp"``, data parallel; ``"low_level_zero"``, ZeRO stage 1 or 2; ``"gemini"`` or
            ``"hybrid_parallel"``, which are refused before launch. The object is of a subclass for it.
        options: arguments of the booster's plugin, such as ``{"stage": 2}``; those that a Trainer decides are refused.
        find_unused_parameters: allow parameters that a step does not use.
        arguments: ``start_method``, ``process_group_backend``, ``timeout`` and the parts, as in
            :class:`ParallelStrategy`.

    Raises:
        ConfigurationError: Colossal-AI is missing, or what it imports; an option that it doesn't have, or that can't be
            given here.
    """

    default_plugin: ClassVar[str] = "torch_ddp"
    """The booster's plugin of a subclass."""
    classes: ClassVar[dict[str, type[ColossalAIStrategy]]] = {}
    """The subclass of each plugin."""
    arguments_of_base: ClassVar[tuple[str, ...]] = ()
    """Arguments that a subclass passes on to another base."""

    @classmethod
    def availability(cls) -> Availability:
        return sdk.COLOSSALAI.availability()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "default_plugin" in vars(cls):
            ColossalAIStrategy.classes.setdefault(cls.default_plugin, cls)

    def __new__(cls, *, plugin: str | None = None, **arguments: Any) -> ColossalAIStrategy:
        if cls is ColossalAIStrategy:
            chosen = cls.default_plugin if plugin is None else _options.check_plugin(plugin)
            return super().__new__(cls.classes[chosen])
        return super().__new__(cls)

    def __init__(
        self, *, plugin: str | None = None, options: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        own = self.default_plugin
        if plugin is not None and _options.check_plugin(plugin) != own:
            raise ConfigurationError(
                f"{type(self).__name__} is the booster's plugin {own!r} (got plugin={plugin!r}): use ColossalAIStrategy"
            )
        if unknown := sorted(set(arguments) - {*PARALLEL_ARGUMENTS, *self.arguments_of_base}):
            raise TypeError(
                f"{type(self).__name__} takes no argument {', '.join(map(repr, unknown))}: those of the booster's "
                f"plugin go into options={{...}}, beside {', '.join(PARALLEL_ARGUMENTS)}"
            )
        self.plugin_options = _options.check_options(own, options)
        super().__init__(**arguments)
        sdk.COLOSSALAI.check()
        self.booster: Any = None
        """Colossal-AI's ``Booster``, while a run is set up."""
        self._session = ExitStack()

    def check_fit(self, composition: Composition) -> None:
        super().check_fit(composition)
        kind = composition.accelerator.device_type
        try:
            sdk.accelerator_name(kind)
        except ConfigurationError as error:
            raise UnsupportedCombinationError(
                f"strategy {self.alias or 'colossalai'!r} doesn't fit accelerator {composition.accelerator.name!r}: "
                f"{error}"
            ) from error

    def setup_communication(self) -> Store | None:
        store = super().setup_communication()
        with self.guard("import of Colossal-AI"):
            sdk.load()
            self._session.enter_context(sdk.session(self.root_device.type))
        return store

    def make_booster(self, **options: Any) -> Any:
        """Return Colossal-AI's booster with this strategy's plugin."""
        from colossalai.booster import Booster
        from colossalai.booster import plugin as plugins

        return Booster(plugin=getattr(plugins, _options.CLASSES[self.default_plugin])(**options))

    def release_model(self) -> None:
        super().release_model()
        self.booster = None

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._session.close()
