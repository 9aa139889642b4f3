"""Profiles of models: coverage beside transformers' attention, the choice beside all choices, and the command."""

from __future__ import annotations

import json
from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import text
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from agentkv import Runtime, methods
from agentkv.cli import app
from agentkv.engine.core import EngineConfig
from agentkv.engine.loader import load_model
from agentkv.engine.preparation import Preparation
from agentkv.engine.runner import ModelRunner
from agentkv.errors import BadRequest
from agentkv.kernels.layer_coverage import choose_observers, coverage, mean_coverage
from agentkv.methods.omnikv import prepare


def test_coverage_is_that_of_transformers_attention(folder: Path) -> None:
    ids = list(text(20).encode())
    loaded = load_model(folder, dtype="float64")
    cover = coverage(Preparation(loaded).traces(ids), loaded.config.head_dim**-0.5, 0.1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        given = [each[0] for each in model(input_ids=torch.tensor([ids]), output_attentions=True).attentions]
    ends = torch.linspace(len(ids) // 2, len(ids) - 1, 64).long().tolist()
    for layer, later in combinations(range(3), 2):
        shares = []
        for end in ends:
            most = given[layer][:, end, : end + 1].amax(0).tolist()
            best = sorted(range(end + 1), key=lambda at: -most[at])[: ceil(0.1 * (end + 1))]
            shares.append(float(given[later][:, end, best].sum(1).min()))
        assert cover[layer][later] == pytest.approx(sum(shares) / len(shares), abs=1e-5)


@pytest.mark.parametrize("num_layers", [2, 5, 7])
def test_no_choice_of_observers_covers_more(num_layers: int) -> None:
    draw = torch.Generator().manual_seed(num_layers)
    for _ in range(5):
        cover = torch.rand(num_layers, num_layers, generator=draw, dtype=torch.float64).tolist()
        for full in range(1, num_layers):
            picks = [
                (first, *more) for first in range(full) for more in combinations(range(first + 1, num_layers), full - first - 1)
            ]
            found, mean = choose_observers(cover, full)
            assert found in picks
            assert mean == pytest.approx(mean_coverage(cover, found))
            assert mean == pytest.approx(max(mean_coverage(cover, each) for each in picks))


def test_layers_that_look_where_the_first_looks_need_no_other() -> None:
    """One key that every query of every layer is all about: any layer observes it; of equals the earliest is taken."""
    k = torch.zeros(64, 1, 4, dtype=torch.float64)
    k[9] = 200.0
    cover = coverage([(torch.ones(64, 2, 4, dtype=torch.float64), k)] * 3, 0.5, 1 / 64)
    for layer, later in combinations(range(3), 2):
        assert cover[layer][later] == pytest.approx(1.0)
    assert choose_observers(cover, 1)[0] == (0,)


def test_a_profile_of_micro_serves_micro_alone(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "observers.json"
    done = CliRunner().invoke(
        app, ["methods", "prepare", "omnikv", "micro", str(path), "--option", "tokens=200", "--option", "full=2", "--json"]
    )
    assert done.exit_code == 0, done.output
    made = json.loads(path.read_text())
    said = json.loads(done.stdout.splitlines()[-1])
    assert {**said, "model": made["model"]} == {**made, "out": str(path)}
    assert made["tokens"] == 200
    assert 0 < made["coverage"] <= 1
    with Runtime("micro", method=f"omnikv:budget=64,prepared={path}", device="cpu", db=tmp_path / "a.db") as runtime:
        session = runtime.session()
        session.add_user("who are you? " * 20)
        session.generate(max_tokens=3)
    with pytest.raises(BadRequest, match="made for another model"):
        ModelRunner(
            load_model(folder), EngineConfig(1 << 20, 128, page_size=16, max_rows=1), methods.get("omnikv", prepared=str(path))
        )


@pytest.mark.parametrize(
    ("options", "named"),
    [({"full": 3}, "full=3"), ({"full": "x"}, "full="), ({"share": 1.0}, "share=1.0"), ({"tokens": 8}, "tokens=8")],
)
def test_what_cannot_be_profiled_is_refused(folder: Path, options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        prepare(Preparation(load_model(folder)), [], tmp_path / "x.json", **options)
    with pytest.raises(ValueError, match="32 or more"):
        prepare(Preparation(load_model(folder)), [[1, 2]], tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_a_model_draws_the_same_text_each_time(folder: Path) -> None:
    one, two = (Preparation(load_model(folder)).sample(40) for _ in range(2))
    assert len(one) == 40
    assert one == two
