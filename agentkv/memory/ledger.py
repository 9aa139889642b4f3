"""The ledger of a branch: its committed ids, its messages and spans, and what was done to them.

Pure state: no store, no backend, no lock. Everything before the last boundary is **committed** and never rendered again;
what was added since is **pending** and has no interval yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

from agentkv.dialogue import Message, Parsed, Rendered
from agentkv.memory import policy as rules
from agentkv.memory.draft import Draft, drafted
from agentkv.memory.epoch import Rebuilt, Replacement, replaced, shift
from agentkv.memory.span import Prune, Record, byte_size, head_record, new_id
from agentkv.types import Frozen, Interval, Policy, Span, SpanState, ToolCall, Turn


class Boundary(Frozen, frozen=True, kw_only=True):
    """Where a turn ended: how much of everything the branch had."""

    length: int
    records: int
    messages: int
    results: int


START = Boundary(length=0, records=0, messages=0, results=0)


class Ledger:
    """See the module. Callers check what may be done; the ledger keeps its parts consistent."""

    def __init__(self, system: str | None = None, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.system = system
        self.tools = tuple(tools)
        self.ids: array[int] = array("i")
        self.records: list[Record] = []
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.boundaries: list[Boundary] = [START]
        self.open: dict[str, ToolCall] = {}
        self.prunes: dict[str, Prune] = {}
        self.pins: set[str] = set()
        self.was_due: set[str] = set()
        self.lags: dict[str, int | None] = {}  # prune_after given after the result was added
        self._index: dict[str, int] = {}
        self._answered: dict[str, int] = {}
        self._calls: dict[str, tuple[int, str]] = {}  # call id -> (assistant turn, tool name)
        self._assistants = 0
        self._results: list[int] = []  # assistant turn that each result answers
        self._unpruned: dict[str, None] = {}
        self._lagged: dict[str, None] = {}  # of those, the ones with a lag of their own
        self._add_head()

    # -- reading

    @property
    def number(self) -> int:
        """Turns committed."""
        return len(self.boundaries) - 1

    @property
    def length(self) -> int:
        """Logical tokens committed."""
        return len(self.ids)

    @property
    def pending(self) -> list[Record]:
        """Spans added since the last boundary; before the first turn, the head as well."""
        return self.records[self.boundaries[-1].records :]

    @property
    def pending_messages(self) -> list[Message]:
        """Messages added since the last boundary."""
        return self.messages[self.boundaries[-1].messages :]

    def find(self, name: str) -> Record | None:
        """The span of that id, or the result of the call of that id."""
        index = self._index.get(name, self._answered.get(name))
        return None if index is None else self.records[index]

    def answer(self, call_id: str) -> Record | None:
        """The result a call has, if any."""
        index = self._answered.get(call_id)
        return None if index is None else self.records[index]

    def knows_call(self, call_id: str) -> bool:
        """Was a call of that id made on this branch?"""
        return call_id in self._calls

    def age(self, record: Record) -> int | None:
        """Age of a result as it was read at the last commit; None for other spans and results no generation has read."""
        if record.answers is None or not record.rendered:
            return None
        return rules.age(self._results, record.answers, self.boundaries[-1].results)

    def is_due(self, record: Record, policy: Policy | None) -> bool:
        """Would the next request start by pruning it?"""
        reached = self.age(record)
        if reached is None or record.id in self.prunes or record.id in self.pins:
            return False
        lag = rules.lag_of(record, policy)
        if (lag is None or reached < lag) and record.id not in self.was_due:
            return False
        start, end = record.removable(rules.keep_of(record, policy))
        return start < end

    def due(self, policy: Policy | None) -> list[Record]:
        """Every result that is due, in order."""
        lagged = [self.records[self._index[name]] for name in {**self._lagged, **dict.fromkeys(self.was_due)}]
        found = [record for record in lagged if self.is_due(record, policy)]
        least = rules.least_lag(policy)
        if least is not None:
            for name in self._unpruned:  # oldest first, so that ages only fall
                record = self.records[self._index[name]]
                age = self.age(record)
                if age is None or age < least:
                    break
                if record.lag is None and name not in self.was_due and self.is_due(record, policy):
                    found.append(record)
        return sorted(found, key=lambda record: record.interval)

    def state(self, record: Record, policy: Policy | None) -> SpanState:
        """The span's state now."""
        if record.id in self.prunes:
            return "pruned"
        if record.id in self.pins:
            return "pinned"
        return "due" if self.is_due(record, policy) else "live"

    def span(self, record: Record, policy: Policy | None) -> Span:
        """The public view of a record."""
        prune = self.prunes.get(record.id)
        is_result = record.kind == "tool_result"
        return record.as_span(
            self.state(record, policy),
            lag=rules.lag_of(record, policy) if is_result else None,
            keep=prune.keep if prune else rules.keep_of(record, policy) if is_result else record.keep,
            age=self.age(record),
            why=prune.why if prune else None,
        )

    def edits(self) -> tuple[tuple[int, tuple[Interval, ...]], ...]:
        """In-place prunes by the boundary they were made at, for the backend."""
        by_boundary: dict[int, list[Interval]] = {}
        for prune in self.prunes.values():
            if prune.mode == "in_place":
                by_boundary.setdefault(prune.at, []).append(self.records[self._index[prune.span_id]].removable(prune.keep))
        return tuple((at, tuple(sorted(by_boundary[at]))) for at in sorted(by_boundary))

    @property
    def removed(self) -> int:
        """Logical tokens of the branch whose KV was removed in place."""
        return sum(prune.tokens for prune in self.prunes.values() if prune.mode == "in_place")

    # -- adding

    def result(self, call_id: str, text: str, *, lag: int | None, keep: str, error: bool) -> tuple[Message, Record]:
        """The message and span of a result for an open call; nothing is added yet."""
        turn, name = self._calls[call_id]
        message = Message(role="tool", content=text, call_id=call_id, name=name)
        made = Record(
            id=new_id("sp"),
            kind="tool_result",
            message=len(self.messages),
            turn=self.number + 1,
            text=text,
            size=byte_size(text),
            call_id=call_id,
            tool_name=name,
            answers=turn,
            lag=lag,
            keep=keep,
            error=error,
        )
        return message, made

    def append(self, message: Message, records: Sequence[Record]) -> None:
        """Add a message and its spans."""
        if message.role == "assistant":
            self._assistants += 1
        self.messages.append(message)
        for added in records:
            self._enter(added)

    def _enter(self, added: Record) -> None:
        self._index[added.id] = len(self.records)
        if added.call is not None:
            self._calls[added.call.id] = (self._assistants, added.call.name)
            self.open[added.call.id] = added.call
        if added.answers is not None and added.call_id is not None:
            self._answered[added.call_id] = len(self.records)
            self.open.pop(added.call_id, None)
            self._results.append(added.answers)
            self._unpruned[added.id] = None
            if added.lag is not None:
                self._lagged[added.id] = None
        self.records.append(added)

    def relag(self, record: Record, lag: int | None) -> Record:
        """Give a result another prune_after of its own."""
        changed: Record = record.replace(lag=lag)
        self.records[self._index[record.id]] = changed
        self.lags[record.id] = lag
        if record.id in self._unpruned:
            self._lagged.pop(record.id, None)
            if lag is not None:
                self._lagged[record.id] = None
        return changed

    # -- committing

    def draft(self, rendered: Rendered, parsed: Parsed) -> Draft:
        """The turn that these make; nothing is changed yet."""
        return drafted(
            self.pending,
            rendered,
            parsed,
            base=self.length,
            first_message=self.boundaries[-1].messages,
            messages=len(self.messages),
            turn=self.number + 1,
        )

    def apply(self, draft: Draft, turn: Turn) -> None:
        """Commit a draft: the boundary is now at its end."""
        before = self.boundaries[-1]
        waiting = len(self.records) - before.records
        self.records[before.records :] = draft.placed
        if len(draft.placed) != waiting or before == START:  # the template brought a head of its own, or turned it round
            self._index = {r.id: i for i, r in enumerate(self.records)}
            self._answered = {r.call_id: i for i, r in enumerate(self.records) if r.answers is not None and r.call_id}
        self.append(draft.message, draft.made)
        self.ids.extend(draft.ids)
        self.turns.append(turn)
        self.boundaries.append(
            Boundary(length=len(self.ids), records=len(self.records), messages=len(self.messages), results=len(self._results))
        )

    # -- pruning

    def prune(self, prunes: Iterable[Prune]) -> None:
        """Mark spans as pruned in place."""
        for prune in prunes:
            self.prunes[prune.span_id] = prune
            self._settle(prune.span_id)

    def _settle(self, span_id: str) -> None:
        self._unpruned.pop(span_id, None)
        self._lagged.pop(span_id, None)
        self.was_due.discard(span_id)

    def rebuild(self, chosen: Sequence[tuple[Record, str, str]], placeholder: Sequence[int]) -> Rebuilt:
        """A new epoch in which the given (span, keep, why) have a placeholder for a body.

        Spans pruned in place after the first of them get their placeholder too: their slots are gone, and everything after
        `start` is computed again anyway. In-place prunes before `start` stay; they now count as made at `start` at the latest.
        """
        start = min(record.removable(keep)[0] for record, keep, _ in chosen)
        todo = {record.id: (record, keep, why) for record, keep, why in chosen}
        for prune in self.prunes.values():
            old = self.records[self._index[prune.span_id]]
            if prune.mode == "in_place" and old.removable(prune.keep)[0] >= start:
                todo.setdefault(old.id, (old, prune.keep, prune.why))
        prunes = dict(self.prunes)
        replacements: list[Replacement] = []
        for old, keep, why in sorted(todo.values(), key=lambda item: item[0].interval):
            low, high = old.removable(keep)
            stand_in = tuple(placeholder[: high - low])
            replacements.append((low, high, stand_in))
            freed = high - low - len(stand_in)
            made = Prune(span_id=old.id, mode="rebuild", keep=keep, at=start, tokens=freed, why=why, placeholder=stand_in)
            prunes[old.id] = made
        for prune in list(prunes.values()):
            if prune.at > start:
                prunes[prune.span_id] = prune.replace(at=start)
        frees = sum(high - low - len(stand_in) for low, high, stand_in in replacements)
        return Rebuilt(start=start, frees=frees, replacements=replacements, prunes=prunes)

    def apply_rebuild(self, rebuilt: Rebuilt) -> None:
        """Enter the new epoch."""
        self._replace(rebuilt.replacements)
        self.prunes = rebuilt.prunes
        for name in rebuilt.prunes:
            self._settle(name)

    def _replace(self, replacements: Sequence[Replacement]) -> None:
        if replacements:
            moved = shift(replacements)
            self.ids = replaced(self.ids, replacements)
            self.records = [r if r.start is None or r.end is None else r.at(moved(r.start), moved(r.end)) for r in self.records]
            self.boundaries = [b.replace(length=moved(b.length)) for b in self.boundaries]

    # -- going back, branching, coming back

    def rollback(self, turn: int) -> None:
        """Drop everything after the boundary of that turn, pending messages included."""
        to = self.boundaries[turn]
        if turn < self.number:
            self.was_due.clear()
        for dropped in self.records[to.records :]:
            self._leave(dropped)
        self._assistants -= sum(message.role == "assistant" for message in self.messages[to.messages :])
        del self.records[to.records :], self.messages[to.messages :], self.turns[turn:], self.boundaries[turn + 1 :]
        del self._results[to.results :], self.ids[to.length :]
        for prune in list(self.prunes.values()):
            if prune.at > to.length:
                self.prunes[prune.span_id] = prune.replace(at=to.length)
        last = self.messages[-1].tool_calls if self.messages else ()
        self.open = {call.id: call for call in last if call.id not in self._answered}
        if turn == 0:
            self._add_head()

    def _leave(self, dropped: Record) -> None:
        self._index.pop(dropped.id, None)
        self._settle(dropped.id)
        self.pins.discard(dropped.id)
        self.lags.pop(dropped.id, None)
        self.prunes.pop(dropped.id, None)
        if dropped.call is not None:
            self._calls.pop(dropped.call.id, None)
        if dropped.answers is not None and dropped.call_id is not None:
            self._answered.pop(dropped.call_id, None)

    def copy(self) -> Ledger:
        """A ledger that shares every record and message with this one."""
        twin = object.__new__(Ledger)
        for name, value in vars(self).items():
            setattr(twin, name, copy(value) if isinstance(value, (list, array, dict, set)) else value)
        return twin

    def restore(
        self, prunes: Iterable[Prune], pins: Iterable[str], was_due: Iterable[str], lags: Iterable[tuple[str, int | None]]
    ) -> None:
        """Take on what the store had of a branch whose turns and messages, as rendered, are already here."""
        for name, lag in lags:
            self.relag(self.records[self._index[name]], lag)
        self.prune(prunes)
        rebuilt = [prune for prune in self.prunes.values() if prune.mode == "rebuild"]
        bodies = [(*self.records[self._index[p.span_id]].removable(p.keep), p.placeholder) for p in rebuilt]
        self._replace(sorted(bodies))
        self.pins = set(pins)
        self.was_due = set(was_due) - self.prunes.keys()

    def _add_head(self) -> None:
        if self.system is not None:
            self._enter(head_record("system", self.system))
        if self.tools:
            names = ", ".join(str(tool.get("function", tool).get("name", "?")) for tool in self.tools)
            self._enter(head_record("tools", names))
