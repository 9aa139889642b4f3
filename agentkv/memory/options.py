"""What a caller may ask of a turn or a prune; what is not served is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentkv.errors import BadRequest, UnknownOption
from agentkv.types import Sampling


def merged(defaults: Sampling, options: Mapping[str, Any]) -> Sampling:
    """The session's defaults with what a call gives."""
    unknown = sorted(set(options) - set(Sampling.__struct_fields__))
    if unknown:
        known = ", ".join(sorted(Sampling.__struct_fields__))
        raise UnknownOption(f"unknown option {unknown[0]!r}", hint=f"Sampling: {known}", param=unknown[0])
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("logprobs") is False:
        given.setdefault("top_logprobs", 0)  # without them the session's number means nothing
    if "stop" in given:
        stop = given["stop"]
        given["stop"] = tuple(stop) if isinstance(stop, list | tuple) else (stop,)  # Sampling checks what is in it
    sampling: Sampling = defaults.replace(**given)
    return Sampling(**{name: getattr(sampling, name) for name in Sampling.__struct_fields__})


def check_history(history: str) -> None:
    """Only histories as they were generated are served."""
    if history == "template":
        raise not_served("history='template'", "Use history='as_generated': committed tokens are never rendered again", None)
    if history != "as_generated":
        raise BadRequest(f"history={history!r}: 'as_generated'", param="history")


def check_window(on_window: str) -> None:
    """Refuse a way to meet the window's end that does not exist."""
    if on_window not in ("rebuild", "error"):
        raise BadRequest(f"on_window={on_window!r}: 'rebuild' or 'error'", param="on_window")


def check_mode(mode: str) -> None:
    """Refuse a prune mode that does not exist."""
    if mode not in ("in_place", "rebuild"):
        raise BadRequest(f"mode={mode!r}: 'in_place' or 'rebuild'", param="mode")


def not_served(what: str, instead: str, kept: int | None) -> BadRequest:
    """The error for what is planned but not there."""
    return BadRequest(f"{what} is not served yet", kept=kept, hint=instead)
