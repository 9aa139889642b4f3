"""Training parts at toy size: rows, optimiser, steps, resume, export."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from agentkv.world import curriculum, rows, score, task, tokens, train, trajectory
from agentkv.world.dialect import DIALECTS
from agentkv.world.micro_model import Micro, MicroConfig, export, load, visible
from agentkv.world.muon import orthogonal
from agentkv.world.samples import sample

TOY = MicroConfig(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, inner=96)
STAGES = (
    curriculum.Stage(0.5, ((256, 1.0),), curriculum.RAW),
    curriculum.Stage(1.01, ((1024, 1.0),), curriculum.MIXED, gaps=0.5, masked=0.5, rebuilt=0.5),
)
FORMS = ("plain", "masked", "rebuilt")


def options(folder, **more):
    return train.Options(
        out=folder, minutes=5.0, batch_tokens=2048, eval_seeds=1, final_seeds=1, model=TOY, stages=STAGES, max_steps=3, **more
    )


@pytest.fixture
def quick_score(monkeypatch):
    monkeypatch.setattr(score, "BUCKETS", {"2K": (2048, 2100)})
    monkeypatch.setattr(score, "REPORTED", {"2K": (2048, 2100)})


def test_export_gives_the_same_logits_in_transformers(tmp_path):
    torch.manual_seed(0)
    model = Micro(TOY)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    export(model, tmp_path, torch.float32)
    other = Qwen3ForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    ids = torch.randint(0, tokens.USED, (2, 70))
    with torch.no_grad():
        mine = model.logits(model(ids, torch.arange(70).expand(2, -1)))
        assert torch.allclose(mine, other(ids).logits, atol=1e-5)
        gaps = torch.arange(70).expand(2, -1) + 5000 * (torch.arange(70) > 30)
        assert torch.allclose(model.logits(model(ids, gaps)), other(ids, position_ids=gaps).logits, atol=1e-4)
    assert type(AutoModelForCausalLM.from_pretrained(str(tmp_path))) is Qwen3ForCausalLM
    assert AutoTokenizer.from_pretrained(str(tmp_path))("a<|im_end|>").input_ids == [97, 257]
    again = load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2


def test_steps_resume_and_finish(tmp_path, quick_score):
    first = train.train(options(tmp_path))
    assert first.step == 3
    assert (tmp_path / "best" / "config.json").exists()
    table = json.loads((tmp_path / "scores.json").read_text())
    assert set(table) == set(DIALECTS)
    assert all(set(families) == set(task.FAMILIES) for families in table.values())
    second = train.train(replace(options(tmp_path, resume=True), max_steps=5))
    assert second.step == 5
    assert second.spent >= first.spent
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert saved["step"] == 5


def test_resume_is_the_uninterrupted_run(tmp_path, quick_score):
    """Three steps, saved and restored, then one more, equals four steps on the same batches."""
    rng = random.Random(5)
    batches = [curriculum.batch(rng, STAGES[1], 2048) for _ in range(4)]
    whole = train.Trainer(options(tmp_path / "a"))
    part = train.Trainer(options(tmp_path / "b"))
    for batch in batches[:3]:
        whole.update(batch)
        part.update(batch)
    part.save()
    again = train.Trainer(options(tmp_path / "b", seed=9))
    again.restore()
    whole.update(batches[3])
    again.update(batches[3])
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    with pytest.raises(ValueError, match="other sizes"):
        train.Trainer(replace(options(tmp_path / "b"), model=replace(TOY, layers=1))).restore()


def test_training_learns_something(tmp_path):
    trainer = train.Trainer(options(tmp_path))
    rng = random.Random(0)
    losses = [float(trainer.update(curriculum.batch(rng, STAGES[0], 2048))[0]) for _ in range(60)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1.0


def test_a_zero_weight_position_has_no_influence(tmp_path):
    hidden = torch.randn(1, 4, 8)
    table = torch.randn(10, 8)
    targets = torch.tensor([[1, 2, 3, 4]])
    weights = torch.tensor([[1.0, 0.0, 4.0, 0.0]])
    loss, _ = train.loss_of(table, hidden, targets, weights)
    log = torch.log_softmax(hidden @ table.T, -1)
    assert float(loss) == pytest.approx(float(-(log[0, 0, 1] + 4 * log[0, 2, 3]) / 5), rel=1e-5)


def test_newton_schulz_flattens_singular_values():
    made = orthogonal(torch.randn(3, 40, 24, dtype=torch.float64).float())
    values = torch.linalg.svdvals(made)
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.4


def test_learning_rate():
    assert train.learning_rate(0.0, 0) == pytest.approx(0.01)
    assert train.learning_rate(0.5, 500) == 1.0
    assert train.learning_rate(0.825, 500) == pytest.approx(0.5)


@pytest.mark.parametrize("stage", range(len(curriculum.STAGES)))
def test_batches(stage):
    rng = random.Random(stage)
    for _ in range(3):
        batch = curriculum.batch(rng, curriculum.STAGES[stage], 20_000)
        assert batch.ids.shape == batch.weights.shape == batch.positions.shape
        assert batch.ids.max() < tokens.USED
        assert (np.diff(batch.positions, axis=1) >= 0).all()
        assert batch.positions.max() < tokens.CONTEXT
        assert (batch.weights[batch.ids == 0] == 0).all()


def test_training_rows_never_use_evaluation_seeds(monkeypatch):
    used = []
    real = rows.make_task

    def spy(seed, *args, **kwargs):
        used.append((seed, kwargs["training"]))
        return real(seed, *args, **kwargs)

    monkeypatch.setattr(rows, "make_task", spy)
    rng = random.Random(1)
    for kind in task.FAMILIES:
        for form in FORMS:
            curriculum.make_row(rng, kind, 4096, form)
    assert len(used) == len(FORMS) * len(task.FAMILIES)
    assert all(seed >= task.EVALUATION_SEEDS and training for seed, training in used)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", task.FAMILIES)
def test_every_weighted_fact_is_in_view(kind, form):
    """Each copied name or value stands earlier in the row, in text that its own query still sees."""
    pruned = 0
    for seed in range(8):
        row = curriculum.make_row(random.Random(seed), kind, 4352, form)
        gone = np.full(len(row.ids), curriculum.NEVER)
        for start, end, at in row.gone:
            gone[start : max(start, end)] = at
        pruned += bool(row.gone) or rows.PLACEHOLDER in tokens.decode(row.ids)
        at = 0
        while at < len(row.ids):
            if row.weights[at] < 4:
                at += 1
                continue
            end = at
            while end < len(row.ids) and row.weights[end] == 4:
                end += 1
            seen = [i for i in range(at) if gone[i] > at]
            assert tokens.decode(row.ids[at:end]) in tokens.decode([row.ids[i] for i in seen])
            at = end
    assert pruned == 0 if form == "plain" else pruned > 2


@pytest.mark.parametrize("form", ["masked", "rebuilt"])
def test_what_is_gone_and_can_be_read_again_is_read_again(form):
    """Where the list's command runs twice, the first list is out of view at the second call, and that call is learnt."""
    call, found = '{"command": "sh list.sh"', 0
    for seed in range(12):
        row = curriculum.make_row(random.Random(seed), "again", 4352, form)
        text = "".join(chr(i) if i < 256 else "~" for i in row.ids)  # one character a token
        first = text.index(call)
        second = text.find(call, first + 1)
        if second < 0:
            continue
        found += 1
        start = text.index("~", text.index("~", first) + 1)
        if form == "masked":
            assert any(first < begin < second and at <= second for begin, _, at in row.gone)
        else:
            assert rows.PLACEHOLDER in text[start:second]
        assert row.weights[second + len('{"command": "')] == 1.0
    assert found >= 4


