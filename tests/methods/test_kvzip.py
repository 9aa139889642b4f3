"""Replayed contexts: against the reference, transformers' model with the same tokens hidden, kvpress, and closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Kept, Run, ask_kvpress
from played import Watched, engine_of, noting, together, turn
from recompute import Choice, agreement, keep_across_model, replay_scores
from recorded import Recorded
from subjects import MICRO, text, tiny
from torch import Tensor
from transformers import AutoTokenizer

from agentkv import methods
from agentkv.engine.core import Edit
from agentkv.engine.form import Held
from agentkv.engine.forms import model_shape
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.engine.sparse import Plain
from agentkv.errors import BadRequest
from agentkv.kernels.replay_mass import replay_mass
from agentkv.methods.kvzip import KVzip

PROMPT = [(5 * i * i + 9 * i + 40) % 251 for i in range(45)]
ASK = {"prefix": (10, 11, 12), "prefix_later": (13, 14), "suffix": (15,), "lead_in": 3}
NotingKVzip = noting(KVzip)
FIRST = b"\n\nRepeat the previous context exactly."
LATER = b"\n\nRepeat the part of the previous context exactly, starting with"
SETTINGS = [(2048, "model", 30), (2048, "layer", 30), (50, "model", 60), (50, "layer", 60)]  # chunk, scope, capacity
TOLERANCE = 2e-5  # of a score of kvpress in float32, as a share of the largest


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny(made, request.param)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float64")


def replays_of(tokens: list[int], chunk: int, system: int) -> list[list[int]]:
    runs, context = [], tokens[system:]
    for at in range(0, len(context), chunk):
        ask = [13, 14, *context[max(0, at - 3) : at]] if at else [10, 11, 12]
        runs.append([*ask, 15, *context[at : at + chunk]])
    return runs


@pytest.mark.parametrize("step_tokens", [7, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"keep_ratio": 0.3},
        {"keep_ratio": 0.5, "chunk": 20, "system": 6},
        {"keep_ratio": 0.4, "chunk": 13, "scope": "layer", "sinks": 0},
        {"keep_ratio": 0.4, "chunk": 20, "scope": "token"},
        {"keep_ratio": 0.3, "chunk": 20, "softmax": "all"},
    ],
)
def test_it_keeps_what_the_reference_reads(
    folder: Path, loaded: LoadedModel, options: dict[str, Any], step_tokens: int
) -> None:
    method = NotingKVzip(**options, **ASK)
    ours = turn(engine_of(loaded, method, step_tokens=step_tokens), PROMPT, count=8)
    recorded, runs = Recorded(folder, torch.float64), replays_of(PROMPT, method.chunk, method.system)
    seen = recorded.prompt(PROMPT)
    replayed = [
        [(each.q, each.k[-len(run) :]) for each in layers]
        for run, layers in zip(runs, recorded.replay(PROMPT, runs), strict=True)
    ]
    scale = loaded.config.head_dim**-0.5
    plain = Plain([s.q for s in seen], [s.k for s in seen], [s.v for s in seen], [s.q[-1] for s in seen], [], replayed, scale)
    watched = Watched(folder)

    def after(model: Watched) -> None:
        if len(PROMPT) == model.hidden[0].shape[1]:
            for layer, hidden in enumerate(model.hidden):
                for head, kept in enumerate(method.reference(plain, layer).positions):
                    hidden[head] = True
                    hidden[head, list(kept)] = False

    made, logprobs = watched.greedy(PROMPT, 8, after)
    (noted,) = method.noted
    for layer, heads in enumerate(noted.positions):
        assert heads == method.reference(plain, layer).positions
    assert ours.made == made
    assert ours.logprobs == pytest.approx(logprobs, abs=1e-7)


def test_a_share_of_all_pairs_stays(loaded: LoadedModel) -> None:
    for ratio in (0.07, 0.3, 0.61):
        method = NotingKVzip(keep_ratio=ratio, **ASK)
        turn(engine_of(loaded, method), PROMPT, count=2)
        pairs = 3 * 2 * len(PROMPT)
        kept = [head for layer in method.noted[0].positions for head in layer]
        assert sum(map(len, kept)) == pairs - int(pairs * (1 - ratio))
        assert all(head[:4] == [0, 1, 2, 3] for head in kept) or ratio == 0.07
        assert len({len(head) for head in kept}) > 1


def test_everything_is_dense(loaded: LoadedModel) -> None:
    dense = turn(engine_of(loaded, methods.get("dense")), PROMPT, count=12)
    ours = turn(engine_of(loaded, KVzip(keep_ratio=1.0)), PROMPT, count=12)
    assert ours == dense


def zip_brutally(watched: Watched, scores: Tensor, gone: range, chunk: int, ids: list[int], keep: int) -> Tensor:
    """Replay the tokens `ids` of the tail, and hide all but the best of what there is.

    scores: of what was sealed, `[layers, heads, floor]`. gone: positions that were pruned from the tail.
    """
    floor, tokens = scores.shape[2], watched.hidden[0].shape[1]
    tail = [at for at in range(floor, tokens) if at not in gone]
    whole = torch.cat([scores, torch.zeros(*scores.shape[:2], tokens - floor, dtype=torch.float64)], 2)
    for number, run in enumerate(replays_of(ids, chunk, 0)):
        start = floor + number * chunk
        end = min(start + chunk, floor + len(tail))
        for layer, (q, k) in watched.aside(run).items():
            there = [*range(floor), *tail, *range(tokens, len(k))]
            whole[layer, :, tail[start - floor : end - floor]] = replay_scores(q, k[there], start, end, 4)
    ranked = whole.clone()
    ranked[..., :4] = 2
    ranked[torch.stack(watched.hidden)] = -1
    flat = ranked.flatten().tolist()
    best = sorted(range(len(flat)), key=lambda at: (-flat[at], at))[:keep]
    hidden = torch.ones(len(flat), dtype=torch.bool)
    hidden[best] = False
    watched.hidden = [each.clone() for each in hidden.view(whole.shape)]
    return whole


@pytest.mark.parametrize(("chunk", "gone"), [(100, range(0)), (12, range(0)), (8, range(46, 49))])
def test_a_second_turn_weighs_old_and_new(folder: Path, loaded: LoadedModel, chunk: int, gone: range) -> None:
    """What is sealed keeps its scores; the answer and the new prompt are replayed, without what was pruned of them."""
    method, more = NotingKVzip(keep_ratio=0.4, chunk=chunk, **ASK), [33, 44, 55, 66, 77, 88, 99]
    llm = engine_of(loaded, method)
    first = turn(llm, PROMPT, "a", 6)
    edits = (Edit(len(first.ids), ((gone.start, gone.stop),)),) if gone else ()
    for edit in edits:
        llm.prune("a", edit.removed)
    second = turn(llm, [*first.ids, *more], "a", 10, edits)
    length = len(first.ids) + len(more)
    tail = [second.ids[at] for at in range(len(PROMPT), length) if at not in gone]
    assert second.prefilled == 1 + len(more) + sum(map(len, replays_of(tail, chunk, 0)))

    watched, empty = Watched(folder), torch.zeros(3, 2, 0, dtype=torch.float64)
    watched.logits(PROMPT)
    shares = [6 * tokens - int(6 * tokens * 0.6) for tokens in (len(PROMPT), length)]
    scores = zip_brutally(watched, empty, range(0), chunk, PROMPT, shares[0])
    for token in first.made[:-1]:
        watched.logits([token])
    for hidden in watched.hidden:
        hidden[:, list(gone)] = True
    last = watched.logits([first.made[-1], *more])
    zip_brutally(watched, scores, gone, chunk, tail, shares[1])
    for heads, layer in zip(method.noted[1].positions, watched.hidden, strict=True):
        assert heads == [torch.nonzero(~hidden).flatten().tolist() for hidden in layer]
    made = [int(last.argmax())]
    while len(made) < 10:
        made.append(int(watched.logits([made[-1]]).argmax()))
    assert second.made == made


@pytest.mark.parametrize("scope", ["model", "token"])
def test_a_fork_and_a_rollback_leave_no_trace(loaded: LoadedModel, scope: Any) -> None:
    method = KVzip(keep_ratio=0.3, chunk=20, scope=scope, **ASK)
    alone = engine_of(loaded, method)
    first = turn(alone, PROMPT, "a", 7)
    second = turn(alone, [*first.ids, 40, 8, 3], "a", 7)
    llm = engine_of(loaded, method)
    assert turn(llm, PROMPT, "a", 7) == first
    llm.fork("a", "b", len(first.ids))
    turn(llm, [*first.ids, 99, 100, 101, 102], "b", 7)
    turn(llm, [*first.ids, 5], "a", 7)
    llm.rollback("a", len(first.ids))
    assert turn(llm, [*first.ids, 40, 8, 3], "a", 7) == second


def test_rows_of_a_step_do_not_meet(loaded: LoadedModel) -> None:
    method = KVzip(keep_ratio=0.3, chunk=20, **ASK)
    prompts = [PROMPT, PROMPT[5:25], PROMPT[9:12], PROMPT[::-1]]
    alone = [turn(engine_of(loaded, method), prompt, count=10).made for prompt in prompts]
    assert together(engine_of(loaded, method, step_tokens=30), prompts, 10) == alone


def test_equal_logits_pay_their_share() -> None:
    keys = torch.randn(2, 9, 6, dtype=torch.float64)
    q = torch.zeros(4, 4, 6, dtype=torch.float64)
    scores = replay_mass(q, keys[:, :3], keys[:, 3:5], keys[:, 5:], 0.5)
    torch.testing.assert_close(scores, torch.full((2, 3), 1 / 6, dtype=torch.float64))  # the first query sees 3 + 2 + 1
    lens = torch.tensor([2, 0], dtype=torch.int32)
    scores = replay_mass(q[2:], keys[:, :3], keys[:, 3:5], keys[:, 5:], 0.5, lens=lens)
    torch.testing.assert_close(scores[:, 0], torch.tensor([1 / 8, 1 / 6], dtype=torch.float64))


def test_lengths() -> None:
    method = KVzip(keep_ratio=0.3, chunk=10, **ASK)
    kept = method.keep(Held(100, 0, 100, 0, True))
    assert kept is not None
    assert (kept.floor, kept.slots, kept.mean, kept.across) == (100, 100, 30, True)
    assert method.keep(Held(101, 100, 1, 100, False)) is None
    shared = KVzip(keep_ratio=0.3, scope="token")
    assert (shared.seals_into, method.seals_into) == ("stripe", "head")
    kept = shared.keep(Held(150, 100, 50, 30, True))
    assert kept is not None
    assert (kept.floor, kept.slots) == (150, 45)
    assert method.replay_most(25) == max(map(len, method.replay(Held(25, 0, 25, 0, True), range(25))))
    assert KVzip(prefix=[1, 2]).prefix == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"keep_ratio": 0.0},
        {"keep_ratio": 1.2},
        {"chunk": 0},
        {"sinks": -1},
        {"system": -1},
        {"lead_in": -1},
        {"scope": "head"},
        {"softmax": "none"},
        {"prefix": (-3,)},
    ],
)
def test_what_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(options))):
        methods.get("kvzip", **options)


def test_an_instruction_of_unknown_tokens_is_refused(loaded: LoadedModel) -> None:
    shape = model_shape(loaded, 16)
    method = methods.get("kvzip", prefix=[1], suffix=[loaded.config.vocab_size])
    assert method.unserved(shape) == f"token id {loaded.config.vocab_size} is none of its {loaded.config.vocab_size}"
    assert methods.get("kvzip", prefix=[loaded.config.vocab_size - 1]).unserved(shape) is None


def settings_of(folder: Path, family: str) -> tuple[list[int], list[int], list[int]]:
    """A prompt, and the system part and the suffix that kvpress finds with the model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    templated = family != "llama"
    system = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False) if templated else []
    suffix = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n" if templated else "\n", add_special_tokens=False)
    return system + list(text(60 if family == "micro" else 16).encode()), system, suffix


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "micro"])
def test_kvpress_keeps_the_same(family: str, tmp_path: Path) -> None:
    folder = MICRO if family == "micro" else tmp_path
    if family != "micro":
        tiny(folder, family)
    tokens, system, suffix = settings_of(folder, family)
    asked = [
        Run("kvzip", tokens, capacity, {"chunk_size": chunk, "layerwise": scope == "layer", "n_sink": 4})
        for chunk, scope, capacity in SETTINGS
    ]
    out = tmp_path / "kvpress"
    out.mkdir()
    loaded = load_model(folder, dtype="float64")
    for (chunk, scope, capacity), theirs in zip(SETTINGS, ask_kvpress(folder, asked, out), strict=True):
        method = NotingKVzip(
            keep_ratio=capacity / len(tokens),
            chunk=chunk,
            scope=scope,
            system=len(system),
            prefix=tuple(FIRST),
            prefix_later=tuple(LATER),
            suffix=tuple(suffix),
        )
        turn(engine_of(loaded, method, memory=64 << 20, window=2000), tokens, count=2)
        compare(method.noted[0].positions, method.noted[0].scores, theirs, capacity, scope)


def compare(positions: list[list[list[int]]], scores: Tensor, theirs: Kept, capacity: int, scope: str) -> None:
    kept = torch.zeros(theirs.kept.shape, dtype=torch.bool)
    for layer, heads in enumerate(positions):
        for head, each in enumerate(heads):
            kept[layer, head, each] = True
    other = torch.from_numpy(theirs.scores).double()
    choice = keep_across_model(other, 4, capacity, scope == "layer")
    tolerance = TOLERANCE * other.max().item()
    gap = (scores.double() - other).abs().max().item()
    found = agreement(Choice(kept, choice.margin), torch.from_numpy(theirs.kept), tolerance)
    print(f"scores up to {other.max():.2f}, largest gap {gap:.1e}; {found}")
    assert gap <= tolerance
    assert int(kept.sum()) == int(theirs.kept.sum())
    assert found.clear >= 0.98 * found.positions
    assert found.clear_same >= 0.999 * found.clear
    assert found.widest <= 2 * tolerance
