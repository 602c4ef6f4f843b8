"""Refuses bad arguments, with the value in the message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any
from unicodedata import category

__all__ = [
    "check_argument",
    "check_callable",
    "check_iterable",
    "is_count",
    "one_number",
    "printable",
    "quoted",
    "readable_state",
    "shown",
]

_MAX_LISTED = 8  # names in one message
_MAX_SHOWN = 80  # characters of a value


def check_argument(name: str, value: object, valid: bool | Callable[[Any], object], expected: str) -> None:
    """Raises a ValueError that names the argument, its value and what it must be, unless it is valid.

    Args:
        name: Name of the argument.
        value: Value as it was given, of any type.
        valid: Whether the value is valid, or a test of it. A value on which the test raises is not valid either.
        expected: Description of a valid value.
    """
    try:
        holds = bool(valid(value) if callable(valid) else valid)
    except Exception:  # of another type: None < 1, or the truth of several numbers
        holds = False
    if not holds:
        raise ValueError(f"{name}={shown(value)} is not valid: it must be {expected}")


def check_callable(name: str, value: object) -> None:
    """Raises a TypeError unless the value is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {shown(value)}: give a function, or None")


def check_iterable(name: str, value: object, remedy: str) -> None:
    """Raises a TypeError unless the value is iterable, and not a text."""
    goes = isinstance(value, Iterable) or hasattr(value, "__getitem__")
    if not goes or isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{name} is {shown(value)}: {remedy}")


def is_count(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number, at least ``least``."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def one_number(what: str, value: Any) -> float:
    """Returns the value, which may be a tensor, as a Python float.

    Raises:
        TypeError: The value is not one number.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(getattr(value, "detach", lambda: value)())  # torch warns of a number with a gradient
    except Exception as error:
        raise TypeError(f"{what} is {shown(value)}: give one number, or a tensor of one") from error


@contextmanager
def readable_state(owner: str) -> Iterator[None]:
    """Turns an error in the block into one that says that the state dict has parts of wrong types."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"the state is not one of {owner} ({why}): give what {owner}.state_dict() returned") from error


def shown(value: object) -> str:
    """Formats a value for a message: the beginning of its repr."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def printable(text: str) -> str:
    """Escapes the characters that would command a terminal, hide or turn around other text, or are half a character."""
    return "".join(ascii(c)[1:-1] if category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t" else c for c in text)


def quoted(names: Iterable[str]) -> str:
    """Formats names for a message: few, short, and with all but ASCII escaped, so that no two look alike."""
    names = list(names)
    shown = ", ".join(ascii(name[:80]) for name in names[:_MAX_LISTED])
    return shown + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
