"""Records to and from the rows of a store: plain dictionaries, nothing of a database."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from agentkv.memory.saved import pack, unpack
from agentkv.memory.span import Prune, Record, byte_size, whole
from agentkv.types import ToolCall

Row = Mapping[Any, Any]


def dumped(value: Any) -> str:
    """A value as JSON. Half surrogates, which a model can write as escapes in arguments, become U+FFFD."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_whole(msgspec.to_builtins(value))).decode()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {whole(str(key)): _whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(item) for item in value]
    return whole(value) if isinstance(value, str) else value


def span_row(record: Record, *, chain_id: str | None, turn: int | None, base: int) -> dict[str, Any]:
    """A row of spans; intervals count from `base`."""
    return {
        "span_id": record.id,
        "chain_id": chain_id,
        "turn": turn,
        "number": record.turn,
        "message": record.message,
        "kind": record.kind,
        "text": whole(record.text),
        "first": None if record.start is None else record.start - base,
        "last": None if record.end is None else record.end - base,
        "call_id": record.call_id,
        "tool_name": record.tool_name,
        "call": None if record.call is None else dumped(record.call),
        "answers": record.answers,
        "lag": record.lag,
        "keep": record.keep,
        "error": record.error,
    }


def span_record(row: Row) -> Record:
    """The record of a row; its interval counts from the turn's first id."""
    return Record(
        id=row["span_id"],
        kind=row["kind"],
        message=row["message"],
        turn=row["number"],
        text=row["text"],
        size=byte_size(row["text"]),
        start=row["first"],
        end=row["last"],
        call=None if row["call"] is None else msgspec.json.decode(row["call"], type=ToolCall),
        call_id=row["call_id"],
        tool_name=row["tool_name"],
        answers=row["answers"],
        lag=row["lag"],
        keep=row["keep"],
        error=bool(row["error"]),
    )


def prune_row(prune: Prune, chain_id: str) -> dict[str, Any]:
    """A row of prunes."""
    return {
        "chain_id": chain_id,
        "span_id": prune.span_id,
        "mode": prune.mode,
        "keep": prune.keep,
        "boundary": prune.at,
        "tokens": prune.tokens,
        "why": prune.why,
        "placeholder": pack(array("i", prune.placeholder)),
        "created": time.time(),
    }


def prune_record(row: Row) -> Prune:
    """The prune of a row."""
    return Prune(
        span_id=row["span_id"],
        mode=row["mode"],
        keep=row["keep"],
        at=row["boundary"],
        tokens=row["tokens"],
        why=row["why"],
        placeholder=tuple(unpack(row["placeholder"])),
    )


def mark_rows(
    chain_id: str, pins: Iterable[str], was_due: Iterable[str], lags: Iterable[tuple[str, int | None]]
) -> list[dict[str, Any]]:
    """Rows of marks."""
    rows = [{"chain_id": chain_id, "span_id": name, "mark": "pinned", "value": None} for name in pins]
    rows += [{"chain_id": chain_id, "span_id": name, "mark": "due", "value": None} for name in was_due]
    return rows + [{"chain_id": chain_id, "span_id": name, "mark": "lag", "value": lag} for name, lag in lags]
