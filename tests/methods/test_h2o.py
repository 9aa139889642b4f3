"""Accumulated scores: against transformers' model with brute-force eviction, closed forms, and sessions that fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from played import Watched, engine_of, noting, together, turn
from recorded import Recorded
from subjects import tiny

from agentkv import methods
from agentkv.engine.core import Edit
from agentkv.engine.form import Held
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.engine.sparse import Plain
from agentkv.errors import BadRequest
from agentkv.methods.h2o import H2O

PROMPT = [(7 * i * i + 3 * i + 11) % 251 for i in range(60)]
NotingH2O = noting(H2O)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny(made, request.param)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float64")


def evicting(heavy: int, recent: int) -> Any:
    """The paper's rule after each forward pass: the lowest of the older ones goes until `heavy` are left."""

    def after(model: Watched) -> None:
        for hidden, received in zip(model.hidden, model.received, strict=True):
            for head in range(len(hidden)):
                older = [j for j in range(hidden.shape[1] - recent) if not hidden[head, j]]
                for j in sorted(older, key=lambda j: (received[head, j].item(), -j))[: max(0, len(older) - heavy)]:
                    hidden[head, j] = True

    return after


@pytest.mark.parametrize(("heavy", "recent", "interval"), [(10, 6, 128), (10, 6, 7), (1, 1, 5), (14, 40, 3), (30, 50, 4)])
def test_every_step_evicts_what_brute_force_evicts(
    folder: Path, loaded: LoadedModel, heavy: int, recent: int, interval: int
) -> None:
    method = NotingH2O(heavy, recent, interval)
    ours = turn(engine_of(loaded, method), PROMPT, count=31)
    watched = Watched(folder)
    made, logprobs = watched.greedy(PROMPT, 31, evicting(heavy, recent))
    assert ours.made == made
    assert ours.logprobs == pytest.approx(logprobs, abs=1e-7)
    if len(PROMPT) > heavy + recent:
        assert len(method.noted) == 1 + 29 // interval  # one is due behind the last step, for nobody
    assert all(len(head) == heavy for noted in method.noted for layer in noted.positions for head in layer)


def test_chunks_give_the_scores_of_one_pass(folder: Path, loaded: LoadedModel) -> None:
    watched = Watched(folder)
    watched.logits(PROMPT)
    want = torch.stack(watched.received)
    for step_tokens in (4, 7, 64):
        method = NotingH2O(10, 6)
        turn(engine_of(loaded, method, step_tokens=step_tokens), PROMPT, count=1)
        scores = method.noted[0].scores.double()
        assert ((scores - want).abs() / want).max() < 1e-6
        group = loaded.config.num_heads // loaded.config.num_kv_heads
        torch.testing.assert_close(scores.sum(2), torch.full_like(scores[..., 0], group * len(PROMPT)))


@pytest.mark.parametrize("step_tokens", [7, 64])
def test_a_window_counts_the_last_queries_of_each_stride(folder: Path, loaded: LoadedModel, step_tokens: int) -> None:
    """Against the probabilities of transformers' own queries and keys, one query at a time."""
    method = NotingH2O(10, 6, window=3, stride=8)
    turn(engine_of(loaded, method, step_tokens=step_tokens), PROMPT, count=1)
    seen, scale = Recorded(folder, torch.float64).prompt(PROMPT), loaded.config.head_dim**-0.5
    counted = [i for i in range(60) if i % 8 in (5, 6, 7)]
    for one, scores in zip(seen, method.noted[0].scores.double(), strict=True):
        want = torch.zeros_like(scores)
        for i in counted:
            for head, query in enumerate(one.q[i]):
                of = head * one.k.shape[1] // one.q.shape[1]
                want[of, : i + 1] += torch.softmax(one.k[: i + 1, of] @ query * scale, 0)
        assert ((scores - want).abs() / want.clamp(min=1e-9)).max() < 1e-6


