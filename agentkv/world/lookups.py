"""Task families that look a record up in an earlier table: across two tables, after a rewrite, or after reading again."""

from __future__ import annotations

from agentkv.world.families import (
    POINTERS,
    Draft,
    Round,
    Step,
    cat,
    echo,
    fits,
    shares,
    want_again,
    want_file,
)
from agentkv.world.programs import Once, Rewrite, Show
from agentkv.world.words import Fact, below, fill, pointer, shuffle, star, value

LAGS = (1, 2, 3, 5, 9)
RECORD = 9  # bytes of a line with a name and a value


def join(draft: Draft) -> None:
    """Ids have hosts in a first one-time table, hosts have ports in a later one; the id is named last."""
    rng, names = draft.rng, draft.names
    fixed = 190 + 2 * (draft.turn + 12) + POINTERS + draft.ending
    groups = _groups(draft, fixed, 4, 2 * 8 * RECORD)
    fixed += groups * 2 * 8 * RECORD
    ids = [fact for _ in range(groups) for fact in star(names, 8)]
    hosts = [fact for _ in range(groups) for fact in star(names, 8)]
    targets = [fact.name for fact in hosts]
    shuffle(rng, targets)
    pairs = [Fact(fact.name, host, False) for fact, host in zip(ids, targets, strict=True)]
    draft.program("ids.sh", Once("ids.sh", _shuffled(draft, pairs)))
    draft.shows(0, pairs)
    ports = names.fresh()
    lag = fits(rng, LAGS, draft.size - fixed, draft.turn + POINTERS + 126)
    late = below(rng, lag)  # which of the results between is the second table
    chain = [f"{ports}.sh" if i == late else f"{names.fresh()}.txt" for i in range(lag)] + [f"{names.fresh()}.txt"]
    sizes = shares(rng, draft.size - fixed - lag * (draft.turn + 12 + POINTERS), lag)
    for i in range(lag):
        lines, facts = fill(names, sizes[i])
        if i == late:
            facts = hosts + facts
            lines += [f"{fact.name} {fact.value}" for fact in hosts]
            shuffle(rng, lines)
        stem, _, suffix = chain[i + 1].partition(".")
        pointer(names, lines, f"next {chain[i + 1]}", stem, f".{suffix}")
        if i == late:
            draft.program(chain[i], Once(chain[i], tuple(lines)))
        else:
            draft.text(chain[i], lines)
        draft.shows(i + 1, facts)
    _join_rounds(draft, chain, pairs, {fact.name: fact.value for fact in hosts})
    draft.metadata["lag"] = lag


def _join_rounds(draft: Draft, chain: list[str], pairs: list[Fact], ports: dict[str, str]) -> None:
    """The request, and in the training form further ones for other ids."""
    rng = draft.rng
    table = next(name for name in chain if name.endswith(".sh"))
    rest = "follow next. Answer: the id after want, its host and its port."
    for i in range(1 + (below(rng, 5) if draft.training else 0)):
        wanted = pairs[below(rng, len(pairs))]
        last = chain[-1] if i == 0 else f"{draft.names.fresh()}.txt"
        want_file(draft, last.removesuffix(".txt"), wanted.name)
        answer = f"{wanted.name} {wanted.value} {ports[wanted.value]}"
        steps = [_read(name) for name in (chain if i == 0 else [last])]
        if i == 0:
            steps.insert(0, Step("sh ids.sh"))
            draft.answer = answer
            draft.metadata["wanted"] = wanted.name
            prompt = f"Run sh ids.sh; it prints hosts and deletes itself. Then start at {chain[0]}; run a .sh once; {rest}"
        else:
            prompt = f"Start at {last}; {rest}"
        steps.append(echo(answer, "sh ids.sh", f"sh {table}"))
        draft.rounds.append(Round(prompt, tuple(steps)))


def _read(name: str) -> Step:
    """Read a text file or run a script."""
    stem, _, suffix = name.partition(".")
    return Step(f"{'sh' if suffix == 'sh' else 'cat'} {name}", copies=(stem,))


