"""A server that is a dictionary: the session routes of the HTTP contract, for httpx's mock transport and for real sockets."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec
import pytest

from agentkv.errors import AgentkvError, BadRequest, Busy, Cancelled, Conflict, OpenCalls, OrphanResult
from agentkv.types import Plan, PrunedSpan, Span, TextDelta, ToolCall, ToolCallReady, Turn, TurnDone, Usage

Script = list[list[ToolCall]]


class StubSession:
    """Each generation says the next calls of the script, or 'done'."""

    def __init__(self, number: int, body: dict[str, Any], script: Script) -> None:
        self.id = body.get("id") or f"s {number}/x"  # an id that must be quoted in a path
        self.body = body
        self.script = script
        self.turns = 0
        self.open: dict[str, ToolCall] = {}
        self.spans: list[Span] = []
        self.answers: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []
        self.suspended = 0
        self.closed = False
        self.cancelled = threading.Event()
        self.running = threading.Lock()
        self.slow = False

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "chain_id": "c1",
            "turns": self.turns,
            "tokens": 10 * self.turns,
            "open_calls": list(self.open.values()),
            "usage": Usage(prompt_tokens=7 * self.turns),
            "tools": self.body.get("tools") or [],
            "system": self.body.get("system"),
            "exactness": "exact",
            "from_a_later_version": True,
        }

    def span(self, kind: Any, **more: Any) -> Span:
        self.spans.append(Span(id=f"sp{len(self.spans)}", kind=kind, turn=self.turns, **more))
        return self.spans[-1]

    def answer(self, call_id: str, content: str, **more: Any) -> Span:
        if call_id in self.answers:
            if self.answers[call_id] != content:
                raise Conflict("another result", kept=self.turns)
            return next(span for span in self.spans if span.call_id == call_id)
        if call_id not in self.open:
            raise OrphanResult("no such call", kept=self.turns, call_id=call_id)
        del self.open[call_id]
        self.answers[call_id] = content
        return self.span("tool_result", call_id=call_id, **more)

    def begin(self, body: dict[str, Any]) -> None:
        if self.open:
            raise OpenCalls("open calls", kept=self.turns, ids=list(self.open))
        if not self.running.acquire(blocking=False):
            raise Busy("a turn is running", kept=self.turns)
        self.cancelled.clear()
        self.asked.append(body)

    def events(self) -> Iterator[Any]:
        """The events of the turn begun; waits between them when slow."""
        try:
            for text in ("line\u2028sep\x85 ", "é🙂"):
                yield TextDelta(text=text)
                deadline = time.monotonic() + (20 if self.slow else 0)
                while time.monotonic() < deadline:
                    if self.cancelled.wait(0.01):
                        raise Cancelled("cancelled", kept=self.turns)
            calls = self.script.pop(0) if self.script else []
            yield from (ToolCallReady(call=call) for call in calls)
            self.open = {call.id: call for call in calls}
            self.turns += 1
            reason: Any = "tool_calls" if calls else "stop"
            yield TurnDone(
                turn=Turn(number=self.turns, text="done", tool_calls=tuple(calls), finish_reason=reason, chain_id="c1")
            )
        finally:
            self.running.release()


class Stub:
    """Routes of the contract over stub sessions."""

    def __init__(self) -> None:
        self.sessions: dict[str, StubSession] = {}
        self.script: Script = []
        self.fail: list[Any] = []  # errors or (status, body) for the next requests
        self.requests: list[tuple[str, str, Any, str | None]] = []

    def handle(self, method: str, path: str, body: Any, key: str | None) -> Any:
        """The answer as a value, or an iterator of events."""
        self.requests.append((method, path, body, key))
        if self.fail:
            failure = self.fail.pop(0)
            if isinstance(failure, AgentkvError):
                raise failure
            return failure
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "micro", "max_model_len": 64}]}
        parts = [httpx.URL(f"http://x/{part}").path[1:] for part in path.split("/")[3:]]
        if not parts:
            return self.collection(method, body)
        session = self.sessions.get(parts[0])
        if session is None:
            raise BadRequest(f"no session {parts[0]!r}")
        if method == "DELETE":
            del self.sessions[session.id]
            return {"id": session.id, "deleted": True}
        return self.verb(session, parts[1] if len(parts) > 1 else "", body)

    def collection(self, method: str, body: Any) -> Any:
        if method == "POST":
            session = StubSession(len(self.sessions), body, self.script)
            self.sessions[session.id] = session
            return session.shown()
        rows = [{"id": each.id, "state": "hot", "turns": each.turns, "tokens": 1, "new": 1} for each in self.sessions.values()]
        return {"sessions": rows}

    def verb(self, session: StubSession, verb: str, body: Any) -> Any:
        if verb == "user":
            return session.span("user", size=len(body["content"]))
        if verb == "tool_results":
            more = {name: body[name] for name in ("prune_after", "keep", "error") if name in body}
            return session.answer(body["call_id"], body["content"], **more)
        if verb == "reject":
            return session.answer(body["call_id"], body["reason"], error=True)
        if verb == "generate":
            session.begin(body)
            events = session.events()
            return events if body.get("stream") else next(event.turn for event in events if isinstance(event, TurnDone))
        if verb == "spans":
            return {"spans": session.spans}
        if verb == "messages":
            return {"messages": [{"role": "user", "content": "x"}]}
        if verb == "plan":
            session.asked.append(body)
            return Plan(frees_now=1, spans=tuple(body.get("spans") or ()))
        if verb == "prune":
            session.asked.append(body)
            return {"pruned": [PrunedSpan(span_id=each, call_id=None, tokens=1, why="asked for") for each in body["spans"]]}
        if verb in ("pin", "unpin", "recall", "redact"):
            return Span(id=body["span"], kind="tool_result", turn=0, state="pinned" if verb == "pin" else "live")
        return self.stand(session, verb, body)

    def stand(self, session: StubSession, verb: str, body: Any) -> Any:
        """The verbs that answer with the session."""
        if verb == "fork":
            child = StubSession(len(self.sessions), session.body | {"id": f"{session.id}-fork"}, self.script)
            child.turns = body.get("at", session.turns)
            self.sessions[child.id] = child
            return child.shown()
        if verb == "rollback":
            session.turns = body.get("to", session.turns - 1)
            session.open = {}
        elif verb == "cancel":
            session.cancelled.set()
        elif verb == "suspend":
            session.suspended += 1
        elif verb == "close":
            session.closed = True
        return session.shown()

    def answer(self, method: str, path: str, content: bytes, key: str | None) -> tuple[int, Iterator[bytes] | bytes]:
        """Status and body, or a stream of lines."""
        try:
            made = self.handle(method, path, json.loads(content) if content else None, key)
        except AgentkvError as error:
            return error.http_status, json.dumps({"error": error.to_wire()}).encode()
        if isinstance(made, tuple):
            return made
        return 200, _lines(made) if isinstance(made, Iterator) else msgspec.json.encode(made)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """As httpx's mock transport."""
        path = request.url.raw_path.decode()
        status, body = self.answer(request.method, path, request.content, request.headers.get("authorization"))
        return httpx.Response(status, content=body)


def _lines(events: Iterator[Any]) -> Iterator[bytes]:
    yield b": hello\n\n"
    try:
        for event in events:
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"
    except AgentkvError as error:
        yield b"data: " + json.dumps({"error": error.to_wire()}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def _serve(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        status, body = self.stub.answer(self.command, self.path, self.rfile.read(length), self.headers.get("authorization"))
        self.send_response(status)
        if isinstance(body, bytes):
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in body:
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _quietly(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client hung up
            self._serve()

    do_GET = do_POST = do_DELETE = _quietly

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def server(stub: Stub) -> Iterator[str]:
    """The stub on a real socket; its address."""
    handler = type("Handler", (_Handler,), {"stub": stub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.fixture
def call() -> Callable[..., ToolCall]:
    return lambda number, name="double", **arguments: ToolCall(id=f"call_{number}", name=name, arguments=arguments, raw="{}")
