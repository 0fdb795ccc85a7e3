"""Forward attributes of one object to another that it holds."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Forwarded(Generic[T]):
    """An attribute that is read and set on the object in the attribute ``holder``, under the same name."""

    def __init__(self, holder: str) -> None:
        self.holder = holder

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Forwarded[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Forwarded[T] | T:
        if instance is None:
            return self
        value: T = getattr(getattr(instance, self.holder), self.name)
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(getattr(instance, self.holder), self.name, value)

    def __delete__(self, instance: Any) -> None:
        delattr(getattr(instance, self.holder), self.name)
