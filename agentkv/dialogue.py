"""The nouns between text and tokens: what is rendered into a prompt, and what is parsed out of a generation.

A leaf beside `types`: memory, the tools package and the runtime share it, and it knows none of them.
"""

from __future__ import annotations

from agentkv.types import FinishReason, Frozen, SpanKind, TokenLogprob, ToolCall


class Message(Frozen, frozen=True, kw_only=True):
    """One message to render. role: user | tool | assistant (history that a client brought along).

    For role 'tool', call_id and name say which call it answers.
    """

    role: str
    content: str
    call_id: str | None = None
    name: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Piece(Frozen, frozen=True, kw_only=True):
    """A meaningful run of tokens: [start, end) counts from the first of the ids it came with.

    index: which of the rendered messages it belongs to (None for the head's system and tools, and in generated turns).
    """

    kind: SpanKind
    start: int
    end: int
    index: int | None = None
    call: ToolCall | None = None
    text: str = ""


class Rendered(Frozen, frozen=True, kw_only=True):
    """Token ids to append, with the pieces in them. They end with the template's generation prompt."""

    ids: list[int]
    pieces: tuple[Piece, ...]


class Parsed(Frozen, frozen=True, kw_only=True):
    """A finished generation as the model's dialect reads it.

    keep: how many of the generated ids stay (a half tool call and what follows a stop string go).
    ids: the ids to commit; usually generated[:keep], longer only where a stop string cut a token in two.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    pieces: tuple[Piece, ...]
    ids: list[int]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None


class Delta(Frozen, frozen=True, kw_only=True):
    """One streamed increment: at most one of text, reasoning and call is set. logprobs: of tokens whose text is out by now."""

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
