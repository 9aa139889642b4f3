"""Rows whose prompts were drawn: what they hold is what the engine's accounts and the methods' own definitions say."""

from __future__ import annotations

import pytest
import torch

from agentkv import methods
from agentkv.bench.injected import Injected, inject
from agentkv.bench.shapes import draw_model
from agentkv.bench.step_bytes import step_bytes
from agentkv.engine.loader import LoadedModel
from agentkv.errors import Capacity

CPU = torch.device("cpu")
LENGTHS = [300, 200, 257]
ALL = (
    "dense",
    "quest:budget=64,dense_layers=1",
    "omnikv:budget=64,observers=(0,)",
    "streamingllm:recent=60",
    "snapkv:capacity=64,window=16",
    "adakv:capacity=64,window=16",
    "h2o:heavy=32,recent=32",
    "kvzip:chunk=64",
    "kivi:group=16,residual=32",
    "fp8_kv",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return draw_model("tiny", CPU, torch.float32)


def entries(injected: Injected, row: int, group: int = 0) -> list[int]:
    work = injected.batch.rows[row]
    table = injected.runner.pages.tables[group]
    return [int(each) for each in table[work.row, : -(-(work.slot + 1) // 16)]]


@pytest.mark.parametrize("text", ALL)
def test_rows_of_every_method_decode_and_the_accounts_hold(loaded: LoadedModel, text: str) -> None:
    injected = inject(loaded, methods.parse(text), LENGTHS)
    injected.llm.check()
    before = [work.position for work in injected.batch.rows]
    injected.llm.step()
    injected.llm.check()
    assert [work.position for work in injected.batch.rows] == [each + 1 for each in before]
    assert all(0 <= position - length < 12 for position, length in zip(before, LENGTHS, strict=True))
    assert injected.runner.execute(injected.batch) == [sequence.token_ids[-1] for sequence in injected.sequences]


def test_many_methods_stand_in_one_step(loaded: LoadedModel) -> None:
    each = [methods.parse(text) for text in ALL]
    injected = inject(loaded, each, [100] * 2 * len(each), forms=[form for form in range(len(each)) for _ in "ab"])
    injected.llm.check()
    assert [work.form for work in injected.batch.rows] == [form for form in range(len(each)) for _ in "ab"]


def test_pages_lie_in_random_order_and_keep_their_contents(loaded: LoadedModel) -> None:
    """Bounds are compared with the keys that the tables lead to, number by number."""
    plain, mixed = (inject(loaded, methods.parse(ALL[1]), LENGTHS, shuffle=shuffle) for shuffle in (False, True))
    for injected, ordered in ((plain, True), (mixed, False)):
        found = entries(injected, 0)
        assert (found == sorted(found)) is ordered
        (units, (group,)) = injected.runner._stage.places[0][0]["bounds"][0], (1,)
        for row, length in enumerate(LENGTHS):
            of_kv, of_state = entries(injected, row), entries(injected, row, group)
            for page in range(length // 16):
                for layer in range(2):
                    keys = injected.runner.pages.layer(layer)[of_kv[page], :, 0]
                    bounds = units[of_state[page], layer]
                    assert torch.equal(bounds[:, 0], keys.amin(1))
                    assert torch.equal(bounds[:, 1], keys.amax(1))


def test_without_room_for_all_it_says_so(loaded: LoadedModel) -> None:
    with pytest.raises(Capacity, match="no room"):
        inject(loaded, methods.get("dense"), [200] * 3, memory=256 << 10)


def test_sealed_prompts_enter_one_after_another_where_their_peaks_would_not_fit(loaded: LoadedModel) -> None:
    method = methods.parse("snapkv:capacity=64,window=16")
    one = 320 * 2 * 2 * 2 * 16 * 4
    injected = inject(loaded, method, [300] * 6, new_tokens=8, memory=one * 4)
    assert len(injected.batch.rows) == 6
    assert injected.llm.scheduler.tally.preemptions == 0


@pytest.mark.parametrize(("text", "kv", "state", "sealed"), [
    ("quest:budget=64,dense_layers=1", (301 + 64) * 2 * 2 * 16 * 4, 18 * 2 * 2 * 16 * 4, 0),
    ("omnikv:budget=64,observers=(0,)", (301 + 64) * 2 * 2 * 16 * 4, 0, 0),
    ("fp8_kv", 0, 301 * 2 * 2 * 2 * (16 + 4), 0),
    ("snapkv:capacity=64,window=16", 17 * 2 * 2 * 2 * 16 * 4, 0, 3 * (2 * 2 * 16 * (2 * 16 * 4 + 4)) + 256),
])  # fmt: skip
def test_bytes_of_a_step_by_hand(loaded: LoadedModel, text: str, kv: int, state: int, sealed: int) -> None:
    """301 tokens with the new one: 18 whole pages; two layers, two heads of 16, float32."""
    injected = inject(loaded, methods.parse(text), [300])
    assert step_bytes(injected) == (loaded.weight_bytes, kv, state, sealed)
