"""What a store keeps of a branch and gives back: plain values, nothing of a database."""

from __future__ import annotations

from array import array
from typing import Any

from agentkv.memory.span import Prune, Record
from agentkv.types import Frozen, Policy, Sampling, Turn, Usage


class Settings(Frozen, frozen=True, kw_only=True):
    """What a branch was opened with and keeps. Sticky: a fork inherits it, a resumed session has it again."""

    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    policy: Policy | None = None
    sampling: Sampling = Sampling()
    on_window: str = "rebuild"
    placeholder: str = "[pruned]"
    template_args: dict[str, Any] = {}
    model: str = ""
    fingerprint: str = ""


class SavedTurn(Frozen, frozen=True, kw_only=True):
    """One committed turn: what it returned, and its ids as int32 (messages, generation prompt and answer).

    node: its row; records have intervals that count from the turn's first id, as it was rendered.
    """

    node: int
    turn: Turn
    ids: bytes
    records: tuple[Record, ...]


class Saved(Frozen, frozen=True, kw_only=True):
    """A branch as the store has it."""

    session_id: str
    chain_id: str
    tenant: str
    version: int
    settings: Settings
    usage: Usage
    turns: tuple[SavedTurn, ...] = ()
    pending: tuple[Record, ...] = ()
    prunes: tuple[Prune, ...] = ()
    pins: tuple[str, ...] = ()
    was_due: tuple[str, ...] = ()
    lags: tuple[tuple[str, int | None], ...] = ()


def pack(ids: array[int]) -> bytes:
    """Token ids as little-endian int32."""
    return ids.tobytes() if LITTLE else _swapped(ids).tobytes()


def unpack(data: bytes) -> array[int]:
    """Token ids from little-endian int32."""
    ids = array("i")
    ids.frombytes(data)
    return ids if LITTLE else _swapped(ids)


LITTLE = array("i", [1]).tobytes()[:1] == b"\1"


def _swapped(ids: array[int]) -> array[int]:
    twin = array("i", ids)
    twin.byteswap()
    return twin
