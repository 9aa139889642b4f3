"""/v1/sessions: the verbs of a session, one route each. Names are those of the Python API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentkv.errors import AgentkvError, BadRequest, UnknownOption
from agentkv.server.auth import Auth
from agentkv.server.job import Job, Threads
from agentkv.server.metrics import Metrics
from agentkv.server.ports import RuntimePort, SessionPort, exactness_of
from agentkv.server.seats import Seats
from agentkv.server.wire import error_object, json_response, read_object, sse
from agentkv.types import Event, Policy, Sampling, Turn, TurnDone, options_of

ROUTE = "sessions"
OPEN = ("id", "system", "tools", "method", "policy", "history", "on_window", "placeholder", "sampling")
GENERATE = (*Sampling.__struct_fields__, "tool_choice", "response_format", "timeout", "priority", "stream")

Verb = Callable[[SessionPort, dict[str, Any]], Any]


class Sessions:
    """The session routes. Each finds its session, runs one verb in a thread, and sends what the verb returned."""

    def __init__(
        self,
        runtime: RuntimePort,
        seats: Seats,
        auth: Auth,
        metrics: Metrics,
        threads: Threads,
        log: Callable[[str], Any],
        policy: Policy | None = None,
    ) -> None:
        self._runtime = runtime
        self._seats = seats
        self._auth = auth
        self._metrics = metrics
        self._threads = threads
        self._log = log
        self._policy = policy

    def router(self) -> APIRouter:
        """All routes."""
        router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

        def route(method: str, path: str, answer: Callable[[Request], Awaitable[Response]], summary: str) -> None:
            router.add_api_route(path, answer, methods=[method], summary=summary, response_model=None, name=summary)

        route("POST", "", self._open, "Open a session")
        route("GET", "", self._list, "List sessions")
        route("GET", "/{id}", self._verb((), lambda session, _: session_object(session)), "Show or resume a session")
        route("DELETE", "/{id}", self._delete, "Delete a session and its text")
        route("POST", "/{id}/generate", self._generate, "Generate the next turn")
        for name, (fields, verb) in VERBS.items():
            route("POST", f"/{{id}}/{name}", self._verb(fields, verb, changes=True), name)
        route("GET", "/{id}/spans", self._verb((), lambda session, _: {"spans": list(session.spans())}), "List spans")
        route("GET", "/{id}/messages", self._verb((), lambda session, _: {"messages": session.messages()}), "The transcript")
        return router

    async def _open(self, request: Request) -> Response:
        tenant = self._auth.tenant(request)
        body = await _body(request, OPEN)
        options = {name: value for name, value in body.items() if value is not None and name != "sampling"}
        options["policy"] = _policy(body.get("policy")) or self._policy
        sampling = body.get("sampling") or {}
        if not isinstance(sampling, dict):
            raise BadRequest("sampling: an object", param="sampling")
        taken = sorted(sampling.keys() & {*OPEN, "self", "tenant", "kind", "template_args"})
        if taken:
            raise UnknownOption(f"sampling: {taken[0]!r} is not a sampling option", param=taken[0])
        if isinstance(sampling.get("stop"), list):
            sampling["stop"] = tuple(sampling["stop"])
        return await self._answer(
            lambda: session_object(self._runtime.session(tenant=tenant, kind="session", **options, **sampling))
        )

    async def _list(self, request: Request) -> Response:
        tenant = self._auth.tenant(request)
        return await self._answer(lambda: {"sessions": list(self._runtime.sessions(tenant=tenant))})

    async def _delete(self, request: Request) -> Response:
        tenant, name = self._auth.tenant(request), request.path_params["id"]

        def delete() -> dict[str, Any]:
            self._runtime.delete(name, tenant=tenant)
            self._runtime.continuation.forget(tenant, name)
            return {"id": name, "deleted": True}

        return await self._answer(delete)

    def _verb(self, fields: tuple[str, ...], verb: Verb, changes: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            tenant, name = self._auth.tenant(request), request.path_params["id"]
            body = await _body(request, fields)

            def run() -> Any:
                session = self._runtime.resume(name, tenant=tenant)
                result = verb(session, body)
                if changes:
                    self._seats.refresh(tenant, session)
                return result

            return await self._answer(run)

        return answer

    async def _answer(self, work: Callable[[], Any]) -> Response:
        return json_response(await self._threads.call(work))

    # -- generate

    async def _generate(self, request: Request) -> Response:
        tenant, name = self._auth.tenant(request), request.path_params["id"]
        body = await _body(request, GENERATE)
        streamed = body.pop("stream", False)
        options = {key: value for key, value in body.items() if value is not None}
        if isinstance(options.get("stop"), list):
            options["stop"] = tuple(options["stop"])

        def work(job: Job[Turn]) -> Turn:
            session = self._runtime.resume(name, tenant=tenant)
            stream = session.stream(**options)
            job.interrupt = stream.cancel
            job.check()
            with stream:
                for event in stream:
                    if not isinstance(event, TurnDone):
                        job.emit(event)
            self._seats.refresh(tenant, session)
            return stream.turn

        job: Job[Turn] = Job(work, request, self._threads)
        try:
            first = await job.next()
            if streamed:
                return StreamingResponse(
                    self._events(job, first), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
                )
            turn = await job.finish()
        except BaseException:
            job.stop()
            raise
        self._log(self._metrics.answered(ROUTE, turn, job.started, job.first_event))
        return json_response(turn)

    async def _events(self, job: Job[Turn], first: Event | None) -> AsyncIterator[bytes]:
        try:
            event = first
            while event is not None:
                yield sse(event)
                event = await job.next()
            turn = await job.finish()
            self._log(self._metrics.answered(ROUTE, turn, job.started, job.first_event))
            yield sse(TurnDone(turn=turn))
        except AgentkvError as error:
            self._metrics.failed(ROUTE, error.code)
            yield sse(error_object(error))
        finally:
            job.stop()
        yield sse("[DONE]")


def session_object(session: SessionPort) -> dict[str, Any]:
    """A session as the wire shows it."""
    return {
        "id": session.id,
        "chain_id": session.chain_id,
        "turns": session.turns,
        "tokens": session.tokens,
        "open_calls": list(session.open_calls),
        "usage": session.usage,
        "tools": list(session.tools),
        "system": session.system,
        "exactness": exactness_of(session),
    }


def _given(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The options that were sent; an absent one and a null are the verb's default."""
    return {name: body[name] for name in names if body.get(name) is not None}


