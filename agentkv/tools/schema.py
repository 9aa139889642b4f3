"""JSON schemas of functions, and the types that arguments are checked against.

`schema_of` reads a function's signature and docstring; `type_of` reads a JSON schema back into a type for msgspec.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from agentkv.errors import BadRequest

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_BY_NAME: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None, "array": list[Any]}
_PARAMETERS = ("Args", "Arguments", "Parameters", "Params")
_HEADERS = {
    *_PARAMETERS,
    "Return",
    "Returns",
    "Raises",
    "Yields",
    "Example",
    "Examples",
    "Note",
    "Notes",
    "See Also",
    "Attributes",
}
_GOOGLE = re.compile(r"\*{0,2}(\w+)[^:]*:\s*(.*)")
_NUMPY = re.compile(r"(\w+)\s*(?::.*)?()$")
_FIELD = re.compile(r":param\s+(?:[^:]+\s)?(\w+)\s*:\s*(.*)")


class Documented(NamedTuple):
    """A docstring read: what the function does, and what each parameter means."""

    summary: str
    parameters: dict[str, str]


def schema_of(function: Callable[..., Any], *, name: str | None = None, description: str | None = None) -> dict[str, Any]:
    """The OpenAI tool schema of a typed function, from its signature and docstring.

    Served annotations: str, int, float, bool, list, dict, Literal, Optional and unions of these, Any; `Annotated[T, "text"]`
    describes a parameter. Anything else, or a parameter without annotation, is a BadRequest.
    """
    name = checked_name(name or str(getattr(function, "__name__", "")))
    documented = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter, annotation in parameters_of(function, name):
        described = next((extra for extra in get_args(annotation)[1:] if isinstance(extra, str)), None)
        entry = _schema(annotation, f"tool {name!r}, parameter {parameter.name!r}")
        text = described if get_origin(annotation) is Annotated and described else documented.parameters.get(parameter.name)
        if text:
            entry["description"] = text
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None:
            entry["default"] = _default(parameter, name)
        properties[parameter.name] = entry
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    text = documented.summary if description is None else description
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


def checked_name(name: str) -> str:
    """The name, if the OpenAI API allows it for a tool."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"tool name {name!r}: 1 to 64 letters, digits, '_' or '-'", param="tools")
    return name


