"""The lifecycle: which hook is called when, with what; methods by name; views of several parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from agentkv import methods
from agentkv.engine.core import GRANULE, SLOT, Batch, EngineConfig, RowWork
from agentkv.engine.form import Bound, Held, Seal
from agentkv.engine.layers import Decoder, ModelConfig, RopeConfig
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import Keep, ModelShape, Most, SparseMethod, StateSpec
from agentkv.engine.view import AttentionView, DeviceBatch, PagedKV, Part, RowMass, Selection
from agentkv.engine.work import TableUpdate
from agentkv.errors import BadRequest, EngineFault, UnknownOption
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
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Sequence[RowMass] | None, batch: DeviceBatch
    ) -> None:
        assert lse is not None
        assert lse.shape == (len(batch.positions), 4)
        self._note("on_attention_end", layer, batch)

    def on_layer_end(self, layer: int, hidden: Tensor, batch: DeviceBatch) -> None:
        assert hidden.shape == (len(batch.positions), 24)
        self._note("on_layer_end", layer, batch)

    def on_chunk_end(self, batch: DeviceBatch) -> None:
        self._note("on_chunk_end", None, batch)

    def on_step_end(self, batch: DeviceBatch) -> None:
        ended = [span.seq_id for span in batch.rows if span.prompt_end]
        self.log.append(f"prompts:{ended}")
        self._note("on_step_end", None, batch)


LAYER = ["project", "store", "select", "view", "finish", "on_attention_end", "on_layer_end"]


def test_hooks_of_a_prefill_step_in_order(loaded: LoadedModel) -> None:
    method = Recorder()
    runner_of(loaded, method).execute(Batch([work(0, [1, 2, 3], sample=True), work(1, [4, 5])]))
    inner = [f"{hook}:prefill:{layer}" for layer in range(2) for hook in LAYER]
    end = ["on_chunk_end:prefill", "prompts:[70]", "on_step_end:prefill"]
    assert method.log == ["on_step_begin:prefill", *inner, *end]


def test_a_mixed_step_runs_each_phase_and_decodes_end_no_prompt(loaded: LoadedModel) -> None:
    method = Recorder()
    runner = runner_of(loaded, method)
    runner.execute(Batch([work(1, [4, 5], sample=True)]))
    method.log.clear()
    runner.execute(Batch([work(1, [6], at=2, sample=True, step=1), work(0, [1, 2, 3])]))
    calls = [call for call in method.log if call.startswith("select")]
    assert calls == ["select:decode:0", "select:prefill:0", "select:decode:1", "select:prefill:1"]
    assert [call for call in method.log if call.startswith("prompts")] == ["prompts:[]", "prompts:[]"]
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


def test_the_only_token_left_of_a_prompt_is_a_chunk(loaded: LoadedModel) -> None:
    method = Recorder()
    runner = runner_of(loaded, method)
    runner.execute(Batch([work(0, [1, 2])]))
    method.log.clear()
    runner.execute(Batch([replace(work(0, [3], at=2, sample=True), prompt=True)]))
    assert method.log[0] == "on_step_begin:prefill"
    method.log.clear()
    runner.execute(Batch([work(0, [4], at=3, sample=True, step=1)]))
    assert method.log[0] == "on_step_begin:decode"


def test_scratch_is_empty_when_a_step_begins(loaded: LoadedModel) -> None:
    method = Scratching()
    runner = runner_of(loaded, method)
    for at in range(3):
        runner.execute(Batch([work(0, [at], at=at)]))
    assert method.found == [None, 0] * 3


@dataclass(frozen=True)
class Scratching(SparseMethod):
    """Hands on the layer's number."""

    found: list[int | None] = field(default_factory=list)

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        self.found.append(batch.scratch.get("layer"))
        batch.scratch["layer"] = layer
        return None


@dataclass(frozen=True)
class Timed(SparseMethod):
    """Seals the prompt but its last two tokens, and then every eighth token."""

    every: int = 8
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "stripe"

    def keep(self, held: Held) -> Keep | None:
        if not held.prompt_end and held.tail < self.every + 2:
            return None
        return Keep(held.tokens - 2, min(held.slots + held.tail - 2, 50), appends=True)

    def most(self, prompt: int, tokens: int) -> Most:
        return Most(self.every + 2, Keep(tokens, 50), again=True)


def test_a_form_counts_in_units_what_the_method_counts_in_tokens(loaded: LoadedModel) -> None:
    (form,) = runner_of(loaded, Timed()).forms
    assert form.seals
    assert form.seal is not None
    assert form.bound is not None
    assert form.seal(Held(30, 0, 30, 0, True)) == Seal(28, 28, (2, 1), (0, 0))
    assert form.seal(Held(31, 28, 3, 28, False)) is None
    assert form.seal(Held(38, 28, 10, 28, False)) == Seal(36, 36, (3, 1), (1, 0))  # its first page of 16 slots stays
    assert form.seal(Held(2, 0, 2, 0, True)) == Seal(0, 0, (0, 0), (0, 0))
    assert form.bound(100, 128) == Bound(10, (8, 2))


