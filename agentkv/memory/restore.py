"""From what a store has of a branch to its ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentkv.dialogue import Message
from agentkv.memory.draft import Draft
from agentkv.memory.ledger import Ledger
from agentkv.memory.saved import Saved, unpack
from agentkv.memory.span import HEAD, Record


def restored(saved: Saved) -> Ledger:
    """Replay the turns as they were rendered, then apply what was done to them."""
    ledger = Ledger(saved.settings.system, saved.settings.tools)
    for told in saved.turns:
        base = ledger.length
        records = [record.at(base + record.interval[0], base + record.interval[1]) for record in told.records]
        last = max(record.message for record in records)
        placed = [record for record in records if record.message != last]
        for message, own in messages_of(record for record in placed if record.message != HEAD):
            ledger.append(message, own)
        turn = told.turn
        answer = Message(role="assistant", content=turn.text, reasoning=turn.reasoning, tool_calls=turn.tool_calls)
        made = [record for record in records if record.message == last]
        ledger.apply(Draft(ids=unpack(told.ids), placed=placed, made=made, message=answer), turn)
    for message, own in messages_of(saved.pending):
        ledger.append(message, own)
    ledger.restore(saved.prunes, saved.pins, saved.was_due, saved.lags)
    return ledger


def messages_of(records: Iterable[Record]) -> list[tuple[Message, list[Record]]]:
    """Spans, in order, grouped into the messages they came from."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record.message, []).append(record)
    return [(_message(own), own) for _, own in sorted(groups.items())]


def _message(records: Sequence[Record]) -> Message:
    first = records[0]
    if first.kind == "user":
        return Message(role="user", content=first.text)
    if first.kind == "tool_result":
        return Message(role="tool", content=first.text, call_id=first.call_id, name=first.tool_name)
    return Message(
        role="assistant",
        content="".join(record.text for record in records if record.kind == "text"),
        reasoning="".join(record.text for record in records if record.kind == "reasoning"),
        tool_calls=tuple(record.call for record in records if record.call is not None),
    )
