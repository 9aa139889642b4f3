"""A branch: one chain of turns with its ledger, its line to the store and its line to the engine, under one lock.

Every change is made in the same order: checked, written to the store, made in memory, made in KV. The store is the truth and KV
a cache of it, so when the last step fails the chain's KV is dropped and the next turn prefills.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from agentkv.errors import AgentkvError, BadRequest, Busy, ContextOverflow, EngineFault, OpenCalls
from agentkv.memory import policy as rules
from agentkv.memory.backend import History, KVBackend
from agentkv.memory.journal import Journal
from agentkv.memory.ledger import Ledger
from agentkv.memory.saved import Settings
from agentkv.memory.span import Prune, Record, new_id
from agentkv.types import Exactness, Policy, PrunedSpan, PruneMode, Span, Usage, worst

if TYPE_CHECKING:
    from agentkv.memory.turn import RunningTurn

log = logging.getLogger(__name__)

Chosen = tuple[Record, str, str]
"""A span to prune, its keep rule, and why."""


class Branch:
    """What a session stands on. Methods expect `lock` to be held unless they say otherwise."""

    def __init__(
        self,
        backend: KVBackend,
        journal: Journal,
        ledger: Ledger,
        settings: Settings,
        *,
        session_id: str,
        tenant: str = "",
        salt: str = "",
        usage: Usage | None = None,
    ) -> None:
        self.backend = backend
        self.journal = journal
        self.ledger = ledger
        self.settings = settings
        self.session_id = session_id
        self.chain_id = journal.chain_id
        self.tenant = tenant
        self.salt = salt
        self.usage = usage or Usage()
        self.lock = threading.RLock()
        self.running: RunningTurn | None = None
        self.closed = False
        self.suspended = False
        self.epoch: int | None = None  # until the next commit: the chain's KV ends here, before the last boundary
        self.rebuilt = False  # because of a rebuild
        self.refingered = settings.fingerprint != backend.fingerprint
        self.unreported: list[PrunedSpan] = []  # pruned when a turn started, and no turn committed since

    # -- what may be done

    @contextmanager
    def verb(self) -> Iterator[None]:
        """Hold the lock; an error says at which turn the session stands. Refused once closed."""
        with self.lock, self.kept():
            self.check_open()
            yield

    @contextmanager
    def change(self) -> Iterator[None]:
        """The same, for what a running turn must not see."""
        with self.verb():
            if self.running is not None:
                raise Busy("a turn of this session is running")
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """An error says at which turn the session stands."""
        try:
            yield
        except AgentkvError as error:
            if error.kept is None:
                error.kept = self.ledger.number
            raise

    @contextmanager
    def engine(self, doing: str) -> Iterator[None]:
        """Whatever the backend raises that is no error of ours is an EngineFault."""
        try:
            yield
        except AgentkvError:
            raise
        except Exception as error:
            raise EngineFault(f"{doing} failed: {type(error).__name__}: {error}", kept=self.ledger.number) from error

    @contextmanager
    def kv(self, doing: str) -> Iterator[None]:
        """A change of KV that is on record already: when it fails, the KV goes, the record stands, the next turn prefills."""
        try:
            yield
        except BaseException as error:
            log.warning("%s failed and the KV of session %s is dropped", doing, self.session_id, exc_info=True)
            with suppress(Exception):
                self.backend.drop(self.chain_id)
            if not isinstance(error, Exception):
                raise

    def check_open(self) -> None:
        """Refuse verbs of a closed session."""
        if self.closed:
            raise BadRequest("the session is closed", hint="Resume it by its id to go on; its transcript is kept")

    def check_answered(self) -> None:
        """Refuse to go on while calls have no result."""
        if self.ledger.open:
            ids = list(self.ledger.open)
            raise OpenCalls(f"{len(ids)} tool call(s) have no result: {', '.join(ids)}", ids=ids)

    # -- reading

    @property
    def policy(self) -> Policy | None:
        """The policy of the branch."""
        return self.settings.policy

    def span(self, record: Record) -> Span:
        """The public view of a record."""
        return self.ledger.span(record, self.policy)

    def history(self) -> History:
        """Committed ids and the in-place prunes they have seen."""
        return History(ids=self.ledger.ids[:], edits=self.ledger.edits())

    @property
    def exactness(self) -> Exactness:
        """The worst of the method's and of the prunes'. After a rebuild the prompt differs, but its KV is exact."""
        pruned = any(prune.mode == "in_place" for prune in self.ledger.prunes.values())
        return worst(self.backend.exactness, "lossy" if pruned else "exact")

    def pick(self, spans: Any) -> list[Record]:
        """The records that spans, span ids or call ids name, each once."""
        try:
            given = [spans] if isinstance(spans, (str, Span)) else list(spans)
        except TypeError:
            raise BadRequest(f"{spans!r} names no span", hint="Take one from session.spans()", param="span") from None
        picked: dict[str, Record] = {}
        for item in given:
            name = item.id if isinstance(item, Span) else item
            found = self.ledger.find(name) if isinstance(name, str) else None
            if found is None:
                raise BadRequest(f"no span {name!r} on this branch", hint="Take one from session.spans()", param="span")
            picked[found.id] = found
        return list(picked.values())

    # -- pruning

    def choose(self, records: Sequence[Record], keep: str, mode: PruneMode, why: str) -> list[Chosen]:
        """Check that each of these can be pruned; BadRequest for the first that cannot."""
        if not records:
            raise BadRequest("no span to prune", hint="Name at least one span of session.spans()")
        shortest = len(self.placeholder()) if mode == "rebuild" else 0
        for record in records:
            self._check_prunable(record, mode)
            start, end = record.removable(keep)
            if end - start <= shortest:
                what = "nothing is left between the kept edges" if keep != "drop" else "its body is empty"
                what = what if not shortest else f"what goes is not longer than the placeholder ({shortest} tokens)"
                raise BadRequest(f"pruning {record.id} frees nothing: {what}", hint="Prune a longer result", param="span")
        return [(record, keep, why) for record in records]

    def _check_prunable(self, record: Record, mode: PruneMode) -> None:
        done = self.ledger.prunes.get(record.id)
        if record.kind != "tool_result":
            problem, hint = f"is a {record.kind} span", "Only the body of a tool result can be pruned"
        elif not record.rendered:
            problem, hint = "has not been rendered yet", "Generate first: a result is read at least once"
        elif record.id in self.ledger.pins:
            problem, hint = "is pinned", "Unpin it first"
        elif done is not None and (done.mode == "rebuild" or mode == "in_place"):
            problem, hint = "is pruned already", "A span pruned in place can still be pruned with mode='rebuild'"
        else:
            return
        raise BadRequest(f"span {record.id} {problem}", hint=hint, param="span")

    def due(self) -> tuple[list[Chosen], PruneMode]:
        """What the next request starts by pruning, and how."""
        mode: PruneMode = self.policy.mode if self.policy is not None else "in_place"
        shortest = len(self.placeholder()) if mode == "rebuild" else 0
        chosen = []
        for record in self.ledger.due(self.policy):
            keep = rules.keep_of(record, self.policy)
            start, end = record.removable(keep)
            if end - start > shortest:
                lag, age = rules.lag_of(record, self.policy), self.ledger.age(record) or 0
                chosen.append((record, keep, rules.reason(lag, age, self.policy, record)))
        return chosen, mode

    def placeholder(self) -> list[int]:
        """Ids of what stands in a rebuilt body."""
        with self.engine("encoding the placeholder"):
            return self.backend.encode(self.settings.placeholder) if self.settings.placeholder else []

    def prune(self, chosen: Sequence[Chosen], mode: PruneMode) -> list[PrunedSpan]:
        """Prune what was chosen."""
        if not chosen:
            return []
        return self._rebuild(chosen) if mode == "rebuild" else self._in_place(chosen)

    def _in_place(self, chosen: Sequence[Chosen]) -> list[PrunedSpan]:
        prunes, intervals = [], []
        for record, keep, why in chosen:
            start, end = record.removable(keep)
            intervals.append((start, end))
            at = self.ledger.length if self.epoch is None or end >= self.epoch else self.epoch
            prunes.append(Prune(span_id=record.id, mode="in_place", keep=keep, at=at, tokens=end - start, why=why))
        self.journal.pruned(prunes)
        self.ledger.prune(prunes)
        with self.kv("pruning"):
            self.backend.prune(self.chain_id, sorted(intervals))
        return [_pruned(record, prune) for (record, _, _), prune in zip(chosen, prunes, strict=True)]

    def _rebuild(self, chosen: Sequence[Chosen]) -> list[PrunedSpan]:
        rebuilt = self.ledger.rebuild(chosen, self.placeholder())
        draft = self.ledger.copy()
        draft.apply_rebuild(rebuilt)
        self.journal.marked(draft)
        self.ledger = draft
        self.rebuilt = True
        self._cut(rebuilt.start, "starting a new epoch")
        return [_pruned(record, rebuilt.prunes[record.id]) for record, _, _ in chosen]

    def make_room(self, added: int, wanted: int | None) -> None:
        """With on_window='rebuild', give back the positions of spans pruned in place before the window is full."""
        reserve = wanted if wanted is not None else min(1024, self.backend.window // 8)
        if self.settings.on_window != "rebuild" or self.ledger.length + added + reserve <= self.backend.window:
            return
        old = [p for p in self.ledger.prunes.values() if p.mode == "in_place" and p.tokens > len(self.placeholder())]
        found = [(self.ledger.find(prune.span_id), prune) for prune in old]
        self.prune([(record, prune.keep, f"{prune.why}; window") for record, prune in found if record is not None], "rebuild")

    def overflow(self, error: ContextOverflow) -> None:
        """Say in the error how many tokens a rebuild could give back."""
        if not error.details.get("freeable"):
            rebuilt = {prune.span_id for prune in self.ledger.prunes.values() if prune.mode == "rebuild"}
            results = (record for record in self.ledger.records if record.kind == "tool_result")
            bodies = (record.interval for record in results if record.id not in rebuilt | self.ledger.pins)
            free = sum(end - start for start, end in bodies)
            error.details["freeable"] = free
            error.freeable = free  # type: ignore[attr-defined]

    # -- marks, back, branches

    def mark(self, ledger: Ledger, settings: Settings | None = None) -> None:
        """Take on a changed copy of the ledger, and changed settings."""
        self.journal.marked(ledger, settings)
        self.ledger = ledger
        self.settings = settings or self.settings

    def turn_at(self, turn: int | None, default: int) -> int:
        """Check a turn number."""
        turn = default if turn is None else turn
        if isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn <= self.ledger.number:
            has = f"This session has turns 0 (nothing said yet) to {self.ledger.number}"
            raise BadRequest(f"no turn {turn!r} to stand at", hint=has, param="turn")
        return turn

    def rollback(self, turn: int) -> None:
        """Stand at the boundary of that turn again."""
        draft = self.ledger.copy()
        draft.rollback(turn)
        moved = draft.length != self.ledger.length
        self.journal.rolled_back(draft)
        self.ledger = draft
        if moved:
            self._cut(draft.length, "rolling back")

    def _cut(self, length: int, doing: str) -> None:
        """The chain's KV ends at `length` now, or earlier if a rebuild had cut it there."""
        if self.epoch is None or length < self.epoch:
            self.epoch = length
            with self.kv(doing):
                self.backend.rollback(self.chain_id, length)
        if self.epoch >= self.ledger.length:
            self.epoch, self.rebuilt = None, False

    def adopt(self) -> None:
        """A branch that was just loaded: make the chain, if there is one, agree with what the store says."""
        with suppress(AgentkvError):
            held = self.backend.held(self.chain_id)
            if held is not None and held.logical_length > self.ledger.length:
                self.backend.rollback(self.chain_id, self.ledger.length)
            elif held is not None and held.logical_length < self.ledger.length:
                self.epoch = held.logical_length

    def fork(self, at: int | None, session_id: str | None) -> Branch:
        """A new branch that shares this one up to turn `at`, or up to now with what is pending."""
        turn = self.turn_at(at, self.ledger.number)
        draft = self.ledger.copy()
        if at is not None:
            draft.rollback(turn)
        session_id = session_id or new_id("s")
        chain_id = new_id("c")
        journal = self.journal.forked(session_id, chain_id, self.tenant, draft, self.settings, pending=at is None)
        child = Branch(self.backend, journal, draft, self.settings, session_id=session_id, tenant=self.tenant, salt=self.salt)
        child.refingered = self.refingered
        if self.epoch is not None and self.epoch < draft.length:
            child.epoch, child.rebuilt = self.epoch, self.rebuilt
        with child.kv("forking"):
            self.backend.fork(self.chain_id, chain_id, draft.length if child.epoch is None else child.epoch)
        return child


def _pruned(record: Record, prune: Prune) -> PrunedSpan:
    return PrunedSpan(span_id=record.id, call_id=record.call_id, tokens=prune.tokens, why=prune.why)
