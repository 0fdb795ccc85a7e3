"""Route the calls of a loop's own objects, a model's forward and an optimizer's step, through a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_MISSING = object()


class Route:
    """A method of one object that is replaced until :meth:`remove`; ``inner`` is the one that it had.

    Args:
        owner: the object.
        name: of the method.

    Attributes:
        call: what is called in its place.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.inner: Callable[..., Any] = getattr(owner, name)
        self.__wrapped__ = self.inner  # by which inspect.signature shows the signature of it
        self._before = vars(owner).get(name, _MISSING)
        self.call: Callable[..., Any] = self.inner
        self._running = False
        self.install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._running:  # the strategy calls the object's own method
            return self.inner(*args, **kwargs)
        self._running = True
        try:
            return self.call(*args, **kwargs)
        finally:
            self._running = False

    @property
    def __func__(self) -> Callable[..., Any]:
        """The route as a function of the owner, as torch's schedulers take an optimizer's step to wrap it."""
        return lambda owner, *args, **kwargs: self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the method, such as a mark that torch's schedulers look for."""
        if name.startswith("__") or "inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce__(self) -> Any:
        """Return, for a copy of the owner, its own method: the route belongs to one object."""
        if self._before is not _MISSING:
            return _same, (self._before,)
        return getattr, (self.owner, self.name)

    def install(self) -> None:
        """Replace the method."""
        vars(self.owner)[self.name] = self

    def hide(self) -> None:
        """Give the object its method back until :meth:`install`, unless it has been replaced by another since."""
        if vars(self.owner).get(self.name) is self:
            if self._before is _MISSING:
                del vars(self.owner)[self.name]
            else:
                vars(self.owner)[self.name] = self._before

    def remove(self) -> None:
        """Give the object its method back; what has been put around this one calls that method from now on."""
        self.hide()
        self.call = self.inner


def _same(method: Any) -> Any:
    return method


class Routes:
    """The routes of one run."""

    def __init__(self) -> None:
        self._routes: list[Route] = []
        self._of_models: list[Route] = []

    def add(self, owner: Any, name: str, call: Callable[[Route], Callable[..., Any]]) -> None:
        """Route ``owner.name`` to what ``call`` makes of the route."""
        route = Route(owner, name)
        route.call = call(route)
        self._routes.append(route)
        if isinstance(owner, nn.Module):
            self._of_models.append(route)

    @contextmanager
    def without_models(self) -> Iterator[None]:
        """Return a context in which the models have their own methods, as inside of a strategy's step."""
        there = [route for route in self._of_models if vars(route.owner).get(route.name) is route]
        for route in there:
            route.hide()
        try:
            yield
        finally:
            for route in there:
                route.install()

    def remove(self) -> None:
        """Give all objects their methods back."""
        while self._routes:
            self._routes.pop().remove()
        self._of_models.clear()
