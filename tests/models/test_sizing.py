"""Start-up sizing: the measure against tensors of known size, two starts, and plans that cannot be."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentkv import Runtime, methods
from agentkv.engine import sizing
from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.drawn_runner import DrawnRunner
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sizing import last_step, measure_step, measured, plan_memory
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import BadModel, BadRequest
from agentkv.types import Sampling

MIB = 1 << 20


def config(**sizes: Any) -> EngineConfig:
    return EngineConfig(**({"memory": 0, "window": 64, "page_size": 4, "max_rows": 4, "step_tokens": 16} | sizes))


def test_the_peak_is_what_lives_at_once() -> None:
    old = torch.zeros(MIB, dtype=torch.uint8)
    with measured(torch.device("cpu")) as peak:
        a = torch.ones(2 * MIB, dtype=torch.uint8)
        a.view(2, MIB)[0].add_(1)  # views and in-place work are not new
        old.view(-1).mul_(3)
        b = a + 1
        del a
        c = b[:MIB].clone()
        del b, c
        torch.zeros(MIB, dtype=torch.uint8)
    assert peak.bytes == 4 * MIB


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_step_takes_at_least_its_logits_and_activations(model: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "STEP_ROUND", 1)
    loaded = model(family, "float32")
    rows, tokens = 8, 64
    size = measure_step(loaded, config(max_rows=rows, step_tokens=tokens, window=128), methods.get("dense"))
    hidden = loaded.config.hidden_size
    assert size >= max(rows * loaded.config.vocab_size * 8, tokens * hidden * 4)
    assert measure_step(loaded, config(max_rows=rows, step_tokens=4 * tokens, window=512), methods.get("dense")) > 2 * size
    assert size == measure_step(loaded, config(max_rows=rows, step_tokens=tokens, window=128), methods.get("dense"))


def test_two_starts_give_the_same_pages() -> None:
    found = []
    for _ in range(2):
        with Runtime("micro", memory="auto", db=None) as runtime:
            session = runtime.session()
            session.add_user("hello")
            assert session.generate(max_tokens=2).number == 1
            found.append(runtime.stats()["arena"]["total"])
    assert found[0] == found[1] > 256 * MIB


def test_the_plan_adds_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = model("llama", "float32")
    monkeypatch.setattr(sizing, "usable_memory", lambda device: 1 << 30)
    plan = plan_memory(loaded, config(), methods.get("dense"))
    assert plan.weights == loaded.weight_bytes
    assert plan.graphs == 0
    assert plan.step == measure_step(loaded, config(), methods.get("dense")) > 0
    share = (plan.usable - plan.weights - plan.step) * sizing.CPU_SHARE
    assert share - 64 * MIB < plan.arena <= share


def test_graphs_have_a_share_of_a_gpu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that says it is on one, and a step that was measured before: nothing runs."""
    loaded, dense = replace(model("llama", "float32"), device=torch.device("cuda")), methods.get("dense")
    monkeypatch.setattr(sizing, "usable_memory", lambda device: 8 << 30)
    step = 64 * MIB
    plan = plan_memory(loaded, config(), dense, step)
    assert plan.graphs == step + sizing.MOST_GRAPHS * sizing.GRAPH_BYTES  # steps of 16 tokens: all may be captured
    share = (plan.usable - plan.weights - step - plan.graphs) * sizing.GPU_SHARE
    assert share - 64 * MIB < plan.arena <= share
    longer = plan_memory(loaded, config(step_tokens=7680), dense, step)
    assert longer.graphs - sizing.MOST_GRAPHS * sizing.GRAPH_BYTES == step // 10
    assert plan_memory(loaded, config(graphs=False), dense, step).graphs == 0


