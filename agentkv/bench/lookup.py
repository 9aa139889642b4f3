"""`agentkv bench lookup`: what prompt lookup gains, and that it changes no token.

Two runtimes of the same weights, one that guesses and one that does not, do the same work turn about, so that whatever else
the machine does reaches both. Decode rates are tokens over seconds of the steps that read no part of a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from agentkv.errors import BadRequest
from agentkv.runtime import Runtime
from agentkv.world.dialect import NATIVE
from agentkv.world.env import World
from agentkv.world.task import FAMILIES, family_of, make_task

Work = Callable[[Runtime], Any]
"""Something to do with a runtime; what it returns is compared."""

EDIT_FILE = '''\
"""Stock of a small warehouse."""

import json
from pathlib import Path


class Stock:
    """Items and how many there are."""

    def __init__(self, path):
        self.path = Path(path)
        self.items = json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, name, count):
        if count < 1:
            raise ValueError(f"cannot add {count} of {name}")
        self.items[name] = self.items.get(name, 0) + count
        self.save()

    def take(self, name, count):
        have = self.items.get(name, 0)
        if have < count:
            raise ValueError(f"only {have} of {name} left")
        self.items[name] = have - count
        self.save()

    def save(self):
        self.path.write_text(json.dumps(self.items, indent=2))
'''
EDIT_PROMPT = f"Rename the method `take` to `remove` in this file. Answer with the whole file.\n\n```python\n{EDIT_FILE}```"

STORY_PROMPT = "Tell a short story about a lighthouse keeper and a lost ship."
"""Nothing to copy: what guessing costs where it cannot help."""


@dataclass
class Side:
    """One of the two runtimes, what its decode steps made, and its rate in each round."""

    runtime: Runtime
    total: Counter[str] = field(default_factory=Counter)
    rates: list[float] = field(default_factory=list)

    def play(self, work: Work) -> Any:
        """What `work` returned."""
        before = Counter(self.runtime.stats()["decoding"])
        result = work(self.runtime)
        after = Counter(self.runtime.stats()["decoding"])
        after.subtract(before)
        self.total.update(after)
        return result

    def end_round(self, before: Counter[str]) -> None:
        """Note the rate since `before`, a copy of `total`."""
        tokens, seconds = self.total["tokens"] - before["tokens"], self.total["seconds"] - before["seconds"]
        self.rates.append(tokens / seconds)


def run_lookup(
    *,
    seeds: Sequence[int],
    model: str = "micro",
    edit_model: str | None = None,
    lookup: int = 8,
    repeats: int = 3,
    max_bytes: int = 8192,
    device: str = "auto",
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compare `lookup` tokens a step with none, greedily.

    Workloads: each family of the agent world among the seeds, with `model`; and, where `edit_model` (a chat model) is given,
    an edited file and a story. Returns `workloads` (rows with `name, prompts, tokens, same, off, on, ratio, ratios,
    drafted, accepted, tokens_per_step`; rates in tokens a second, `ratios` one a repeat and `ratio` that of all) and the
    conditions.
    """
    if repeats < 1 or not 2 <= lookup <= 8:
        raise BadRequest(f"repeats={repeats}, lookup={lookup}: at least 1 repeat, 2 to 8 tokens")
    told = tell or (lambda text: None)
    rows = []
    works = {name: [_task(seed, max_bytes) for seed in seeds if family_of(seed) == name] for name in FAMILIES}
    works = {f"world: {name}": plays for name, plays in works.items() if plays}
    rows += _compare(model, works, lookup, repeats, device, told)
    if edit_model is not None:
        works = {"edit a file": [_answer(EDIT_PROMPT, 400)], "tell a story": [_answer(STORY_PROMPT, 150)]}
        rows += _compare(edit_model, works, lookup, repeats, device, told)
    conditions = {"model": model, "edit_model": edit_model, "seeds": list(seeds), "max_bytes": max_bytes, "device": device}
    return {"workloads": rows, "lookup": lookup, "repeats": repeats, "threads": torch.get_num_threads(), **conditions}


def _compare(
    model: str, works: dict[str, list[Work]], lookup: int, repeats: int, device: str, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row a workload. The two runtimes are opened once; both do each work, the first to go alternating."""
    rows = []
    with ExitStack() as stack:
        opened = [stack.enter_context(Runtime(model, db=None, device=device, lookup=most)) for most in (0, lookup)]
        for name, plays in works.items():
            sides, same = [Side(runtime) for runtime in opened], True
            for repeat in range(repeats):
                before = [Counter(side.total) for side in sides]
                for number, work in enumerate(plays, start=repeat):
                    results = [side.play(work) for side in (sides if number % 2 == 0 else reversed(sides))]
                    same = same and results[0] == results[1]
                for side, then in zip(sides, before, strict=True):
                    side.end_round(then)
            rows.append(_row(name, model, len(plays), same, *sides))
            tell(f"{name}: {rows[-1]['ratio']:.2f}x, {'the same tokens' if same else 'OTHER TOKENS'}")
    return rows


def _row(name: str, model: str, prompts: int, same: bool, off: Side, on: Side) -> dict[str, Any]:
    ratios = [round(b / a, 3) for a, b in zip(off.rates, on.rates, strict=True)]
    rates = [side.total["tokens"] / side.total["seconds"] for side in (off, on)]
    return {
        "name": name,
        "model": model,
        "prompts": prompts,
        "tokens": on.total["tokens"],
        "same": same and off.total["tokens"] == on.total["tokens"],
        "off": round(rates[0], 1),
        "on": round(rates[1], 1),
        "ratio": round(rates[1] / rates[0], 3),
        "ratios": ratios,
        "drafted": on.total["drafted"],
        "accepted": on.total["accepted"],
        "tokens_per_step": round(on.total["tokens"] / on.total["steps"], 2),
    }


def _task(seed: int, max_bytes: int) -> Work:
    def play(runtime: Runtime) -> Any:
        """The transcript of one task of the agent world, and the world's verdict."""
        task = make_task(seed, max_bytes=max_bytes)
        with World(task) as world, runtime.session(system=NATIVE.system, tools=[world.bash]) as session:
            session.add_user(task.prompt)
            session.run(max_turns=24)
            return _said(session.messages()), world.verdict()

    return play


def _answer(prompt: str, max_tokens: int) -> Work:
    def ask(runtime: Runtime) -> Any:
        """The answer to one message."""
        with runtime.session() as session:
            session.add_user(prompt)
            turn = session.generate(max_tokens=max_tokens)
            return turn.text, turn.usage.completion_tokens

    return ask


def _said(messages: list[dict[str, Any]]) -> list[Any]:
    """What the model wrote: texts and calls without their ids, which are random."""
    own = [message for message in messages if message["role"] == "assistant"]
    return [(message.get("content"), [call["function"] for call in message.get("tool_calls") or ()]) for message in own]
