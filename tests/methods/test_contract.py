"""The lifecycle: which hook is called when, with what; methods by name; views of several parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentkv import methods
from agentkv.engine.core import GRANULE, Batch, EngineConfig, RowWork, TableUpdate
from agentkv.engine.layers import Decoder, ModelConfig, RopeConfig
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import Selection, SparseMethod
from agentkv.engine.view import AttentionView, DeviceBatch, PagedKV, Part
from agentkv.errors import BadRequest, UnknownOption
from agentkv.types import Sampling


class Normed(Decoder):
    qk_norm = True


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.manual_seed(0)
    config = ModelConfig("Normed", 50, 24, 40, 2, 4, 2, 8, 1e-6, RopeConfig(), 128, True)
    model = Normed(config).double().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.prepare()
    return LoadedModel(model, config, tmp_path_factory.getbasetemp(), torch.device("cpu"), torch.float64, "f")


def runner_of(loaded: LoadedModel, method: SparseMethod, **more: Any) -> ModelRunner:
    runner = ModelRunner(loaded, EngineConfig(1 << 20, 128, page_size=4, max_rows=3), method, **more)
    stride = runner.groups[0].stripe_bytes // GRANULE
    runner.pages.update_tables([TableUpdate(row, 0, [stride * (10 * row + page) for page in range(10)]) for row in range(3)])
    return runner


def work(row: int, tokens: list[int], at: int = 0, sample: bool = False, step: int = 0) -> RowWork:
    return RowWork(row, tokens, at, at, sample, Sampling(), 0, step, seq_id=70 + row)


@dataclass(frozen=True)
class Recorder(SparseMethod):
    """Writes down every hook call and checks the shapes it is given."""

    log: list[str] = field(default_factory=list)

    def _note(self, hook: str, layer: int | None, batch: DeviceBatch) -> None:
        phase = "prefill" if batch.prefill else "decode"
        self.log.append(f"{hook}:{phase}" + ("" if layer is None else f":{layer}"))

    def on_step_begin(self, batch: DeviceBatch) -> None:
        self._note("on_step_begin", None, batch)

    def project(self, layer: int, x: Tensor, batch: DeviceBatch) -> None:
        assert x.shape == (len(batch.positions), 24)
        self._note("project", layer, batch)

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        assert k_raw.shape == k.shape == v.shape == (len(batch.positions), 2, 8)
        assert not torch.equal(k_raw, k)
        self._note("store", layer, batch)
        super().store(layer, k_raw, k, v, batch)

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        assert q.shape == q_raw.shape == (len(batch.positions), 4, 8)
        self._note("select", layer, batch)
        return None

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        self._note("view", layer, batch)
        return super().view(layer, selection, batch)

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        assert out.shape == (len(batch.positions), 4, 8)
        self._note("finish", layer, batch)
        return out

    def on_attention_end(
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Tensor | None, batch: DeviceBatch
    ) -> None:
        assert lse is not None
        assert lse.shape == (len(batch.positions), 4)
        self._note("on_attention_end", layer, batch)

    def on_layer_end(self, layer: int, hidden: Tensor, batch: DeviceBatch) -> None:
        assert hidden.shape == (len(batch.positions), 24)
        self._note("on_layer_end", layer, batch)

    def on_chunk_end(self, batch: DeviceBatch) -> None:
        self._note("on_chunk_end", None, batch)

    def on_prompt_end(self, batch: DeviceBatch) -> None:
        ended = [span.seq_id for span in batch.rows if span.prompt_end]
        self.log.append(f"on_prompt_end:{ended}")

    def on_step_end(self, batch: DeviceBatch) -> None:
        self._note("on_step_end", None, batch)


LAYER = ["project", "store", "select", "view", "finish", "on_attention_end", "on_layer_end"]


def test_hooks_of_a_prefill_step_in_order(loaded: LoadedModel) -> None:
    method = Recorder()
    runner_of(loaded, method).execute(Batch([work(0, [1, 2, 3], sample=True), work(1, [4, 5])]))
    inner = [f"{hook}:prefill:{layer}" for layer in range(2) for hook in LAYER]
    end = ["on_chunk_end:prefill", "on_prompt_end:[70]", "on_step_end:prefill"]
    assert method.log == ["on_step_begin:prefill", *inner, *end]


def test_a_mixed_step_runs_each_phase_and_decodes_end_no_prompt(loaded: LoadedModel) -> None:
    method = Recorder()
    runner = runner_of(loaded, method)
    runner.execute(Batch([work(1, [4, 5], sample=True)]))
    method.log.clear()
    runner.execute(Batch([work(1, [6], at=2, sample=True, step=1), work(0, [1, 2, 3])]))
    calls = [call for call in method.log if call.startswith("select")]
    assert calls == ["select:decode:0", "select:prefill:0", "select:decode:1", "select:prefill:1"]
    assert not any(call.startswith("on_prompt_end") for call in method.log)
    assert "on_chunk_end:decode" not in method.log


@dataclass(frozen=True)
class Halves(SparseMethod):
    """Reads the same slots as two parts: the first page, and the rest of the row."""

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        if batch.prefill:
            return super().view(layer, selection, batch)
        payload, table = PagedKV(batch.pages(layer)), batch.table_of(layer)
        page_size = table.page_size
        first = replace(table, host_lens=(page_size,) * len(table.host_lens), lens=torch.full_like(table.lens, page_size))
        rest = replace(
            table,
            entries=table.entries[:, 1:],
            host_lens=tuple(length - page_size for length in table.host_lens),
            lens=table.lens - page_size,
        )
        return AttentionView((Part(payload, first), Part(payload, rest)))


def test_a_view_in_two_parts_gives_the_whole(loaded: LoadedModel) -> None:
    scores = []
    for method in (Halves(), methods.get("dense")):
        runner = runner_of(loaded, method)
        runner.logits(Batch([work(0, list(range(9))), work(1, list(range(20)))]))
        scores.append(runner.logits(Batch([work(0, [3], at=9), work(1, [4], at=20)])))
    assert (scores[0] - scores[1]).abs().max() < 1e-12


def test_a_view_has_one_to_three_parts(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="one to three parts"):
        AttentionView(())


@dataclass(frozen=True)
class Loud(SparseMethod):
    """Raises when it is asked to select."""

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        raise AssertionError("selected")


def test_the_prefill_axis_selects_in_prefill_only(loaded: LoadedModel) -> None:
    runner = runner_of(loaded, methods.get("dense"), prefill=Loud())
    with pytest.raises(AssertionError, match="selected"):
        runner.execute(Batch([work(0, [1, 2])]))
    runner.execute(Batch([work(0, [1])]))
    runner = runner_of(loaded, Loud(), prefill=methods.get("dense"))
    runner.execute(Batch([work(0, [1, 2])]))
    with pytest.raises(AssertionError, match="selected"):
        runner.execute(Batch([work(0, [1], at=2)]))


@dataclass(frozen=True)
class Timed(SparseMethod):
    every: int = 8
    done: list[tuple[int, ...]] = field(default_factory=list)

    def due(self, lengths: Any) -> tuple[int, ...]:
        return tuple(row for row, length in lengths.items() if length % self.every == 0)

    def maintain(self, rows: Any) -> None:
        self.done.append(tuple(rows))


def test_timed_work_is_done_for_due_rows_only(loaded: LoadedModel) -> None:
    method = Timed()
    controller = runner_of(loaded, method).controller
    assert controller.maintain({0: 7, 1: 8, 2: 16}) == (1, 2)
    assert controller.maintain({0: 9}) == ()
    assert method.done == [(1, 2)]


@dataclass(frozen=True)
class Threads(SparseMethod):
    """Notes how many threads a step runs on."""

    seen: list[int] = field(default_factory=list)

    def on_step_begin(self, batch: DeviceBatch) -> None:
        self.seen.append(torch.get_num_threads())
        if batch.positions[0] == 99:
            raise RuntimeError("fault")


def test_a_small_step_runs_on_one_thread_and_leaves_the_setting(loaded: LoadedModel) -> None:
    method = Threads()
    runner = runner_of(loaded, method)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner.execute(Batch([work(0, list(range(30)))]))
        runner.execute(Batch([work(0, [1], at=30)]))
        assert method.seen == [2, 1]
        with pytest.raises(RuntimeError, match="fault"):
            runner.execute(Batch([work(0, [1], at=99)]))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Blind(SparseMethod):
    """Selects, and forgets to say what of it is read."""

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        return Selection(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))


def test_a_selection_is_never_dropped_in_silence(loaded: LoadedModel) -> None:
    with pytest.raises(TypeError, match="Blind selects"):
        runner_of(loaded, Blind()).execute(Batch([work(0, [1, 2])]))


def test_dense_says_what_it_is() -> None:
    dense = methods.get("dense")
    assert (dense.exactness, dense.reuse, dense.evicts, dense.states) == ("exact", "radix", False, ())
    assert dense.fingerprint == "agentkv.methods.dense:Dense()"
    assert dense == methods.get("dense")


def test_options_are_in_the_fingerprint() -> None:
    assert Timed(every=3).fingerprint != Timed(every=4).fingerprint


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(UnknownOption, match="densest") as caught:
        methods.get("densest")
    assert "dense" in caught.value.hint


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(UnknownOption, match="no option 'budget'") as caught:
        methods.get("dense", budget=3)
    assert caught.value.details["param"] == "budget"


def test_a_value_out_of_range_is_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Picky(SparseMethod):
        budget: int = 1

        def __post_init__(self) -> None:
            if self.budget < 1:
                raise ValueError(f"budget={self.budget}: at least 1")

    monkeypatch.setattr(methods, "resolve", lambda name: Picky)
    assert methods.get("picky", budget=2) == Picky(2)
    with pytest.raises(BadRequest, match="budget=0: at least 1"):
        methods.get("picky", budget=0)
