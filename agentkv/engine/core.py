"""The engine's nouns: read this first.

A **sequence** is one run of tokens through the model. Its **logical** length counts every token since the start of the
conversation; its **physical** length counts the KV slots it still holds (pruning and eviction free slots, never positions).
A **row** is the sequence's line in the device's page table while it runs. A **batch** is what one step forwards.

This module has no torch in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from agentkv.types import FinishReason, Interval, Miss, Sampling

if TYPE_CHECKING:
    from agentkv.engine.cache.state import KVState
    from agentkv.engine.lookup import Drafter

GRANULE = 256
"""Bytes of one granule: table entries are int32 offsets in granules (reach 549 GB)."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one KV group. A stripe is one page of all its layers: [layer][kv head][K,V][token][dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    page_size: int

    @property
    def stripe_bytes(self) -> int:
        """Bytes of one stripe, rounded up to whole granules."""
        raw = self.num_layers * self.num_kv_heads * 2 * self.page_size * self.head_dim * self.itemsize
        return -(-raw // GRANULE) * GRANULE

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. memory: bytes of the KV arena; window: most logical tokens of a sequence.

    lookup: most tokens that a decode row forwards in one step, guesses of prompt lookup included; 0 guesses nothing.
    """

    memory: int
    window: int
    page_size: int = 16
    max_rows: int = 64
    step_tokens: int = 2048
    checkpoints: int = 2
    lookup: int = 0


@dataclass(frozen=True, slots=True)
class Edit:
    """An in-place prune recorded at a logical boundary: slots of `removed` go when the sequence has `at` tokens.

    The last of them has no KV yet (it was just sampled): `at - 1` tokens are forwarded, then the slots go, then token
    `at - 1` is forwarded. So a replay sees what the pruned chain saw. Where a history is cut below `at`, so is `at`.
    """

    at: int
    removed: tuple[Interval, ...]


Mask = Callable[[list[int]], Any]
"""From the ids generated so far to what may come next: a contiguous buffer (array, bytes, numpy) of one byte a token of the
vocabulary, nonzero where it may be drawn, or of 32-bit words, in which bit i % 32 of word i // 32 is token i. Called on the
host for each draw, on the engine's thread; an end of turn has to be allowed like any other token."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked to continue.

    token_ids: the whole logical history, committed ids first. chain_id: the owner-addressed state to continue and to
    advance at commit; None uses the radix prefix alone. edits: prunes that the history has seen, in order of `at`; they
    are replayed where the state they were applied to is gone. salt: tenant secret of every content key. mask: what each draw
    may choose from, None for everything; where it fails or allows nothing, its sequence alone ends, with an EngineFault.
    """

    token_ids: list[int]
    sampling: Sampling
    chain_id: str | None = None
    edits: tuple[Edit, ...] = ()
    salt: str = ""
    stop_ids: frozenset[int] = frozenset()
    mask: Mask | None = None


@dataclass(slots=True, eq=False)
class History:
    """What the penalties of one sequence count. token_ids grows with the sequence; the first num_prompt are its prompt.

    counted, counts: how far the sampler has counted, and its counts, which live on its device and end with the sequence.
    """

    token_ids: list[int]
    num_prompt: int
    counted: int = 0
    counts: Any = None


class Status(Enum):
    """Where a sequence is; a sequence is in exactly one queue."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"  # out of tokens to make, waiting for commit or abort
    CLOSED = "closed"  # committed or aborted: holds nothing


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. `token_ids[:num_forwarded]` have KV (or had, before a prune).

    table_from: pages of the state from this index on are not yet in the row's page table. reserved_units: units that it may
    still take. kept_ids: the generated ids to commit where a stop string ended it (None: all that were generated).
    history: None where nothing is penalised. allowed: None where every token may come next. drafter: None where nothing is
    guessed.
    """

    seq_id: int
    request: Request
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    status: Status = Status.WAITING
    row: int | None = None
    state: KVState | None = None
    table_from: int = 0
    reserved_units: int = 0
    num_cached_tokens: int = 0
    num_prefilled_tokens: int = 0
    pending_edits: list[Edit] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    kept_ids: list[int] | None = None
    miss: Miss | None = None
    fault: Exception | None = None
    history: History | None = None
    allowed: Callable[[], memoryview | None] | None = None
    drafter: Drafter | None = None

    @property
    def num_forwarded(self) -> int:
        """Logical tokens whose KV has been computed."""
        return self.state.logical_length if self.state is not None else 0

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prefilling(self) -> bool:
        """Is some of the prompt not forwarded yet?"""
        return self.num_forwarded < self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a drawn token in the model's own distribution, and of the likeliest tokens in its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]


Draw = tuple[int, TokenScore | None]
"""A drawn token, and what was said of it."""

Drawn = tuple[Sequence, list[Draw]]
"""A sequence that a step touched, and its new tokens."""


@dataclass(slots=True)
class RowWork:
    """One row of a batch: `tokens` enter at logical `position` and physical `slot` of the row's pages.

    sample: draw a token after the last one; `step` numbers the draw (with `seed` it fixes the random stream).
    history: needed where the sampling is penalised. score: what the runner says of the token where logprobs are asked for.
    allowed: gives the checked mask of this draw, None for a row whose token will not count; see `Mask`.
    drafted: so many of the last tokens are guesses. A token is drawn before and after each: `step` numbers the first draw,
    and the runner puts the draws behind the guesses, numbered on from there, into `later`.
    """

    row: int
    tokens: list[int]
    position: int
    slot: int
    sample: bool
    sampling: Sampling
    seed: int
    step: int
    seq_id: int = -1
    history: History | None = None
    score: TokenScore | None = None
    allowed: Callable[[], memoryview | None] | None = None
    drafted: int = 0
    later: list[Draw] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Does the row go on from its last token, rather than read a part of its prompt?"""
        return len(self.tokens) == 1 + self.drafted


@dataclass(slots=True)
class Batch:
    """One step: decodes first, then prefill chunks.

    moves: source and target slots to copy before anything else, each pair by one `Runner.move_slots`, in order (the LLM does
    it). table_updates: (row, first page index, units) to write into the device's page table before the forward pass. Units
    are int offsets in granules.
    """

    rows: list[RowWork]
    table_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    moves: list[tuple[list[Slot], list[Slot]]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(work.tokens) for work in self.rows)


Slot = tuple[int, int]
"""(unit offset in granules, slot inside the page)."""


class Runner(Protocol):
    """The device side. The engine's host logic talks to it only through this, so it can be tested without torch."""

    layout: KVLayout
    num_granules: int
    vocab_size: int

    def execute(self, batch: Batch) -> list[int | None]:
        """Forward the batch; for each row the sampled token id, None where `sample` is False, -1 where a mask allows none.

        Of a row with guesses it is the first draw; the others are in the row's `later`.
        """
        ...

    def move_slots(self, source: list[Slot], target: list[Slot]) -> None:
        """Copy K and V of all layers from slot to slot (compaction, copy-on-write of a page).

        The sets may overlap: as if every source were read before a target is written.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step made for one sequence: new tokens, the text they add, and whether it finished. scores: one a token, where
    logprobs are asked for."""

    seq: Sequence
    token_ids: tuple[int, ...]
    text: str
    finished: bool
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class ChainInfo:
    """What is held for a chain. bytes_unique return to the pool when the chain is closed."""

    chain_id: str
    logical_length: int
    resident_tokens: int
    bytes_held: int
    bytes_unique: int
    busy: bool
    checkpoints: tuple[int, ...]
