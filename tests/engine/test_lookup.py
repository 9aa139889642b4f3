"""Prompt lookup: matches against brute force, and engines that guess against engines that do not."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from fake_engine import Oracle, copying, engine, request, run, turn
from hypothesis import given, settings
from test_output import Pieces
from test_properties import WINDOWS, EngineLife, act

from agentkv.engine.core import EngineConfig, Request, RowWork, Status, TokenScore
from agentkv.engine.llm import LLM
from agentkv.engine.lookup import GRAM, PLACES, REACH, Drafter, agreed, share
from agentkv.types import Sampling


def brute_force(ids: list[int]) -> tuple[int, int] | None:
    """Every place is compared, token by token."""

    def length(place: int) -> int:
        pairs = zip(reversed(ids[:place]), reversed(ids), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), place)

    places = [place for place in range(GRAM, len(ids)) if ids[place - GRAM : place] == ids[-GRAM:]][::-1][:PLACES]
    best = max(places, key=lambda place: min(length(place), REACH), default=None)  # the first, so the newest, of equals
    return None if best is None else (best, min(length(best), REACH))


@given(st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=20), st.integers(0, 9))
@settings(deadline=None)
def test_the_match_is_that_of_brute_force_however_the_text_grows(pieces: list[list[int]], limit: int) -> None:
    ids: list[int] = []
    drafter = Drafter(ids, 7)
    for piece in pieces:
        ids += piece
        drafted, want = drafter.draft(limit), brute_force(ids)
        assert drafter.match() == want
        assert len(drafted) <= min(limit, 7)
        told = list(ids)
        for token in drafted:  # the guesses follow the match, and themselves where it reaches the end
            assert want is not None
            assert token == told[want[0] + len(told) - len(ids)]
            told.append(token)


def test_a_copied_text_is_guessed_seven_tokens_ahead_and_random_text_is_not() -> None:
    rng = random.Random(1)
    text = [rng.randrange(200) for _ in range(300)]
    ids = [*text, *text[:20]]
    drafter = Drafter(ids, 7)
    for _ in range(20):
        drafted = drafter.draft(7)
        at = len(ids) - len(text)
        assert drafted == text[at : at + len(drafted)]
        ids += drafted or text[at : at + 1]
    assert len(drafted) == 7

    noise = [rng.randrange(4) for _ in range(2000)]
    drafter, sizes = Drafter(noise, 7), []
    for _ in range(400):
        sizes.append(len(drafter.draft(7)))
        noise.append(rng.randrange(4))
    assert sum(sizes[200:]) < 200, "a fourth of these guesses is right: one at a time, at most"


def test_guessing_stops_where_guesses_are_wrong_and_comes_back_without_being_tried() -> None:
    ids = [1, 2, 3, 4, 9, 1, 2, 3]
    drafter, sizes = Drafter(ids, 7), []
    for number in range(100, 130):  # what follows 1 2 3 is always new
        sizes.append(len(drafter.draft(7)))
        ids += [number, 1, 2, 3]
    assert sizes[0] > 3
    assert sizes[-10:] == [0] * 10
    for _ in range(20):
        drafter.draft(7)
        ids += [4, 1, 2, 3]
    assert drafter.draft(7)[:4] == [4, 1, 2, 3]


def test_long_texts_take_constant_work_a_step() -> None:
    """Counted: reads of the text in a step, after 50,000 tokens of the worst text."""

    class Counting(list[int]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            self.reads += 1
            return super().__getitem__(index)

    ids = Counting([5] * 50_000)
    drafter = Drafter(ids, 7)
    drafter.draft(7)
    ids.append(5)
    ids.reads = 0
    assert drafter.draft(7) == [5] * 7
    assert ids.reads < 4 * PLACES * REACH


def test_the_room_of_a_step_is_shared() -> None:
    assert [share(rows, 1024) for rows in (0, 1, 4, 5, 8, 16, 17, 64)] == [0, 7, 7, 5, 3, 1, 0, 0]
    assert share(1, 8) == 3, "half of the step is the prompts'"


def test_draws_count_up_to_the_first_that_was_not_guessed() -> None:
    def left(guesses: list[int], draws: list[int]) -> list[int]:
        later = [(token, TokenScore(float(token), ())) for token in draws[1:]]
        work = RowWork(0, [9, *guesses], 5, 5, True, Sampling(), 0, 3, drafted=len(guesses), later=later)
        return [token for token, _ in agreed(work, draws[0])]

    assert left([], [4]) == [4]
    assert left([4, 5], [4, 5, 6]) == [4, 5, 6]
    assert left([4, 5], [4, 6, 7]) == [4, 6]
    assert left([4, 5], [3, 5, 6]) == [3]


class GuessingLife(EngineLife):
    """Everything that happens to an engine, while its rows guess."""

    lookup = 8

    def start(self, *args: object, **options: object) -> None:
        super().start(*args, **options)
        self.llm.runner.draw = self.oracle.draw = copying


def test_lives_that_guess_have_the_tokens_of_lives_that_do_not() -> None:
    """`one_step` compares each token with the oracle, and checks every account after each step."""
    drafted = accepted = 0
    for seed in range(60):
        rng, life = random.Random(seed), GuessingLife()
        reuse = rng.choice(["radix", "chain"])
        sizes = rng.randrange(3, 40), rng.choice([2, 3, 4]), rng.randrange(1, 5), rng.randrange(6, 40), rng.randrange(3), reuse
        life.start(*sizes, windows=rng.choice(WINDOWS), slack=rng.randrange(4))
        try:
            for _ in range(100):
                act(life, rng)
            life.teardown()
        except Exception as error:
            raise AssertionError(f"life {seed}") from error
        drafted, accepted = drafted + life.llm.decoding.drafted, accepted + life.llm.decoding.accepted
    assert accepted > 200
    assert drafted - accepted > 200


def guessing(**options: object) -> LLM:
    llm = engine(**{"units": 100, "step_tokens": 40, "lookup": 8, **options})  # type: ignore[arg-type]
    llm.runner.draw = copying  # type: ignore[attr-defined]
    return llm


def oracle() -> Oracle:
    made = Oracle()
    made.draw = copying
    return made


PROMPT = [1, 2, 3, 4, 0, 2, 1, 3] * 4


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_the_last_token_may_be_anywhere_in_a_draft(max_tokens: int) -> None:
    llm = guessing(units=15, page_size=4, window=len(PROMPT) + max_tokens)
    assert turn(llm, PROMPT, "a", max_tokens=max_tokens, seed=3) == oracle().generate(PROMPT, [], 3, max_tokens)
    assert max_tokens < 9 or llm.decoding.accepted
    info = llm.chain_info("a")
    assert info is not None
    assert info.resident_tokens == len(PROMPT) + max_tokens - 1
    assert llm.stats().reserved == 0


@pytest.mark.parametrize("stop", range(5))
def test_a_stop_id_ends_a_draft(stop: int) -> None:
    llm = guessing()
    made = turn(llm, PROMPT, "a", max_tokens=40, seed=5, stop_ids=frozenset({stop}))
    assert made == oracle().generate(PROMPT, [], 5, 40, stop=[stop])


def test_a_stop_string_inside_an_accepted_draft_ends_the_text_there() -> None:
    """Tokens are letters; the copied text goes on past the stop string, and nothing of that is shown, kept or held."""
    pieces = Pieces([b"a", b"b", b"c", b"d", b"e"])
    seen = 0
    for seed in range(12):
        texts = {}
        for lookup in (0, 8):
            llm = guessing(lookup=lookup, tokenizer=pieces)
            seq = llm.add(request(PROMPT, "a", max_tokens=40, seed=seed, stop=("ea", "dc")))
            told = ""
            while seq.status is not Status.FINISHED:
                for output in llm.step():
                    told += output.text
                    seen += lookup > 0 and seq.stop_text is not None and len(output.token_ids) > 1
                llm.check()
            texts[lookup] = told, seq.token_ids, seq.kept_ids, seq.stop_text, seq.finish_reason
            assert seq.num_forwarded <= len(seq.token_ids) - 1
            llm.commit(seq, seq.kept_ids if seq.kept_ids is not None else seq.token_ids[len(PROMPT) :])
            llm.check()
        assert texts[0] == texts[8]
    assert seen, "a stop string was met behind the first token of a step"


def test_a_sequence_that_ends_between_drafts_leaves_its_chain_at_the_boundary() -> None:
    """Abort, early commit and rollback after steps that drafted: the next turn is that of a life without guesses."""
    for steps in range(1, 12):
        llm, want = guessing(), oracle()
        ids = PROMPT + turn(llm, PROMPT, "a", max_tokens=6)
        gone = llm.add(request([*ids, 1, 2, 3], "a", max_tokens=40))
        for _ in range(steps):
            llm.step()
            llm.check()
        if steps % 3 == 0:
            llm.abort(gone)
        else:
            made = gone.token_ids[len(ids) + 3 :]
            llm.commit(gone, made)
            llm.check()
            if steps % 3 == 1:
                llm.rollback("a", len(ids))
            else:
                ids = [*ids, 1, 2, 3, *made]
        llm.check()
        assert turn(llm, [*ids, 2], "a", max_tokens=20, seed=steps) == want.generate([*ids, 2], [], steps, 20)


def test_a_row_that_is_penalised_or_masked_does_not_guess() -> None:
    llm = guessing()
    for options in ({"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.1}):
        seq = llm.add(Request(PROMPT, Sampling(max_tokens=20, **options)))
        assert seq.drafter is None
    masked = llm.add(Request(PROMPT, Sampling(max_tokens=20), mask=lambda made: bytes([1] * 5)))
    assert masked.drafter is None
    assert llm.add(request(PROMPT)).drafter is not None
    run(llm)
    assert guessing(lookup=0).add(request(PROMPT)).drafter is None
    assert EngineConfig(memory=1, window=1).lookup == 0


def test_a_prompt_is_not_kept_waiting_by_drafts() -> None:
    llm = guessing(step_tokens=8, units=200)
    llm.add(request(PROMPT, max_tokens=60))
    for _ in range(8):
        llm.step()
    late = llm.add(request([4, 4, 0, 0] * 10, max_tokens=1))
    for _ in range(12):
        llm.step()
    assert late.status is Status.FINISHED
