"""The sampling fields of a chat request, by OpenAI's names and those that other servers have added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentkv.errors import BadRequest
from agentkv.types import Sampling

NUMBERS: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "repetition_penalty": (int, float),
    "top_logprobs": (int,),
    "seed": (int,),
}


def read_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields the client set; what it left out is the session's default (greedy unless configured)."""
    given: dict[str, Any] = {}
    for name, types in NUMBERS.items():
        value = body.get(name)
        if value is not None:
            given[name] = _number(name, value, types)
    if not -(2**63) <= given.get("seed", 0) < 2**63:
        raise BadRequest(f"seed={given['seed']} is out of range: 64 bits", param="seed")
    if given.get("top_k") == -1:
        given["top_k"] = 0  # how other servers spell "no limit"
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            given["max_tokens"] = _number(name, body[name], (int,))
            break
    stop = body.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
            raise BadRequest("stop: a string or a list of strings", param="stop")
        given["stop"] = tuple(stops)
    if body.get("logprobs") is not None:
        given["logprobs"] = body["logprobs"]
    if body.get("logit_bias") is not None:
        given["logit_bias"] = body["logit_bias"]
    checked = Sampling(**given)  # ranges
    return given | ({"logit_bias": checked.logit_bias} if "logit_bias" in given else {})


def short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _number(name: str, value: Any, types: tuple[type, ...]) -> Any:
    if isinstance(value, float) and float not in types and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, types):
        raise BadRequest(f"{name}={short(value)}: a number", param=name)
    return value