def test_equal_logits_favour_the_old() -> None:
    k = torch.zeros(6, 1, 4)
    q = torch.zeros(6, 1, 4)
    want = [sum(1 / (i + 1) for i in range(j, 6)) for j in range(6)]
    assert want == pytest.approx([2.45, 1.45, 0.95, 0.61667, 0.36667, 0.16667], abs=1e-5)
    read = H2O(2, 1).reference(Plain([q], [k], [k], [q[0]], [], [], 0.5), 0)
    assert read.positions == [[0, 1, 5]]


def test_equal_scores_are_told_apart_by_position(loaded: LoadedModel) -> None:
    """Where all scores are equal, the higher position goes, in a step and in a seal."""

    class Equal(NotingH2O):  # type: ignore[misc, valid-type]
        def on_attention_end(self, *rest: Any) -> None:
            """Nothing is received."""

    method = Equal(5, 4, 3)
    turn(engine_of(loaded, method), PROMPT[:20], count=12)
    assert len(method.noted) == 4
    assert all(head == [0, 1, 2, 3, 4] for noted in method.noted for layer in noted.positions for head in layer)


@pytest.mark.parametrize(("heavy", "recent"), [(10, 6), (0.2, 0.1), (3, 80)])
def test_the_first_step_reads_what_the_reference_says(folder: Path, loaded: LoadedModel, heavy: float, recent: float) -> None:
    method = NotingH2O(heavy, recent)
    turn(engine_of(loaded, method), PROMPT, count=2)
    seen = Recorded(folder, torch.float64).prompt(PROMPT)
    scale = loaded.config.head_dim**-0.5
    plain = Plain([s.q for s in seen], [s.k for s in seen], [s.v for s in seen], [s.q[-1] for s in seen], [], [], scale)
    for layer in range(len(seen)):
        want = [list(each) for each in method.reference(plain, layer).positions]
        if not method.noted:
            assert want == [list(range(60))] * 2
            continue
        newest = list(range(60 - (6 if recent == 6 or recent == 0.1 else 80), 60))
        assert [head + newest for head in method.noted[0].positions[layer]] == want


def test_a_budget_of_the_length_is_dense(loaded: LoadedModel) -> None:
    dense = turn(engine_of(loaded, methods.get("dense")), PROMPT, count=20)
    for eviction in ("step", "interval"):
        ours = turn(engine_of(loaded, H2O(40, 40, eviction=eviction)), PROMPT, count=20)
        assert (ours.made, ours.logprobs) == (dense.made, pytest.approx(dense.logprobs, abs=1e-9))


def test_bursts_keep_the_best_of_an_interval(folder: Path, loaded: LoadedModel) -> None:
    method = NotingH2O(10, 6, 7, "interval")
    ours = turn(engine_of(loaded, method), PROMPT, count=20)
    watched, rule, due = Watched(folder), evicting(10, 6), [0]

    def burst(model: Watched) -> None:
        if due[0] % 7 == 0:
            rule(model)
        due[0] += 1

    made, logprobs = watched.greedy(PROMPT, 20, burst)
    assert ours.made == made
    assert ours.logprobs == pytest.approx(logprobs, abs=1e-7)


@pytest.mark.parametrize("method", [H2O(10, 6, 5), H2O(10, 6, 100), H2O(0.2, 0.1, 4), H2O(12, 5, 6, "interval")])
def test_a_fork_and_a_rollback_leave_no_trace(loaded: LoadedModel, method: H2O) -> None:
    alone = engine_of(loaded, method)
    first = turn(alone, PROMPT, "a", 9)
    second = turn(alone, [*first.ids, 40, 8, 3], "a", 9)
    assert second.prefilled <= 4  # the last token of a turn has no KV yet
    third = turn(alone, [*second.ids, 77], "a", 9)

    llm = engine_of(loaded, method)
    assert turn(llm, PROMPT, "a", 9) == first
    llm.fork("a", "b", len(first.ids))
    other = turn(llm, [*first.ids, 99, 100, 101, 102], "b", 9)
    assert other.prefilled <= 5
    assert turn(llm, [*first.ids, 40, 8, 3], "a", 9) == second
    llm.rollback("a", len(first.ids))
    turn(llm, [*first.ids, 5], "a", 9)
    llm.rollback("a", len(first.ids))
    assert turn(llm, [*first.ids, 40, 8, 3], "a", 9) == second
    assert turn(llm, [*second.ids, 77], "a", 9) == third


