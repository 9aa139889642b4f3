"""What an answer must be: the form of its text, and the tool calls it may make. Read from OpenAI's spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentkv.errors import BadRequest
from agentkv.types import Frozen

MAX_FORM = 256 << 10
"""Characters of a schema, a pattern or a grammar."""

_KINDS = "'text', 'json_object', 'json_schema', 'regex' (with pattern), 'grammar' (with grammar) or 'choice' (with choices)"
_CHOICES = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"


class Form(Frozen, frozen=True, kw_only=True):
    """The form of a whole text. kind says what `text` is: a JSON schema (as JSON), a regular expression for the whole text
    (Rust's syntax; digits and word characters are ASCII), or a Lark grammar in llguidance's dialect, with a rule `start`."""

    kind: Literal["json", "regex", "grammar"]
    text: str


class Calls(Frozen, frozen=True, kw_only=True):
    """Tool calls that may be made: by name, the JSON schema of the arguments. many: more than one in an answer."""

    tools: tuple[tuple[str, Form], ...]
    many: bool = True


class Constraint(Frozen, frozen=True, kw_only=True):
    """An answer is a text of `form`, or calls out of `calls`; with one of them None, it is the other."""

    form: Form | None = None
    calls: Calls | None = None


def read_constraint(tool_choice: Any, response_format: Any, tools: Sequence[Mapping[str, Any]]) -> Constraint | None:
    """The constraint of a turn; None where anything may be said.

    tool_choice: 'auto' and 'none' want no call, 'required' at least one, a named function exactly one. tools: OpenAI schemas.
    Where the model may call tools, a form holds for the answers that call none. BadRequest for what cannot be read.
    """
    form = read_form(response_format)
    if tool_choice in (None, "auto", "none"):
        if form is None:
            return None
        return Constraint(form=form, calls=Calls(tools=_schemas(tools)) if tools and tool_choice != "none" else None)
    name, many = _named(tool_choice)
    if not tools:
        raise BadRequest(f"tool_choice={tool_choice!r} without tools", hint="Pass tools, or leave it out", param="tool_choice")
    known = _schemas(tools)
    chosen = known if name is None else tuple(each for each in known if each[0] == name)
    if not chosen:
        names = ", ".join(sorted(each for each, _ in known))
        raise BadRequest(f"tool_choice: no tool {name!r}", hint=f"The tools are: {names}", param="tool_choice")
    return Constraint(calls=Calls(tools=chosen, many=many))


def read_form(given: Any) -> Form | None:
    """The form that a `response_format` asks for, None for plain text. BadRequest for what is none."""
    if given is None or given == "text":
        return None
    if not isinstance(given, Mapping):
        raise _bad("an object with a type", _KINDS)
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Form(kind="json", text='{"type":"object"}')
    if kind == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise _bad("json_schema.schema must be an object", "{'type': 'json_schema', 'json_schema': {'schema': {...}}}")
        return _schema(schema, "response_format")
    if kind == "choice":
        return _choice(given.get("choices"))
    for name, field in (("regex", "pattern"), ("grammar", "grammar")):
        if kind == name:
            text = given.get(field)
            if not isinstance(text, str) or not text:
                raise _bad(f"{field} must be text", f"{{'type': {name!r}, {field!r}: '...'}}")
            return _form(name, text, "response_format")
    raise _bad(f"{kind!r} is no type", _KINDS)


def _choice(choices: Any) -> Form:
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise _bad("choices must be texts", "{'type': 'choice', 'choices': ['yes', 'no']}")
    texts = [json.dumps(each, ensure_ascii=False).replace("\x7f", "\\u007f") for each in choices]
    return _form("grammar", f"start: CHOICE\nCHOICE: {' | '.join(texts)}", "response_format")  # a terminal: one lexeme for all


def _named(choice: Any) -> tuple[str | None, bool]:
    """The function that a tool_choice names, None for any, and whether several calls may be made."""
    if choice == "required" or (isinstance(choice, Mapping) and choice.get("type") == "required"):
        return None, choice == "required" or choice.get("parallel") is not False
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise BadRequest(f"tool_choice={str(choice)[:80]!r} cannot be read", hint=_CHOICES, param="tool_choice")
    return name, False


def _schemas(tools: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, Form], ...]:
    functions = [tool.get("function") or tool for tool in tools]
    return tuple((str(each.get("name")), _schema(_object(each.get("parameters") or {}), "tools")) for each in functions)


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same schema, of objects alone: arguments that are none would be no call."""
    parts = schema.get("allOf", [])
    if schema.get("type") == "object" or not isinstance(parts, list):
        return schema
    return {**schema, "allOf": [*parts, {"type": "object"}]}


def _schema(schema: Mapping[str, Any], param: str) -> Form:
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"{param}: the schema is no JSON: {error}", hint="A JSON schema as an object", param=param) from None
    return _form("json", text, param)


def _form(kind: Any, text: str, param: str) -> Form:
    if len(text) > MAX_FORM:
        hint = f"At most {MAX_FORM:,} characters"
        raise BadRequest(f"{param}: {len(text):,} characters of a form are too many", hint=hint, param=param)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise BadRequest(f"{param}: half a surrogate pair is no text", hint="Send whole characters", param=param)
    return Form(kind=kind, text=text)


def _bad(problem: str, hint: str) -> BadRequest:
    return BadRequest(f"response_format: {problem}", hint=hint, param="response_format")