def test_a_body_goes_when_the_turn_after_its_lag_has_ended():
    """The oracle counts results and assistant turns in the decoded text."""
    checked = 0
    for seed in range(40):
        row = curriculum.make_row(random.Random(seed), "again", 4352, "masked")
        for start, _, at in row.gone:
            before, between = row.ids[:start], row.ids[start:at]
            assert between[-1] == tokens.IM_END
            assert row.ids[at] == 10
            later = between.count(tokens.RESPONSE)
            assert 0 <= later <= max(rows.LAGS)
            assert tokens.RESPONSE in before[-130:]
            checked += 1
    assert checked > 40


def test_masks_against_their_definition():
    gone = torch.tensor([[2, 9, 3, 9]])
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    assert visible(gone)[0, 0].int().tolist() == want


def test_a_masked_key_has_no_influence_from_its_time_on():
    torch.manual_seed(0)
    model = Micro(TOY)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    ids = torch.randint(0, 256, (1, 24))
    other = ids.clone()
    other[0, 3:6] = (other[0, 3:6] + 1) % 256
    gone = torch.full((1, 24), curriculum.NEVER)
    gone[0, 3:6] = 6
    at = torch.arange(24)[None]
    with torch.no_grad():
        one, two = (model(x, at, visible(gone)) for x in (ids, other))
        assert torch.allclose(one[:, 6:], two[:, 6:], atol=1e-6)
        assert not torch.allclose(one[:, 5], two[:, 5], atol=1e-3)
        full = torch.full_like(gone, curriculum.NEVER)
        assert torch.allclose(model(ids, at, visible(full)), model(ids, at), atol=1e-5)


def test_warm_up_runs_every_shape_and_leaves_nothing(tmp_path):
    trainer = train.Trainer(options(tmp_path))
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.warm_up()
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, trainer.model.parameters(), strict=True))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["compiled"], line["masked"]) for line in lines] == [(256, False), (1024, False), (1024, True)]


def test_the_twin_sees_no_pruned_body():
    rng = random.Random(0)
    for stage in curriculum.without_pruning(curriculum.LATE):
        batch = curriculum.batch(rng, stage, 9000)
        assert batch.gone is None
        assert rows.PLACEHOLDER not in "".join(tokens.decode(row.tolist()) for row in batch.ids)


def test_scores_are_judged_token_by_token():
    item = sample(3, "chase", 2048, 2200)
    right = [*item.ids[1:], 0]
    assert score.judge(item, right) == (True, 4, 4) or score.judge(item, right)[0]
    task_places = [at for at, question in item.judged if question < 0]
    wrong = list(right)
    wrong[task_places[5] - 1] ^= 1
    assert score.judge(item, wrong)[0] is False
    last = item.judged[-1][0]
    wrong = list(right)
    wrong[last - 1] ^= 1
    good, hits, asked = score.judge(item, wrong)
    assert (good, hits) == (True, asked - 1)
    assert asked == len(task.make_task(3, "chase", 2200).followups)
    assert trajectory.play(task.make_task(3, "chase", 2200)).events[-1].text == "done"