def test_rows_of_a_step_do_not_meet(loaded: LoadedModel) -> None:
    """Sequences with much, little and nothing evicted, in one batch."""
    method = H2O(10, 6, 4)
    prompts = [PROMPT, PROMPT[5:25], PROMPT[9:12], PROMPT[::-1]]
    alone = [turn(engine_of(loaded, method), prompt, count=15).made for prompt in prompts]
    assert together(engine_of(loaded, method), prompts, 15) == alone


@pytest.mark.parametrize("gone", [(), ((0, 7), (50, 57), (62, 64))])
def test_a_second_turn_evicts_on(folder: Path, loaded: LoadedModel, gone: tuple[tuple[int, int], ...]) -> None:
    """What died in the first answer stays hidden while the second prompt is read, chunk by chunk; so does what was pruned."""
    llm = engine_of(loaded, H2O(10, 6, 50), step_tokens=5)
    first, more = turn(llm, PROMPT, "a", 9), PROMPT[20:33]
    edits = (Edit(len(first.ids), gone),) if gone else ()
    for edit in edits:
        llm.prune("a", edit.removed)
    second = turn(llm, [*first.ids, *more], "a", 9, edits)
    assert second.prefilled == len(more) + 1
    watched, rule = Watched(folder), evicting(10, 6)
    assert watched.greedy(PROMPT, 9, rule)[0] == first.made
    for hidden in watched.hidden:
        for start, end in gone:
            hidden[:, start:end] = True
    made, logprobs = watched.greedy([first.made[-1], *more], 9, rule)
    assert second.made == made
    assert second.logprobs == pytest.approx(logprobs, abs=1e-7)


def test_memory_returns(loaded: LoadedModel) -> None:
    """After a prompt of 60 with room for 16: 16 slots sealed, and the tail's pages."""
    llm = engine_of(loaded, H2O(10, 6, 8))
    turn(llm, PROMPT, "a", 5)
    groups = llm.runner.groups
    tail, score = (groups[0].stripe_bytes * 3, groups[1].stripe_bytes * 3)
    sealed = sum(group.stripe_bytes for group in groups[2:])
    info = llm.chain_info("a")
    assert info is not None
    assert info.bytes_held <= tail + score + sealed
    assert info.resident_tokens <= 10 + 6 + 8


def test_budgets() -> None:
    absolute, shares = H2O(10, 6, 8), H2O()
    assert absolute.keep(Held(16, 0, 16, 0, True)) is None
    kept = absolute.keep(Held(17, 0, 17, 0, False))
    assert kept is not None
    assert (kept.floor, kept.slots) == (11, 10)
    assert absolute.keep(Held(24, 11, 13, 10, False)) is None
    assert absolute.keep(Held(25, 11, 14, 10, False)) is not None
    kept = shares.keep(Held(1000, 0, 1000, 0, True))
    assert kept is not None
    assert (kept.floor, kept.slots) == (900, 100)
    later = shares.keep(Held(1128, 900, 228, 100, False))
    assert later is not None
    assert (later.floor, later.slots) == (1028, 100)
    assert shares.keep(Held(1127, 900, 227, 100, False)) is None


@pytest.mark.parametrize(
    "options",
    [
        {"heavy": 0, "recent": 1},
        {"heavy": 4},
        {"heavy": 0.5, "recent": 0.5},
        {"heavy": 1.5, "recent": 0.1},
        {"heavy": True, "recent": 1},
        {"interval": 0},
        {"eviction": "never"},
    ],
)
def test_what_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(options))):
        methods.get("h2o", **options)
