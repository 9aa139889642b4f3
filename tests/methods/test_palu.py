"""Latents of low rank: transformers with projected weights, identities, calibration, chains, refusals, the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded import DIM, HEADS, HIDDEN, LAYERS, Engine, Twin, make, prompt
from safetensors.torch import load_file
from subjects import MICRO
from torch import Tensor
from typer.testing import CliRunner

from agentkv import methods
from agentkv.check.kit import check
from agentkv.check.subject import subjects
from agentkv.cli import app
from agentkv.engine.core import Edit, Request
from agentkv.engine.loader import load_model
from agentkv.engine.preparation import Preparation
from agentkv.engine.sparse import Plain
from agentkv.errors import BadRequest
from agentkv.methods.palu import prepare
from agentkv.types import Sampling

CLOSE = 1e-5
"""Factors are float32."""
TEXTS = [prompt(150, seed=8), prompt(40, seed=9)]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("palu"), request.param)


@pytest.fixture(scope="module", params=[1, 2])
def group_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def plain(folder: Path, group_size: int) -> str:
    """By the weights alone."""
    out = folder / f"plain-{group_size}.safetensors"
    found = prepare(Preparation(load_model(folder)), [], out, group_size=group_size)
    assert found == {"out": str(out), "groups": 2 // group_size, "rank": group_size * DIM, "calibrated": False}
    return str(out)


@pytest.fixture(scope="module")
def calibrated(folder: Path) -> str:
    out = folder / "calibrated.safetensors"
    assert prepare(Preparation(load_model(folder)), TEXTS, out, group_size=2)["calibrated"]
    return str(out)


def moments(folder: Path) -> list[np.ndarray]:
    """By layer, sum of x x^T of the calibration, from transformers' own hidden states."""
    totals = [np.zeros((HIDDEN, HIDDEN)) for _ in range(LAYERS)]
    for ids in TEXTS:
        twin = Twin(folder)
        for layer, block in enumerate(twin.model.model.layers):

            def add(module: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                x = kwargs["hidden_states"][0].numpy()
                totals[layer] += x.T @ x

            block.self_attn.register_forward_pre_hook(add, with_kwargs=True)
        twin.forward(ids)
    return totals


def project(twin: Twin, group_size: int, ranks: tuple[int, int], spaces: list[np.ndarray] | None = None) -> None:
    """Cut the model's own projections to rank: each group's rows onto the leading directions of what they make."""
    for layer, attention in enumerate(twin.attention):
        root = np.eye(HIDDEN) if spaces is None else np.linalg.cholesky(spaces[layer])
        for part, rank in zip((attention.k_proj, attention.v_proj), ranks, strict=True):
            weight = part.weight.detach().numpy()
            for start in range(0, HEADS * DIM, group_size * DIM):
                rows = weight[start : start + group_size * DIM]
                u = np.linalg.svd(rows @ root)[0][:, :rank]
                weight[start : start + group_size * DIM] = u @ (u.T @ rows)


def test_it_is_the_model_with_projected_weights(folder: Path, plain: str, group_size: int) -> None:
    """Three turns in chunks, with a prune: keys are turned at their positions wherever their slots are."""
    ranks = 5 * group_size, 9 * group_size
    twin, engine = Twin(folder), Engine(folder, "palu", prepared=plain, rank_k=ranks[0], rank_v=ranks[1], step_tokens=37)
    project(twin, group_size, ranks)
    ids, edits, gap = prompt(90), (), 0.0
    for number in range(3):
        turn = engine.turn(ids, edits=edits)
        assert turn.prefilled == len(ids) - twin.forwarded
        gap = max(gap, twin.answer(ids, turn))
        ids = [*ids, *turn.tokens]
        if number == 0:
            assert engine.llm.prune("c", [(10, 30), (77, 80)])
            edits = (Edit(len(ids), ((10, 30), (77, 80))),)
            twin.gone |= {*range(10, 30), *range(77, 80)}
        ids = [*ids, *prompt(9, seed=number)]
    print(f"groups of {group_size}, ranks {ranks}: {gap:.1e}")
    assert gap < CLOSE


def test_calibration_errs_least_on_what_it_has_seen(folder: Path, calibrated: str) -> None:
    """The projection is that of the hidden states' second moments, as transformers sees them; and closer on these than SVD of
    the weights."""
    spaces = moments(folder)
    twin, engine = Twin(folder), Engine(folder, "palu", prepared=calibrated, rank_k=12, rank_v=12)
    project(twin, 2, (12, 12), spaces)
    assert twin.answer(prompt(60), engine.turn(prompt(60))) < CLOSE
    file = load_file(calibrated)
    for layer, space in enumerate(spaces):
        for side, part in (("k", "k_proj"), ("v", "v_proj")):
            weight = getattr(Twin(folder).attention[layer], part).weight.detach().numpy()
            up, down = (file[f"{side}.{name}"][layer].double() for name in ("up", "down"))
            root = np.linalg.cholesky(space)
            dropped = np.linalg.svd(weight @ root)[1][12:]
            low = torch.cat([up[head, :12].T for head in range(HEADS)]) @ down[0, :12]
            found = np.linalg.norm((weight - low.numpy()) @ root)
            assert found == pytest.approx(np.sqrt((dropped**2).sum()), rel=1e-5)


def test_full_rank_is_dense(folder: Path, plain: str) -> None:
    dense, ours = Engine(folder, "dense"), Engine(folder, "palu", prepared=plain, ratio=1.0)
    ids = prompt(90)
    for _ in range(2):
        a, b = dense.turn(ids), ours.turn(ids)
        assert a.tokens == b.tokens
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < CLOSE
        ids = [*ids, *a.tokens, *prompt(7, seed=2)]


@pytest.mark.parametrize("step_tokens", [5, 16])
def test_chunks_and_others_in_the_step_change_nothing(folder: Path, plain: str, step_tokens: int) -> None:
    whole = Engine(folder, "palu", prepared=plain)
    cut = Engine(folder, "palu", prepared=plain, step_tokens=step_tokens, page_size=7)
    for length in (3, 50):
        cut.llm.add(Request(prompt(length, seed=length), Sampling(max_tokens=4)))
    a, b = whole.turn(prompt(90)), cut.turn(prompt(90))
    assert a.tokens == b.tokens
    assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 1e-9


def test_prefixes_forks_and_host_memory(folder: Path, calibrated: str) -> None:
    """By content, by chain, and back from host memory after a prune: the same answers, and only new tokens are forwarded."""
    engine = Engine(folder, "palu", prepared=calibrated, warm=16 << 20)
    alone = Engine(folder, "palu", prepared=calibrated)
    ids = prompt(90)
    first = engine.turn(ids)
    assert engine.turn(ids, chain="other").prefilled == 1
    more = [*ids, *first.tokens[:2], *prompt(8, seed=4)]
    wanted = alone.turn(more, chain="x").tokens
    engine.llm.fork("c", "d", len(ids) + 2)
    assert engine.turn(more, chain="d").tokens == wanted
    engine.llm.rollback("c", len(ids) + 2)
    assert engine.turn(more).tokens == wanted
    for chain in ("other", "d"):
        engine.llm.drop(chain)
    edits = (Edit(len(more) + 6, ((10, 30),)),)
    more = [*more, *wanted, *prompt(5, seed=5)]
    for llm, chain in ((engine.llm, "c"), (alone.llm, "x")):
        llm.prune(chain, [(10, 30)])
    engine.llm.suspend("c")
    info = engine.llm.chain_info("c")
    assert info is not None
    assert info.warm_tokens
    back = engine.turn(more, edits=edits)
    assert (back.tokens, back.prefilled) == (alone.turn(more, chain="x", edits=edits).tokens, 6)


def test_a_token_takes_its_latents_and_its_position(folder: Path, plain: str, group_size: int) -> None:
    engine = Engine(folder, "palu", prepared=plain, dtype="float32", ratio=0.5, page_size=64)
    _, latents, positions = engine.turn(prompt(128), count=1).bytes_held
    assert (latents / 128, positions / 128) == (LAYERS * HEADS * DIM * 4, 4)


def test_the_reference_says_the_same(folder: Path, plain: str, group_size: int) -> None:
    """Of transformers' hidden states, keys and values with projected weights."""
    twin = Twin(folder)
    project(twin, group_size, (8 * group_size, 4 * group_size))
    xs: dict[int, Tensor] = {}
    for layer, block in enumerate(twin.model.model.layers):

        def add(module: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
            xs[layer] = kwargs["hidden_states"][0].clone()

        block.self_attn.register_forward_pre_hook(add, with_kwargs=True)
    twin.forward(prompt(30))
    method = methods.get("palu", prepared=plain, rank_k=8 * group_size, rank_v=4 * group_size)
    for layer, attention in enumerate(twin.attention):
        read = method.reference(Plain([], [], [], [], [xs[each][:29] for each in range(LAYERS)], [], 1.0, (), [
            xs[each][29] for each in range(LAYERS)
        ]), layer)  # fmt: skip
        for head in range(HEADS):
            assert list(read.positions[head]) == list(range(30))
            for x, found in zip(attention.exact, (read.k[head], read.v[head]), strict=True):
                assert (x[head] - found).abs().max() < CLOSE


def test_it_keeps_the_contract(folder: Path, calibrated: str) -> None:
    (method,) = subjects("palu", {"prepared": calibrated})
    assert [each for each in check(method, load_model(folder, dtype="float64")) if each.result == "failed"] == []


def test_another_model_s_file_is_refused(folder: Path, plain: str, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1999}))
    with pytest.raises(BadRequest, match="prepared for another model"):
        Engine(other, "palu", prepared=plain)
    with pytest.raises(BadRequest, match="is not prepared: give prepared=OUT"):
        Engine(folder, "palu")


