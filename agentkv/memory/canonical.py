"""What a resent history says, whatever its spelling: the canonical form of chat messages, and a rolling digest over it.

Clients resend the whole history with every request, and re-spell it: arguments are re-serialised, content becomes a list of
parts, null becomes absent, cache markers move. Two histories continue the same chain when their canonical forms are equal.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from agentkv.errors import BadRequest, OrphanResult
from agentkv.types import Frozen

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
SYSTEM_ROLES = ("system", "developer")
DATA_KEYWORDS = ("enum", "const", "default", "example", "examples")
"""JSON Schema keywords whose value is data, in which the order of an array means something."""


class CanonicalCall(Frozen, frozen=True, kw_only=True):
    """A tool call; arguments is canonical JSON (text that is no JSON stays as it is, marked). raw: as it was spelled."""

    id: str
    name: str
    arguments: str
    raw: str = ""


class CanonicalMessage(Frozen, frozen=True, kw_only=True):
    """One message after the head. index: its place in the client's list. reasoning "" means the client sent none."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CanonicalCall, ...] = ()
    call_id: str = ""
    index: int = -1

    @property
    def said(self) -> str:
        """The content that is compared: of an assistant without outer whitespace, which many clients trim."""
        return self.content.strip() if self.role == "assistant" else self.content

    @property
    def size(self) -> int:
        """About how many bytes it takes to keep this message."""
        calls = sum(2 * len(call.arguments) + len(call.name) + len(call.id) + 150 for call in self.tool_calls)
        return len(self.content) + len(self.reasoning) + calls + 250


