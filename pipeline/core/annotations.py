"""Configured values checked against the annotations of the parameters they are meant for."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reference:
    """`@scope/name()` in a config: the configured object, or without `()` its constructor."""

    scopes: tuple[str, ...]
    name: str
    evaluate: bool

    def __str__(self) -> str:
        return f"@{'/'.join((*self.scopes, self.name))}{'()' if self.evaluate else ''}"


class Mismatch(ValueError):
    """A value does not fit an annotation; the message says what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What a config may set on one stage function or settings class."""

    name: str
    target: Callable[..., Any]
    annotations: Mapping[str, Any]
    required: frozenset[str]  # the parameters without a default

    @classmethod
    def of(cls, target: Callable[..., Any]) -> Schema:
        """Reads the signature of a function or dataclass."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = [
            p for p in inspect.signature(target).parameters.values() if p.kind not in variadic
        ]
        hints = typing.get_type_hints(target)
        return cls(
            name=target.__name__,
            target=target,
            annotations={p.name: hints.get(p.name, Any) for p in parameters},
            required=frozenset(p.name for p in parameters if p.default is p.empty),
        )


def coerce(value: Any, annotation: Any, classes: Mapping[str, Any]) -> Any:
    """Returns `value` as the type that `annotation` asks for.

    A list is taken for a tuple and an int for a float; nothing else is converted. Annotations that
    no config value can be checked against (type variables, protocols) accept everything.

    Args:
      value: Python literals, with `Reference` leaves.
      annotation: a resolved type hint.
      classes: the settings classes that references may name.

    Raises:
      Mismatch: `value` does not fit.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, InitVar):
        return coerce(value, annotation.type, classes)
    if origin is typing.Annotated:
        return coerce(value, args[0], classes)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, annotation, classes)
    if origin is typing.Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
        raise Mismatch(f"expected {describe(annotation)}")
    if annotation is Any:
        return value
    if isinstance(value, Reference):
        return _coerce_reference(value, annotation, classes)
    return _coerce_plain(value, annotation, origin or annotation, classes)


def _coerce_union(value: Any, annotation: Any, classes: Mapping[str, Any]) -> Any:
    fits = []
    for arm in typing.get_args(annotation):
        try:
            fits.append(coerce(value, arm, classes))
        except Mismatch:
            continue
    if not fits:
        raise Mismatch(f"expected {describe(annotation)}")
    # An arm that takes the value as it is wins: 3 stays an int for `float | int`.
    return next((fit for fit in fits if fit is value), fits[0])


def _coerce_reference(reference: Reference, annotation: Any, classes: Mapping[str, Any]) -> Any:
    expected = typing.get_origin(annotation) or annotation
    if not reference.evaluate:
        if expected in (type, collections.abc.Callable) or not inspect.isclass(expected):
            return reference
        raise Mismatch(f"expected {describe(annotation)}; write {reference}() for the object")
    checkable = inspect.isclass(expected) and not getattr(expected, "_is_protocol", False)
    if checkable and not issubclass(classes[reference.name], expected):
        raise Mismatch(f"expected {describe(annotation)}")
    return reference


def _coerce_plain(value: Any, annotation: Any, origin: Any, classes: Mapping[str, Any]) -> Any:
    args = typing.get_args(annotation)
    if origin is float and type(value) is int:
        return float(value)
    if origin in (int, float, str, bool, bytes):
        # `type(...) is`: True is an int for isinstance, but not for a person.
        fits = type(value) is origin
    elif annotation in (None, types.NoneType):
        fits = value is None
    elif origin in (tuple, list, collections.abc.Sequence) and isinstance(value, list | tuple):
        return _coerce_items(value, annotation, origin, classes)
    elif origin in (dict, collections.abc.Mapping) and isinstance(value, dict):
        key, item = args or (Any, Any)
        return {coerce(k, key, classes): coerce(v, item, classes) for k, v in value.items()}
    else:
        fits = not inspect.isclass(origin) or getattr(origin, "_is_protocol", False)
        fits = fits or isinstance(value, origin)
    if not fits:
        raise Mismatch(f"expected {describe(annotation)}")
    return value


def _coerce_items(value: Any, annotation: Any, origin: Any, classes: Mapping[str, Any]) -> Any:
    args = typing.get_args(annotation)
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(value):
            raise Mismatch(f"expected {describe(annotation)}: {len(args)} items, not {len(value)}")
        items: Iterable[Any] = args
    else:
        items = [args[0] if args else Any] * len(value)
    container = list if origin is list else tuple
    return container(coerce(v, a, classes) for v, a in zip(value, items, strict=True))


def describe(annotation: Any) -> str:
    """The values that `annotation` allows, in words: `int or None`, `one of 'a', 'b'`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is typing.Annotated:
        return describe(args[0])
    if annotation is types.NoneType:
        return "None"
    if args:
        inner = ", ".join("..." if arg is Ellipsis else describe(arg) for arg in args)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    if hasattr(annotation, "__dataclass_fields__"):
        return f"@{annotation.__name__}()"
    return getattr(annotation, "__name__", str(annotation))