def test_a_seal_outside_what_is_held_is_a_fault_of_the_method(loaded: LoadedModel) -> None:
    (form,) = runner_of(loaded, Timed()).forms
    assert form.seal is not None
    with pytest.raises(EngineFault, match="outside what is held"):
        form.seal(Held(1, 0, 1, 0, True))


@dataclass(frozen=True)
class Counted(Timed):
    """With state that is rewritten, so that no unit of it may be shared by an old and a new sealed part."""

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        return tuple(StateSpec(kind, "slot", "int32", kind, (2, 2, SLOT), "both") for kind in ("append", "mutable"))  # type: ignore[arg-type]


def test_units_that_are_rewritten_are_never_taken_over(loaded: LoadedModel) -> None:
    (form,) = runner_of(loaded, Counted()).forms
    assert (form.groups, form.sealed, form.mutable) == ((0, 1, 2), (3, 4, 5, 6), {2, 6})
    assert form.seal is not None
    assert form.seal(Held(38, 28, 10, 28, False)) == Seal(36, 36, (3, 1, 3, 3), (1, 0, 1, 0))


@dataclass(frozen=True)
class ByHead(Timed):
    mean: int = 0
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "head"

    def keep(self, held: Held) -> Keep | None:
        return Keep(held.tokens, 20, mean=self.mean, across=True)


@pytest.mark.parametrize(("mean", "units"), [(0, 8), (20, 8), (10, 6), (5, 5), (1, 4)])
def test_head_pages_are_bounded_by_the_mean(loaded: LoadedModel, mean: int, units: int) -> None:
    """2 layers of 2 heads: however four heads of at most 20 slots share `4 * mean`, `units` pages hold them."""
    (form,) = runner_of(loaded, ByHead(mean=mean)).forms
    assert form.seal is not None
    seal = form.seal(Held(40, 0, 40, 0, True))
    assert seal is not None
    assert seal.units == (units, 1)
    most = max(
        sum(-(-count // 16) for count in counts) for counts in product(range(21), repeat=4) if sum(counts) <= 4 * (mean or 20)
    )
    assert most <= units


@dataclass(frozen=True)
class Declares(SparseMethod):
    """Declares what it is told to."""

    declared: tuple[StateSpec, ...] = ()
    into: str | None = None

    @property
    def seals_into(self) -> Any:  # type: ignore[override]
        return self.into

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        return self.declared


@pytest.mark.parametrize(
    ("into", "declared", "why"),
    [
        (None, (StateSpec("a", "sequence", "int32", "append", (1,)),) * 2, "one name"),
        (None, (StateSpec("a", "slot", "int32", "append", (2, 2, SLOT), "both"),), "never seals"),
        ("states", (StateSpec("a", "slot", "int32", "append"),), "it has none"),
        ("stripe", (StateSpec("a", "page", "int32", "append", (2, 2), "both"),), "no item of a slot"),
        ("stripe", (StateSpec("a", "slot", "int32", "append", (2, SLOT, 3), "both"),), "layers and heads"),
    ],
)
def test_what_cannot_be_kept_is_refused(loaded: LoadedModel, into: str | None, declared: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        runner_of(loaded, Declares(declared, into))


def test_the_same_method_twice_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(BadRequest, match="twice"):
        ModelRunner(loaded, EngineConfig(1 << 20, 128), [Timed(), methods.get("dense"), Timed()])
    assert len(ModelRunner(loaded, EngineConfig(1 << 20, 128), [Timed(), Timed(9)]).forms) == 2


@dataclass(frozen=True)
class Choosy(SparseMethod):
    def unserved(self, model: ModelShape) -> str | None:
        return f"{model.num_layers} layers of {model.dtype}"


def test_a_method_says_what_it_does_not_serve(loaded: LoadedModel) -> None:
    with pytest.raises(BadRequest, match="2 layers of float64"):
        runner_of(loaded, Choosy())


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
    """Selects in decode, and forgets to say what of it is read."""

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        if batch.prefill:
            return None
        return Selection(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))


def test_a_selection_is_never_dropped_in_silence(loaded: LoadedModel) -> None:
    found = []
    for method in (methods.get("dense"), Blind()):
        runner = runner_of(loaded, method)
        runner.execute(Batch([work(0, [1, 2, 9, 4])]))
        try:
            found.append(runner.logits(Batch([work(0, [3], at=4)])))
        except NotImplementedError:
            return  # refused
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_dense_says_what_it_is() -> None:
    dense = methods.get("dense")
    assert (dense.exactness, dense.reuse, dense.evicts, dense.seals_into) == ("exact", "radix", False, None)
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
