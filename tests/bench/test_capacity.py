"""The largest batches of a method and of full attention, in sizes for a CPU; loads of experts against a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentkv.bench import capacity
from agentkv.bench.expert_loads import expert_loads, idle_bytes, spread
from agentkv.bench.gpu_report import line, markdown
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.shapes import draw_model
from agentkv.engine.drawn_runner import DrawnRunner
from agentkv.errors import EngineFault

CPU = torch.device("cpu")


@pytest.fixture
def rig() -> Rig:
    rig = Rig(CPU, 2, tiny=True)
    rig.copy = 1.0
    return rig


def test_the_row_adds_up(rig: Rig) -> None:
    found = capacity._measure(rig)
    more, dense = found.more, found.more["dense"]
    assert more["rows"] > dense["rows"] == 4  # an arena of four windows
    assert found.value == pytest.approx(more["tokens_per_s"] / dense["tokens_per_s"])
    assert more["tokens_per_s"] == pytest.approx(more["rows"] / more["median_us"] * 1e6)
    assert more["same_tokens_as_eager"]
    assert dense["same_tokens_as_eager"]
    total = {name: sum(each["bytes"].values()) for name, each in (("mine", more), ("dense", dense))}
    assert more["bytes_allow"] == pytest.approx(total["dense"] / 4 / (total["mine"] / more["rows"]))
    for each in (more, dense):
        assert each["held_bytes"] <= more["plan"]["arena"]
        assert each["bytes"]["weights"] <= more["plan"]["weights"]
    real = more["really_read"]
    sealed = 48 * 2 * 2 * 2 * 64 * 4  # slots, layers, heads, K and V
    assert sealed < real["held_bytes"] <= real["accounted_bytes"]
    assert "really_read" not in dense
    (row,) = capacity.capacity_rows()
    assert "bytes allow" in line(row.judged(found) | {"seconds": 1.0})


def test_memory_that_is_not_accounted_for_fails_the_row() -> None:
    read = {"held_over_accounted": 0.99, "beside_over_planned": 0.9}
    assert capacity.unaccounted(read) is None
    assert capacity.unaccounted(read | {"beside_over_planned": None}) is None
    held = capacity.unaccounted(read | {"held_over_accounted": 0.97})
    assert held == "a sealed prompt holds 0.970 of what was set aside for it"
    peak = capacity.unaccounted(read | {"beside_over_planned": 1.03})
    assert peak == "beside weights and KV the device held 1.030 of the plan"
    row = Row("r", "x", 1.0, lambda rig: Measured([1.0], 2.0, 1.0, "TB/s", short=peak))
    judged = row.judged(row.measure(Rig(CPU, 1))) | {"seconds": 1.0}
    assert (judged["met"], judged["value_met"]) == (False, True)
    assert f"met, but for {peak}" in line(judged)
    assert f"2 x; {peak} | at least 1 | no" in markdown({"rows": [judged]})


def test_steps_are_executed_again_on_a_device_that_launches_ahead(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a step that was launched behind another has not its tokens, and they are gone by then."""

    class Ahead(DrawnRunner):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.ahead = True

    monkeypatch.setattr(capacity, "DrawnRunner", Ahead)
    assert capacity._measure(rig).more["same_tokens_as_eager"]


def test_a_preemption_fails_the_row(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    read = capacity.read_prompts

    def preempted(llm: Any, sequences: Any) -> None:
        read(llm, sequences)
        llm.scheduler.tally.preemptions += 1

    monkeypatch.setattr(capacity, "read_prompts", preempted)
    with pytest.raises(EngineFault, match="preemptions"):
        capacity._measure(rig)


def test_loads_are_those_of_the_routers() -> None:
    """By hand: of each token the experts with the largest scores. One that no token goes to is not read."""
    loaded = draw_model("tiny-experts-fp8", CPU, torch.float32)
    mlps = [layer.mlp for layer in loaded.model.layers]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    loads = expert_loads(loaded, lambda: [mlp(x) for mlp in mlps])
    want = torch.zeros(2, 8, dtype=torch.int64)
    for layer, mlp in enumerate(mlps):
        for token in x:
            for expert in sorted(range(8), key=lambda each: -float(mlp.gate.weight[each] @ token))[:2]:
                want[layer, expert] += 1
    assert torch.equal(loads, want)
    expert = 3 * 128 * 128 + 3 * 4  # codes, and a float32 scale for each block
    assert idle_bytes(loaded, loads) == int((want == 0).sum()) * expert
    assert spread(torch.tensor([[4, 0], [2, 2]])) == {"busiest_over_mean": 1.5, "idle": 0.25}
    assert not any(mlp.gate._forward_hooks for mlp in mlps)