def canonical_json(value: Any) -> str:
    """One spelling for equal JSON values: sorted keys, no spaces, integral floats as integers."""
    return json.dumps(_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical_arguments(arguments: Any) -> str:
    """Arguments of a call, given as JSON text or as an object, in canonical spelling; what cannot be parsed stays verbatim."""
    if arguments is None or arguments == "":
        return "{}"
    try:
        return canonical_json(json.loads(arguments) if isinstance(arguments, str) else arguments)
    except (ValueError, TypeError, RecursionError):
        return "?" + str(arguments)  # no JSON value starts with '?'


def canonical_tool(tool: Mapping[str, Any]) -> str:
    """A tool schema in which neither key order nor the order of set-like arrays is left; `enum` keeps its order."""
    return canonical_json(_unordered(tool))


def text_of(content: Any, where: str) -> str:
    """Content as text: a string, a list of text parts joined without a separator, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: a string, a list of text parts, or null", param="messages")
    texts = []
    for number, part in enumerate(content):
        kind = str(part.get("type", "text")) if isinstance(part, Mapping) else ""
        if isinstance(part, str):
            texts.append(part)
        elif kind in TEXT_PARTS and isinstance(part, Mapping):
            texts.append(_string(part.get(TEXT_PARTS[kind]), f"{where}.content[{number}]"))
        elif kind not in THOUGHT_PARTS:
            raise BadRequest(
                f"{where}.content[{number}]: a part of type {kind or type(part).__name__!r} is not served",
                hint="Send text parts only",
                param="messages",
            )
    return "".join(texts)


class Conversation:
    """A history in canonical form. `digests[i]` covers the head and the first i messages.

    The head is what every token after it depends on: system text, tools (in any order), template arguments and salt.
    tools keeps the client's spelling and order, for rendering; the digest does not see them.
    """

    __slots__ = ("digests", "messages", "salt", "system", "template_args", "tools")

    def __init__(
        self,
        messages: Sequence[CanonicalMessage] = (),
        *,
        system: str = "",
        tools: Sequence[dict[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> None:
        self.system = system
        self.tools = tuple(tools)
        self.template_args = dict(template_args or {})
        self.salt = salt
        head = _digest(
            b"head", salt, system, canonical_json(self.template_args), *sorted(canonical_tool(tool) for tool in self.tools)
        )
        self.messages: tuple[CanonicalMessage, ...] = ()
        self.digests: tuple[bytes, ...] = (head,)
        self._extend(messages)

    @classmethod
    def read(
        cls,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> Conversation:
        """Read OpenAI-style messages and tools. Raises BadRequest for what no history can be, OrphanResult for a result
        without its call. A result that is sent twice counts once; non-function tools are skipped."""
        start = 0
        while start < len(messages) and isinstance(messages[start], Mapping) and messages[start].get("role") in SYSTEM_ROLES:
            start += 1
        system = "\n\n".join(filter(None, (text_of(messages[i].get("content"), f"messages[{i}]") for i in range(start))))
        body = _paired(_message(raw, start + at) for at, raw in enumerate(messages[start:]))
        return cls(body, system=system, tools=read_tools(tools or ()), template_args=template_args, salt=salt)

    @property
    def open_calls(self) -> tuple[str, ...]:
        """Ids of calls that have no result yet."""
        answered: set[str] = set()
        for message in reversed(self.messages):
            if message.role == "tool":
                answered.add(message.call_id)
            elif message.role == "assistant":
                return tuple(call.id for call in message.tool_calls if call.id not in answered)
        return ()

    @property
    def size(self) -> int:
        """About how many bytes it takes to keep this history."""
        tools = sum(len(canonical_tool(tool)) for tool in self.tools)
        return len(self.system) + tools + sum(message.size for message in self.messages)

    def first(self, count: int) -> Conversation:
        """The same head with the first `count` messages."""
        part = self._copy()
        part.messages = self.messages[:count]
        part.digests = self.digests[: count + 1]
        return part

    def then(self, *messages: CanonicalMessage) -> Conversation:
        """This history with more messages; only those are hashed."""
        longer = self._copy()
        longer._extend(messages)
        return longer

    def _copy(self) -> Conversation:
        twin = object.__new__(Conversation)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def _extend(self, messages: Iterable[CanonicalMessage]) -> None:
        added = tuple(messages)
        digests = list(self.digests)
        for message in added:
            digests.append(message_digest(digests[-1], message))
        self.messages += added
        self.digests = tuple(digests)


def message_digest(before: bytes, message: CanonicalMessage) -> bytes:
    """The rolling digest after one more message. Reasoning and index are not in it."""
    calls = [field for call in message.tool_calls for field in (call.id, call.name, call.arguments)]
    return _digest(before, message.role, message.said, message.call_id, *calls)


def assistant_message(text: str, reasoning: str, calls: Iterable[tuple[str, str, Any]]) -> CanonicalMessage:
    """The canonical form of an answer of ours; calls are (id, name, arguments)."""
    return CanonicalMessage(
        role="assistant",
        content=text,
        reasoning=reasoning.strip(),
        tool_calls=tuple(CanonicalCall(id=i, name=name, arguments=canonical_arguments(args)) for i, name, args in calls),
    )


def read_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Function tools in the client's order and spelling, without cache markers; other kinds of tool are skipped."""
    found: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise BadRequest(f"tools[{number}]: an object with 'type' and 'function'", param="tools")
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function") if "function" in tool else {k: v for k, v in tool.items() if k != "type"}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest(f"tools[{number}].function: an object with a 'name'", param="tools")
        found.append({"type": "function", "function": {k: v for k, v in function.items() if k != "cache_control"}})
    names = [tool["function"]["name"] for tool in found]
    if len(set(names)) != len(names):
        raise BadRequest(f"tools: two tools are called {max(names, key=names.count)!r}", param="tools")
    return found


def _message(raw: Any, index: int) -> CanonicalMessage:
    where = f"messages[{index}]"
    if not isinstance(raw, Mapping):
        raise BadRequest(f"{where}: an object with 'role' and 'content'", param="messages")
    role = raw.get("role")
    content = text_of(raw.get("content"), where)
    if role in ("user", *SYSTEM_ROLES):  # a system message in mid-conversation is rendered as what the user says
        return CanonicalMessage(role="user", content=content, index=index)
    if role == "tool":
        call_id = raw.get("tool_call_id")
        if not isinstance(call_id, str) or not call_id:
            raise BadRequest(f"{where}.tool_call_id: the id of the call it answers", param="messages")
        return CanonicalMessage(role="tool", content=content, call_id=call_id, index=index)
    if role != "assistant":
        raise BadRequest(f"{where}.role={role!r}: system, developer, user, assistant or tool", param="messages")
    if raw.get("function_call"):
        raise BadRequest(f"{where}.function_call is not served", hint="Send tool_calls and tool messages", param="messages")
    reasoning = raw.get("reasoning_content") or raw.get("reasoning") or ""
    sent = raw.get("tool_calls") or []
    if not isinstance(sent, list):
        raise BadRequest(f"{where}.tool_calls: a list", param="messages")
    calls = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(sent)]
    if len({call.id for call in calls}) != len(calls):
        raise BadRequest(f"{where}.tool_calls: two calls have the same id", param="messages")
    return CanonicalMessage(
        role="assistant",
        content=content,
        reasoning=reasoning.strip() if isinstance(reasoning, str) else "",
        tool_calls=tuple(calls),
        index=index,
    )


