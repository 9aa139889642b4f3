"""A session on a server: the verbs of a session in process, with the same names, values and exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan
from types import TracebackType
from typing import Any, Self, Unpack
from urllib.parse import quote

from agentkv.client_http import EventStream, Http, Unreachable
from agentkv.errors import AgentkvError, BadRequest
from agentkv.tools.registry import Toolbox
from agentkv.tools.run import ToolLoop
from agentkv.types import (
    Event,
    Exactness,
    Frozen,
    Plan,
    PrunedSpan,
    PruneMode,
    SamplingOptions,
    Span,
    ToolCall,
    Turn,
    TurnDone,
    Usage,
)


class Shown(Frozen, frozen=True, kw_only=True):
    """A session as the server shows it."""

    id: str
    chain_id: str
    turns: int = 0
    tokens: int = 0
    open_calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    tools: tuple[dict[str, Any], ...] = ()
    system: str | None = None
    exactness: Exactness = "exact"


class _Spans(Frozen, frozen=True, kw_only=True):
    spans: list[Span]


class _Messages(Frozen, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]


class _Pruned(Frozen, frozen=True, kw_only=True):
    pruned: list[PrunedSpan]


class RemoteStream:
    """`with session.stream() as st: for event in st: ...`. The turn starts at `with`; leaving early rolls it back."""

    def __init__(self, session: RemoteSession, body: dict[str, Any]) -> None:
        self._session = session
        self._body = body
        self._source: EventStream | None = None
        self._events: Iterator[Event] | None = None
        self._turn: Turn | None = None
        self._over = False

    def __enter__(self) -> Self:
        if self._source is not None:
            raise BadRequest("this stream has been entered before", hint="Call session.stream() again for another turn")
        self._source = self._session.open_stream(self._body)
        self._events = iter(self._source)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._source is None:
            return
        try:
            if not self._over:
                # hanging up would cancel, too; reading to the end waits until the turn is rolled back
                with contextlib.suppress(AgentkvError):
                    self._session.cancel()
                    self.finish()
        finally:
            self._source.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._events is None:
            raise BadRequest("this stream has not been entered", hint="Use it as `with session.stream() as st:`")
        try:
            event = next(self._events)
        except StopIteration:
            self._over = True
            if self._turn is None:
                self._session.doubt()
                raise Unreachable("the stream ended before the turn did") from None
            raise
        except AgentkvError:
            self._over = True
            self._session.doubt()
            raise
        if isinstance(event, TurnDone):
            self._turn, self._over = event.turn, True
            self._session.took(event.turn)
        return event

    @property
    def done(self) -> bool:
        """Is the turn committed?"""
        return self._turn is not None

    @property
    def turn(self) -> Turn:
        """The committed turn; BadRequest until then."""
        if self._turn is None:
            raise BadRequest("the turn is not committed", hint="Read the stream to its end first, or call finish()")
        return self._turn

    def finish(self) -> Turn:
        """Read to the end and return the turn."""
        for _ in self:
            pass
        return self.turn

    def cancel(self) -> None:
        """Ask for the turn's rollback, from any thread; whoever reads the stream gets Cancelled."""
        self._session.cancel()


