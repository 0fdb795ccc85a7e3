"""Check the settings of a run whenever they are set, and accept or refuse them while it runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torchhal import _arguments as arguments
from torchhal.errors import ConfigurationError
from torchhal.precision.base import needs_closure
from torchhal.trainer.profilers import Profiler
from torchhal.trainer.profilers._choice import check_profiler

if TYPE_CHECKING:
    from torchhal.strategies import Strategy
    from torchhal.trainer._progress import FitProgress
    from torchhal.trainer._state import TrainerState
    from torchhal.trainer.data._sources import DataSources

T = TypeVar("T")
_OPTIONAL = partial(arguments.check_optional_count, minimum=0)


class Setting(Generic[T]):
    """A setting of a run, which callbacks and scripts may set again.

    Args:
        check: ``check(name, value)``, as in the constructor: the normalised value, or a ConfigurationError.
        fits: raises ConfigurationError where the value contradicts another argument.
        running: ``running(run, name, value)`` raises ConfigurationError where the value can't be taken any more;
            called while a run is on, from the end of its ``setup`` hooks.
        follow: called once it is set; by default the training loop reads its settings again.
    """

    def __init__(
        self,
        check: Callable[[str, Any], T],
        *,
        fits: Callable[[RunSettings, str, Any], None] | None = None,
        running: Callable[[RunSettings, str, Any], None] | None = None,
        follow: Callable[[RunSettings], None] | None = None,
    ) -> None:
        self.check = check
        self.fits = fits
        self.running = running
        self.follow = follow

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, run: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, run: object, owner: type) -> T: ...
    def __get__(self, run: object | None, owner: type) -> Setting[T] | T:
        if run is None:
            return self
        try:
            value: T = vars(run)[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r} yet") from None
        return value

    def __set__(self, run: Any, value: Any) -> None:
        value = self.check(self.name, value)
        if not run.settled:  # the constructor, which checks all arguments together
            vars(run)[self.name] = value
            return
        if self.fits is not None:
            self.fits(run, self.name, value)
        before = vars(run)[self.name]
        same = type(value) is type(before) and value == before  # 1 is a batch, 1.0 all of them
        if same or run.state.status != "running" or not run.sources.ready:
            vars(run)[self.name] = value
            return
        if self.running is not None:
            self.running(run, self.name, value)
        vars(run)[self.name] = value
        run.progress.settings_changed = run.progress.settings_differ = True
        if self.follow is not None:
            self.follow(run)


def _refuse_in(*functions: str) -> Callable[[RunSettings, str, Any], None]:
    """Raise while one of ``functions`` (default: any) runs: they have used the value already."""

    def refuse(run: RunSettings, name: str, value: Any) -> None:
        fn = run.state.fn
        if fn in functions or not functions:
            raise ConfigurationError(
                f"'{name}' can't become {value!r} any more: {fn} has begun with {getattr(run, name)!r}. Set it "
                f"before {fn}, or in a setup hook"
            )

    return refuse


def _refuse_always(run: RunSettings, name: str, value: Any) -> None:
    if value != getattr(run, name):
        raise ConfigurationError(
            f"'{name}' can't become {value!r} any more: the Trainer was made with {getattr(run, name)!r}. Pass it "
            "to a new one"
        )


def _in_order(run: RunSettings, name: str, value: Any) -> None:
    """``min_epochs`` and ``min_steps`` may not exceed their ``max``."""
    what = name.removeprefix("max_").removeprefix("min_")
    limits = {f"{end}_{what}": getattr(run, f"{end}_{what}") for end in ("min", "max")} | {name: value}
    arguments.check_order(f"min_{what}", limits[f"min_{what}"], f"max_{what}", limits[f"max_{what}"])


def _interval_fits(run: RunSettings, name: str, value: Any) -> None:
    both = {key: getattr(run, key) for key in ("val_check_interval", "check_val_every_n_epoch")} | {name: value}
    arguments.check_validation(both["val_check_interval"], both["check_val_every_n_epoch"])


def _may_accumulate(run: RunSettings, name: str, value: int) -> None:
    """Raise ConfigurationError where the optimizer steps of the fit that runs can't take so many batches."""
    strategy = run.strategy
    if run.state.fn != "fit":
        return
    refuse_by_hand(run.module, name, value, 1)
    if {"owns_accumulation", "owns_step"} & set(strategy.features):
        _refuse_owned(run, name, value)
    if value > 1 and any(map(needs_closure, strategy.optimizers)):
        raise ConfigurationError(
            f"'{name}' must be 1 for an optimizer that evaluates a batch several times within one step (got {value})"
        )
    strategy.check_accumulation(value)


