"""Seeded names, values and filler lines of the agent world.

Names are three letters, values four digits.  A *star* is a name with its near misses (one
letter changed); all names of one task are distinct, so each has one value.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (
    "valve", "rotor", "pump", "panel", "relay", "motor", "cable", "drain", "guard", "hinge", "lever", "nozzle",
    "piston", "sensor", "shaft", "spring", "switch", "tank", "gauge", "filter", "frame", "clamp", "coil", "plate",
    "bearing", "seal", "socket", "washer", "wheel", "bracket", "was", "is", "near", "under", "above", "beside",
    "checked", "moved", "cleaned", "painted", "replaced", "noted", "kept", "left", "right", "warm", "cold", "loose",
    "tight", "open", "closed", "today", "again", "twice", "later", "before", "after", "with", "without", "the", "and",
    "for",
)  # fmt: skip
_INSIDE = frozenset(w[i : i + 3] for w in WORDS for i in range(len(w) - 2))


def below(rng: random.Random, n: int) -> int:
    """A number in `range(n)` that depends on `rng.random()` alone (stable across versions)."""
    return int(rng.random() * n)


def pick(rng: random.Random, items: tuple[str, ...] | list[str]) -> str:
    """One of `items`."""
    return items[below(rng, len(items))]


def shuffle(rng: random.Random, items: list[str]) -> None:
    """Shuffle in place, by `rng.random()` alone."""
    for i in range(len(items) - 1, 0, -1):
        j = below(rng, i + 1)
        items[i], items[j] = items[j], items[i]


def insert(rng: random.Random, lines: list[str], line: str) -> None:
    """Put `line` at a random place."""
    lines.insert(below(rng, len(lines) + 1), line)


def value(rng: random.Random) -> str:
    """Four digits, the first not zero."""
    return str(1000 + below(rng, 9000))


def prose(rng: random.Random) -> str:
    """One line of filler without names or values."""
    return " ".join(WORDS[below(rng, len(WORDS))] for _ in range(3 + below(rng, 6)))


@dataclass
class Names:
    """Hands out names that were not handed out before."""

    rng: random.Random
    used: set[str] = field(default_factory=set)

    def _free(self, name: str) -> bool:
        return name not in self.used and name not in _INSIDE

    def fresh(self) -> str:
        """A name not used so far."""
        while True:
            name = "".join(LETTERS[below(self.rng, 26)] for _ in range(3))
            if self._free(name):
                self.used.add(name)
                return name

    def near(self, name: str, count: int) -> list[str]:
        """`count` unused names that differ from `name` in one letter."""
        found: list[str] = []
        for _ in range(2000):
            if len(found) == count:
                return found
            at = below(self.rng, 3)
            other = name[:at] + LETTERS[below(self.rng, 26)] + name[at + 1 :]
            if self._free(other):
                self.used.add(other)
                found.append(other)
        raise ValueError("a task asks for more names than there are")


@dataclass(frozen=True)
class Fact:
    """A name and its value as a line of one file shows them; `base` has near misses beside it."""

    name: str
    value: str
    base: bool


def star(names: Names, size: int, base: str | None = None) -> list[Fact]:
    """A base name with `size - 1` near misses, each with a value of its own."""
    rng = names.rng
    first = base or names.fresh()
    facts = [Fact(first, value(rng), True)]
    facts.extend(Fact(other, value(rng), False) for other in names.near(first, size - 1))
    return facts


def fill(names: Names, size: int, share: float = 0.8) -> tuple[list[str], list[Fact]]:
    """About `size` bytes of shuffled lines: stars of records and some prose, and their facts."""
    rng = names.rng
    lines: list[str] = []
    facts: list[Fact] = []
    left = size
    while left >= 63:
        if rng.random() < share:
            group = star(names, 7)
            facts.extend(group)
            lines.extend(f"{f.name} {f.value}" for f in group)
            left -= 63
        else:
            line = prose(rng)
            lines.append(line)
            left -= len(line) + 1
    while left > 12:
        line = prose(rng)[: left - 1].rstrip()
        lines.append(line)
        left -= len(line) + 1
    shuffle(rng, lines)
    return lines, facts


def pointer(names: Names, lines: list[str], line: str, target: str, suffix: str = "") -> None:
    """Put `line` among `lines`, with five near misses of `target` under other words."""
    for other in names.near(target, 5):
        word = ("skip", "old", "seen", "drop")[below(names.rng, 4)]
        insert(names.rng, lines, f"{word} {other}{suffix}")
    insert(names.rng, lines, line)