def parameters_of(function: Callable[..., Any], name: str) -> list[tuple[inspect.Parameter, Any]]:
    """Each parameter with its annotation; parameters that a call by name cannot fill are refused."""
    try:
        signature = inspect.signature(function)
        target = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(target, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise BadRequest(f"tool {name!r}: its signature cannot be read: {error}", param="tools") from None
    found: list[tuple[inspect.Parameter, Any]] = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadRequest(f"tool {name!r}: parameter {parameter.name!r} cannot be passed by name", param="tools")
        if parameter.name not in hints:
            raise BadRequest(f"tool {name!r}: parameter {parameter.name!r} has no type annotation", param="tools")
        found.append((parameter, hints[parameter.name]))
    return found


def arguments_type(function: Callable[..., Any], name: str) -> type[msgspec.Struct]:
    """A struct with the function's parameters: converting to it checks a call's arguments."""
    fields: list[Any] = []
    for parameter, annotation in parameters_of(function, name):
        if parameter.default is inspect.Parameter.empty:
            fields.append((parameter.name, annotation))
        else:
            fields.append((parameter.name, Union[annotation, msgspec.UnsetType], msgspec.UNSET))  # noqa: UP007
    struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    if problem := _unusable(struct):
        raise BadRequest(f"tool {name!r}: its arguments cannot be checked: {problem}", param="tools")
    return struct


def _unusable(kind: Any) -> str | None:
    """Why msgspec cannot check values against this type (it refuses some unions), None when it can."""
    try:
        msgspec.convert(None, kind)
    except msgspec.ValidationError:
        return None
    except TypeError as error:
        return str(error).split("\n")[0]
    return None


def _default(parameter: inspect.Parameter, name: str) -> Any:
    try:
        return msgspec.to_builtins(parameter.default)
    except TypeError:
        raise BadRequest(f"tool {name!r}: the default of {parameter.name!r} is not a JSON value", param="tools") from None


def _schema(annotation: Any, where: str) -> dict[str, Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _schema(inner[0], where)
    if annotation in _PLAIN:
        return {"type": _PLAIN[annotation]}
    if annotation is Any:
        return {}
    if annotation is None or annotation is types.NoneType:
        return {"type": "null"}
    if annotation is list or origin is list:
        return {"type": "array", "items": _schema(inner[0], where)} if inner else {"type": "array"}
    if annotation is dict or (origin is dict and inner[0] is str):
        return {"type": "object", "additionalProperties": _schema(inner[1], where)} if inner else {"type": "object"}
    if origin is Literal:
        kinds = {type(value) for value in inner}
        kind = {"type": _PLAIN[kinds.pop()]} if len(kinds) == 1 and kinds <= set(_PLAIN) else {}
        return {**kind, "enum": list(inner)}
    if origin in (Union, types.UnionType):
        options = [_schema(item, where) for item in inner]
        if all(set(option) == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    raise BadRequest(
        f"{where}: annotation {annotation!r} is not supported",
        hint="Use str, int, float, bool, list, dict, Literal, Optional or a union of these",
        param="tools",
    )


def type_of(schema: Any) -> Any:
    """The type that values of a JSON schema have; Any where the schema says more than these checks know."""
    kind = _type_of(schema)
    return Any if _unusable(kind) else kind


def _type_of(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return Any
    values = schema.get("enum")
    if isinstance(values, list) and values and all(type(value) in (str, int) for value in values):
        return Literal[tuple(values)]
    kind = schema.get("type")
    if isinstance(kind, list) and kind:
        return Union[tuple(_type_of({**schema, "type": item}) for item in kind)]  # noqa: UP007
    if kind == "array":
        return list[type_of(schema.get("items"))]  # type: ignore[misc]
    if kind == "object":
        return _object_type(schema)
    return _BY_NAME.get(kind, Any) if isinstance(kind, str) else Any


def _object_type(schema: Mapping[str, Any]) -> Any:
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    required = required if isinstance(required, list) else []
    fields: list[Any] = []
    for number, key in enumerate({**properties, **dict.fromkeys(required)}):
        kind = type_of(properties.get(key))
        if key in required:
            fields.append((f"field_{number}", kind, msgspec.field(name=key)))
        else:
            kind = Union[kind, msgspec.UnsetType]  # noqa: UP007
            fields.append((f"field_{number}", kind, msgspec.field(default=msgspec.UNSET, name=key)))
    return msgspec.defstruct(
        "Arguments", fields, kw_only=True, forbid_unknown_fields=schema.get("additionalProperties") is False
    )


def read_docstring(text: str) -> Documented:
    """Summary and parameters of a Google, NumPy or `:param x:` docstring."""
    blocks: dict[str, list[str]] = {"": []}
    title, numpy = "", False
    lines = text.splitlines()
    for line, following in zip_longest(lines, lines[1:], fillvalue=""):
        word = line.rstrip().rstrip(":")
        if word in _HEADERS and (line.rstrip().endswith(":") or set(following.strip()) == {"-"}):
            title = word
            continue
        if title and set(line.strip()) == {"-"}:
            numpy = True
            continue
        if line.startswith(":"):
            title = ":"
        blocks.setdefault(title, []).append(line)
    parameters = _entries("\n".join(blocks.get(":", [])), _FIELD)
    for name in _PARAMETERS:
        parameters |= _entries(textwrap.dedent("\n".join(blocks.get(name, []))), _NUMPY if numpy else _GOOGLE)
    return Documented("\n".join(blocks[""]).strip(), parameters)


def _entries(text: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """Name to text: an entry starts in column 0, its continuation is indented."""
    found: dict[str, str] = {}
    name: str | None = None
    for line in text.splitlines():
        if line[:1].strip():
            entry = pattern.match(line)
            name = entry[1] if entry else None
            if entry:
                found[entry[1]] = entry[2]
        elif name is not None:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
