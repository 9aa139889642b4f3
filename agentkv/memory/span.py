"""What a branch remembers of one span, and the arithmetic of its body.

A record is immutable: what changes about a span during its life (pruned, pinned, due) is kept beside it in the ledger, so
that a fork shares records and never copies them.
"""

from __future__ import annotations

import secrets

from agentkv.dialogue import Message
from agentkv.types import Frozen, Interval, PruneMode, Span, SpanKind, SpanState, ToolCall, parse_keep

SYSTEM_ID = "sp_system"
TOOLS_ID = "sp_tools"
HEAD = -1
"""`Record.message` of the spans of the head: system and tools belong to no message."""


class Record(Frozen, frozen=True, kw_only=True):
    """One span of a branch.

    message: index of the branch's message it belongs to. turn: the turn that renders it. start, end: logical interval, None
    until rendered; of a tool result it is the body alone, without the template's frame. answers: for a result, which
    assistant message of the branch it answers, counted from 1. lag: the prune_after given with the result itself.
    """

    id: str
    kind: SpanKind
    message: int
    turn: int
    text: str = ""
    size: int = 0
    start: int | None = None
    end: int | None = None
    call: ToolCall | None = None
    call_id: str | None = None
    tool_name: str | None = None
    answers: int | None = None
    lag: int | None = None
    keep: str = "drop"
    error: bool = False

    @property
    def rendered(self) -> bool:
        """Is it part of a committed turn?"""
        return self.start is not None

    @property
    def interval(self) -> Interval:
        """[start, end), empty before it is rendered."""
        return (0, 0) if self.start is None or self.end is None else (self.start, self.end)

    def at(self, start: int, end: int) -> Record:
        """The record with its interval set."""
        moved: Record = self.replace(start=start, end=end)
        return moved

    def removable(self, keep: str) -> Interval:
        """The part of the body that a prune with this keep rule takes; empty when the edges cover the body."""
        edge = parse_keep(keep)
        start, end = self.interval
        return (start + edge, max(start + edge, end - edge))

    def as_span(self, state: SpanState, *, lag: int | None, keep: str, age: int | None, why: str | None) -> Span:
        """The public view of it."""
        return Span(
            id=self.id,
            kind=self.kind,
            turn=self.turn,
            state=state,
            start=self.start,
            end=self.end,
            tool_name=self.tool_name,
            call_id=self.call_id,
            size=self.size,
            prune_after=lag,
            age=age,
            keep=keep,
            error=self.error,
            why=why,
        )


class Prune(Frozen, frozen=True, kw_only=True):
    """A prune that one branch has seen.

    in_place: slots of the body's removable part go when the branch has `at` logical tokens. rebuild: `placeholder` ids stand
    in that part's place, as if the body had never been there. tokens: logical tokens that went.
    """

    span_id: str
    mode: PruneMode
    keep: str
    at: int
    tokens: int
    why: str
    placeholder: tuple[int, ...] = ()


def new_id(prefix: str) -> str:
    """A fresh random name."""
    return f"{prefix}_{secrets.token_hex(8)}"


def byte_size(text: str) -> int:
    """Bytes of a text as UTF-8; lone surrogates count like any character of their range."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def whole(text: str) -> str:
    """The text with half surrogates replaced by U+FFFD: no tokenizer and no database takes them."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def record(kind: SpanKind, text: str, *, message: int, turn: int, call: ToolCall | None = None) -> Record:
    """A new span that has not been rendered."""
    return Record(
        id=new_id("sp"),
        kind=kind,
        message=message,
        turn=turn,
        text=text,
        size=byte_size(text),
        call=call,
        call_id=call.id if call is not None else None,
        tool_name=call.name if call is not None else None,
    )


def spans_of(message: Message, *, index: int, turn: int) -> list[Record]:
    """The spans of a message that has not been rendered, results excepted (the ledger makes those)."""
    if message.role == "user":
        return [record("user", message.content, message=index, turn=turn)]
    made = [record("reasoning", message.reasoning, message=index, turn=turn)] if message.reasoning else []
    if message.content or not message.tool_calls:
        made.append(record("text", message.content, message=index, turn=turn))
    return made + [record("tool_call", call.raw, message=index, turn=turn, call=call) for call in message.tool_calls]


def head_record(kind: SpanKind, text: str) -> Record:
    """The span of the system prompt or of the tools; there is one of each at most."""
    named: Record = record(kind, text, message=HEAD, turn=1).replace(id=SYSTEM_ID if kind == "system" else TOOLS_ID)
    return named
