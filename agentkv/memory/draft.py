"""A turn ready to be committed: where the pending spans came to lie, and the spans of the answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from agentkv.dialogue import Message, Parsed, Piece, Rendered
from agentkv.memory.span import HEAD, Record, head_record, record
from agentkv.types import Frozen, SpanKind

Place = tuple[int, SpanKind]
"""Message and kind."""


class Draft(Frozen, frozen=True, kw_only=True):
    """ids: to append. placed: the pending records with their intervals. made: the answer's. message: the answer."""

    ids: array[int]
    placed: list[Record]
    made: list[Record]
    message: Message


def drafted(
    pending: Sequence[Record], rendered: Rendered, parsed: Parsed, *, base: int, first_message: int, messages: int, turn: int
) -> Draft:
    """Make the draft of a turn whose first id has position `base`.

    first_message: the branch's index of the first rendered message; messages: of the answer.
    """
    by_place: dict[Place, list[Piece]] = {}
    for piece in rendered.pieces:
        place = HEAD if piece.index is None else first_message + piece.index
        by_place.setdefault((place, piece.kind), []).append(piece)
    if base == 0:
        known = {r.kind for r in pending if r.message == HEAD}
        own = {p.kind: p for p in rendered.pieces if p.index is None and p.kind in ("system", "tools")}
        pending = [head_record(kind, piece.text) for kind, piece in own.items() if kind not in known] + list(pending)
    placed = _placed(pending, by_place, base)
    head = sum(r.message == HEAD for r in placed)
    return Draft(
        ids=array("i", [*rendered.ids, *parsed.ids]),
        placed=sorted(placed[:head], key=lambda r: r.interval) + placed[head:],
        made=_made(parsed, base + len(rendered.ids), messages, turn),
        message=Message(role="assistant", content=parsed.text, reasoning=parsed.reasoning, tool_calls=parsed.tool_calls),
    )


def _placed(pending: Sequence[Record], by_place: dict[Place, list[Piece]], base: int) -> list[Record]:
    """Give each pending span the pieces of its message and kind, one each, the last of them what remains.

    A span that the template leaves out gets an empty interval where it would have been.
    """
    wanted: dict[Place, int] = {}
    for waiting in pending:
        wanted[waiting.message, waiting.kind] = wanted.get((waiting.message, waiting.kind), 0) + 1
    placed, reached = [], 0
    for waiting in pending:
        place: Place = (waiting.message, waiting.kind)
        pieces = by_place.get(place, [])
        wanted[place] -= 1
        taken = pieces[:1] if wanted[place] else pieces[:]
        del pieces[: len(taken)]
        start = min((piece.start for piece in taken), default=reached)
        end = max((piece.end for piece in taken), default=reached)
        placed.append(waiting.at(base + start, base + end))
        reached = max(reached, end)
    return placed


def _made(parsed: Parsed, base: int, message: int, turn: int) -> list[Record]:
    """The spans of an answer: at least one, and one for each call."""
    calls = {call.id: call for call in parsed.tool_calls}
    texts = sum(piece.kind == "text" for piece in parsed.pieces)
    made = []
    for piece in parsed.pieces:
        call = None
        if piece.kind == "tool_call":
            call = calls.pop(piece.call.id if piece.call is not None else next(iter(calls), ""), None)
        text = parsed.text if piece.kind == "text" and texts == 1 else piece.text or (call.raw if call else "")
        made.append(record(piece.kind, text, message=message, turn=turn, call=call).at(base + piece.start, base + piece.end))
    for call in calls.values():  # a dialect that does not say where its calls lie
        made.append(record("tool_call", call.raw, message=message, turn=turn, call=call).at(base, base))
    return made or [record("text", parsed.text, message=message, turn=turn).at(base, base)]
