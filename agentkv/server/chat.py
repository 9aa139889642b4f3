"""POST /v1/chat/completions: a resent history becomes the next turn of a session."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentkv.constraint import read_constraint
from agentkv.errors import AgentkvError, BadRequest
from agentkv.server.auth import Auth, salt_of
from agentkv.server.job import Job, Threads
from agentkv.server.metrics import Metrics
from agentkv.server.ports import ChoicesPort, ConversationPort, OneChoice, RuntimePort, SessionPort
from agentkv.server.seats import Seat, Seats
from agentkv.server.wire import (
    ChatRequest,
    Reply,
    call_object,
    error_object,
    extension_object,
    json_response,
    new_reply,
    read_chat,
    read_object,
    sse,
    total_usage,
)
from agentkv.types import Event, Miss, ReasoningDelta, TextDelta, ToolCall, ToolCallReady, Turn, TurnDone

ROUTE = "chat"

Answer = tuple[tuple[Turn, ...], dict[str, Any]]
"""The committed turns, one a choice, and the `agentkv` object that goes with them."""

Said = tuple[int, Event]
"""Which choice, and what it says."""


class Chat:
    """The chat route. What blocks is in `answer` and runs in a thread; seats choose the session, wire has the shapes."""

    def __init__(
        self, runtime: RuntimePort, seats: Seats, auth: Auth, metrics: Metrics, threads: Threads, log: Callable[[str], Any]
    ) -> None:
        self._runtime = runtime
        self._index = runtime.continuation
        self._seats = seats
        self._auth = auth
        self._metrics = metrics
        self._threads = threads
        self._log = log

    async def __call__(self, request: Request) -> Response:
        """Answer one request. An error before the first token has a status of its own, streamed or not."""
        tenant = self._auth.tenant(request)
        ask = read_chat(await read_object(request), request.headers, self._runtime.model_name)
        reply = new_reply(f"chatcmpl-{uuid.uuid4().hex}", self._runtime.model_name)
        job: Job[Answer] = Job(lambda job: self.answer(tenant, ask, job), request, self._threads)
        try:
            first = await job.next()
            if ask.stream:
                return StreamingResponse(
                    self._stream(job, first, reply, ask),
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
                )
            turns, extension = await job.finish()
        except BaseException:
            job.stop()
            raise
        self._answered(turns, job)
        return json_response(reply.completion(turns, extension))

    def answer(self, tenant: str, ask: ChatRequest, job: Job[Answer]) -> Answer:
        """Find the session, add what is new in the request, generate, and index the new boundary."""
        conversation: ConversationPort = self._index.read(
            ask.messages, tools=ask.tools, template_args=ask.template_args, salt=salt_of(tenant)
        )
        _check_end(conversation)
        read_constraint(ask.tool_choice, ask.response_format, conversation.tools)  # refused before anything is made
        with self._seats.take(tenant, ask, conversation) as seat:
            session = seat.session
            if ask.policy is not None:
                session.set_policy(ask.policy)
            _say(session, conversation.messages[: seat.matched], conversation.messages[seat.matched :], ask.prune_after)
            job.check()
            sessions, turns, extension = _generate(seat, ask, job, self._seats.names(tenant, ask))
            for index, (made, turn) in enumerate(zip(sessions, turns, strict=True)):
                if index:
                    known: dict[str, Any] = {"session_id": made.id, "chain_id": made.chain_id, "matched": seat.matched}
                    self._index.register_fork(tenant, session.id, **known)
                self._index.register(
                    tenant,
                    ask.key,
                    conversation,
                    session_id=made.id,
                    chain_id=made.chain_id,
                    turn=made.turns,
                    matched=seat.matched,
                    text=turn.text,
                    reasoning=turn.reasoning,
                    tool_calls=turn.tool_calls,
                    named=seat.named,
                    stateless=bool(index) or seat.stateless,
                )
        return turns, extension

    def _answered(self, turns: Sequence[Turn], job: Job[Answer]) -> None:
        whole: Turn = turns[0].replace(usage=total_usage(turns))
        self._log(self._metrics.answered(ROUTE, whole, job.started, job.first_event))

    async def _stream(self, job: Job[Answer], first: Said | None, reply: Reply, ask: ChatRequest) -> AsyncIterator[bytes]:
        """The answer as server-sent events; what went wrong on the way is an event too."""
        blank: dict[str, Any] = {"usage": None} if ask.include_usage else {}
        calls, sent = [0] * ask.n, [0] * ask.n
        opened: set[int] = set()
        role = {"role": "assistant", "content": ""}
        try:
            said = first
            while said is not None:
                index, event = said
                if index not in opened:
                    opened.add(index)
                    told: dict[str, Any] = {"agentkv": event.extension} if isinstance(event, Opening) else {}
                    yield sse(reply.chunk(role, index=index, **told, **blank))
                if isinstance(event, ToolCallReady):
                    yield sse(reply.chunk({"tool_calls": [call_object(event.call, calls[index])]}, index=index, **blank))
                    calls[index] += 1
                elif isinstance(event, (TextDelta, ReasoningDelta)) and not isinstance(event, Opening):
                    name = "content" if isinstance(event, TextDelta) else "reasoning_content"
                    yield sse(reply.chunk({name: event.text}, logprobs=event.logprobs, index=index, **blank))
                    sent[index] += len(event.logprobs)
                said = await job.next()
            turns, extension = await job.finish()
            for index in sorted(set(range(ask.n)) - opened):  # turns without a single token
                told = {} if opened or index else {"agentkv": extension}
                yield sse(reply.chunk(role, index=index, **told, **blank))
            self._answered(turns, job)
            for index, turn in enumerate(turns):
                rest = (turn.logprobs or ())[sent[index] :]
                yield sse(reply.chunk({}, turn.finish_reason, rest, index=index, **blank))
            if ask.include_usage:
                yield sse(reply.usage_chunk(total_usage(turns)))
        except AgentkvError as error:
            self._metrics.failed(ROUTE, error.code)
            yield sse(error_object(error))
        finally:
            job.stop()
        yield sse("[DONE]")


class Opening(TextDelta, frozen=True, kw_only=True, tag="opening"):
    """What is known of a turn at its first token: the `agentkv` object that rides on a stream's first chunk."""

    extension: dict[str, Any]


