"""The task families: each fills a draft with files, a request, a plan and facts.

Plans are single hops: every step needs one thing from the latest result, or one from an
earlier result and none from elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from agentkv.world.programs import Check, Once, Program
from agentkv.world.words import Fact, Names, below, fill, insert, pointer, prose, shuffle, star, value

POINTERS = 80  # a pointer line with its near misses


@dataclass(frozen=True)
class Step:
    """One command of the plan, the exit status that completes it, and the bytes it copies.

    `needs`: earlier commands whose last result it copies from; what the step before it showed needs no mention.
    """

    command: str
    code: int = 0
    copies: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Round:
    """A user message and the steps that answer it."""

    prompt: str
    steps: tuple[Step, ...]


@dataclass
class Draft:
    """What a family builds.  `size` is the budget in bytes, without the head.

    `turn`: tokens of a tool call and its result around the command and the output; `finish`: of handing in.
    """

    rng: random.Random
    size: int
    training: bool
    turn: int = 84
    finish: int = 0
    files: dict[str, str] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    facts: list[tuple[int, Fact]] = field(default_factory=list)
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = Names(self.rng)

    @property
    def ending(self) -> int:
        """Tokens of the last command, of handing in and of the closing text."""
        return self.turn + len("echo 1234 > answer.txt") + self.finish + 14

    def program(self, path: str, program: Program) -> None:
        """Add a file that may be run."""
        self.programs[path] = program
        self.files[path] = program.source()

    def text(self, path: str, lines: list[str]) -> None:
        """Add a text file."""
        self.files[path] = "".join(line + "\n" for line in lines)

    def shows(self, index: int, facts: list[Fact]) -> None:
        """Result number `index` of the plan shows `facts`."""
        self.facts.extend((index, fact) for fact in facts)


def echo(answer: str, *needs: str) -> Step:
    """The last step of a round."""
    return Step(f"echo {answer} > answer.txt", copies=tuple(answer.split()), needs=needs)


def cat(name: str) -> Step:
    """Read the file that a pointer named."""
    return Step(f"cat {name}.txt", copies=(name,))


def shares(rng: random.Random, total: int, count: int) -> list[int]:
    """`total` split into `count` uneven parts."""
    weights = [0.6 + rng.random() for _ in range(count)]
    scale = max(total, 0) / sum(weights)
    return [int(w * scale) for w in weights]


def fits(rng: random.Random, options: tuple[int, ...], left: int, each: int) -> int:
    """One of the `options` that fit `left` bytes at `each` bytes apiece (the first if none)."""
    fitting = [n for n in options if n * each <= left]
    return fitting[below(rng, len(fitting))] if fitting else options[0]


def chase(draft: Draft) -> None:
    """Each file names the next; the last is searched for a key that only the request names."""
    rng, names = draft.rng, draft.names
    key, data = names.fresh(), names.fresh()
    left = draft.size - 110 - (draft.turn + 110) - draft.ending
    options = (2, 3, 4, 5, 6, 7) if draft.training else (3, 4, 5, 6, 7)
    count = fits(rng, options, left, draft.turn + POINTERS + 110)
    chain = [names.fresh() for _ in range(count)]
    sizes = shares(rng, left - count * (draft.turn + 12 + POINTERS), count)
    for i, name in enumerate(chain):
        lines, facts = fill(names, sizes[i])
        follows, word = (chain[i + 1], "next") if i + 1 < count else (data, "last")
        pointer(names, lines, f"{word} {follows}.txt", follows, ".txt")
        draft.text(f"{name}.txt", lines)
        draft.shows(i, facts)
    answer = _search_file(draft, data, key)
    steps = [*map(cat, chain), Step(f"grep {key} {data}.txt", copies=(key, data)), echo(answer)]
    prompt = f"Start at {chain[0]}.txt; follow next, then last. Answer: the code of {key}."
    draft.rounds.append(Round(prompt, tuple(steps)))
    draft.answer = answer
    draft.metadata["files"] = count + 1
    if draft.training:
        _chase_again(draft)


def _search_file(draft: Draft, data: str, key: str) -> str:
    """A file in which `key` stands once, among names that contain or resemble it."""
    rng, names = draft.rng, draft.names
    facts = star(names, 7, base=key)
    lines = [f"{f.name} {f.value}" for f in facts]
    for _ in range(5):
        letter = "abcdefghijklmnopqrstuvwxyz"[below(rng, 26)]
        longer = letter + key if rng.random() < 0.5 else key + letter
        lines.append(f"{longer} {value(rng)}")
    more, _ = fill(names, 300 + below(rng, 700))
    lines.extend(more)
    shuffle(rng, lines)
    draft.text(f"{data}.txt", lines)
    return facts[0].value


def _chase_again(draft: Draft) -> None:
    """Training form: further short requests of the same kind."""
    rng, names = draft.rng, draft.names
    for _ in range(below(rng, 4)):
        start, data, key = names.fresh(), names.fresh(), names.fresh()
        lines, _ = fill(names, 63 * below(rng, 3))
        pointer(names, lines, f"last {data}.txt", data, ".txt")
        draft.text(f"{start}.txt", lines)
        answer = _search_file(draft, data, key)
        prompt = f"Start at {start}.txt; follow next, then last. Answer: the code of {key}."
        step = Step(f"grep {key} {data}.txt", copies=(key, data))
        draft.rounds.append(Round(prompt, (cat(start), step, echo(answer))))


def once(draft: Draft) -> None:
    """A script prints codes one time only; some results later a file says which one is wanted."""
    rng, names = draft.rng, draft.names
    fixed = 150 + 2 * (draft.turn + 12) + POINTERS + draft.ending
    groups = 8
    if draft.training and rng.random() < 0.5:
        groups = max(2, min(8, (draft.size - fixed - 200) // 72))
    fixed += groups * 72
    facts = [fact for _ in range(groups) for fact in star(names, 8)]
    order = [f"{f.name} {f.value}" for f in facts]
    shuffle(rng, order)
    draft.program("once.sh", Once("once.sh", tuple(order)))
    draft.shows(0, facts)
    bases = [fact for fact in facts if fact.base]
    wanted = bases[below(rng, len(bases))]
    left = draft.size - fixed
    lag = fits(rng, (1, 2, 3, 5, 9), left, draft.turn + POINTERS + 126)
    chain = [names.fresh() for _ in range(lag + 1)]
    sizes = shares(rng, left - lag * (draft.turn + 12 + POINTERS), lag)
    for i in range(lag):
        lines, more = fill(names, sizes[i])
        pointer(names, lines, f"next {chain[i + 1]}.txt", chain[i + 1], ".txt")
        draft.text(f"{chain[i]}.txt", lines)
        draft.shows(i + 1, more)
    want_file(draft, chain[-1], wanted.name)
    answer = f"{wanted.name} {wanted.value}"
    steps = [Step("sh once.sh"), *map(cat, chain), echo(answer, "sh once.sh")]
    prompt = (
        f"Run sh once.sh; it prints codes and deletes itself. Then start at {chain[0]}.txt; follow next."
        " Answer: the name after want and its code."
    )
    draft.rounds.append(Round(prompt, tuple(steps)))
    draft.answer = answer
    draft.metadata.update(lag=lag, wanted=wanted.name)
    if draft.training:
        want_again(draft, facts, "sh once.sh")


def want_again(draft: Draft, facts: list[Fact], shown_by: str) -> None:
    """Training form: further requests for a record of `facts`, which the command `shown_by` printed."""
    rng = draft.rng
    for _ in range(below(rng, 5)):
        other = facts[below(rng, len(facts))]
        name = draft.names.fresh()
        want_file(draft, name, other.name)
        again = f"Start at {name}.txt; follow next. Answer: the name after want and its code."
        draft.rounds.append(Round(again, (cat(name), echo(f"{other.name} {other.value}", shown_by))))


def want_file(draft: Draft, path: str, wanted: str) -> None:
    """A short file that names `wanted`; its near misses of that name are already records."""
    rng = draft.rng
    near = [n for n in sorted(draft.names.used) if sum(a != b for a, b in zip(n, wanted, strict=True)) == 1]
    lines = [prose(rng) for _ in range(below(rng, 2))]
    for other in near[:5]:
        insert(rng, lines, f"{('skip', 'old', 'seen', 'drop')[below(rng, 4)]} {other}")
    insert(rng, lines, f"want {wanted}")
    draft.text(f"{path}.txt", lines)


def repair(draft: Draft) -> None:
    """A test names a wrong constant; its right value stood in a spec read some results earlier."""
    rng, names = draft.rng, draft.names
    fixes = 1 + (below(rng, 4) if draft.training else 0)
    spec_stars = [star(names, 7) for _ in range(max(2, fixes) if draft.training else 2)]
    module = 250
    fixed = 130 + 5 * draft.turn + 150 + draft.ending + (fixes - 1) * 2 * (draft.turn + 60)
    fixed += len(spec_stars) * 63 + 10 + module
    left = draft.size - fixed
    lag = fits(rng, (1, 2, 3, 4, 5), left, draft.turn + POINTERS + 126)
    chain = [names.fresh() for _ in range(lag)]
    sizes = shares(rng, left - (lag - 1) * (draft.turn + 12 + POINTERS), lag + 1)
    if draft.size > 8192:  # a module has at most 4,000 bytes; what is left over goes to the texts
        over = max(0, module + sizes[lag] - 4000) // lag
        sizes = [*(size + over for size in sizes[:lag]), sizes[lag]]
    spec = [fact for group in spec_stars for fact in group]
    for i, name in enumerate(chain):
        lines, facts = fill(names, sizes[i])
        if i == 0:
            for fact in spec:
                insert(rng, lines, f"{fact.name} {fact.value}")
            facts = spec + facts
        if i + 1 < lag:
            pointer(names, lines, f"next {chain[i + 1]}.txt", chain[i + 1], ".txt")
        else:
            insert(rng, lines, "next m.py")
        draft.text(f"{name}.txt", lines)
        draft.shows(i, facts)
    wrong = [group[0] for group in spec_stars[:fixes]]
    old = _module(draft, min(module + sizes[lag], 4000), wrong)
    draft.program("t.py", Check.of(draft.files["m.py"], {f"lim_{f.name}": f.value for f in wrong}))
    steps = [*map(cat, chain), Step("cat m.py"), Step("python3 t.py", 1)]
    for i, fact in enumerate(wrong):
        steps.append(_fix(fact, old[i], chain[0]))
        steps.append(Step("python3 t.py", int(i + 1 < fixes)))
    steps.append(echo(wrong[-1].value))  # the sed before it has the value
    prompt = (
        f"Start at {chain[0]}.txt, the spec; follow next. Then make python3 t.py pass: edit m.py as in the spec."
        " Answer: the new value."
    )
    draft.rounds.append(Round(prompt, tuple(steps)))
    draft.answer = wrong[-1].value
    draft.metadata.update(lag=lag, fixes=fixes)


def _fix(fact: Fact, old: str, spec: str) -> Step:
    name = f"lim_{fact.name}"
    command = f"sed -i 's/^{name} = {old}$/{name} = {fact.value}/' m.py"
    return Step(command, copies=(fact.name, old, fact.value), needs=(f"cat {spec}.txt",))


def _module(draft: Draft, size: int, wrong: list[Fact]) -> list[str]:
    """`m.py`: constants, some with one-letter neighbours; returns the wrong values in order."""
    rng, names = draft.rng, draft.names
    old = [_other(rng, fact.value) for fact in wrong]
    lines = [f"lim_{fact.name} = {bad}" for fact, bad in zip(wrong, old, strict=True)]
    for fact in wrong:
        lines.extend(f"lim_{other} = {value(rng)}" for other in names.near(fact.name, 5))
    left = size - sum(len(line) + 1 for line in lines)
    while left > 0:
        line = f"lim_{names.fresh()} = {value(rng)}" if rng.random() < 0.8 else f"# {prose(rng)}"
        lines.append(line)
        left -= len(line) + 1
    shuffle(rng, lines)
    draft.text("m.py", lines)
    return old


def _other(rng: random.Random, right: str) -> str:
    """A value that is not the right one."""
    while (wrong := value(rng)) == right:
        pass
    return wrong
