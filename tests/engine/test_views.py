"""Attention over views of several parts, against one query and one key at a time in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from view_scene import SCALE, Row, Scene, brute, seen_of_tail

from agentkv.engine.attention import attend
from agentkv.engine.received import received
from agentkv.engine.view import AttentionView, PagedKV, Part

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
FORMS = pytest.mark.parametrize("form", ["stripe", "head"])

DECODE = [Row(1, 30, 18, (33, 5)), Row(1, 3, 0, (0, 0)), Row(1, 300, 21, (0, 47)), Row(1, 41, 40, (16, 300))]
GUESSES = [Row(3, 30, 18, (33, 5)), Row(1, 3, 0, (0, 0)), Row(2, 25, 17, (0, 47))]
EVEN = [Row(2, 30, 18, (33, 5)), Row(2, 25, 17, (0, 47))]
CHUNKS = [Row(9, 30, 18, (33, 5)), Row(12, 12, 0, (0, 0)), Row(5, 25, 17, (0, 47)), Row(1, 6, 5, (17, 17))]
PLAIN = [Row(1, 30, 0, (33, 5)), Row(1, 9, 0, (16, 0))]


def check(scene: Scene, parts: tuple[Part, ...], want: tuple[Tensor, Tensor]) -> Tensor:
    got = attend(scene.q, AttentionView(parts), scene.batch, SCALE, lse=True)
    assert got.lse is not None
    assert got.out.dtype == scene.dtype
    assert got.lse.dtype == (torch.float64 if scene.dtype == torch.float64 else torch.float32)
    assert (got.out - want[0]).abs().max() <= TOLERANCE[scene.dtype]
    assert (got.lse - want[1]).abs().max() <= TOLERANCE[scene.dtype]
    return got.lse


@pytest.mark.usefixtures("cpu_kernels")
@DTYPES
@FORMS
@pytest.mark.parametrize("host_slots", [True, False])
@pytest.mark.parametrize("rows", [DECODE, GUESSES, EVEN, PLAIN], ids=["decode", "guesses", "even", "plain"])
def test_decode_over_a_sealed_part_and_the_tail(
    rows: list[Row], dtype: torch.dtype, form: Literal["stripe", "head"], host_slots: bool
) -> None:
    scene = Scene(rows, False, dtype, seed=1)
    part, lines = scene.sealed(form, host_slots)
    check(scene, (part, scene.batch.part(0)), brute(scene, [lines]))


@DTYPES
@FORMS
@pytest.mark.parametrize("host_slots", [True, False])
def test_chunks_over_a_sealed_part_and_the_tail(dtype: torch.dtype, form: Literal["stripe", "head"], host_slots: bool) -> None:
    scene = Scene(CHUNKS, True, dtype, seed=2)
    part, lines = scene.sealed(form, host_slots)
    check(scene, (part, scene.batch.part(0)), brute(scene, [lines]))


@pytest.mark.usefixtures("cpu_kernels")
@DTYPES
@pytest.mark.parametrize("prefill", [False, True])
def test_the_tail_alone_begins_at_its_floor(prefill: bool, dtype: torch.dtype) -> None:
    scene = Scene(CHUNKS if prefill else GUESSES, prefill, dtype, seed=3)
    check(scene, (scene.batch.part(0),), brute(scene, []))


def earlier_rows(scene: Scene) -> tuple[Part, list[Any]]:
    """The tails' slots once more under another table, as a part that all queries see whole; one row holds nothing there."""
    table, lens = scene.batch.table_of(0), [row.tail for row in scene.rows]
    lens[-1] = scene.rows[-1].floor
    seen = replace(table, host_lens=tuple(lens), lens=torch.tensor(lens, dtype=torch.int32))
    cut = [
        [replace(line, k=line.k[row.floor : stop], v=line.v[row.floor : stop]) for line in lines]
        for lines, row, stop in zip(scene.tails, scene.rows, lens, strict=True)
    ]
    return Part(PagedKV(scene.pages), seen), cut


@pytest.mark.usefixtures("cpu_kernels")
@DTYPES
@FORMS
@pytest.mark.parametrize("case", [(DECODE, False), (GUESSES, False), (CHUNKS, True)], ids=["decode", "guesses", "chunks"])
def test_three_parts(case: tuple[list[Row], bool], dtype: torch.dtype, form: Literal["stripe", "head"]) -> None:
    scene = Scene(case[0], case[1], dtype, seed=4)
    part, lines = scene.sealed(form, True)
    rows, cut = earlier_rows(scene)
    check(scene, (part, rows, scene.batch.part(0)), brute(scene, [lines, cut]))


@FORMS
@pytest.mark.parametrize("prefill", [False, True])
def test_a_sealed_part_in_which_no_row_holds_anything(prefill: bool, form: Literal["stripe", "head"]) -> None:
    scene = Scene([Row(2, 9), Row(1, 4)], prefill, seed=5)
    part, lines = scene.sealed(form, False)
    check(scene, (part, scene.batch.part(0)), brute(scene, [lines]))


def biases(scene: Scene, by_head: bool, most: int) -> Tensor:
    bias = torch.randn(len(scene.rows), scene.num_kv_heads if by_head else 1, most, generator=scene.random)
    bias[0, 0, 1] = -torch.inf
    return bias


