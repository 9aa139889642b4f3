"""Messages as clients spell them."""

from __future__ import annotations

import json
from typing import Any

from agentkv.dialogue import Message
from agentkv.errors import BadRequest
from agentkv.memory.canonical import text_of
from agentkv.memory.span import whole


def said(content: Any, where: str) -> str:
    """What a caller gave as content, as text: a string, or a list of text parts joined."""
    if not isinstance(content, (str, list, tuple)):
        raise BadRequest(f"{where}: text, or a list of text parts, not {type(content).__name__}", param=where)
    return whole(content if isinstance(content, str) else text_of(list(content), where))


def openai_message(message: Message) -> dict[str, Any]:
    """A message as chat.completions spells it."""
    if message.role == "tool":
        named = {} if message.name is None else {"name": message.name}
        return {"role": "tool", "tool_call_id": message.call_id, **named, "content": message.content}
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["content"] = message.content or None
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": whole(json.dumps(call.arguments, ensure_ascii=False))},
            }
            for call in message.tool_calls
        ]
    return told
