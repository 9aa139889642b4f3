"""A runtime without a model: sessions over lists, and a scripted model that answers by rule. Nothing here knows torch."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import uvicorn

from agentkv.errors import (
    BadRequest,
    Busy,
    Cancelled,
    Capacity,
    Conflict,
    ContextOverflow,
    OpenCalls,
    OrphanResult,
    UnknownOption,
)
from agentkv.memory.continuation import ContinuationIndex
from agentkv.server.app import create_app
from agentkv.types import (
    Plan,
    PrunedSpan,
    ReasoningDelta,
    SessionInfo,
    Span,
    TextDelta,
    ToolCall,
    ToolCallReady,
    Turn,
    TurnDone,
    Usage,
)  # fmt: skip

Script = Callable[[list[dict[str, Any]], "FakeSession"], dict[str, Any]]


def echo(messages: list[dict[str, Any]], session: FakeSession) -> dict[str, Any]:
    """`call NAME JSON` makes calls (joined by ' & '), anything else is echoed; `think X` reasons first."""
    text = messages[-1]["content"]
    reply: dict[str, Any] = {"text": f"echo: {text}", "reasoning": "", "calls": []}
    if text.startswith("think "):
        reply["reasoning"] = "\nhm, " + text[6:] + "\n"
    if text.startswith("call "):
        reply["text"] = ""
        for part in text.split(" & "):
            _, name, raw = part.split(" ", 2)
            reply["calls"].append((name, raw))
    return reply


def tokens(value: Any) -> int:
    return len(json.dumps(value, default=str).split())


class FakeStream:
    def __init__(self, session: FakeSession, options: dict[str, Any]) -> None:
        self.session, self.options = session, options

    @property
    def begun(self) -> Turn:
        session = self.session
        return Turn(number=session.turns + 1, text="", usage=Usage(resident_tokens=7), pruned_now=session.world.pruned)

    def __enter__(self) -> Self:
        self.session.start(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.session.end()

    def cancel(self) -> None:
        if self.session.current is self:
            self.session.stop.set()

    def __iter__(self) -> Iterator[Any]:
        session, world = self.session, self.session.world
        reply = world.script(session.log, session)
        limit = self.options.get("max_tokens") or 10**6
        pieces = [("reasoning", word) for word in split(reply["reasoning"])] + [("text", word) for word in split(reply["text"])]
        finish = "length" if len(pieces) > limit else "stop"
        done: dict[str, str] = {"reasoning": "", "text": ""}
        for kind, word in pieces[:limit]:
            session.check()
            world.made += 1
            if world.delay:
                session.stop.wait(world.delay)
            session.check()
            done[kind] += word
            yield TextDelta(text=word) if kind == "text" else ReasoningDelta(text=word)
        calls = ()
        if finish == "stop" and self.options.get("tool_choice") != "none":
            calls = tuple(
                ToolCall(id="call_" + secrets.token_hex(12), name=name, arguments=json.loads(raw), raw=raw)
                for name, raw in reply["calls"]
            )
            finish = "tool_calls" if calls else "stop"
        for call in calls:
            yield ToolCallReady(call=call)
        session.check()
        self.turn = session.commit(done["text"], done["reasoning"], calls, finish)
        yield TurnDone(turn=self.turn)


def split(text: str) -> list[str]:
    return [word if not i else " " + word for i, word in enumerate(text.split(" "))] if text else []


class FakeSession:
    def __init__(self, world: FakeRuntime, id: str, **options: Any) -> None:
        self.world, self.id, self.options = world, id, options
        self.chain_id = "ch_" + secrets.token_hex(6)
        self.system = options.get("system")
        self.tools = list(options.get("tools") or ())
        self.policy = options.get("policy")
        self.template_args = options.get("template_args") or {}
        self.exactness = "exact"
        self.usage = Usage()
        self.log: list[dict[str, Any]] = []
        self.marks = [0]
        self.lags: dict[str, int | None] = {}
        self.busy = False
        self.stop = threading.Event()
        self.current: FakeStream | None = None
        self.closed = False

    # state
    @property
    def turns(self) -> int:
        return len(self.marks) - 1

    @property
    def tokens(self) -> int:
        return tokens(self.log[: self.marks[-1]]) if self.turns else 0

    @property
    def open_calls(self) -> list[ToolCall]:
        answered = {m["tool_call_id"] for m in self.log if m["role"] == "tool"}
        return [c for m in self.log for c in m.get("_calls", ()) if c.id not in answered]

    def messages(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in m.items() if not k.startswith("_")} for m in self.log]

    def spans(self) -> list[Span]:
        return [Span(id=f"sp{i}", kind="user" if m["role"] == "user" else "text", turn=0) for i, m in enumerate(self.log)]

    # adding
    def _free(self) -> None:
        if self.busy:
            raise Busy("a turn is running", kept=self.turns)

    def add_user(self, text: Any) -> Span:
        self._free()
        if self.open_calls:
            raise OpenCalls("calls are open", ids=[c.id for c in self.open_calls], kept=self.turns)
        self.log.append({"role": "user", "content": text})
        return Span(id=f"sp{len(self.log)}", kind="user", turn=self.turns + 1)

    def add_tool_result(self, call_id: str, content: Any, *, prune_after=None, keep="drop", pin=False, error=False) -> Span:
        self._free()
        if prune_after is not None:
            self.lags[call_id] = prune_after
        span = Span(id=f"sp{len(self.log)}", kind="tool_result", turn=self.turns + 1, call_id=call_id, prune_after=prune_after)
        before = [m for m in self.log if m.get("tool_call_id") == call_id]
        if before:
            if before[0]["content"] != content:
                raise Conflict(f"{call_id} has a result", kept=self.turns)
            return span
        if call_id not in {c.id for c in self.open_calls}:
            raise OrphanResult(f"no call {call_id}", kept=self.turns)
        self.log.append({"role": "tool", "tool_call_id": call_id, "content": content})
        return span

    def add_assistant(self, text: str, tool_calls=(), reasoning: str = "") -> None:
        self._free()
        self.log.append(assistant(text, reasoning, tool_calls))

    def reject(self, call_id: str, reason: str) -> Span:
        return self.add_tool_result(call_id, f"rejected: {reason}", error=True)

    def set_policy(self, policy: Any) -> None:
        self.policy = policy

    def set_prune_after(self, span: str, prune_after: int | None) -> None:
        self.lags[span] = prune_after

    # running
    def stream(self, **options: Any) -> FakeStream:
        if options.get("response_format") is not None:
            raise UnknownOption("response_format is not served")
        return FakeStream(self, options)

    def start(self, stream: FakeStream) -> None:
        self._free()
        if self.open_calls:
            raise OpenCalls("calls are open", ids=[c.id for c in self.open_calls], kept=self.turns)
        size = tokens(self.log)
        if self.world.full:
            raise Capacity("no room", retry_after=1.5)
        if size > self.world.window:
            raise ContextOverflow("too long", logical=size, resident=0, limit=self.world.window, freeable=0, kept=self.turns)
        self.stop.clear()
        self.busy, self.current = True, stream
        self.world.running += 1
        self.options["last"] = stream.options

    def check(self) -> None:
        if self.stop.is_set():
            raise Cancelled("cancelled", kept=self.turns)

    def end(self) -> None:
        self.busy = False
        self.world.running -= 1

    def commit(self, text: str, reasoning: str, calls: tuple[ToolCall, ...], finish: str) -> Turn:
        before = self.tokens
        prompt = tokens(self.log)
        self.log.append(assistant(text, reasoning, calls))
        self.marks.append(len(self.log))
        usage = Usage(
            prompt_tokens=prompt, completion_tokens=tokens(text), cached_tokens=before, prefilled_tokens=prompt - before,
            resident_tokens=self.tokens, reusable_tokens=before,
        )  # fmt: skip
        self.usage = usage
        return Turn(
            number=self.turns,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason=finish,
            pruned_now=self.world.pruned,
            usage=usage,
            chain_id=self.chain_id,
        )

    def cancel(self) -> None:
        self.stop.set()

    # editing
    def fork(self, at: int | None = None, *, session_id: str | None = None) -> FakeSession:
        at = self.turns if at is None else at
        if not 0 <= at <= self.turns:
            raise BadRequest(f"no boundary {at}")
        child = self.world.session(
            id=session_id, **{**self.options, "system": self.system, "tools": self.tools, "policy": self.policy}
        )
        child.marks = self.marks[: at + 1]
        child.log = list(self.log[: child.marks[-1]])
        return child

    def rollback(self, to: int | None = None) -> None:
        to = self.turns - 1 if to is None else to
        del self.marks[to + 1 :]
        del self.log[self.marks[-1] :]

    def plan(self, edit: Any = None) -> Plan:
        return Plan(spans=tuple((edit or {}).get("spans", ())), frees_tokens=3)

    def prune(self, spans: Any, **options: Any) -> list[PrunedSpan]:
        return [PrunedSpan(span_id=name, call_id=None, tokens=3, why="asked") for name in spans]

    def pin(self, span: str) -> Span:
        return Span(id=span, kind="tool_result", turn=1, state="pinned")

    def unpin(self, span: str) -> Span:
        return Span(id=span, kind="tool_result", turn=1)

    def recall(self, span: str) -> Span:
        raise UnknownOption("recall is not served yet", hint="Fork before the prune")

    redact = recall

    def suspend(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def assistant(text: str, reasoning: str, calls: Any) -> dict[str, Any]:
    shaped = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.raw or json.dumps(c.arguments)}}
        for c in calls
    ]
    message = {"role": "assistant", "content": text, "reasoning_content": reasoning, "_calls": tuple(calls)}
    return message | ({"tool_calls": shaped} if shaped else {})


class FakeRuntime:
    def __init__(self, script: Script = echo, window: int = 10_000) -> None:
        self.script, self.window = script, window
        self.model_name = "fake"
        self.continuation = ContinuationIndex()
        self.live: dict[tuple[str, str], FakeSession] = {}
        self.delay = 0.0
        self.made = 0
        self.running = 0
        self.full = False
        self.pruned: tuple[PrunedSpan, ...] = ()
        self.stuck = False

    def session(self, *, id: str | None = None, tenant: str = "", **options: Any) -> FakeSession:
        known = {"system", "tools", "method", "policy", "history", "on_window", "kind", "template_args", "temperature", "last"}
        if set(options) - known:
            raise UnknownOption(f"unknown option {min(set(options) - known)!r}")
        name = id or "se-" + secrets.token_hex(6)
        if (tenant, name) in self.live:
            raise Conflict(f"session {name!r} exists")
        made = FakeSession(self, name, tenant=tenant, **options)
        self.live[tenant, name] = made
        return made

    def resume(self, id: str, *, tenant: str = "") -> FakeSession:
        if (tenant, id) not in self.live:
            raise BadRequest(f"no session {id!r}")
        return self.live[tenant, id]

    def sessions(self, *, tenant: str = "") -> list[SessionInfo]:
        return [
            SessionInfo(id=s.id, state="hot", turns=s.turns, tokens=s.tokens, open_calls=tuple(c.id for c in s.open_calls))
            for (owner, _), s in self.live.items()
            if owner == tenant
        ]

    def delete(self, id: str, *, tenant: str = "") -> None:
        self.resume(id, tenant=tenant)
        del self.live[tenant, id]

    def stats(self) -> dict[str, Any]:
        used = sum(s.tokens for s in self.live.values())
        return {
            "arena": {"total": 10_000, "free": 10_000 - used, "active": 0, "chains": used, "radix": 0},
            "queue": {"waiting": 0, "running": self.running},
        }

    def ready(self) -> bool:
        return not self.stuck

    def trouble(self) -> str | None:
        return "no token for 11 s" if self.stuck else None


class Served:
    """An app under uvicorn on an ephemeral port of the loopback."""

    def __init__(self, runtime: FakeRuntime, **options: Any) -> None:
        self.runtime, self.lines = runtime, []
        app = create_app(runtime, log=self.lines.append, **options)
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY by this number
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=2))
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        until(lambda: self.server.started)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        self._socket.close()


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., None]:
    return until


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def start(runtime: FakeRuntime | None = None, **options: Any) -> Served:
        servers.append(Served(runtime or FakeRuntime(), **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