@DTYPES
@FORMS
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("case", [(DECODE, False), (GUESSES, False), (CHUNKS, True)], ids=["decode", "guesses", "chunks"])
def test_a_bias_of_slots(
    case: tuple[list[Row], bool], by_head: bool, dtype: torch.dtype, form: Literal["stripe", "head"]
) -> None:
    """Of the sealed part always, of the tail in decode."""
    scene = Scene(case[0], case[1], dtype, seed=6)
    part, lines = scene.sealed(form, True)
    of_sealed, of_tail = biases(scene, by_head, 310), biases(scene, by_head, 300)
    if scene.prefill:
        of_tail.zero_()
    else:
        scene.leave_behind(7.0)
    expanded: list[Tensor | None] = [each.expand(-1, scene.num_kv_heads, -1) for each in (of_sealed, of_tail)]
    tail = scene.batch.part(0) if scene.prefill else replace(scene.batch.part(0), bias=of_tail)
    check(scene, (replace(part, bias=of_sealed), tail), brute(scene, [lines], expanded))


def test_a_bias_that_does_not_fit_is_refused() -> None:
    scene = Scene(DECODE, False)
    part = scene.sealed("head", True)[0]
    for bias, shown in ((torch.zeros(4, 2, 299), "299"), (torch.zeros(4, 3, 300), "3, 300")):
        with pytest.raises(TypeError, match=shown):
            attend(scene.q, AttentionView((replace(part, bias=bias), scene.batch.part(0))), scene.batch, SCALE)
    chunks = Scene(CHUNKS, True)
    tail = replace(chunks.batch.part(0), bias=torch.zeros(4, 1, 30))
    with pytest.raises(TypeError, match="own tokens"):
        attend(chunks.q, AttentionView((tail,)), chunks.batch, SCALE)


@pytest.mark.usefixtures("cpu_kernels")
@DTYPES
@FORMS
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("case", [(DECODE, False), (GUESSES, False), (CHUNKS, True)], ids=["decode", "guesses", "chunks"])
def test_attention_received(
    case: tuple[list[Row], bool], reduce: Literal["sum", "max"], form: Literal["stripe", "head"], dtype: torch.dtype
) -> None:
    scene = Scene(case[0], case[1], dtype, seed=7)
    part, lines = scene.sealed(form, True)
    view = AttentionView((part, scene.batch.part(0)))
    want_lse = brute(scene, [lines])[1]
    lse = check(scene, view.parts, brute(scene, [lines]))
    got = received(scene.q, view, scene.batch, SCALE, lse, reduce)
    for index, (span, row) in enumerate(zip(scene.batch.rows, scene.rows, strict=True)):
        assert got[index].first == row.floor
        tail = torch.zeros(2, row.tail - row.floor, dtype=torch.float64)
        sealed = torch.zeros(2, max(row.sealed), dtype=torch.float64)
        for query in range(row.count):
            for head in range(scene.num_heads):
                q, kv_head = scene.q[span.start + query, head].double(), head // 3
                places = [(sealed, slot, lines[index][kv_head].k[slot]) for slot in range(row.sealed[kv_head])]
                keys = scene.tails[index][kv_head].k
                places += [(tail, slot - row.floor, keys[slot]) for slot in seen_of_tail(scene, index, query)]
                for into, slot, key in places:
                    mass = (key @ q * SCALE - want_lse[span.start + query, head]).exp()
                    into[kv_head, slot] = into[kv_head, slot] + mass if reduce == "sum" else max(into[kv_head, slot], mass)
        assert got[index].tail.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert got[index].tail.shape == tail.shape
        assert (got[index].tail - tail).abs().max() <= 3 * TOLERANCE[dtype]
        seal = got[index].sealed
        if max(row.sealed):
            assert seal is not None
            assert (seal - sealed).abs().max() <= 3 * TOLERANCE[dtype]
        else:
            assert seal is None


def test_what_each_query_gives_away_is_one() -> None:
    scene = Scene(CHUNKS, True, seed=8)
    part = scene.sealed("head", False)[0]
    view = AttentionView((part, scene.batch.part(0)))
    lse = attend(scene.q, view, scene.batch, SCALE, lse=True).lse
    assert lse is not None
    for mass, row in zip(received(scene.q, view, scene.batch, SCALE, lse), scene.rows, strict=True):
        assert mass.sealed is not None
        total = mass.tail.sum() + mass.sealed.sum()
        assert abs(float(total) - row.count * scene.num_heads) < 1e-10


def test_mass_is_refused_where_tokens_see_a_window_only() -> None:
    scene = Scene([Row(2, 9, 4)], True)
    windowed = replace(scene.batch.table_of(0), starts=torch.tensor([4, 5], dtype=torch.int32), host_starts=((4, 5),))
    view = AttentionView((Part(PagedKV(scene.pages), windowed),))
    with pytest.raises(TypeError, match="window"):
        received(scene.q, view, scene.batch, SCALE, scene.q.new_zeros(2, 6))


class NoWaiting(TorchDispatchMode):
    """Refuses operations that a device would have to be waited for."""

    WAITING = ("_local_scalar_dense", "nonzero", "equal.", "is_nonzero", "masked_select", "unique", "_to_copy")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_to_copy" in name and (kwargs or {}).get("device") is None:
            return func(*args, **(kwargs or {}))
        if any(word in name for word in self.WAITING):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [(DECODE, False), (GUESSES, False), (CHUNKS, True)], ids=["decode", "guesses", "chunks"])
def test_nothing_waits_for_the_device(case: tuple[list[Row], bool]) -> None:
    from agentkv.kernels.native import native

    if not native().functions:
        pytest.skip("without the compiled kernels the CPU looks for runs of pages")
    scene = Scene(case[0], case[1], torch.float32, seed=9)
    part = replace(scene.sealed("head", True)[0], bias=biases(scene, True, 310))
    for parts in ((part, scene.batch.part(0)), (replace(part, bias=None), scene.batch.part(0))):
        view = AttentionView(parts)
        with NoWaiting():
            lse = attend(scene.q, view, scene.batch, SCALE, lse=True).lse
            assert lse is not None
            received(scene.q, view, scene.batch, SCALE, lse)
