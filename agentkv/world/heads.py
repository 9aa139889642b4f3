"""System blocks of training rows: the dialect's own, with other wordings, or behind unrelated instructions and schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from agentkv.world import render
from agentkv.world.dialect import Dialect, Place
from agentkv.world.render import Ids
from agentkv.world.words import LETTERS, WORDS, below, pick, prose

LONG_HEADS = 0.3  # share of rows with unrelated text before the head
SHORTEST, LONGEST = 200, 30_000  # bytes of that text


def extra_size(rng: random.Random, room: int) -> int:
    """Bytes of unrelated text in a row that can spare `room`; 0 in most rows."""
    if rng.random() >= LONG_HEADS or room < SHORTEST:
        return 0
    return int(SHORTEST * (min(room, LONGEST) / SHORTEST) ** rng.random())


def head(rng: random.Random, out: Ids, dialect: Dialect, extra: int) -> None:
    """The system block of `dialect` behind about `extra` bytes of other instructions and tool schemas."""
    share = rng.random()
    system, tools = dialect.system, [_respelt(rng, tool) for tool in dialect.tools]
    if rng.random() < 0.15:
        system = _sentences(rng, 40 + below(rng, 160))
    if extra:
        system = f"{_sentences(rng, int(extra * share))}\n\n{system}"
        tools = [*_schemas(rng, int(extra * (1 - share))), *tools]
    render.head(out, system, tools)


def place(rng: random.Random) -> Place:
    """A working directory and an interpreter, as results may show them."""
    parent = pick(rng, ("/tmp", "/work", "/home/user", "/workspace", "/tmp/agentkv"))
    name = "".join(LETTERS[below(rng, 26)] if rng.random() < 0.8 else str(below(rng, 10)) for _ in range(4 + below(rng, 9)))
    base = pick(rng, ("", "agentkv-world-", "task_"))
    python = pick(rng, ("/usr/bin/python3", "/usr/bin/python", "/usr/local/bin/python", "/opt/venv/bin/python", ""))
    return Place(f"{parent}/{base}{name}", python)


def _sentences(rng: random.Random, size: int) -> str:
    """Instructions about nothing: sentences, lists and headings of about `size` bytes."""
    lines: list[str] = []
    while size > 0:
        start = pick(rng, ("", "", "", "- ", "1. ", "## ", "* "))
        end = "" if start == "## " else pick(rng, (".", ".", ":", "!"))
        line = f"{start}{prose(rng).capitalize()}{end}"
        lines.append(line)
        size -= len(line) + 1
    return ("\n" if rng.random() < 0.7 else " ").join(lines)


def _schemas(rng: random.Random, size: int) -> list[dict[str, Any]]:
    """Schemas of tools that the task does not use, of about `size` bytes."""
    made: list[dict[str, Any]] = []
    while size > 150:
        properties = {f"{pick(rng, WORDS)}_{pick(rng, WORDS)}": _property(rng) for _ in range(1 + below(rng, 4))}
        parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)[:1]}
        description = _sentences(rng, below(rng, 80 + size // 3))
        function = {"name": f"{pick(rng, WORDS)}_{pick(rng, WORDS)}", "description": description, "parameters": parameters}
        made.append({"type": "function", "function": function})
        size -= len(json.dumps(made[-1]))
    return made


def _property(rng: random.Random) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": pick(rng, ("string", "string", "integer", "boolean"))}
    if rng.random() < 0.5:
        kind["description"] = prose(rng).capitalize() + "."
    return kind


def _respelt(rng: random.Random, tool: dict[str, Any]) -> dict[str, Any]:
    """The tool's schema; in some rows with other descriptions, more options or another order."""
    if rng.random() >= 0.25:
        return tool
    function = json.loads(json.dumps(tool["function"]))
    if rng.random() < 0.5:
        function["description"] = _sentences(rng, 20 + below(rng, 200))
    parameters = function["parameters"]
    if rng.random() < 0.5:
        parameters["additionalProperties"] = False
    properties: dict[str, Any] = parameters["properties"]
    for name, old in properties.items():
        if rng.random() < 0.4:
            properties[name] = {**old, "description": prose(rng).capitalize() + "."}
    if rng.random() < 0.3:
        properties[pick(rng, WORDS)] = _property(rng)
    parameters["properties"] = _mixed(rng, list(properties.items())) if rng.random() < 0.3 else properties
    return {"type": "function", "function": function}


def _mixed(rng: random.Random, items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    left, mixed = list(items), {}
    while left:
        name, value = left.pop(below(rng, len(left)))
        mixed[name] = value
    return mixed
