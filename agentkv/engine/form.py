"""The form of a sequence's KV: what the host knows of a method, without knowing the method.

Every token enters the **tail**: pages in the groups that the form fills. A form that seals moves tokens from the tail into its
**sealed** part, which only a seal writes and attention reads beside the tail:

    logical       0 ............................ floor ............ tokens
    sealed part   what the method kept of [0, floor)
    tail                                         every token of [floor, tokens)

A sealed part is immutable and counted by reference like everything else, so forks and checkpoints keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Held(NamedTuple):
    """What a sequence holds, in tokens. tokens: logical length. floor: logical position from which the tail begins; tail:
    tokens in it (pruned ones are not). slots: most slots of the sealed part in a layer and head. prompt_end: has the prompt
    just been read? Otherwise the question is whether timed work is due."""

    tokens: int
    floor: int
    tail: int
    slots: int
    prompt_end: bool


@dataclass(frozen=True, slots=True)
class Seal:
    """What a seal leaves. floor: logical position from which the tail begins. slots: most slots of the sealed part in a layer
    and head. units: of the sealed part, by sealed group of the form. keeps: leading units of the old sealed part that the new
    one takes over unchanged, by sealed group; () for none."""

    floor: int
    slots: int
    units: tuple[int, ...]
    keeps: tuple[int, ...] = ()


class Bound(NamedTuple):
    """The most that a sequence holds once its prompt is sealed. tail: tokens in the tail. units: of sealed
    parts by sealed group, a second copy while one replaces the other included."""

    tail: int
    units: tuple[int, ...]


def _none(prompt: int) -> int:
    """Nothing is replayed."""
    return 0


@dataclass(frozen=True, slots=True)
class Form:
    """groups: those that every token enters; sealed: those that seals write; mutable: groups (of either) whose units are
    rewritten in steps, so that nobody else may hold them; all are indexes into the runner's groups.

    name: what requests call it. fingerprint: what KV depends on beside its tokens. truncates: is a sequence without its newest
    tokens what it was before them? paged: has it state of whole pages?
    shrinks: are the last units of a sealed part empty when its slots have become fewer? stays: sealed groups whose units a
    prune leaves as they are. holes: has a pruned token a sealed slot all the same?

    All are pure functions: seal(held): the seal that is due, or None. bound(prompt, tokens): the most that is held after the
    seal of a prompt of so many tokens until there are `tokens`. replay(held, token_ids): runs of tokens that are forwarded
    behind the prompt before its seal, each for itself, their KV taken back; replay_most(prompt): most tokens of one.
    looks_back: so many of a prompt's newest queries are kept with its row for the seal.
    """

    groups: tuple[int, ...]
    name: str = ""
    sealed: tuple[int, ...] = ()
    mutable: frozenset[int] = frozenset()
    reuse: Literal["radix", "chain"] = "radix"
    fingerprint: str = ""
    truncates: bool = True
    paged: bool = False
    shrinks: bool = False
    stays: frozenset[int] = frozenset()
    holes: bool = False
    seal: Callable[[Held], Seal | None] | None = None
    bound: Callable[[int, int], Bound] | None = None
    replay: Callable[[Held, Sequence[int]], tuple[tuple[int, ...], ...]] | None = None
    replay_most: Callable[[int], int] = _none
    looks_back: int = 0

    @property
    def seals(self) -> bool:
        """Has it a sealed part?"""
        return self.seal is not None

    def reaches(self, sealed_at: int, logical_length: int, length: int) -> bool:
        """Can a state that was sealed at one length and is as long as the second be cut to the third?"""
        return length >= logical_length if self.mutable else length >= sealed_at
