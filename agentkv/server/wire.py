"""The wire of /v1/chat/completions: what a request may say, and the shapes of what is sent back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from agentkv.errors import AgentkvError, BadRequest, Cancelled, UnknownModel, UnknownOption
from agentkv.server.forms import read_response_format, read_tool_choice
from agentkv.server.sampling import read_sampling, short
from agentkv.types import (
    Exactness,
    Frozen,
    Miss,
    Policy,
    PrunedSpan,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Turn,
    Usage,
    check_choices,
    check_lag,
    check_priority,
    check_timeout,
    options_of,
)

MAX_BODY = 64 << 20
BIG_BODY = 256 << 10
"""From this size on a body is decoded in a thread, so that other streams go on."""

# OpenAI (and common extension) fields that change the answer and are not served: field -> (harmless values, hint)
UNSERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "Send several requests"),
    "functions": (([],), "Use tools"),
    "function_call": (("auto", "none"), "Use tool_choice"),
    "audio": ((), "Text only"),
    "web_search_options": ((), "Leave it out"),
}


class Extension(Frozen, frozen=True, kw_only=True):
    """The `agentkv` object of a request. prune_after: lag by call id. priority, timeout: as in `Session.generate`."""

    session_id: str | None = None
    chain_id: str | None = None
    policy: dict[str, Any] | None = None
    prune_after: dict[str, int | None] = msgspec.field(default_factory=dict)
    priority: int = 0
    timeout: float | None = None


class ChatRequest(Frozen, frozen=True, kw_only=True):
    """A chat request, checked. sampling has only what the client set. key: the session key, None when it sent none.

    session_id and chain_id are explicit: they name one session, and Busy is an answer. policy None: the branch's stays.
    """

    messages: list[Any]
    tools: list[Any] = msgspec.field(default_factory=list)
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    tool_choice: Any = "auto"
    response_format: Any = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    key: str | None = None
    session_id: str | None = None
    chain_id: str | None = None
    policy: Policy | None = None
    prune_after: dict[str, int | None] = msgspec.field(default_factory=dict)
    priority: int = 0
    timeout: float | None = None


async def read_object(request: Request, limit: int = MAX_BODY) -> dict[str, Any]:
    """The body as a JSON object, {} when it is empty; a body over the limit is refused before it is held."""
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise BadRequest(f"the body is larger than {limit:,} bytes")
    except ClientDisconnect:
        raise Cancelled("the client left while it was sending") from None
    if len(data) > BIG_BODY:
        return await anyio.to_thread.run_sync(decode_object, bytes(data))
    return decode_object(bytes(data))


def decode_object(data: bytes) -> dict[str, Any]:
    """A JSON object from bytes, {} from none."""
    if not data:
        return {}
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if b"\\ud" in data or b"\\uD" in data:
        body = _without_surrogates(body)  # half a surrogate pair is valid JSON and no text
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def read_chat(body: Mapping[str, Any], headers: Mapping[str, str], model: str) -> ChatRequest:
    """Check a chat request. Unknown fields are ignored, known ones that are not served are refused."""
    check_model(body.get("model"), model)
    refuse_unserved(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a list with at least one message", param="messages")
    extension: Extension = options_of(Extension, _object(body, "agentkv"), "agentkv")
    for lag in extension.prune_after.values():
        check_lag(lag)
    options = _object(body, "stream_options")
    return ChatRequest(
        messages=messages,
        tools=_typed(body, "tools", list, "a list of tools") or [],
        template_args=_object(body, "chat_template_kwargs"),
        sampling=read_sampling(body),
        tool_choice=read_tool_choice(body),
        response_format=read_response_format(body),
        n=1 if body.get("n") is None else check_choices(body["n"]),
        stream=bool(_typed(body, "stream", bool, "true or false")),
        include_usage=bool(options.get("include_usage")),
        key=session_key(body, headers, extension),
        session_id=extension.session_id or None,
        chain_id=extension.chain_id or None,
        policy=read_policy(extension, headers),
        prune_after=extension.prune_after,
        priority=check_priority(extension.priority),
        timeout=check_timeout(extension.timeout),
    )


def session_key(body: Mapping[str, Any], headers: Mapping[str, str], extension: Extension) -> str | None:
    """The first of: agentkv.chain_id, agentkv.session_id, X-AgentKV-Session, prompt_cache_key, x-litellm-session-id,
    session_id, user. Explicit ids name their session's set, so a chain_id alone gives no key of its own."""
    if extension.session_id:
        return extension.session_id
    if extension.chain_id:
        return None
    candidates = (
        headers.get("x-agentkv-session"),
        body.get("prompt_cache_key"),
        headers.get("x-litellm-session-id"),
        body.get("session_id"),
        body.get("user"),
    )
    return next((key for key in candidates if isinstance(key, str) and key), None)