def _need(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...] = str) -> Any:
    value = body.get(name)
    if not isinstance(value, kind):
        raise BadRequest(f"{name}: missing or of the wrong type", param=name)
    return value


def _then(verb: Callable[[SessionPort, dict[str, Any]], Any]) -> Verb:
    """A verb whose answer is the session itself."""

    def run(session: SessionPort, body: dict[str, Any]) -> dict[str, Any]:
        verb(session, body)
        return session_object(session)

    return run


def _result(session: SessionPort, body: dict[str, Any]) -> Any:
    options = _given(body, "prune_after", "keep", "pin", "error")
    return session.add_tool_result(_need(body, "call_id"), body.get("content") or "", **options)


def _plan(session: SessionPort, body: dict[str, Any]) -> Any:
    return session.plan(_given(body, "spans", "keep", "mode") or None)


def _prune(session: SessionPort, body: dict[str, Any]) -> Any:
    spans = _need(body, "spans", list)
    return {"pruned": list(session.prune(spans, **_given(body, "keep", "scorer", "keep_ratio", "mode")))}


VERBS: dict[str, tuple[tuple[str, ...], Verb]] = {
    "user": (("content",), lambda s, body: s.add_user(_need(body, "content", (str, list)))),
    "tool_results": (("call_id", "content", "prune_after", "keep", "pin", "error"), _result),
    "reject": (("call_id", "reason"), lambda s, body: s.reject(_need(body, "call_id"), _need(body, "reason"))),
    "plan": (("spans", "keep", "mode"), _plan),
    "prune": (("spans", "keep", "scorer", "keep_ratio", "mode"), _prune),
    "pin": (("span",), lambda s, body: s.pin(_need(body, "span"))),
    "unpin": (("span",), lambda s, body: s.unpin(_need(body, "span"))),
    "recall": (("span",), lambda s, body: s.recall(_need(body, "span"))),
    "redact": (("span",), lambda s, body: s.redact(_need(body, "span"))),
    "fork": (("at",), lambda s, body: session_object(s.fork(**_given(body, "at")))),
    "rollback": (("to",), _then(lambda s, body: s.rollback(**_given(body, "to")))),
    "suspend": ((), _then(lambda s, body: s.suspend())),
    "close": ((), _then(lambda s, body: s.close())),
    "cancel": ((), _then(lambda s, body: s.cancel())),
}


def _policy(given: Any) -> Policy | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadRequest("policy: an object", param="policy")
    policy: Policy = options_of(Policy, given, "policy")
    return policy


async def _body(request: Request, fields: tuple[str, ...]) -> dict[str, Any]:
    """The body, in which nothing but `fields` may stand."""
    body = await read_object(request)
    unknown = sorted(set(body) - set(fields))
    if unknown:
        raise UnknownOption(f"unknown field {unknown[0]!r}", hint=f"Known: {', '.join(fields) or 'none'}", param=unknown[0])
    return body
