"""Where two histories part: the first message and field that differ, with a short snippet of each side."""

from __future__ import annotations

from agentkv.memory.canonical import CanonicalMessage, Conversation, canonical_json, canonical_tool
from agentkv.types import Miss

SNIPPET = 80


def common(ours: Conversation, theirs: Conversation) -> int:
    """How many leading messages agree, reasoning included; -1 when the heads differ."""
    pairs = list(zip(ours.digests, theirs.digests, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)) - 1
    both = zip(ours.messages[: max(same, 0)], theirs.messages, strict=False)
    return next((i for i, (a, b) in enumerate(both) if b.reasoning and a.reasoning != b.reasoning), same)


def difference(ours: Conversation, theirs: Conversation) -> Miss:
    """The first message and field in which a client's history differs from ours. message_index counts in the client's list;
    a difference in the head has 0 (system) or -1."""
    at = common(ours, theirs)
    if at < 0:
        return _head_difference(ours, theirs)
    if at >= len(theirs.messages) or at >= len(ours.messages):
        index = theirs.messages[-1].index if theirs.messages else 0
        return Miss(reason="diverged", message_index=index, field="messages", detail="the history ends between two boundaries")
    mine, sent = ours.messages[at], theirs.messages[at]
    for field, a, b in _fields(mine, sent):
        if a != b:
            return _miss(sent.index, field, a, b)
    return _miss(sent.index, "messages", "", "")


def _fields(mine: CanonicalMessage, sent: CanonicalMessage) -> list[tuple[str, str, str]]:
    """(field, ours, theirs) in the order in which a difference is reported."""
    rows = [("role", mine.role, sent.role), ("content", mine.said, sent.said)]
    calls = [[f"{call.name}({call.arguments}) id={call.id}" for call in message.tool_calls] for message in (mine, sent)]
    rows.append(("tool_calls", "; ".join(calls[0]), "; ".join(calls[1])))
    rows.append(("tool_call_id", mine.call_id, sent.call_id))
    rows.append(("reasoning", mine.reasoning, sent.reasoning or mine.reasoning))
    return rows


def _head_difference(ours: Conversation, theirs: Conversation) -> Miss:
    if ours.system != theirs.system:
        return _miss(0, "system", ours.system, theirs.system)
    mine, sent = (sorted(map(canonical_tool, side.tools)) for side in (ours, theirs))
    if mine != sent:
        only = ([tool for tool in mine if tool not in sent], [tool for tool in sent if tool not in mine])
        return _miss(-1, "tools", *("; ".join(side) for side in only))
    arguments = [canonical_json(side.template_args) for side in (ours, theirs)]
    if arguments[0] != arguments[1]:
        return _miss(-1, "template_args", arguments[0], arguments[1])
    return Miss(reason="salt", message_index=-1, field="salt")


def _miss(index: int, field: str, ours: str, theirs: str) -> Miss:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - SNIPPET // 4)
    mine, sent = (("…" if start else "") + side[start : start + SNIPPET] for side in (ours, theirs))
    return Miss(reason="diverged", message_index=index, field=field, ours=mine, theirs=sent)
