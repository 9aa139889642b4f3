"""The fields of a chat request that say what the answer must be: OpenAI's, and the names that other servers have added."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentkv.constraint import read_form
from agentkv.errors import BadRequest

Shape = Callable[[Any, str], dict[str, Any]]


def read_response_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `response_format`, also where it has another name; None for plain text. BadRequest for two of them.

    `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar` are vLLM's former fields; `structured_outputs` is its
    present one, an object with one of json, json_object, regex, choice, grammar.
    """
    found: dict[str, dict[str, Any]] = {}
    if body.get("response_format") is not None:
        found["response_format"] = body["response_format"]
    for name, shape in SHAPES.items():
        if body.get(f"guided_{name}") is not None:
            found[f"guided_{name}"] = shape(body[f"guided_{name}"], f"guided_{name}")
    outputs = body.get("structured_outputs")
    if outputs is not None:
        found["structured_outputs"] = _structured(outputs)
    if len(found) > 1:
        names = ", ".join(found)
        raise BadRequest(f"{names}: an answer has one form", hint="Send one of them", param=next(iter(found)))
    form = next(iter(found.values()), None)
    return form if read_form(form) is not None else None


def read_tool_choice(body: Mapping[str, Any]) -> Any:
    """The `tool_choice` as sessions take it; without parallel_tool_calls, 'required' is one call."""
    choice = body.get("tool_choice")
    if choice == "required" and body.get("parallel_tool_calls") is False:
        return {"type": "required", "parallel": False}
    return "auto" if choice is None else choice


def _structured(outputs: Any) -> dict[str, Any]:
    known: dict[str, Shape] = {**SHAPES, "json_object": lambda value, name: {"type": "json_object"}}
    given = {name: value for name, value in outputs.items() if value not in (None, False)} if isinstance(outputs, dict) else {}
    kinds = [name for name in given if name in known]
    if len(kinds) != 1 or len(given) != 1:
        hint = f"An object with one of {', '.join(known)}"
        raise BadRequest("structured_outputs cannot be read", hint=hint, param="structured_outputs")
    return known[kinds[0]](given[kinds[0]], "structured_outputs")


def _json(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{name} is not JSON: {error}", hint="A JSON schema", param=name) from None
    return {"type": "json_schema", "json_schema": {"schema": value}}


SHAPES: dict[str, Shape] = {
    "json": _json,
    "regex": lambda value, name: {"type": "regex", "pattern": value},
    "choice": lambda value, name: {"type": "choice", "choices": value},
    "grammar": lambda value, name: {"type": "grammar", "grammar": value},
}
