"""The tool loop: generate, run the calls, add the results, again, until the model answers without a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from agentkv.errors import BadRequest
from agentkv.tools.registry import Execute, Toolbox
from agentkv.types import Event, Frozen, Span, ToolCall, Turn, check_lag


class Decision(Frozen, frozen=True, kw_only=True):
    """What `approve` says about a call: `ALLOW`, `WAIT` or `reject(reason)`."""

    verdict: Literal["allow", "reject", "wait"]
    reason: str = ""


ALLOW = Decision(verdict="allow")
WAIT = Decision(verdict="wait")


def reject(reason: str) -> Decision:
    """Answer the call with this reason instead of running it; the model reads the reason."""
    return Decision(verdict="reject", reason=reason)


class ToolStarted(Frozen, frozen=True, kw_only=True, tag="tool_started"):
    """A call is about to run."""

    call: ToolCall


class ToolFinished(Frozen, frozen=True, kw_only=True, tag="tool_finished"):
    """A call was answered: it ran (seconds), or it was rejected (content is the reason)."""

    call: ToolCall
    content: str
    error: bool = False
    rejected: bool = False
    seconds: float = 0.0


RunEvent = Event | ToolStarted | ToolFinished
Approve = Callable[[ToolCall], Decision]
OnEvent = Callable[[RunEvent], Any]
PruneAfter = int | Mapping[str, int | None] | None


class Stream(Protocol):
    """A running generation: iterate its events; `turn` is what it returned, once it has ended."""

    def __iter__(self) -> Iterator[Event]:
        """The events as they come."""
        ...

    @property
    def turn(self) -> Turn:
        """The finished turn."""
        ...


class LoopSession(Protocol):
    """What the loop asks of a session. toolbox: the tools that the caller passed; no other is ever run."""

    @property
    def toolbox(self) -> Toolbox:
        """The tools."""
        ...

    @property
    def open_calls(self) -> Sequence[ToolCall]:
        """Calls without a result, in the order they were made."""
        ...

    def generate(self) -> Turn:
        """One turn."""
        ...

    def stream(self) -> AbstractContextManager[Stream]:
        """One turn, event by event."""
        ...

    def add_tool_result(self, call_id: str, content: str, *, prune_after: int | None = ..., error: bool = ...) -> Span:
        """Answer a call."""
        ...

    def reject(self, call_id: str, reason: str) -> Span:
        """Answer a call without running it."""
        ...

    def suspend(self) -> None:
        """The session may give up its memory for now."""
        ...

    def standing_turn(self) -> Turn:
        """The turn whose calls are open."""
        ...


class ToolLoop:
    """Gives a session `run`. The session has the verbs of `LoopSession`; `standing_turn` may be overridden."""

    def standing_turn(self: LoopSession) -> Turn:
        """The turn whose calls are open, for a `run` that waits again before it could generate."""
        last: Turn | None = getattr(self, "last_turn", None)
        return last or Turn(number=0, text="", tool_calls=tuple(self.open_calls), finish_reason="tool_calls")

    def run(
        self: LoopSession,
        *,
        max_turns: int = 50,
        prune_after: PruneAfter = None,
        approve: Approve | None = None,
        on_event: OnEvent | None = None,
        execute: Execute | None = None,
    ) -> Turn:
        """Generate and run tools until the model answers without a call; returns the last turn.

        Open calls are answered first, so a run that was stopped goes on by calling it again. Calls run one after another.

        max_turns: at most so many generations. When they are used up, the last turn is returned with finish_reason
        "tool_calls" and its calls open and not run: call `run` again to go on, or reject them.
        prune_after: for every result, or by tool name; None (or a name that is missing) leaves it to the session's policy.
        approve: called with each call before it runs: `ALLOW`, `reject(reason)` or `WAIT`. At `WAIT` the run stops, suspends
        the session and returns the turn with state "waiting"; this call and those after it stay open, however long it takes.
        on_event: called with every stream event and with ToolStarted and ToolFinished; what it raises ends the run.
        execute: runs the calls of tools that came as schemas; needed when there is one.
        """
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise BadRequest(f"max_turns={max_turns!r}: an int, at least 1", param="max_turns")
        if execute is None and self.toolbox.without_function:
            raise BadRequest(
                f"nothing can run the tool {self.toolbox.without_function[0]!r}: it came as a schema",
                hint="Pass execute= (a function from ToolCall to text), or pass the tool as a function",
                param="execute",
            )
        answers = _Answers(self, approve, on_event, execute, _lags(prune_after))
        if not answers.give():
            return _waiting(self, self.standing_turn())
        turn = _turn(self, on_event)
        for _ in range(1, max_turns):
            if not turn.tool_calls:
                break
            if not answers.give():
                return _waiting(self, turn)
            turn = _turn(self, on_event)
        return turn


def _turn(session: LoopSession, on_event: OnEvent | None) -> Turn:
    if on_event is None:
        return session.generate()
    with session.stream() as stream:
        for event in stream:
            on_event(event)
    return stream.turn


def _waiting(session: LoopSession, turn: Turn) -> Turn:
    session.suspend()
    waiting: Turn = turn.replace(state="waiting")
    return waiting


class _Answers:
    """Answers the open calls of a session."""

    def __init__(
        self,
        session: LoopSession,
        approve: Approve | None,
        on_event: OnEvent | None,
        execute: Execute | None,
        lag_of: Callable[[str], dict[str, Any]],
    ) -> None:
        self._session = session
        self._approve = approve
        self._on_event = on_event
        self._execute = execute
        self._lag_of = lag_of

    def give(self) -> bool:
        """Answer the calls in order; False when one must wait, which leaves it and the later ones open."""
        for call in tuple(self._session.open_calls):
            decision = ALLOW if self._approve is None else self._approve(call)
            if not isinstance(decision, Decision):
                raise BadRequest(f"approve returned {decision!r}: ALLOW, WAIT or reject(reason)", param="approve")
            if decision.verdict == "wait":
                return False
            if decision.verdict == "reject":
                self._session.reject(call.id, decision.reason)
                self._tell(ToolFinished(call=call, content=decision.reason, error=True, rejected=True))
                continue
            self._tell(ToolStarted(call=call))
            started = time.perf_counter()
            outcome = self._session.toolbox.invoke(call, self._execute)
            seconds = time.perf_counter() - started
            self._session.add_tool_result(call.id, outcome.content, error=outcome.error, **self._lag_of(call.name))
            self._tell(ToolFinished(call=call, content=outcome.content, error=outcome.error, seconds=seconds))
        return True

    def _tell(self, event: RunEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


def _lags(prune_after: PruneAfter) -> Callable[[str], dict[str, Any]]:
    """The prune_after option of a result, by tool name: absent where the session's policy decides."""
    if prune_after is None:
        return lambda name: {}
    if isinstance(prune_after, Mapping):
        by_name = {name: check_lag(lag) for name, lag in prune_after.items()}
        return lambda name: {"prune_after": by_name[name]} if name in by_name else {}
    lag = check_lag(prune_after)
    return lambda name: {"prune_after": lag}
