"""Attention methods by name. A method is one file here, or any class at "module:Class"."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import fields
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from agentkv.errors import BadRequest, UnknownOption

if TYPE_CHECKING:
    from agentkv.engine.sparse import SparseMethod

NAMES: dict[str, str] = {
    "adakv": "agentkv.methods.adakv:AdaKV",
    "dense": "agentkv.methods.dense:Dense",
    "fp8_kv": "agentkv.methods.fp8_kv:FP8KV",
    "h2o": "agentkv.methods.h2o:H2O",
    "kivi": "agentkv.methods.kivi:KIVI",
    "kvzip": "agentkv.methods.kvzip:KVzip",
    "omnikv": "agentkv.methods.omnikv:OmniKV",
    "palu": "agentkv.methods.palu:Palu",
    "quest": "agentkv.methods.quest:Quest",
    "snapkv": "agentkv.methods.snapkv:SnapKV",
    "streamingllm": "agentkv.methods.streamingllm:StreamingLLM",
}
"""Name -> "module:Class"."""

LARGEST = 2**31 - 1
"""Of whole numbers in options: what an int32 on a device holds."""


def resolve(name: str) -> type[SparseMethod]:
    """The class of a method; an unknown name is an UnknownOption that lists the known ones."""
    if name not in NAMES:
        raise UnknownOption(f"unknown method {name!r}", hint=f"Known: {', '.join(sorted(NAMES))}", param="method")
    module, _, attribute = NAMES[name].partition(":")
    found: type[SparseMethod] = getattr(import_module(module), attribute)
    return found


def parse(text: str) -> SparseMethod:
    """A method as people write it: 'name', or 'name:option=value,option=value' with Python literals (words need no quotes).
    Raises as `get`."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, _parts(rest)):
        key, found, value = part.partition("=")
        if not found:
            raise BadRequest(f"method {text!r}: {part!r} is no option=value", hint="Like name:option=value", param="method")
        options[key.strip()] = _literal(value.strip())
    return get(name.strip(), **options)


def _parts(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _literal(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def get(name: str, **options: Any) -> SparseMethod:
    """A configured method. Unknown options are an UnknownOption, values out of range a BadRequest."""
    return configured(resolve(name), name, **options)


def configured(kind: type[SparseMethod], name: str, **options: Any) -> SparseMethod:
    """The same of a class; name: what messages call it."""
    known = sorted(each.name for each in fields(kind))
    unknown = sorted(set(options) - set(known))
    if unknown:
        hint = f"Known: {', '.join(known)}" if known else f"{name} has no options"
        raise UnknownOption(f"method {name!r} has no option {unknown[0]!r}", hint=hint, param=unknown[0])
    try:
        return kind(**{key: typed(kind, name, key, value) for key, value in options.items()})
    except (TypeError, ValueError) as error:
        raise BadRequest(f"method {name!r}: {error}", param="method") from None


def check_types(method: SparseMethod) -> None:
    """BadRequest where an instance has an option of another type than it declares."""
    for each in fields(method):
        typed(type(method), type(method).__name__, each.name, getattr(method, each.name))


def typed(kind: Any, name: str, option: str, value: Any) -> Any:
    """The value, if it is of the option's type (a whole number is a float, too) and its numbers are within bounds; a list as a
    tuple. kind: a class or function, which has the option. BadRequest."""
    value = tuple(value) if isinstance(value, list) else value
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and abs(number) > LARGEST:
            raise BadRequest(f"method {name!r}: {option}={value!r}: whole numbers are at most {LARGEST:,}", param=option)
        if isinstance(number, float) and not isfinite(number):
            raise BadRequest(f"method {name!r}: {option}={value!r}: give a finite number", param=option)
    try:
        wanted = get_type_hints(kind)[option]
        if get_origin(wanted) is Literal:  # one of some values: the class says it better
            return next((each for each in get_args(wanted) if each == value), value)
        msgspec.convert(value, wanted, strict=True)
    except msgspec.ValidationError as error:
        raise BadRequest(f"method {name!r}: {option}={value!r}: {error}", param=option) from None
    except (TypeError, NameError):
        pass  # a type that is no plain data: the class checks it itself
    return value
