"""What memory asks of the engine side, as protocols: text to ids, ids to text, and the verbs on a chain's KV.

`runtime.py` implements them over the engine; tests implement them over a dictionary. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from agentkv.constraint import Constraint
from agentkv.dialogue import Delta, Message, Parsed, Piece, Rendered
from agentkv.types import Exactness, Frozen, Interval, Miss, Sampling

__all__ = [
    "Counts", "Delta", "Freed", "Generation", "Held", "History", "KVBackend", "Message", "Parsed", "Piece", "Rendered",
]  # fmt: skip


class Counts(Frozen, frozen=True, kw_only=True):
    """What the engine measured for one generation. generated_tokens: all that were drawn, those that were cut off again too."""

    cached_tokens: int
    prefilled_tokens: int
    resident_tokens: int
    evicted_tokens: int = 0
    generated_tokens: int = 0
    miss: Miss | None = None


class Generation(Protocol):
    """A running generation. Iterating gives deltas as tokens arrive and ends when the model has finished."""

    def __iter__(self) -> Iterator[Delta]: ...

    def result(self) -> Parsed:
        """The finished answer; raises the error that ended the generation, Cancelled after `cancel`."""
        ...

    def counts(self) -> Counts:
        """What the engine has measured so far."""
        ...

    def commit(self, ids: list[int]) -> Counts:
        """Advance the chain by the prompt and these generated ids; a turn boundary is now at their end."""
        ...

    def cancel(self, *, late: bool = False) -> None:
        """Stop and return the chain to its last boundary. Any thread, any time, more than once. late: its timeout passed."""
        ...


class History(Frozen, frozen=True, kw_only=True):
    """A branch's committed ids and the in-place prunes it has seen: (logical boundary, removed intervals)."""

    ids: Sequence[int]
    edits: tuple[tuple[int, tuple[Interval, ...]], ...] = ()


class Freed(Frozen, frozen=True, kw_only=True):
    """What a prune gave back."""

    tokens: int
    bytes: int


class Held(Frozen, frozen=True, kw_only=True):
    """What is resident for a chain now; None from the backend means nothing is. warm_tokens: slots of its copy in host memory,
    from which the next turn goes on."""

    logical_length: int
    resident_tokens: int
    bytes_held: int
    bytes_unique: int
    warm_tokens: int = 0


class KVBackend(Protocol):
    """One model behind an engine, seen from a session."""

    window: int
    exactness: Exactness
    fingerprint: str
    model_name: str
    token_bytes: int

    def render(
        self,
        messages: Sequence[Message],
        *,
        first: bool,
        closed: bool,
        system: str | None,
        tools: Sequence[dict[str, Any]],
        template_args: dict[str, Any],
    ) -> Rendered:
        """Ids of new messages and the generation prompt. first: nothing precedes them, so the head (system, tools) is part
        of the rendering. closed: the committed history ends with the template's end-of-turn token (otherwise the rendering
        supplies it). The committed history itself is never rendered again."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; text that looks like a special token stays plain text."""
        ...

    def closes_turn(self, token_id: int) -> bool:
        """Is this the template's end-of-turn token?"""
        ...

    def generate(
        self,
        chain_id: str,
        history: History,
        suffix: list[int],
        sampling: Sampling,
        *,
        salt: str,
        tools: bool,
        constraint: Constraint | None = None,
        beside: Generation | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Generation:
        """Continue the chain: prefill what is not resident, then decode. Raises Busy, Capacity, ContextOverflow, and BadRequest
        for a constraint that cannot be served, at once.

        constraint: what the answer must be. beside: one of this backend's own that runs with the same prompt, which is then
        computed once and shared. priority: -10 to 10, higher goes first. timeout: seconds after which it ends with Cancelled,
        unless it has finished."""
        ...

    def prune(self, chain_id: str, intervals: Sequence[Interval]) -> Freed:
        """Remove the slots of these logical intervals from the chain and its checkpoints. Nothing resident: frees 0."""
        ...

    def price(self, chain_id: str, intervals: Sequence[Interval]) -> Freed:
        """What `prune` would free, without doing it."""
        ...

    def fork(self, chain_id: str, new_chain_id: str, length: int) -> None:
        """Let a new chain share the first `length` logical tokens; where that is not resident the child prefills later."""
        ...

    def rollback(self, chain_id: str, length: int) -> None:
        """Cut the chain back to `length` logical tokens; not resident there: the next turn prefills."""
        ...

    def suspend(self, chain_id: str) -> None:
        """The chain may be demoted or reclaimed first when memory is short."""
        ...

    def drop(self, chain_id: str) -> None:
        """Free the chain's KV; parts that other chains share stay."""
        ...

    def held(self, chain_id: str) -> Held | None:
        """What is resident for the chain; None for a chain that is not known."""
        ...

    def prefill_rate(self) -> float:
        """Measured prompt tokens per second, an estimate before anything was measured."""
        ...
