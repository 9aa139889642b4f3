"""A session: the verbs of one branch, in process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from agentkv.constraint import read_constraint
from agentkv.dialogue import Message
from agentkv.errors import AgentkvError, BadRequest, Conflict, OrphanResult
from agentkv.memory import plan as plans
from agentkv.memory.backend import KVBackend
from agentkv.memory.branch import Branch
from agentkv.memory.choices import ChoiceStream, choice_sampling
from agentkv.memory.journal import Journal
from agentkv.memory.ledger import Ledger
from agentkv.memory.options import check_history, check_mode, check_window, merged, not_served
from agentkv.memory.restore import restored
from agentkv.memory.saved import Settings
from agentkv.memory.span import Record, new_id, spans_of
from agentkv.memory.standing import Standing
from agentkv.memory.stream import TurnStream
from agentkv.memory.transcript import said
from agentkv.memory.turn import RunningTurn
from agentkv.types import (
    Plan,
    Policy,
    PrunedSpan,
    PruneMode,
    Sampling,
    SamplingOptions,
    Span,
    ToolCall,
    Turn,
    check_lag,
    check_priority,
    check_timeout,
    parse_keep,
)

if TYPE_CHECKING:
    from agentkv.memory.store import SessionStore


class Session(Standing):
    """One conversation that stays resident. Thread safe: one turn at a time, everything else waits its turn or says Busy.

    A new session is written to `store` at once; `Session.resume` opens one that is there. `branch` is for forks and resumed
    sessions: everything else is then taken from it.
    """

    def __init__(
        self,
        backend: KVBackend,
        store: SessionStore | None = None,
        *,
        session_id: str | None = None,
        chain_id: str | None = None,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        policy: Policy | None = None,
        history: str = "as_generated",
        on_window: str = "rebuild",
        sampling: Sampling | None = None,
        placeholder: str = "[pruned]",
        template_args: Mapping[str, Any] | None = None,
        salt: str = "",
        tenant: str = "",
        branch: Branch | None = None,
    ) -> None:
        if branch is None:
            check_history(history)
            check_window(on_window)
            settings = Settings(
                system=None if system is None else said(system, "system"),
                tools=tuple(tools),
                policy=policy,
                sampling=sampling or Sampling(),
                on_window=on_window,
                placeholder=placeholder,
                template_args=dict(template_args or {}),
                model=backend.model_name,
                fingerprint=backend.fingerprint,
            )
            session_id, chain_id = session_id or new_id("s"), chain_id or new_id("c")
            journal = Journal(store, chain_id)
            ledger = Ledger(settings.system, settings.tools)
            branch = Branch(backend, journal, ledger, settings, session_id=session_id, tenant=tenant, salt=salt)
            if store is not None:
                journal.version = store.create(session_id, chain_id, tenant, settings)
        super().__init__(branch)

    @classmethod
    def resume(
        cls,
        backend: KVBackend,
        store: SessionStore,
        session_id: str,
        *,
        chain_id: str | None = None,
        salt: str = "",
        tenant: str | None = None,
        others: Iterable[KVBackend] = (),
        **more: Any,
    ) -> Self:
        """A stored session, wherever it was made. tenant: refuse another tenant's. others: the same model by other methods; the
        one that made the session is taken before `backend`. more: for the constructor of a subclass."""
        saved = store.load(session_id, chain_id=chain_id, tenant=tenant)
        backend = next((each for each in others if each.fingerprint == saved.settings.fingerprint), backend)
        if saved.settings.model != backend.model_name:
            raise BadRequest(
                f"session {session_id!r} was made with model {saved.settings.model!r}, not {backend.model_name!r}",
                kept=len(saved.turns),
                hint="Its token ids mean nothing to another model; open the runtime with that model",
            )
        journal = Journal(store, saved.chain_id, saved.version, [told.node for told in saved.turns])
        branch = Branch(
            backend,
            journal,
            restored(saved),
            saved.settings,
            session_id=saved.session_id,
            tenant=saved.tenant,
            salt=salt,
            usage=saved.usage,
        )
        branch.adopt()
        return cls(backend, store, branch=branch, **more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Suspend; a turn that is still running is rolled back first. A closed session stays closed."""
        running = self._branch.running
        if running is not None:
            running.abandon()
        if not self._branch.closed:
            with suppress(*([] if error is None else [AgentkvError])):  # what the body raised matters more
                self.suspend()

    # -- adding

    def add_user(self, content: str | Sequence[Any]) -> Span:
        """Add what the user says: text, or a list of text parts. Durable when it returns."""
        with self._branch.change():
            text = said(content, "content")
            self._branch.check_answered()
            return self._append(Message(role="user", content=text))[0]

    def add_assistant(self, text: str = "", tool_calls: Iterable[ToolCall] = (), reasoning: str = "") -> list[Span]:
        """Add an answer that a client brought along; it is rendered as history, and its calls are open."""
        calls = tuple(tool_calls)
        with self._branch.change():
            text, reasoning = said(text, "content"), said(reasoning, "reasoning")
            self._branch.check_answered()
            names = [call.id for call in calls]
            for name in names:
                if names.count(name) > 1 or self._branch.ledger.knows_call(name):
                    raise Conflict(f"call id {name!r} is in use on this branch", hint="Call ids must be unique on a branch")
            return self._append(Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls))

    def _append(self, message: Message) -> list[Span]:
        branch = self._branch
        records = spans_of(message, index=len(branch.ledger.messages), turn=branch.ledger.number + 1)
        branch.journal.appended(records)
        branch.ledger.append(message, records)
        return [branch.span(record) for record in records]

    def add_tool_result(
        self,
        call_id: str,
        content: str | Sequence[Any],
        *,
        prune_after: int | None = None,
        keep: str = "drop",
        pin: bool = False,
        error: bool = False,
    ) -> Span:
        """Answer an open call. prune_after: lag of this result, before the policy's. The same result twice is one."""
        branch = self._branch
        with branch.change():
            text = said(content, "content")
            check_lag(prune_after)
            parse_keep(keep)
            known = branch.ledger.answer(call_id)
            if known is not None:
                if known.text != text:
                    raise Conflict(f"call {call_id!r} has another result", call_id=call_id)
                return branch.span(known)
            if call_id not in branch.ledger.open:
                raise OrphanResult(f"no call {call_id!r} was made on this branch", call_id=call_id)
            message, record = branch.ledger.result(call_id, text, lag=prune_after, keep=keep, error=error)
            branch.journal.appended([record])
            branch.ledger.append(message, [record])
            if pin:
                self._pin(record)
            return branch.span(record)

    def reject(self, call_id: str, reason: str) -> Span:
        """Answer an open call without running it."""
        return self.add_tool_result(call_id, f"Rejected: {reason}" if reason else "Rejected", error=True)

    # -- turns

    def generate(
        self,
        *,
        tool_choice: Any = "auto",
        response_format: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> Turn:
        """Let the model answer; sampling: what differs from the session's. On any error the turn is rolled back and what was
        added stays.

        tool_choice: 'auto', 'none', 'required' (one call or more; {'type': 'required', 'parallel': False}: exactly one) or
        {'type': 'function', 'function': {'name': ...}}. response_format: OpenAI's types, and 'regex', 'grammar', 'choice'.
        timeout: seconds after which it is, with Cancelled. priority: -10 to 10, higher goes first where the engine is full.
        """
        options: dict[str, Any] = {"tool_choice": tool_choice, "response_format": response_format, **sampling}
        with self.stream(timeout=timeout, priority=priority, **options) as stream:
            return stream.finish()

    def stream(
        self,
        *,
        tool_choice: Any = "auto",
        response_format: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> TurnStream:
        """The same as events: TextDelta, ReasoningDelta, ToolCallReady, at the end TurnDone. Leaving early rolls back."""

        return TurnStream(lambda: self._turn(tool_choice, response_format, timeout, priority, sampling))

    def choices(
        self,
        n: int,
        *,
        tool_choice: Any = "auto",
        response_format: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        names: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> ChoiceStream[Self]:
        """`n` answers to one prompt, which is computed once: this session's own turn and those of n - 1 forks, as (index,
        event) pairs. names: ids of the forks. With a seed, each choice has one derived from it (`choice_sampling`)."""

        def make(session: Self, index: int, beside: RunningTurn | None) -> RunningTurn:
            return session._turn(tool_choice, response_format, timeout, priority, sampling, index=index, beside=beside)

        with self._branch.kept():
            return ChoiceStream(self, n, make, names)

    def _turn(
        self,
        tool_choice: Any,
        response_format: Any,
        timeout: float | None,
        priority: int,
        sampling: SamplingOptions,
        *,
        index: int = 0,
        beside: RunningTurn | None = None,
    ) -> RunningTurn:
        with self._branch.kept():
            check_timeout(timeout)
            check_priority(priority)
            constraint = read_constraint(tool_choice, response_format, self.tools)
            chosen = choice_sampling(merged(self.sampling, sampling), index)
        tools = bool(self.tools) and tool_choice != "none"
        asked: dict[str, Any] = {"constraint": constraint, "timeout": timeout, "priority": priority}
        return RunningTurn(self._branch, chosen, tools=tools, beside=beside, **asked)

    def cancel(self) -> None:
        """Ask the running turn to roll back, from any thread; without one, nothing. Who runs it gets Cancelled."""
        running = self._branch.running
        if running is not None:
            running.cancel()

    # -- pruning

    def plan(self, edit: Any = None, *, keep: str | None = None, mode: PruneMode | None = None) -> Plan:
        """The price of pruning what is due now, or of an edit: span(s), or a mapping with spans, keep and mode."""
        with self._branch.verb():
            if mode is not None:
                check_mode(mode)
            return plans.price(self._branch, *plans.chosen(self._branch, edit, keep, mode))

    def prune(
        self,
        spans: Span | str | Iterable[Span | str],
        *,
        keep: str = "drop",
        scorer: Any = None,
        keep_ratio: float | None = None,
        mode: PruneMode = "in_place",
    ) -> list[PrunedSpan]:
        """Remove the bodies of tool results now, all of them or none."""
        for name, value in (("scorer", scorer), ("keep_ratio", keep_ratio)):
            if value is not None:
                raise not_served(f"prune({name}=...)", "Use keep='drop' or keep='edges:N'", self.turns)
        with self._branch.change():
            check_mode(mode)
            parse_keep(keep)
            return self._branch.prune(self._branch.choose(self._branch.pick(spans), keep, mode, "asked for"), mode)

    def recall(self, span: Span | str) -> Span:
        """Not served yet."""
        raise not_served("recall", "The full text is in session.messages(); add it again, or roll back", self.turns)

    def redact(self, span: Span | str) -> Span:
        """Not served yet."""
        raise not_served("redact", "Roll back to before the span, or delete the session: both remove text", self.turns)

    def pin(self, span: Span | str) -> Span:
        """Never prune this result until it is unpinned."""
        with self._branch.change():
            return self._pin(self._one(span))

    def unpin(self, span: Span | str) -> Span:
        """Let a result be pruned again; its age has gone on."""
        with self._branch.change():
            record = self._one(span)
            if record.id in self._branch.ledger.pins:
                draft = self._branch.ledger.copy()
                draft.pins.discard(record.id)
                self._branch.mark(draft)
            return self._branch.span(record)

    def _one(self, span: Span | str) -> Record:
        picked = self._branch.pick(span)
        if len(picked) != 1:
            raise BadRequest("name one span", param="span")
        return picked[0]

    def _pin(self, record: Record) -> Span:
        ledger = self._branch.ledger
        if record.id in ledger.prunes:
            raise BadRequest(f"span {record.id} is pruned already", hint="Pin a result before it is pruned", param="span")
        if record.id not in ledger.pins:
            draft = ledger.copy()
            draft.pins.add(record.id)
            self._branch.mark(draft)
        return self._branch.span(record)

    def set_policy(self, policy: Policy | None) -> None:
        """The policy from now on. Results that are due stay due; nothing is un-pruned."""
        with self._branch.change():
            branch = self._branch
            if policy != branch.policy:
                draft = branch.ledger.copy()
                draft.was_due.update(record.id for record in draft.due(branch.policy))
                branch.mark(draft, branch.settings.replace(policy=policy))

    def set_prune_after(self, span: Span | str, prune_after: int | None) -> Span:
        """Another lag for one result; None leaves it to the policy. A result that is due stays due."""
        with self._branch.change():
            check_lag(prune_after)
            branch, record = self._branch, self._one(span)
            if record.kind != "tool_result":
                raise BadRequest(f"span {record.id} is a {record.kind} span", hint="Only tool results have a lag", param="span")
            if record.lag != prune_after:
                draft = branch.ledger.copy()
                if draft.is_due(record, branch.policy):
                    draft.was_due.add(record.id)
                record = draft.relag(record, prune_after)
                branch.mark(draft)
            return branch.span(record)

    # -- branches and the end

    def fork(self, at: int | None = None, *, session_id: str | None = None) -> Self:
        """A child that shares everything up to turn `at` (0: nothing said yet), or up to now with what was added since."""
        branch = self._branch
        with branch.verb():
            child = type(self)(branch.backend, branch.journal.store, branch=branch.fork(at, session_id))
        child._inherit(self)
        return child

    def _inherit(self, parent: Self) -> None:
        """For subclasses: take over what a fork shares beyond the branch."""

    def rollback(self, to: int | None = None) -> int:
        """Stand at the boundary of turn `to` again; everything after it goes, unanswered messages included. None: one turn
        back. Returns the turn the session stands at."""
        branch = self._branch
        with branch.change():
            if to is None and not branch.ledger.number:
                raise BadRequest("no turn to roll back", hint="rollback(to=0) drops what was added before the first turn")
            turn = branch.turn_at(to, branch.ledger.number - 1)
            branch.rollback(turn)
            return turn

    def suspend(self) -> None:
        """Its KV may be demoted or reclaimed; everything else stays."""
        with self._branch.change():
            with self._branch.engine("suspending"):
                self._branch.backend.suspend(self.chain_id)
            self._branch.suspended = True

    def erase(self) -> None:
        """Close it, and remove its text."""
        self.close()
        if self._branch.journal.store is not None:
            self._branch.journal.store.delete(self._branch.session_id, tenant=self.tenant)

    def close(self) -> None:
        """Free its KV; a running turn is rolled back. The transcript stays in the store. Twice is once."""
        branch = self._branch
        running = branch.running
        if running is not None:
            running.end()
        with branch.lock, branch.kept():
            if branch.closed:
                return
            branch.closed = True
            try:
                with suppress(Conflict):  # another process goes on with it
                    branch.journal.closed()
            finally:
                with branch.engine("closing"):
                    branch.backend.drop(self.chain_id)