def _check_end(conversation: ConversationPort) -> None:
    """There must be something to answer."""
    if not conversation.messages:
        raise BadRequest("messages: nothing to answer after the system message", param="messages")
    if conversation.open_calls:
        raise BadRequest(
            f"messages: the tool calls {', '.join(conversation.open_calls)} have no result",
            hint="Add a tool message for each call",
            param="messages",
        )
    if conversation.messages[-1].role == "assistant":
        raise BadRequest(
            "messages: the last message is the assistant's; continuing it is not served",
            hint="End with a user or tool message",
            param="messages",
        )


def _say(session: SessionPort, known: Sequence[Any], new: Sequence[Any], lags: dict[str, int | None]) -> None:
    """Add the messages that the session does not have yet. Answers among them come from elsewhere: they are rendered.

    Ids of calls are unique on a branch, but other servers count from 1 in every turn: a repeated id gets a suffix.
    """
    for message in known:
        if message.call_id in lags:  # the latest lag wins; a result that is due or pruned stays so
            session.set_prune_after(message.call_id, lags[message.call_id])
    seen = {call.id for message in known for call in message.tool_calls}
    names: dict[str, str] = {}
    for message in new:
        if message.role == "user":
            session.add_user(message.content)
        elif message.role == "tool":
            lag = {"prune_after": lags[message.call_id]} if message.call_id in lags else {}
            session.add_tool_result(names.get(message.call_id, message.call_id), message.content, **lag)
        else:
            calls = []
            for call in message.tool_calls:
                names[call.id] = _unused(call.id, seen)
                calls.append(ToolCall(id=names[call.id], name=call.name, arguments=_arguments(call.raw), raw=call.raw))
            session.add_assistant(message.content, tuple(calls), message.reasoning)


def _generate(
    seat: Seat, ask: ChatRequest, job: Job[Answer], names: Sequence[str]
) -> tuple[Sequence[SessionPort], tuple[Turn, ...], dict[str, Any]]:
    """The sessions that answered (forks where there are several choices), their turns, and the `agentkv` object."""
    opened, stream = False, _choices(seat.session, ask, names)
    job.interrupt = stream.cancel  # this turn, and not another that begins on the session when it is over
    with stream:
        for index, event in stream:
            if isinstance(event, TurnDone):
                continue  # committed: a client that leaves now does not undo it
            if not opened:
                opened = True
                job.emit((index, Opening(text="", extension=_extension(seat, stream.begun))))
            job.emit((index, event))
    first, *others = stream.turns
    first = first.replace(miss=_miss(seat, first.miss, first.usage.prefilled_tokens))
    return stream.sessions, (first, *others), _extension(seat, first)


def _choices(session: SessionPort, ask: ChatRequest, names: Sequence[str]) -> ChoicesPort:
    options: dict[str, Any] = {"tool_choice": ask.tool_choice, **ask.sampling}
    if ask.response_format is not None:
        options["response_format"] = ask.response_format
    if ask.priority:
        options["priority"] = ask.priority
    if ask.timeout is not None:
        options["timeout"] = ask.timeout
    return session.choices(ask.n, names=names, **options) if ask.n > 1 else OneChoice(session, session.stream(**options))


def _extension(seat: Seat, turn: Turn) -> dict[str, Any]:
    return extension_object(
        session_id=seat.session.id,
        chain_id=seat.session.chain_id,
        miss=_miss(seat, turn.miss, turn.usage.prefilled_tokens),
        exactness=turn.exactness,
        pruned_now=turn.pruned_now,
        resident_tokens=turn.usage.resident_tokens,
    )


def _miss(seat: Seat, engine: Miss | None, prefilled: int) -> Miss | None:
    """Why something was recomputed: what the history says first, else what the engine says."""
    miss = seat.miss or engine
    if miss is not None and not miss.tokens:
        miss = miss.replace(tokens=prefilled)
    return miss


def _unused(call_id: str, seen: set[str]) -> str:
    name, number = call_id, 1
    while name in seen:
        number += 1
        name = f"{call_id}#{number}"
    seen.add(name)
    return name


def _arguments(raw: str) -> dict[str, Any]:
    """The object that a client's arguments stand for; text that is no JSON object is kept under one name."""
    try:
        value = json.loads(raw or "{}")
    except (ValueError, RecursionError):
        value = raw
    return value if isinstance(value, dict) else {"arguments": value}
