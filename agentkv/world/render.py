"""The chat template's pieces as token ids and loss weights.

Text equals what the bundled chat template gives byte for byte (a test); bodies of tools and
users become plain bytes.  Weight `w` at index `i` is the weight of predicting token `i`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from agentkv.world import tokens
from agentkv.world.dialect import Dialect

BACKGROUND = 0.02
ASSISTANT = 1.0
COPIED = 4.0


@dataclass
class Ids:
    """A growing token sequence with its weights and the spans of tool-result bodies.

    `gone` is `(start, end, at)`: tokens `start` to `end` are no longer seen by queries from `at` on.
    """

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    bodies: list[tuple[int, int]] = field(default_factory=list)
    gone: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, ids: Sequence[int], weight: float = BACKGROUND) -> None:
        """Append tokens with one weight."""
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))


def head(out: Ids, system: str, tools: Sequence[dict[str, Any]]) -> None:
    """The system block."""
    schemas = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    out.add([tokens.IM_START, *tokens.plain(f"system\n{system}\n\n# Tools\n<tools>{schemas}\n</tools>")])
    out.add([tokens.IM_END, 10])


def user(out: Ids, text: str) -> None:
    """A user message."""
    out.add([tokens.IM_START, *tokens.plain(f"user\n{text}"), tokens.IM_END, 10])


def result(out: Ids, body: str) -> None:
    """A tool result."""
    out.add([tokens.IM_START, *tokens.plain("user\n"), tokens.RESPONSE, 10])
    start = len(out.ids)
    out.add(tokens.plain(body))
    out.bodies.append((start, len(out.ids)))
    out.add([10, tokens.END_RESPONSE, tokens.IM_END, 10])


def call(out: Ids, made: dict[str, Any], copies: Sequence[str], weight: float = ASSISTANT) -> None:
    """An assistant turn with one tool call (OpenAI form); the bytes of `copies` in the command weigh more."""
    function = made["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    text = f'\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n'
    _assistant(out, [tokens.CALL, *tokens.plain(text), tokens.END_CALL], text, 1, copies, weight)


def text(out: Ids, words: str, copies: Sequence[str] = (), weight: float = ASSISTANT) -> None:
    """An assistant turn of plain text."""
    _assistant(out, tokens.plain(words), words, 0, copies, weight)


def _assistant(out: Ids, ids: list[int], words: str, shift: int, copies: Sequence[str], weight: float) -> None:
    out.add([tokens.IM_START, *tokens.plain("assistant\n")])
    weights = [weight] * len(ids)
    for copied in copies if weight else ():
        at = words.find(copied)
        while at >= 0:
            for i in range(at + shift, at + shift + len(copied)):
                weights[i] = COPIED
            at = words.find(copied, at + 1)
    out.ids.extend(ids)
    out.weights.extend(weights)
    out.add([tokens.IM_END], weight)
    out.add([10])


@cache
def head_size(dialect: Dialect) -> int:
    """Tokens of the dialect's system block."""
    out = Ids()
    head(out, dialect.system, dialect.tools)
    return len(out.ids) + len(dialect.prompt(""))


@cache
def turn_size(dialect: Dialect) -> int:
    """Tokens of a call and its result around the command and the output."""
    out = Ids()
    call(out, dialect.call(""), ())
    result(out, dialect.body("", 0))
    return len(out.ids)


@cache
def finish_size(dialect: Dialect) -> int:
    """Tokens of the call that hands the work in, with its result."""
    out = Ids()
    if (finish := dialect.finish()) is not None:
        call(out, finish[0], ())
        result(out, finish[1])
    return len(out.ids)
