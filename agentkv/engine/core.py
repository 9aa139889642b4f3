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
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal

from agentkv.engine.units import NOTHING, Units
from agentkv.engine.work import TableUpdate, Work
from agentkv.types import FinishReason, Interval, Miss, Sampling

if TYPE_CHECKING:
    from agentkv.engine.cache.state import KVState
    from agentkv.engine.cache.tiers import Warm
    from agentkv.engine.lookup import Drafter

GRANULE = 256
"""Bytes of one granule: table entries are int32 offsets in granules (reach 549 GB)."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV has one shape, lifetime and page size. A sequence has one page table for each group of the model.

    A stripe is one page of all the group's layers: [layer][kv head][K,V][token][dim]. layers: their numbers in the model.
    window: a token sees itself and `window - 1` tokens before it, and pages further back are freed; None sees everything.
    slack: tokens kept beyond the window, so that a few can be taken back (a stop string, a draft that was not accepted) and
    what is left still has a whole window.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    itemsize: int
    page_size: int
    window: int | None = None
    slack: int = 32

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    @property
    def stripe_bytes(self) -> int:
        """Bytes of one stripe, rounded up to whole granules."""
        raw = self.num_layers * self.num_kv_heads * 2 * self.page_size * self.head_dim * self.itemsize
        return -(-raw // GRANULE) * GRANULE

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_dim * self.itemsize


SLOT = -1
"""In the shape of a state: where the slots of a page lie."""

WHOLE = 1 << 30
"""Slots of a page that a whole sequence shares."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """What a method keeps beside KV, or instead of it, in a table of its own: a unit is a page of items.

    It is a group like those of KV, so it is appended, pruned, shared, cut, moved, sent to tiers and counted like them. shape:
    dims of a unit; SLOT stands for the page's slots, and where there is none, the item belongs to the page as a whole
    (page_size WHOLE: to the sequence). beside: dims of a second array behind the first in each unit, with SLOT; () for none.
    Elements are of `dtype`, of `itemsize` bytes. sealed: written by seals, not token by
    token. mutable: rewritten in steps; otherwise a slot's item is written when its slot is, and never again.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    page_size: int
    sealed: bool = False
    mutable: bool = False
    layers: tuple[int, ...] = ()
    window: int | None = None
    slack: int = 0
    beside: tuple[int, ...] = ()

    @property
    def by_slot(self) -> bool:
        """Has each slot an item of its own?"""
        return SLOT in self.shape

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Dims of one unit's first array."""
        return self._sized(self.shape)

    @property
    def beside_shape(self) -> tuple[int, ...]:
        """Dims of one unit's second array."""
        return self._sized(self.beside)

    @property
    def unit_items(self) -> int:
        """Elements of one unit."""
        return prod(self.unit_shape) + (prod(self.beside_shape) if self.beside else 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one slot's item; of a page's item its share."""
        return -(-self.unit_items * self.itemsize // self.page_size)

    @property
    def stripe_bytes(self) -> int:
        """Bytes of one unit, rounded up to whole granules."""
        return -(-self.unit_items * self.itemsize // GRANULE) * GRANULE

    def _sized(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.page_size if dim == SLOT else dim for dim in shape)


Group = KVGroup | StateGroup
"""What a sequence has one page table of."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. memory: bytes of the KV arena; window: most logical tokens of a sequence; warm_memory: most bytes
    of host memory for the KV of idle chains and preempted sequences, 0 for none. lookup: most tokens that a decode row
    forwards in one step, guesses of prompt lookup included; 0 guesses nothing.

    graphs: on a GPU, decode steps are captured and replayed (see `graphs.Graphs`). attention: whose kernel reads decode rows
    that share a page table, where it can: our own ("triton"), or a library's (see `attention_flashinfer`).
    patience: steps that a waiting request may be passed over before it is owed service (see `queue.WaitingQueue`).
    step_timeout: seconds after which a step is taken for lost (see `worker.EngineWorker`).
    """

    memory: int
    window: int
    page_size: int = 16
    max_rows: int = 64
    step_tokens: int = 2048
    checkpoints: int = 2
    patience: int = 256
    step_timeout: float = 300.0
    warm_memory: int = 0
    lookup: int = 0
    graphs: bool = True
    attention: Literal["triton", "flashinfer"] = "triton"


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
vocabulary, nonzero where it may be drawn, or of 32-bit words, in which bit i % 32 of word i // 32 is token i. Called for each
draw, in a thread of its own while the device runs the step; an end of turn has to be allowed like any other token."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked to continue.

    token_ids: the whole logical history, committed ids first. chain_id: the owner-addressed state to continue and to
    advance at commit; None uses the radix prefix alone. edits: prunes that the history has seen, in order of `at`; they
    are replayed where the state they were applied to is gone. salt: tenant secret of every content key. mask: what each draw
    may choose from, None for everything; where it fails or allows nothing, its sequence alone ends, with an EngineFault.
    form: index of the runner's form that its KV has.
    beside: a sequence of the same prompt, edits and salt: this one waits until that prompt is forwarded, and shares its pages.
    priority: -10 to 10, higher goes first. timeout: seconds from `LLM.add` after which it ends with Cancelled, unless it has
    finished; None is never.
    """

    token_ids: list[int]
    sampling: Sampling
    chain_id: str | None = None
    edits: tuple[Edit, ...] = ()
    salt: str = ""
    stop_ids: frozenset[int] = frozenset()
    mask: Mask | None = None
    form: int = 0
    beside: Sequence | None = None
    priority: int = 0
    timeout: float | None = None

    @property
    def key(self) -> str:
        """What the content of its KV is addressed by, beside the tokens: tenant and form."""
        return content_key(self.salt, self.form)


def content_key(salt: str, form: int) -> str:
    """Tenant and form in one."""
    return f"{salt}\0{form}" if form else salt


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

    WAITING = "waiting"  # parked, if it was preempted and still holds a state
    RUNNING = "running"
    FINISHED = "finished"  # out of tokens to make, waiting for commit or abort
    CLOSED = "closed"  # committed or aborted: holds nothing


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. `token_ids[:num_forwarded]` have KV (or had, before a prune).

    table_from: by group, pages of the state from this index on are not yet in the row's page table. reserved_units: units that
    it may still take; peak_units: most that this can be. shared_until: tokens that it begins with like somebody before it whose
    windows are gone; what it holds of them is cached when they are forwarded, 0 for nothing. kept_ids: the generated ids to
    commit where a stop string ended it (None: all that were generated).
    seal_at: logical length at which the prompt's seal is due, 0 after it and where the form has none. replays: runs that are
    still to be forwarded before it, None before they are known; replayed: tokens of the first that have been; run: its number.
    history: None where nothing is penalised. allowed: None where every token may come next. leader: the sequence whose prompt
    this one waits for; head: one whose prompt begins as this one's does, see `demands.head_of`. shared_as: the prefix cache's
    name for this sequence while it holds its prompt there. drafter: None where nothing is guessed. before: what it held before
    a seal that was launched ahead of a token which may end it, until that is known.

    deadline: on the engine's clock. passed_over: steps in which others went first. guaranteed: it was owed service and runs
    to its end. wanted_units: what it would have taken when it was last tried. preemptions: how often it lost its row; computed:
    tokens that were forwarded by then; warm: its KV in host memory, where others took its units. paid: tokens that its tenant
    was charged for and that are still to be forwarded.
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
    table_from: list[int] = field(default_factory=list)
    reserved_units: Units = NOTHING
    peak_units: Units = NOTHING
    shared_until: int = 0
    num_cached_tokens: int = 0
    num_prefilled_tokens: int = 0
    pending_edits: list[Edit] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    kept_ids: list[int] | None = None
    miss: Miss | None = None
    fault: Exception | None = None
    seal_at: int = 0
    replays: list[tuple[int, ...]] | None = None
    replayed: int = 0
    run: int = 0
    history: History | None = None
    allowed: Callable[[], memoryview | None] | None = None
    leader: Sequence | None = None
    head: Sequence | None = None
    shared_as: str | None = None
    deadline: float = inf
    passed_over: int = 0
    guaranteed: bool = False
    wanted_units: Units = NOTHING
    preemptions: int = 0
    computed: int = 0
    warm: Warm | None = None
    paid: int = 0
    drafter: Drafter | None = None
    before: KVState | None = None

    @property
    def num_forwarded(self) -> int:
        """Logical tokens whose KV has been computed; those of a replay are none of the sequence's."""
        return self.state.logical_length - self.replayed if self.state is not None else 0

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prefilling(self) -> bool:
        """Is more to be forwarded than one new token: some of the prompt, or what a preemption cost?"""
        return self.num_forwarded < self.num_known

    @property
    def parked(self) -> bool:
        """Was it preempted, and does it still hold a state?"""
        return self.status is Status.WAITING and self.preemptions > 0 and self.state is not None

    @property
    def num_known(self) -> int:
        """Tokens that are forwarded without a draw between them: the prompt, after a preemption all but the newest."""
        return max(self.num_prompt_tokens, len(self.token_ids) - 1)

    @property
    def held(self) -> bool:
        """Does it wait for the prompt of its leader, or for one that is being read? One that has run goes on by itself."""
        if self.preemptions:
            return False
        if self.head is not None and self.head.status is Status.RUNNING and self.head.prefilling:
            return True
        leader = self.leader
        return leader is not None and leader.status in (Status.WAITING, Status.RUNNING) and leader.prefilling


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a drawn token in the model's own distribution, and of the likeliest tokens in its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]


Draw = tuple[int, TokenScore | None]
"""A drawn token, and what was said of it."""

Drawn = tuple[Sequence, list[Draw]]
"""A sequence that a step touched, and its new tokens."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A row's tokens in a window group. slot: where the first of them enters (a prune behind the window moves nothing here, so
    it may differ from the other groups'). first: for each of the tokens the slot of the oldest one that it sees."""

    slot: int
    first: tuple[int, ...]


@dataclass(slots=True)
class RowWork:
    """One row of a batch: `tokens` enter at logical `position` and physical `slot` of the row's pages.

    reaches: by group, None for those that see everything and where `slot` is the place; () where every group holds every token
    and none was pruned.
    to_come: tokens of the prompt that are still to follow.
    sample: draw a token after the last one; `step` numbers the draw (with `seed` it fixes the random stream).
    history: needed where the sampling is penalised. score: what the runner says of the token where logprobs are asked for.
    allowed: gives the checked mask of this draw, None for a row whose token will not count; see `Mask`.
    form: index of the runner's form that the row's sequence has. sealed: most slots of its sealed part in a layer and head, 0
    where there is none. replay: the tokens are forwarded to be looked at; their KV is taken back. run, run_from: of a replay,
    which of the runs they belong to, and tokens of it that were forwarded before.
    prompt: the tokens are of a prompt, so they are a chunk even where there is only one (the rest was held already).
    follows: the token is the one that the step before draws in the row; it is not known yet, and `tokens` has a 0 in its place.
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
    reaches: tuple[Reach | None, ...] = ()
    form: int = 0
    sealed: int = 0
    to_come: int = 0
    replay: bool = False
    run: int = 0
    run_from: int = 0
    prompt: bool = False
    follows: bool = False
    drafted: int = 0
    later: list[Draw] = field(default_factory=list)

    def slot_in(self, group: int) -> int:
        """Where the first token enters in the group."""
        reach = self.reaches[group] if self.reaches else None
        return self.slot if reach is None else reach.slot

    @property
    def decodes(self) -> bool:
        """Does the row go on from its last token, rather than read a part of its prompt?"""
        return not self.prompt and len(self.tokens) == 1 + self.drafted


@dataclass(slots=True)
class Batch:
    """One step: decodes first, then prefill chunks.

    moves: to carry out before anything else, in order (the LLM does it). table_updates: to write into the device's page
    tables before the forward pass.
    """

    rows: list[RowWork]
    table_updates: list[TableUpdate] = field(default_factory=list)
    moves: list[Work] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(work.tokens) for work in self.rows)


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
    """What is held for a chain. bytes_unique return to the pool when the chain is closed. warm_tokens: slots of its copy in
    host memory. evicted_tokens: what seals have let go of, not counting prunes."""

    chain_id: str
    logical_length: int
    resident_tokens: int
    bytes_held: int
    bytes_unique: int
    busy: bool
    checkpoints: tuple[int, ...]
    warm_tokens: int = 0
    evicted_tokens: int = 0
