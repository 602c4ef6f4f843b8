"""Bad arguments are refused first, with the value in the message."""

from __future__ import annotations


def check_argument(name: str, value: object, valid: bool, expected: str) -> None:
    """Raises a ValueError that names the argument, its value and what it must be, unless it is valid."""
    if not valid:
        raise ValueError(f"{name}={value!r} is not valid: it must be {expected}")
