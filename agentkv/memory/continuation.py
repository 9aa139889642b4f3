"""Which session a resent history continues: an index of committed boundaries by what was said up to them.

A session key names a set of chains of one tenant. A request takes the one with the longest full-message match that ends at
a committed boundary. Pure host logic; nothing here knows sessions, HTTP or KV.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentkv.memory.canonical import Conversation, assistant_message
from agentkv.memory.difference import common, difference
from agentkv.types import Frozen, Miss, ToolCall

MAX_SESSIONS = 4096
MAX_BYTES = 256 << 20
MAX_SPELLINGS = 64

Group = tuple[str, str, str]
"""(tenant, 'key' or 'own', name): the set of chains that one session key names; without a key a session is its own set."""


class Match(Frozen, frozen=True, kw_only=True):
    """A boundary to continue from. turn: turns committed there. newest: nothing was committed after it.

    matched_messages: how many messages of the request (after its head) the boundary covers; the rest is new.
    """

    session_id: str
    chain_id: str
    turn: int
    matched_messages: int
    newest: bool


class _Record:
    """What the index keeps of one session: its history in canonical form and the boundaries in it (messages -> turn)."""

    __slots__ = ("boundaries", "chain_id", "conversation", "group", "issued", "session_id", "size", "stateless", "used")

    def __init__(self, session_id: str, chain_id: str, group: Group, conversation: Conversation, stateless: bool) -> None:
        self.session_id = session_id
        self.chain_id = chain_id
        self.group = group
        self.conversation = conversation
        self.stateless = stateless
        self.boundaries: dict[int, int] = {}
        self.issued: set[str] = set()
        self.size = 0
        self.used = 0

    @property
    def newest(self) -> int:
        return max(self.boundaries, default=0)


class ContinuationIndex:
    """Committed boundaries of all sessions that plain requests may continue. Thread safe, bounded by `trim`."""

    def __init__(self, *, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES) -> None:
        self.max_sessions = max_sessions
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._bytes = 0
        self._clock = 0
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()  # (tenant, session id), oldest use first
        self._groups: dict[Group, set[str]] = {}
        self._boundaries: dict[tuple[Group, bytes], dict[str, int]] = {}  # -> {session id: messages}
        self._issued: dict[tuple[str, str], set[str]] = {}  # (tenant, call id) -> session ids
        self._spellings: OrderedDict[bytes, tuple[dict[str, Any], ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def read(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        template_args: dict[str, Any] | None = None,
        salt: str = "",
    ) -> Conversation:
        """The canonical form of OpenAI-style messages; see `Conversation.read`."""
        return Conversation.read(messages, tools=tools, template_args=template_args, salt=salt)

    def spelling(self, conversation: Conversation) -> tuple[dict[str, Any], ...]:
        """The tools as the first request with an equal head spelled and ordered them: shuffled tools then share a prefix."""
        with self._lock:
            tools = self._spellings.setdefault(conversation.digests[0], conversation.tools)
            self._spellings.move_to_end(conversation.digests[0])
            if len(self._spellings) > MAX_SPELLINGS:
                self._spellings.popitem(last=False)
            return tools

    def knows(self, tenant: str, session_id: str) -> bool:
        """Is this session in the index?"""
        return (tenant, session_id) in self._records

    def stands(self, tenant: str, session_id: str) -> bool:
        """Is this session in the index with at least one boundary?"""
        record = self._records.get((tenant, session_id))
        return record is not None and bool(record.boundaries)

    def same_head(self, tenant: str, session_id: str, conversation: Conversation) -> bool:
        """Does the history begin with the session's own system text, tools and template arguments?"""
        record = self._records.get((tenant, session_id))
        return record is not None and record.conversation.digests[0] == conversation.digests[0]

    def of_chain(self, tenant: str, chain_id: str) -> str | None:
        """The id of the session that stands on this chain."""
        with self._lock:
            return next((r.session_id for (t, _), r in self._records.items() if t == tenant and r.chain_id == chain_id), None)

    # -- what sessions tell the index

    def register(
        self,
        tenant: str,
        key: str | None,
        conversation: Conversation,
        *,
        session_id: str,
        chain_id: str,
        turn: int,
        matched: int = 0,
        text: str = "",
        reasoning: str = "",
        tool_calls: Iterable[ToolCall] = (),
        named: str | None = None,
        stateless: bool = True,
    ) -> None:
        """A turn of this session was committed: it answered `conversation` (of which the session already had the first
        `matched` messages) with this answer, and has now `turn` turns. A new session joins the set that the request's key,
        its explicitly `named` session or its call ids point at."""
        calls = tuple(tool_calls)
        answer = assistant_message(text, reasoning, ((call.id, call.name, call.arguments) for call in calls))
        with self._lock:
            record = self._records.get((tenant, session_id))
            if record is None:
                group = self._group(tenant, key, conversation, named) or (tenant, "own", session_id)
                record = self._add(_Record(session_id, chain_id, group, conversation.first(0), stateless))
                matched = 0
            self._cut(record, matched)
            # our copy of the matched messages stays: it has the reasoning that a client may not send back
            longer = record.conversation.then(*conversation.messages[matched:], answer)
            self._grow(record, longer, {len(longer.messages): turn}, [call.id for call in calls])
            record.chain_id = chain_id

    def register_fork(self, tenant: str, parent_id: str, *, session_id: str, chain_id: str, matched: int) -> None:
        """A session was forked off `parent_id` where the parent's first `matched` messages end."""
        with self._lock:
            parent = self._records.get((tenant, parent_id))
            if parent is None:
                return
            shared = parent.conversation.first(matched)
            child = self._add(_Record(session_id, chain_id, parent.group, parent.conversation.first(0), True))
            boundaries = {count: turn for count, turn in parent.boundaries.items() if count <= matched}
            issued = [call.id for message in shared.messages for call in message.tool_calls if call.id in parent.issued]
            self._grow(child, shared, boundaries, issued)

    def restore(
        self,
        tenant: str,
        key: str | None,
        conversation: Conversation,
        *,
        session_id: str,
        chain_id: str,
        turns: int,
        stateless: bool = False,
    ) -> None:
        """Index a session from its transcript, anew if it was known. Its last answer ends turn `turns`; the earlier boundaries
        are known only when all answers are its own."""
        with self._lock:
            known = self._records.get((tenant, session_id))
            group = (tenant, "key", key) if key else (tenant, "own", session_id)
            if known is not None:
                group, stateless = known.group, known.stateless
            record = self._add(_Record(session_id, chain_id, group, conversation.first(0), stateless))
            ends = [i + 1 for i, message in enumerate(conversation.messages) if message.role == "assistant"]
            known_ends = ends if len(ends) == turns else ends[-1:] if turns else []
            boundaries = dict(zip(reversed(known_ends), range(turns, 0, -1), strict=False))
            issued = [call.id for message in conversation.messages for call in message.tool_calls]
            self._grow(record, conversation.first(max(boundaries, default=0)), boundaries, issued)

    def forget(self, tenant: str, session_id: str) -> None:
        """The session was closed or deleted."""
        with self._lock:
            record = self._records.pop((tenant, session_id), None)
            if record is None:
                return
            self._cut(record, 0)
            self._bytes -= record.size
            members = self._groups[record.group]
            members.discard(session_id)
            if not members:
                del self._groups[record.group]

    def rolled_back(self, tenant: str, session_id: str, turn: int) -> None:
        """The session stands at `turn` again: boundaries after it are gone."""
        with self._lock:
            record = self._records.get((tenant, session_id))
            if record is not None:
                self._cut(record, max((count for count, at in record.boundaries.items() if at <= turn), default=0))

    def trim(self, busy: Callable[[str], bool] = lambda session_id: False) -> list[tuple[str, str]]:
        """Forget the longest unused sessions until the bounds hold; returns the stateless ones, which nothing can find
        any more, as (tenant, session id). The newest session and busy ones stay."""
        dropped = []
        with self._lock:
            for tenant, session_id in list(self._records)[:-1]:
                if len(self._records) <= self.max_sessions and self._bytes <= self.max_bytes:
                    break
                if busy(session_id):
                    continue
                if self._records[tenant, session_id].stateless:
                    dropped.append((tenant, session_id))
                self.forget(tenant, session_id)
        return dropped

    # -- what requests ask

    def lookup(
        self,
        tenant: str,
        key: str | None,
        conversation: Conversation,
        *,
        named: str | None = None,
        busy: Callable[[str], bool] = lambda session_id: False,
    ) -> Match | None:
        """The longest match that ends at a committed boundary. Of equally long ones: the session `named`, else an idle one
        that stands there, else the one used last."""
        with self._lock:
            group = self._group(tenant, key, conversation, named)
            if group is None or group not in self._groups:
                return None
            agreed: dict[str, int] = {}
            for count in range(len(conversation.messages), 0, -1):
                found = self._boundaries.get((group, conversation.digests[count]))
                if not found:
                    continue
                records = [self._records[tenant, session_id] for session_id in found]
                records = [r for r in records if _reasoning_agrees(r, conversation, count, agreed)]
                if records:
                    best = max(
                        records,
                        key=lambda r: (
                            r.session_id == named,
                            r.newest == count and not busy(r.session_id),
                            r.used,
                        ),
                    )
                    self._touch(best)
                    return Match(
                        session_id=best.session_id,
                        chain_id=best.chain_id,
                        turn=best.boundaries[count],
                        matched_messages=count,
                        newest=best.newest == count,
                    )
            return None

    def explain(self, tenant: str, key: str | None, conversation: Conversation, *, named: str | None = None) -> Miss | None:
        """Why `conversation` does not continue the nearest session of the key further: the first message and field that
        differ. message_index counts in the client's list; a difference in the head has 0 (system) or -1. None: no session."""
        with self._lock:
            group = self._group(tenant, key, conversation, named)
            members = self._groups.get(group, set()) if group else set()
            records = [record for (t, s), record in self._records.items() if t == tenant and s in members]
            if not records:
                return None
            nearest = max(records, key=lambda r: (common(r.conversation, conversation), r.session_id == named))
            return difference(nearest.conversation, conversation)

    # -- inside

    def _group(self, tenant: str, key: str | None, conversation: Conversation, named: str | None) -> Group | None:
        record = self._records.get((tenant, named)) if named else None
        if record is not None:
            return record.group
        if key:
            return (tenant, "key", key)
        for message in reversed(conversation.messages):
            for call in message.tool_calls:
                owners = self._issued.get((tenant, call.id))
                if owners:
                    return self._records[tenant, next(iter(owners))].group
        return None

    def _add(self, record: _Record) -> _Record:
        tenant = record.group[0]
        self.forget(tenant, record.session_id)
        self._records[tenant, record.session_id] = record
        self._groups.setdefault(record.group, set()).add(record.session_id)
        return record

    def _grow(self, record: _Record, conversation: Conversation, boundaries: dict[int, int], issued: Iterable[str]) -> None:
        tenant = record.group[0]
        record.conversation = conversation
        record.boundaries.update(boundaries)
        for count in boundaries:
            self._boundaries.setdefault((record.group, conversation.digests[count]), {})[record.session_id] = count
        for call_id in issued:
            record.issued.add(call_id)
            self._issued.setdefault((tenant, call_id), set()).add(record.session_id)
        self._resize(record)
        self._touch(record)

    def _touch(self, record: _Record) -> None:
        self._clock += 1
        record.used = self._clock
        self._records.move_to_end((record.group[0], record.session_id))

    def _cut(self, record: _Record, count: int) -> None:
        """Keep the first `count` messages of a record and the boundaries in them."""
        tenant = record.group[0]
        for end in [end for end in record.boundaries if end > count]:
            del record.boundaries[end]
            _discard(self._boundaries, (record.group, record.conversation.digests[end]), record.session_id)
        for message in record.conversation.messages[count:]:
            for call in message.tool_calls:
                if call.id in record.issued:
                    record.issued.discard(call.id)
                    _discard(self._issued, (tenant, call.id), record.session_id)
        record.conversation = record.conversation.first(count)
        self._resize(record)

    def _resize(self, record: _Record) -> None:
        size = record.conversation.size
        self._bytes += size - record.size
        record.size = size


def _discard(table: dict[Any, Any], key: Any, member: str) -> None:
    """Remove a member of `table[key]` (a set or a dict), and the entry when it was the last."""
    members = table.get(key)
    if members is None:
        return
    members.pop(member, None) if isinstance(members, dict) else members.discard(member)
    if not members:
        del table[key]


def _reasoning_agrees(record: _Record, theirs: Conversation, count: int, known: dict[str, int]) -> bool:
    """Nowhere in the first `count` messages did the client send other reasoning than ours. known: first differing message."""
    first = known.get(record.session_id)
    if first is None:
        pairs = zip(record.conversation.messages[:count], theirs.messages[:count], strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if b.reasoning and a.reasoning != b.reasoning), count)
        known[record.session_id] = first
    return first >= count