def _call(raw: Any, where: str) -> CanonicalCall:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where}: an object with 'id' and 'function'", param="messages")
    arguments = function.get("arguments")
    return CanonicalCall(
        id=_string(raw.get("id"), f"{where}.id"),
        name=_string(function.get("name"), f"{where}.function.name"),
        arguments=canonical_arguments(arguments),
        raw=arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False),
    )


def _paired(messages: Iterable[CanonicalMessage]) -> list[CanonicalMessage]:
    """Check that calls and results pair up; drop a result that repeats one already given."""
    kept: list[CanonicalMessage] = []
    waiting: set[str] = set()
    answers: dict[str, str] = {}
    for message in messages:
        where = f"messages[{message.index}]"
        if message.role != "tool":
            if waiting:
                raise BadRequest(
                    f"{where}: the tool calls {', '.join(sorted(waiting))} before it have no result",
                    hint="Every tool call needs a tool message before the conversation goes on",
                    param="messages",
                )
            waiting = {call.id for call in message.tool_calls}
        elif message.call_id in waiting:
            waiting.remove(message.call_id)
            answers[message.call_id] = message.content
        elif message.call_id not in answers:
            raise OrphanResult(
                f"{where}: no call before it has the id {message.call_id!r}",
                hint="A tool message must follow the assistant message that made the call",
                param="messages",
            )
        elif answers[message.call_id] == message.content:
            continue
        else:
            raise BadRequest(f"{where}: a second, different result for {message.call_id!r}", param="messages")
        kept.append(message)
    return kept


def _string(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    raise BadRequest(f"{where}: a string", param="messages")


def _numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)  # a JavaScript client sends 1.0 back as 1
    if isinstance(value, Mapping):
        return {str(key): _numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(item) for item in value]
    return value


def _unordered(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        out = {key: item if key in DATA_KEYWORDS else _unordered(item) for key, item in schema.items()}
        for key in ("required", "type"):
            if isinstance(out.get(key), list) and all(isinstance(item, str) for item in out[key]):
                out[key] = sorted(out[key])
        return out
    if isinstance(schema, list):
        return [_unordered(item) for item in schema]
    return schema


def _digest(*fields: bytes | str) -> bytes:
    """A hash of length-framed fields: ("ab", "c") and ("a", "bc") differ."""
    state = blake2b(digest_size=20)
    for field in fields:
        data = field if isinstance(field, bytes) else field.encode("utf-8", "surrogatepass")
        state.update(struct.pack("<Q", len(data)))
        state.update(data)
    return state.digest()