def test_impossible_plans_say_the_numbers_and_what_to_do(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, dense = model("llama", "float32"), methods.get("dense")
    step = measure_step(loaded, config(), dense)
    stripe = sum(group.stripe_bytes for group in loaded.groups(4))
    monkeypatch.setattr(sizing, "usable_memory", lambda device: loaded.weight_bytes + step)
    with pytest.raises(BadModel, match=r"no room for KV on cpu: weights take .* a step 16\.0 MiB") as caught:
        plan_memory(loaded, config(), dense)
    assert "smaller model" in caught.value.hint
    monkeypatch.setattr(sizing, "usable_memory", lambda device: loaded.weight_bytes + step + 4 * 9 * stripe)
    with pytest.raises(BadModel, match="one window of 64 tokens needs") as caught:
        plan_memory(loaded, config(), dense)
    assert "window=36 or less" in caught.value.hint
    assert plan_memory(loaded, config(window=36), dense).arena == 9 * stripe
    monkeypatch.setattr(sizing.ModelRunner, "execute", lambda self, batch: 1 / 0)
    with pytest.raises(BadModel, match="a step of 16 tokens cannot run beside the weights"):
        plan_memory(loaded, config(), dense)


@pytest.mark.parametrize("method", ["dense", "quest:budget=64", "snapkv:capacity=64", "h2o", "kivi:group=16", "kvzip:chunk=64"])
def test_the_last_step_of_a_window_is_what_a_prompt_takes_that_is_read(model: Any, method: str) -> None:
    """Beside an engine that reads it all, as real sessions do."""
    loaded, given, served = model("llama", "float32"), config(window=257, step_tokens=64, max_rows=1), methods.parse(method)
    llm = LLM(replace(given, memory=4 * MIB), ModelRunner(loaded, replace(given, memory=4 * MIB), served), reuse="chain")
    sequence = llm.add(Request([0] * 256, Sampling(max_tokens=1, temperature=0.0)))
    while sequence.num_forwarded < 192:
        llm.step()
    with measured(loaded.device) as peak:
        while llm.has_work:
            llm.step()
    assert sequence.fault is None
    assert last_step(loaded, given, served) == pytest.approx(peak.bytes, rel=0.02)
    for window in (194, 200, 256):  # not in whole steps: a later turn may end the window with one
        assert last_step(loaded, replace(given, window=window), served) == last_step(loaded, given, served)
    assert last_step(loaded, replace(given, window=1025), served) > peak.bytes


def test_a_window_is_tried_on_a_gpu_that_has_room_for_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, dense = replace(model("llama", "float32"), device=torch.device("cuda")), methods.get("dense")
    window = 64 // 4 * sum(group.stripe_bytes for group in loaded.groups(4))
    monkeypatch.setattr(sizing, "_first_step", lambda *given: 20 * MIB)
    monkeypatch.setattr(sizing, "last_step", lambda *given: 60 * MIB)
    for room, want in ((window, 64 * MIB), (window - 1, 32 * MIB)):
        monkeypatch.setattr(sizing, "usable_memory", lambda device, room=room: loaded.weight_bytes + 32 * MIB + room)
        assert measure_step(loaded, config(), dense) == want


def test_a_method_that_cannot_go_on_from_drawn_tokens_is_measured_by_its_first_steps(model: Any) -> None:
    class Stubborn(SparseMethod):
        def view(self, layer: int, selection: Any, batch: Any) -> Any:
            batch.scratch["viewed"] = True
            return super().view(layer, selection, batch)

        def on_layer_end(self, layer: int, hidden: Any, batch: Any) -> None:
            if not batch.scratch["viewed"]:
                raise ValueError("nothing was read")

    assert last_step(model("llama", "float32"), config(), Stubborn()) == 0


def test_memory_that_lacks_for_a_drawn_prompt_is_told(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DrawnRunner, "_normal", lacking)
    with pytest.raises(BadModel, match="out of memory") as raised:
        last_step(model("llama", "float32"), config(), methods.get("dense"))
    assert "smaller window" in raised.value.hint


@pytest.mark.parametrize("window", [2, 100, 512])
def test_the_smallest_windows_have_a_page_of_each_kind(window: int) -> None:
    with Runtime("micro", db=None, memory="auto", window=window, method="fp8_kv") as runtime:
        assert runtime.stats()["arena"]["total"] > 0


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_of_a_trial(model: Any, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """Not even until somebody collects what forms a cycle: the arena that is planned takes that memory."""
    if fails:
        monkeypatch.setattr(sizing.ModelRunner, "execute", lambda self, batch: 1 / 0)
    engines = list[weakref.ref[LLM]]()

    class Watched(LLM):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            engines.append(weakref.ref(self))

    monkeypatch.setattr(sizing, "LLM", Watched)
    gc.disable()
    try:
        with suppress(BadModel):
            measure_step(model("llama", "float32"), config(), methods.get("dense"))
        assert [engine() for engine in engines] == [None] * (2 - fails)
    finally:
        gc.enable()


@pytest.mark.parametrize("bad", [{"memory": "automatic"}, {"step_timeout": 0}, {"step_timeout": "1"}, {"threads": 0}])
def test_bad_sizes_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        Runtime("micro", db=None, **bad)
    assert caught.value.details["param"] in bad


def test_the_engine_has_the_threads_asked_for_and_the_caller_keeps_its_own() -> None:
    before = torch.get_num_threads()
    try:
        with Runtime("micro", db=None, threads=before + 1) as runtime:
            assert runtime._engine.worker.call(torch.get_num_threads) == before + 1
            assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)  # torch gives a new number to threads that have none yet