def read_policy(extension: Extension, headers: Mapping[str, str]) -> Policy | None:
    """The policy of this request: the body's, else the header's, else None."""
    if extension.policy is not None:
        policy: Policy = options_of(Policy, extension.policy, "agentkv.policy")
        return policy
    header = headers.get("x-agentkv-policy")
    if header is None:
        return None
    try:
        given = json.loads(header)
    except ValueError as error:
        raise BadRequest(f"X-AgentKV-Policy is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest("X-AgentKV-Policy: a JSON object")
    sent: Policy = options_of(Policy, given, "X-AgentKV-Policy")
    return sent


def refuse_unserved(body: Mapping[str, Any]) -> None:
    """Raise for a field that would change the answer and is not served."""
    for name, (harmless, hint) in UNSERVED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise UnknownOption(f"{name}={short(value)} is not served", hint=hint, param=name)
    if body.get("modalities") not in (None, ["text"]):
        raise UnknownOption(f"modalities={short(body['modalities'])} is not served", hint="Text only", param="modalities")


def check_model(asked: Any, served: str) -> None:
    """The model a request names must be the one served; a request that names none gets it."""
    if asked is None or asked == "" or asked == served or asked == served.rstrip("/").rsplit("/", 1)[-1]:
        return
    raise UnknownModel(f"no model {asked!r} here", hint=f"This server serves {served!r}", param="model")


# -- what is sent back


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI usage; ours is inside prompt_tokens_details, which every client passes through."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "agentkv_prefilled_tokens": usage.prefilled_tokens,
            "agentkv_resident_tokens": usage.resident_tokens,
            "agentkv_pruned_tokens": usage.pruned_tokens,
            "agentkv_evicted_tokens": usage.evicted_tokens,
        },
    }


class Reply(Frozen, frozen=True, kw_only=True):
    """What all parts of one answer share."""

    id: str
    created: int
    model: str

    def _frame(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        frame = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return frame | more

    def completion(self, turns: Sequence[Turn], extension: dict[str, Any]) -> dict[str, Any]:
        """The whole answer as one object: a choice a turn."""
        choices = [_choice(index, turn) for index, turn in enumerate(turns)]
        return self._frame("chat.completion", choices, usage=usage_object(total_usage(turns)), agentkv=extension)

    def chunk(
        self,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        *,
        index: int = 0,
        **more: Any,
    ) -> dict[str, Any]:
        """One increment of the choice `index`."""
        told = logprobs_object(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish_reason}
        return self._frame("chat.completion.chunk", [choice], **more)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk when the client asked for usage; it has no choices."""
        return self._frame("chat.completion.chunk", [], usage=usage_object(usage))


def _choice(index: int, turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or (None if turn.tool_calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [call_object(call) for call in turn.tool_calls]
    logprobs = None if turn.logprobs is None else logprobs_object(turn.logprobs)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": turn.finish_reason}


def total_usage(turns: Sequence[Turn]) -> Usage:
    """The usage of a request: its prompt once, as the first choice computed it, and what all choices generated."""
    made: Usage = turns[0].usage.replace(completion_tokens=sum(turn.usage.completion_tokens for turn in turns))
    return made


def new_reply(reply_id: str, model: str) -> Reply:
    """A reply that begins now."""
    return Reply(id=reply_id, created=int(time.time()), model=model)


def call_object(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    """A tool call; arguments is a JSON text, valid whatever the model wrote. index: its place, in a stream."""
    arguments = call.raw if _is_object(call.raw) else json.dumps(call.arguments)
    shaped = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
    return shaped if index is None else {"index": index} | shaped


def logprobs_object(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities in OpenAI's form, which has no ids."""

    def shown(entry: TopLogprob) -> dict[str, Any]:
        return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}

    content = [shown(entry) | {"top_logprobs": [shown(top) for top in entry.top_logprobs]} for entry in entries]
    return {"content": content, "refusal": None}


def extension_object(
    *,
    session_id: str,
    chain_id: str,
    miss: Miss | None,
    exactness: Exactness,
    pruned_now: tuple[PrunedSpan, ...],
    resident_tokens: int,
) -> dict[str, Any]:
    """The `agentkv` object of a response."""
    return {
        "chain_id": chain_id,
        "session_id": session_id,
        "miss": msgspec.to_builtins(miss),
        "exactness": exactness,
        "pruned_now": msgspec.to_builtins(pruned_now),
        "resident_tokens": resident_tokens,
    }


def error_object(error: AgentkvError) -> dict[str, Any]:
    """The body of an error. An overflow says it in the words that clients look for."""
    wire = error.to_wire()
    if error.code == "context_length_exceeded" and "maximum context length" not in wire["message"]:
        limit = getattr(error, "limit", None)
        wire["message"] = (
            f"This model's maximum context length is {limit if limit is not None else 'exceeded'} tokens. {wire['message']}"
        )
    return {"error": wire}


def encode(value: Any) -> bytes:
    """Structs and plain values as JSON; half a surrogate pair, which a model can write, stays escaped."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(encode(value), status, headers=headers, media_type="application/json")


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + (value.encode() if isinstance(value, str) else encode(value)) + b"\n\n"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode() if not value.isascii() else value
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # NaN and Infinity are no JSON


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _typed(body, name, dict, "an object") or {}


def _typed(body: Mapping[str, Any], name: str, kind: type, rule: str) -> Any:
    value = body.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise BadRequest(f"{name}={short(value)}: {rule}", param=name)
