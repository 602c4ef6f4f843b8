"""Settings from JSON that a stranger may have written: names, types and sizes are checked. Light: no torch."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rlsprune.model.arguments import quoted

__all__ = ["from_plain"]

Plain = TypeVar("Plain")

MAX_INT = 2**31 - 1
MAX_TEXT = 4096  # characters of a name or a path
MAX_ITEMS = 100_000


def from_plain(kind: type[Plain], values: object, what: str) -> Plain:
    """Builds a dataclass from what JSON had. Fields that have a default may be missing.

    Args:
        kind: The dataclass, made of strings, numbers, booleans, None, tuples and further dataclasses.
        values: A mapping, if all is well.
        what: What it should be, for the message.

    Raises:
        ValueError: A name is unknown or missing, or a value is not of its field's type.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"this is not {what}: it is a {type(values).__name__}, not an object with names")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    required = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    odd = sorted((set(values) - known.keys()) | (required - values.keys()))
    if odd:
        raise ValueError(
            f"this is not {what} of this version: {quoted(odd)} is unknown or missing. Start it anew, or use the "
            "version that wrote it"
        )
    hints = get_type_hints(kind)
    return kind(**{name: _checked(hints[name], value, name, what) for name, value in values.items()})


def _checked(hint: Any, value: object, name: str, what: str) -> Any:
    """The value as its field has it."""
    if is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, f"{name} in {what}")
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        [hint] = [part for part in get_args(hint) if part is not type(None)]
        return _checked(hint, value, name, what)
    if get_origin(hint) is tuple:
        return _checked_tuple(get_args(hint), value, name, what)
    if hint is float and type(value) is int and abs(value) <= MAX_INT:
        return value
    if type(value) is not hint:
        raise ValueError(f"{name} in {what} is a {type(value).__name__}: it must be a {hint.__name__}")
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise ValueError(f"{name} in {what} is larger than {MAX_INT:,}")
    if isinstance(value, str) and (len(value) > MAX_TEXT or "\0" in value):
        raise ValueError(f"{name} in {what} is longer than {MAX_TEXT:,} characters, or holds a zero byte")
    return value


def _checked_tuple(hints: tuple[Any, ...], value: object, name: str, what: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_ITEMS:
        raise ValueError(f"{name} in {what} is not a list of at most {MAX_ITEMS:,} items")
    if hints[-1] is ...:
        hints = hints[:1] * len(value)
    if len(value) != len(hints):
        raise ValueError(f"{name} in {what} has {len(value)} items: it must have {len(hints)}")
    return tuple(_checked(hint, item, name, what) for hint, item in zip(hints, value, strict=True))