def test_refusals(folder: Path, plain: str, group_size: int) -> None:
    most = group_size * DIM
    for options, why in (
        ({"ratio": 0.0}, "ratio=0.0"),
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"rank_k": -1}, "rank_k=-1"),
        ({"prepared": plain, "rank_v": most + 1}, f"rank_v={most + 1}: give 0 to {most}"),
        ({"prepared": str(folder / "none")}, "no file of factors"),
        ({"prepared": str(folder / "model.safetensors")}, "no file of factors"),
    ):
        with pytest.raises(BadRequest, match=why):
            methods.get("palu", **options)
    with pytest.raises(ValueError, match="group_size=3: it must divide the 2 KV heads"):
        prepare(Preparation(load_model(folder)), [], folder / "x", group_size=3)


def test_what_is_in_the_file_is_in_the_fingerprint(plain: str, calibrated: str, group_size: int) -> None:
    one, two = (methods.get("palu", prepared=path) for path in (plain, calibrated))
    assert one.fingerprint != two.fingerprint
    assert plain not in one.fingerprint


def test_the_command_writes_what_the_engine_reads(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "micro.safetensors"
    text.write_text("a line of text that calibrates\n" * 20)
    run = CliRunner().invoke(
        app, ["methods", "prepare", "palu", "micro", str(out), "--text", str(text), "--option", "group_size=1", "--json"]
    )
    assert json.loads(run.stdout.splitlines()[-1]) == {"out": str(out), "groups": 2, "rank": 64, "calibrated": True}
    turn = Engine(MICRO, "palu", dtype="float32", prepared=str(out), ratio=0.75).turn(prompt(40))
    assert len(turn.tokens) == 6
    refused = CliRunner().invoke(app, ["methods", "prepare", "dense", "micro", str(out)])
    assert isinstance(refused.exception, BadRequest)
    refused = CliRunner().invoke(app, ["methods", "prepare", "palu", "micro", str(out), "--option", "group_size=3"])
    assert "it must divide" in str(refused.exception)
    refused = CliRunner().invoke(
        app, ["methods", "prepare", "palu", "micro", str(tmp_path / "no" / "x"), "--option", "group_size=1"]
    )
    assert "cannot be written" in str(refused.exception)
