"""Bad arguments are refused first, with the value in the message."""

from __future__ import annotations

from collections.abc import Iterable
from unicodedata import category

__all__ = ["check_argument", "printable", "quoted"]

_MAX_LISTED = 8  # names in one message


def check_argument(name: str, value: object, valid: bool, expected: str) -> None:
    """Raises a ValueError that names the argument, its value and what it must be, unless it is valid."""
    if not valid:
        raise ValueError(f"{name}={value!r} is not valid: it must be {expected}")


def printable(text: str) -> str:
    """Text for a terminal: what would command it, hide or turn around other text, or is half a character is escaped."""
    return "".join(ascii(c)[1:-1] if category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t" else c for c in text)


def quoted(names: Iterable[str]) -> str:
    """Names for a message: few, short, and with everything but ASCII escaped, so that no two look alike."""
    names = list(names)
    shown = ", ".join(ascii(name[:80]) for name in names[:_MAX_LISTED])
    return shown + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
