"""Makes the functions that a copy of a network took over from it use the copy.

``copy.deepcopy`` copies a bound method together with its object, but leaves functions as they are: a forward that was
replaced by a function would run the layers of the original. A function that finds the network among the globals of its
file gets a copy of these.
"""

from __future__ import annotations

import dis
import functools
from collections import OrderedDict
from collections.abc import Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

__all__ = ["rebind_functions"]


def rebind_functions(copied: nn.Module, copies: Mapping[int, Any]) -> None:
    """Makes the functions among the attributes and hooks of a copied network use the copy.

    Args:
        copied: The copy.
        copies: Id of a module, parameter or buffer of the original → its copy.
    """
    rebound = _Rebinding(copies)
    for module in copied.modules():
        for name, value in vars(module).items():
            if name not in ("_modules", "_parameters", "_buffers"):
                vars(module)[name] = rebound(value)


class _Rebinding:
    """Maps a value to its counterpart in the copy: the value itself, if it holds nothing of the original."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = dict(copies)
        self._foreign: set[int] = set()
        """Ids of values that hold nothing of the original."""

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._copies and self._is_foreign(value):
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = self._made(value)
        return self._copies[id(value)]

    def _is_foreign(self, value: Any) -> bool:
        seen: dict[int, Any] = {}
        ahead = [value]
        while ahead:
            one = ahead.pop()
            if id(one) in self._copies:
                return False
            if id(one) not in seen and id(one) not in self._foreign:
                seen[id(one)] = one
                ahead += _parts(one)
        self._foreign |= seen.keys()
        return True

    def _made(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            return MethodType(self(value.__func__), self(value.__self__))
        if isinstance(value, functools.partial):
            part = functools.partial(self(value.func), *map(self, value.args), **_mapped(self, value.keywords))
            vars(part).update(vars(value))
            return part
        if isinstance(value, dict):
            return type(value)(_mapped(self, value))
        if not isinstance(value, FunctionType):
            return type(value)(map(self, value))
        cells = [CellType() for _ in value.__closure__ or ()]
        known = {**value.__globals__}
        made = FunctionType(value.__code__, known, value.__name__, None, tuple(cells))
        self._copies[id(value)] = made  # it may refer to itself
        known.update(_mapped(self, _globals_of(value)))
        made.__defaults__ = value.__defaults__ and tuple(map(self, value.__defaults__))
        made.__kwdefaults__ = value.__kwdefaults__ and _mapped(self, value.__kwdefaults__)
        functools.update_wrapper(made, value)
        del vars(made)["__wrapped__"]
        vars(made).update(vars(value))
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            for held in _contents(old):
                cell.cell_contents = self(held)
        return made


def _mapped(function: _Rebinding, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: function(value) for name, value in values.items()}


def _parts(value: Any) -> list[Any]:
    """Returns the values that a function, or a container of functions, may use."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) in (dict, OrderedDict):
        return list(value.values())
    if type(value) in (list, tuple):
        return list(value)
    if not isinstance(value, FunctionType):
        return []
    held = [each for cell in value.__closure__ or () for each in _contents(cell)]
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return held + defaults + list(_globals_of(value).values())


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Returns the globals that a function uses, without functions of other files, which do not know the network."""
    known = function.__globals__
    used = {name: known[name] for name in _global_names(function.__code__) if name in known}
    return {
        name: value for name, value in used.items() if not isinstance(value, FunctionType) or value.__globals__ is known
    }


def _global_names(code: CodeType) -> set[str]:
    """Returns the global names that code uses, including functions inside of it."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return own.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