class RemoteSession(ToolLoop):
    """A session on a server. Leaving `with` suspends it; it can be resumed by its id from anywhere.

    The properties show what the last answer said; usage, turns and tokens are fetched when a turn has passed since.
    """

    def __init__(self, http: Http, shown: Shown, toolbox: Toolbox) -> None:
        self._http = http
        self._shown = shown
        self._path = f"/v1/sessions/{quote(shown.id, safe='')}"
        self._stale = False  # the counts are older than the last turn
        self._doubtful = False  # after an error: even the open calls may be others
        self._closed = False
        self.toolbox = toolbox
        self.last_turn: Turn | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._closed:
            return
        with contextlib.suppress(AgentkvError) if error is not None else contextlib.nullcontext():
            self.suspend()

    def __repr__(self) -> str:
        return f"<RemoteSession {self.id} at {self._http.base_url}>"

    # -- what it is

    def refresh(self) -> None:
        """Ask the server how the session stands."""
        self._show(self._http.call("GET", self._path, kind=Shown))

    def _show(self, shown: Shown) -> None:
        self._shown = shown
        self._stale = self._doubtful = False

    def _counts(self) -> Shown:
        if self._stale or self._doubtful:
            self.refresh()
        return self._shown

    @property
    def id(self) -> str:
        """Name of the session."""
        return self._shown.id

    @property
    def chain_id(self) -> str:
        """Name of its chain."""
        return self._shown.chain_id

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._shown.system

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Schemas of its tools."""
        return self._shown.tools

    @property
    def turns(self) -> int:
        """Turns committed."""
        return self._counts().turns

    @property
    def tokens(self) -> int:
        """Logical tokens committed."""
        return self._counts().tokens

    @property
    def usage(self) -> Usage:
        """Token counts over all turns."""
        return self._counts().usage

    @property
    def exactness(self) -> Exactness:
        """The worst of its method's exactness and of its prunes."""
        return self._counts().exactness

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """Calls that have no result yet, in the order they were made."""
        if self._doubtful:
            self.refresh()
        return self._shown.open_calls

    def spans(self) -> list[Span]:
        """Every span in order."""
        return self._http.call("GET", f"{self._path}/spans", kind=_Spans).spans

    def messages(self) -> list[dict[str, Any]]:
        """The transcript in OpenAI's form."""
        return self._http.call("GET", f"{self._path}/messages", kind=_Messages).messages

    # -- talking to the server

    def _post(self, verb: str, body: dict[str, Any], *, kind: type[Any]) -> Any:
        try:
            return self._http.call("POST", f"{self._path}/{verb}", body, kind=kind)
        except AgentkvError:
            self.doubt()
            raise

    def _change(self, verb: str, body: dict[str, Any]) -> None:
        self._show(self._post(verb, body, kind=Shown))

    def open_stream(self, body: dict[str, Any]) -> EventStream:
        """Start a turn; for RemoteStream."""
        self._doubtful = True  # until its TurnDone
        return self._http.events(f"{self._path}/generate", body)

    def doubt(self) -> None:
        """Something failed: ask the server before the next answer about this session."""
        self._doubtful = True

    def took(self, turn: Turn) -> None:
        """A turn was committed."""
        self.last_turn = turn
        self._shown = self._shown.replace(open_calls=turn.tool_calls, chain_id=turn.chain_id or self.chain_id)
        self._stale, self._doubtful = True, False

    def _answered(self, call_id: str) -> None:
        left = tuple(call for call in self._shown.open_calls if call.id != call_id)
        self._shown = self._shown.replace(open_calls=left)

    # -- adding

    def add_user(self, content: str | Sequence[Any]) -> Span:
        """Add what the user says: text, or a list of text parts. Durable when it returns."""
        span: Span = self._post("user", {"content": content}, kind=Span)
        return span

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
        body: dict[str, Any] = {"call_id": call_id, "content": content}
        body |= _given(prune_after=prune_after, keep=keep if keep != "drop" else None, pin=pin or None, error=error or None)
        span: Span = self._post("tool_results", body, kind=Span)
        self._answered(call_id)
        return span

    def reject(self, call_id: str, reason: str) -> Span:
        """Answer an open call without running it."""
        span: Span = self._post("reject", {"call_id": call_id, "reason": reason}, kind=Span)
        self._answered(call_id)
        return span

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
        """Let the model answer. On any error the turn is rolled back and what was added stays."""
        options: dict[str, Any] = {"tool_choice": tool_choice, "response_format": response_format, **sampling}
        body = _given(timeout=timeout, priority=priority or None, **options)
        turn: Turn = self._post("generate", body, kind=Turn)
        self.took(turn)
        return turn

    def stream(
        self,
        *,
        tool_choice: Any = "auto",
        response_format: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> RemoteStream:
        """The same as events: TextDelta, ReasoningDelta, ToolCallReady, at the end TurnDone. Leaving early rolls back."""
        options: dict[str, Any] = {"tool_choice": tool_choice, "response_format": response_format, **sampling}
        body = _given(timeout=timeout, priority=priority or None, **options)
        return RemoteStream(self, body | {"stream": True})

    def cancel(self) -> None:
        """Roll the running turn back, if there is one. From any thread."""
        self._http.call("POST", f"{self._path}/cancel", {}, kind=Shown)
        self.doubt()

    # -- pruning

    def plan(self, edit: Any = None, *, keep: str | None = None, mode: PruneMode | None = None) -> Plan:
        """The price of pruning what is due now, or of an edit: span(s), or a mapping with spans, keep and mode."""
        body = dict(edit) if isinstance(edit, Mapping) else _given(spans=edit)
        if body.get("spans") is not None:
            body["spans"] = _ids(body["spans"])
        plan: Plan = self._post("plan", body | _given(keep=keep, mode=mode), kind=Plan)
        return plan

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
        body: dict[str, Any] = {"spans": _ids(spans), "keep": keep, "mode": mode}
        pruned: _Pruned = self._post("prune", body | _given(scorer=scorer, keep_ratio=keep_ratio), kind=_Pruned)
        self._stale = True
        return pruned.pruned

    def recall(self, span: Span | str) -> Span:
        """Bring a pruned body back."""
        return self._one("recall", span)

    def redact(self, span: Span | str) -> Span:
        """Remove a body everywhere, text included."""
        return self._one("redact", span)

    def pin(self, span: Span | str) -> Span:
        """Never prune this result until it is unpinned."""
        return self._one("pin", span)

    def unpin(self, span: Span | str) -> Span:
        """Let a result be pruned again."""
        return self._one("unpin", span)

    def _one(self, verb: str, span: Span | str) -> Span:
        changed: Span = self._post(verb, {"span": _ids(span)[0]}, kind=Span)
        self._stale = True
        return changed

    # -- branches and the end

    def fork(self, at: int | None = None) -> RemoteSession:
        """A child that shares everything up to turn `at`, or up to now with what was added since."""
        return RemoteSession(self._http, self._post("fork", _given(at=at), kind=Shown), self.toolbox)

    def rollback(self, to: int | None = None) -> int:
        """Stand at the boundary of turn `to` again, or one turn back; returns the turn it stands at."""
        self._change("rollback", _given(to=to))
        return self._shown.turns

    def suspend(self) -> None:
        """Its KV may be demoted or reclaimed; everything else stays."""
        self._change("suspend", {})

    def close(self) -> None:
        """Free its KV; the transcript stays on the server."""
        self._change("close", {})
        self._closed = True


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given. BadRequest for NaN: JSON has none, so it would arrive as an option that was not given."""
    for name, value in options.items():
        if isinstance(value, float) and isnan(value):
            raise BadRequest(f"{name}={value}: a number", param=name)
    return {name: value for name, value in options.items() if value is not None}


def _ids(spans: Span | str | Iterable[Span | str]) -> list[str]:
    many = [spans] if isinstance(spans, Span | str) else list(spans)
    return [span.id if isinstance(span, Span) else span for span in many]
