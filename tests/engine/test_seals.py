"""Sealed parts on the host: turns of every form, what they leave, and what goes on from it."""

from __future__ import annotations

import pytest
from fake_engine import request, run
from fake_kinds import APPENDS, EVICTS, KINDS, LOOSE, MARKED, PAGED, PLAIN, REPLAYS, TIMED, Kind
from fake_seals import sealing_engine
from seal_oracle import Follower, Line, answer

FORMS = {kind.name: index for index, kind in enumerate(KINDS)}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


class Talk:
    """A session of one form, and its history as a list."""

    def __init__(self, llm, kind: Kind, name: str = "s") -> None:
        self.llm, self.kind, self.name = llm, kind, name
        self.line, self.ids, self.edits = Line(kind), [], []

    def say(self, new: list[int], *, count: int = 4, seed: int = 0, check: bool = True):
        """A whole turn; its sequence. What it makes is what the list makes."""
        llm, prompt = self.llm, self.ids + new
        seq = llm.add(request(prompt, self.name, max_tokens=count, seed=seed, edits=self.edits, form=FORMS[self.kind.name]))
        run(llm)
        assert seq.fault is None
        made = seq.token_ids[len(prompt) :]
        if check:
            assert made == answer(self.line, prompt, count=count, seed=seed, edits=self.edits)
        llm.commit(seq, made)
        llm.check()
        self.ids = prompt + made
        return seq


@each_kind
def test_turns_go_on_from_what_a_seal_left(kind: Kind) -> None:
    llm = sealing_engine(60)
    Follower(llm)
    talk = Talk(llm, kind)
    for number in range(5):
        new = [(3 * number + i) % 5 for i in range((13, 1, 7, 22, 2)[number])]
        held = max(0, len(talk.ids) - 1)
        seq = talk.say(new, count=(9, 1, 12, 4, 30)[number], seed=number)
        replays = sum(map(len, kind.replay(seq.request.token_ids))) if seq.max_tokens > 1 else 0
        assert seq.num_cached_tokens == held
        assert seq.num_prefilled_tokens == len(talk.ids) - seq.max_tokens - held + replays
    llm.drop("s")
    llm.oracle.reclaim(llm.pools.free + llm.pools.used)
    assert llm.arena.used_bytes == 0