def _may_clip(run: RunSettings, name: str, value: Any) -> None:
    if run.state.fn != "fit":
        return
    refuse_by_hand(run.module, name, value, None if name == "gradient_clip_val" else "norm")
    if "owns_clipping" in run.strategy.features:
        _refuse_owned(run, name, value)


def _refuse_owned(run: RunSettings, name: str, value: Any) -> None:
    strategy = run.strategy
    raise ConfigurationError(
        f"'{name}' can't become {value!r} any more: strategy {strategy.display_name!r} has set up "
        f"its steps with {getattr(run, name)!r}. Set it before fit, or in a setup hook"
    )


def refuse_by_hand(module: Any, name: str, value: Any, default: Any) -> None:
    """Raise for a model with manual optimization, which has to implement the effect of ``name`` itself."""
    if value != default and not getattr(module, "automatic_optimization", True):
        raise ConfigurationError(
            f"'{name}' must be {default!r} for a model with manual optimization (got {value!r}): "
            f"{type(module).__name__}.training_step does this itself"
        )


def _clip_from_now_on(run: RunSettings) -> None:
    run.strategy.gradient_clip_val = run.gradient_clip_val
    run.strategy.gradient_clip_algorithm = run.gradient_clip_algorithm


class RunSettings:
    """The arguments of the Trainer that are attributes too.

    While a run is on, from the end of its ``setup`` hooks, a new value is taken with the next batch, or refused by a
    ConfigurationError where it would come too late. Every rank must set the same. An argument that no Trainer has as an
    attribute, or a name that is nearly a setting, is set with a warning; what the constructor has decided is refused.
    """

    strategy: Strategy
    state: TrainerState
    module: Any
    sources: DataSources
    progress: FitProgress
    settled: bool = False
    """Whether all settings have their first values: until then the constructor checks them together."""

    fast_dev_run = Setting[int](lambda name, value: arguments.check_fast_dev_run(value), fits=_refuse_always)
    max_epochs = Setting[int | None](partial(_OPTIONAL, unlimited=True), fits=_in_order)
    min_epochs = Setting[int | None](_OPTIONAL, fits=_in_order)
    max_steps = Setting[int](partial(arguments.check_count, minimum=0, unlimited=True), fits=_in_order)
    min_steps = Setting[int | None](_OPTIONAL, fits=_in_order)
    max_time = Setting[timedelta | None](arguments.check_duration)
    limit_train_batches = Setting[int | float](arguments.check_limit, running=_refuse_in("fit"))
    limit_val_batches = Setting[int | float](arguments.check_limit, running=_refuse_in("fit", "validate"))
    limit_test_batches = Setting[int | float](arguments.check_limit, running=_refuse_in("test"))
    limit_predict_batches = Setting[int | float](arguments.check_limit, running=_refuse_in("predict"))
    overfit_batches = Setting[int | float](partial(arguments.check_limit, optional=False), running=_refuse_in("fit"))
    val_check_interval = Setting[int | float | timedelta](arguments.check_interval, fits=_interval_fits)
    check_val_every_n_epoch = Setting[int | None](
        partial(arguments.check_optional_count, minimum=1), fits=_interval_fits
    )
    num_sanity_val_steps = Setting[int](
        partial(arguments.check_count, minimum=0, unlimited=True), running=_refuse_in("fit")
    )
    accumulate_grad_batches = Setting[int](partial(arguments.check_count, minimum=1), running=_may_accumulate)
    gradient_clip_val = Setting[float | None](arguments.check_clip_val, running=_may_clip, follow=_clip_from_now_on)
    gradient_clip_algorithm = Setting[str](arguments.check_clip_algorithm, running=_may_clip, follow=_clip_from_now_on)
    log_every_n_steps = Setting[int](partial(arguments.check_count, minimum=0))
    reload_dataloaders_every_n_epochs = Setting[int](partial(arguments.check_count, minimum=0))
    use_distributed_sampler = Setting[bool](arguments.check_bool, running=_refuse_in())
    sync_batchnorm = Setting[bool](arguments.check_bool, fits=_refuse_always)
    inference_mode = Setting[bool](arguments.check_bool)
    detect_anomaly = Setting[bool](arguments.check_bool, running=_refuse_in())
    deterministic = Setting[bool | str](lambda name, value: arguments.check_deterministic(value), running=_refuse_in())
    benchmark = Setting[bool | None](arguments.check_optional_bool, running=_refuse_in())
    default_root_dir = Setting[str](arguments.check_folder, fits=_refuse_always)
    profiler = Setting[Profiler](check_profiler, running=_refuse_in())
