"""What a method object, its classes and its module hold, in a form that can be compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from agentkv.engine.sparse import SparseMethod

_DEEP = 6


def snapshot(method: SparseMethod) -> dict[str, Any]:
    """By name, what each attribute and global is. Tensors are told by identity and shape: what stands in scratch may change."""
    kinds = [kind for kind in type(method).__mro__ if issubclass(kind, SparseMethod) and kind is not SparseMethod]
    found = {f"self.{name}": value for name, value in vars(method).items()}
    for kind in kinds:
        found |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items() if not name.startswith("__")}
        module = sys.modules.get(kind.__module__)
        found |= {name: value for name, value in vars(module).items() if not name.startswith("__")} if module else {}
    return {name: _plain(value, _DEEP) for name, value in found.items()}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is another now, or new."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _plain(value: Any, deep: int) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value), tuple(value.shape))
    if value is None or isinstance(value, str | int | float | bool | bytes):
        return value
    if deep == 0:
        return id(value)
    if isinstance(value, Mapping):
        return [(repr(key), _plain(each, deep - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each, deep - 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(each) for each in value)
    inside = getattr(value, "__dict__", None)
    if (
        isinstance(inside, dict)
        and not isinstance(value, type)
        and not callable(value)
        and type(value).__module__ != "builtins"
    ):
        return (id(value), _plain(inside, deep - 1))
    return id(value)
