"""Attention methods by name. A method is one file here, or any class at "module:Class"."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentkv.errors import BadRequest, UnknownOption

if TYPE_CHECKING:
    from agentkv.engine.sparse import SparseMethod

NAMES: dict[str, str] = {
    "adakv": "agentkv.methods.adakv:AdaKV",
    "dense": "agentkv.methods.dense:Dense",
    "snapkv": "agentkv.methods.snapkv:SnapKV",
    "streamingllm": "agentkv.methods.streamingllm:StreamingLLM",
}
"""Name -> "module:Class"."""


def resolve(name: str) -> type[SparseMethod]:
    """The class of a method; an unknown name is an UnknownOption that lists the known ones."""
    if name not in NAMES:
        raise UnknownOption(f"unknown method {name!r}", hint=f"Known: {', '.join(sorted(NAMES))}", param="method")
    module, _, attribute = NAMES[name].partition(":")
    found: type[SparseMethod] = getattr(import_module(module), attribute)
    return found


def get(name: str, **options: Any) -> SparseMethod:
    """A configured method. Unknown options are an UnknownOption, values out of range a BadRequest."""
    cls = resolve(name)
    known = sorted(each.name for each in fields(cls))
    unknown = sorted(set(options) - set(known))
    if unknown:
        hint = f"Known: {', '.join(known)}" if known else f"{name} has no options"
        raise UnknownOption(f"method {name!r} has no option {unknown[0]!r}", hint=hint, param=unknown[0])
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"method {name!r}: {error}", param="method") from None