def update(draft: Draft) -> None:
    """A file is read, rewritten by a script and read again; the last value counts."""
    rng, names = draft.rng, draft.names
    fixed = 200 + 4 * (draft.turn + 12) + POINTERS + draft.ending
    groups = _groups(draft, fixed, 6, 2 * 8 * RECORD)
    fixed += groups * 2 * 8 * RECORD
    old = [fact for _ in range(groups) for fact in star(names, 8)]
    new = [fact if rng.random() < 0.2 else Fact(fact.name, value(rng), fact.base) for fact in old]
    rules = names.fresh()
    draft.text(f"{rules}.txt", list(_shuffled(draft, old)))
    draft.program("up.sh", Rewrite(f"{rules}.txt", _shuffled(draft, new)))
    draft.shows(2, new)
    wanted = _changed(draft, old, new)
    lag = fits(rng, (1, 2, 3, 5, 7), draft.size - fixed, draft.turn + POINTERS + 126)
    chain = _chain(draft, lag, draft.size - fixed, 3)
    want_file(draft, chain[-1], wanted.name)
    read = Step(f"cat {rules}.txt", copies=(rules,))
    draft.answer = f"{wanted.name} {wanted.value}"
    steps = [read, Step("sh up.sh"), read, *map(cat, chain), echo(draft.answer, read.command)]
    prompt = (
        f"Read {rules}.txt, run sh up.sh, read {rules}.txt again. Then start at {chain[0]}.txt; follow next."
        " Answer: the name after want and its last code."
    )
    draft.rounds.append(Round(prompt, tuple(steps)))
    draft.metadata.update(lag=lag, wanted=wanted.name)
    if draft.training:
        want_again(draft, new, read.command)


def _changed(draft: Draft, old: list[Fact], new: list[Fact]) -> Fact:
    """A base record whose value was changed; one is changed if none was."""
    before = {fact.name: fact.value for fact in old}
    changed = [fact for fact in new if fact.base and fact.value != before[fact.name]]
    bases = changed or [fact for fact in new if fact.base]
    return bases[below(draft.rng, len(bases))]


def again(draft: Draft) -> None:
    """The twin of once whose script stays: what is no longer in view can be read again."""
    rng, names = draft.rng, draft.names
    fixed = 150 + 2 * (draft.turn + 12) + POINTERS + draft.ending
    groups = _groups(draft, fixed, 8, 8 * RECORD)
    fixed += groups * 8 * RECORD
    facts = [fact for _ in range(groups) for fact in star(names, 8)]
    draft.program("list.sh", Show(_shuffled(draft, facts)))
    draft.shows(0, facts)
    bases = [fact for fact in facts if fact.base]
    wanted = bases[below(rng, len(bases))]
    lag = fits(rng, LAGS, draft.size - fixed, draft.turn + POINTERS + 126)
    chain = _chain(draft, lag, draft.size - fixed, 1)
    want_file(draft, chain[-1], wanted.name)
    draft.answer = f"{wanted.name} {wanted.value}"
    steps = [Step("sh list.sh"), *map(cat, chain), echo(draft.answer, "sh list.sh")]
    prompt = (
        f"Run sh list.sh; it prints codes and can be run again. Then start at {chain[0]}.txt; follow next."
        " Answer: the name after want and its code."
    )
    draft.rounds.append(Round(prompt, tuple(steps)))
    draft.metadata.update(lag=lag, wanted=wanted.name, reread="sh list.sh")
    if draft.training:
        want_again(draft, facts, "sh list.sh")


def _chain(draft: Draft, lag: int, left: int, first: int) -> list[str]:
    """`lag` files that each name the next, shown by results from `first` on; the last name's file is not written."""
    names = draft.names
    chain = [names.fresh() for _ in range(lag + 1)]
    sizes = shares(draft.rng, left - lag * (draft.turn + 12 + POINTERS), lag)
    for i in range(lag):
        lines, facts = fill(names, sizes[i])
        pointer(names, lines, f"next {chain[i + 1]}.txt", chain[i + 1], ".txt")
        draft.text(f"{chain[i]}.txt", lines)
        draft.shows(first + i, facts)
    return chain


def _groups(draft: Draft, fixed: int, most: int, each: int) -> int:
    """How many stars a table has; short training tasks have fewer."""
    if draft.training and draft.rng.random() < 0.5:
        return max(2, min(most, (draft.size - fixed - 200) // each))
    return most


def _shuffled(draft: Draft, facts: list[Fact]) -> tuple[str, ...]:
    """The records as lines in random order."""
    lines = [f"{fact.name} {fact.value}" for fact in facts]
    shuffle(draft.rng, lines)
    return tuple(lines)
