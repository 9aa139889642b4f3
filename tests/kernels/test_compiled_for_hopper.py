"""GPU kernels compile for an H200 without one: what the interpreter lets pass and the compiler does not is found here."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the compiler is not there when interpreted")
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
KINDS |= {torch.uint8: "u8", torch.int16: "i16", torch.float8_e4m3fn: "fp8e4nv"}
BF16 = torch.bfloat16


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A launch compiles and does not run; kernel's name -> its assembly."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    made: dict[str, str] = {}

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in [*named] if name not in self.arg_names}
        values = dict(zip(self.arg_names, given, strict=False)) | named
        signature, constants, aligned = {}, {}, {}
        for place, parameter in enumerate(self.params):
            value = values.get(parameter.name, parameter.default)
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + KINDS[value.dtype]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            whole = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if whole and not parameter.is_constexpr and not parameter.do_not_specialize:
                aligned[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self, signature, constants, aligned)
        made[self.__name__] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

    monkeypatch.setattr(JITFunction, "run", run)
    return made


def paged(num_rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, 8, 2, 16, 128, dtype=BF16), torch.zeros(num_rows, 16, dtype=torch.int32)


@pytest.mark.parametrize("merge", ["after", "last", "overlap"])
def test_decode(built: dict[str, str], merge: Any) -> None:
    from agentkv.kernels.paged_decode import paged_decode, plan_decode, tuning

    pages, table = paged()
    plan = plan_decode(torch.zeros(2, dtype=torch.int32), torch.arange(2), 10)
    paged_decode(torch.zeros(2, 32, 128, dtype=BF16), pages, table, plan, 0.1, tuned=tuning(256)._replace(merge=merge))
    assert "cp.async" in built["_piece_kernel"]  # tiles are on their way while others are worked on
    assert ("atom" in built["_piece_kernel"]) == (merge == "last")
    assert ("griddepcontrol.wait" in built["_piece_kernel"]) == (merge == "overlap")
    assert ("_merge_kernel" in built) == (merge != "last")


def test_prefill_over_pages(built: dict[str, str]) -> None:
    from agentkv.kernels.paged_prefill import paged_prefill

    pages, table = paged()
    paged_prefill(torch.zeros(100, 32, 128, dtype=BF16), pages, table[0], 200, 0.1, route="pages")
    assert "wgmma" in built["_prefill_kernel"]  # Hopper's own matrix instructions
    assert "cp.async" in built["_prefill_kernel"]


def test_gather_and_merge(built: dict[str, str]) -> None:
    from agentkv.kernels.gather_pages import gather_pages
    from agentkv.kernels.merge_parts_triton import merge_two

    pages, table = paged()
    gather_pages(pages, table[0], 100)
    out, lse = torch.zeros(5, 32, 128, dtype=BF16), torch.zeros(5, 32)
    merge_two((out, out), (lse, lse))
    assert "ld.global.v4" in built["_gather_kernel"]  # 16 bytes a thread


@pytest.mark.parametrize("overlaps", [False, True])
def test_token_ops(built: dict[str, str], monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    from agentkv.kernels import overlap
    from agentkv.kernels import token_ops_triton as fused
    from agentkv.kernels.store_kv import Places

    monkeypatch.setattr(overlap, "_can_overlap", lambda device: overlaps)
    x, weight = torch.zeros(8, 2560, dtype=BF16), torch.zeros(2560, dtype=BF16)
    fused.norm(x, weight, 1e-6, x)
    heads, angle = torch.zeros(8, 48, 128, dtype=BF16), torch.zeros(8, 1, 64, dtype=BF16)
    fused.turn(heads[:, :40], angle, angle, torch.zeros(40, 128, dtype=BF16), 1e-6)
    fused.swiglu(x)
    place = torch.zeros(8, dtype=torch.int64)
    fused.put(paged()[0], place, place, heads[:, 32:40], heads[:, 40:])
    waits = {name: "griddepcontrol.wait" in each and "griddepcontrol.launch_dependents" in each for name, each in built.items()}
    assert waits == dict.fromkeys(("_norm_kernel", "_rotate_kernel", "_gate_kernel", "_store_kernel"), overlaps)
    fused.turn_and_put(heads, 32, angle, angle, torch.zeros(40, 128, dtype=BF16), 1e-6, Places(paged()[0], place, place))
    assert built["_rotate_kernel"].count("st.global") >= 4  # queries, and what is stored


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("tile", "instruction"), [((64, 128, 1, 4, 4), "wgmma"), ((16, 64, 4, 4, 4, 2, 8), "mma.sync")])
def test_linear_of_few_tokens(
    built: dict[str, str], monkeypatch: pytest.MonkeyPatch, overlaps: bool, tile: tuple[int, ...], instruction: str
) -> None:
    """Weights come 16 bytes a thread past the first cache, and the first of them before what they are multiplied with."""
    from agentkv.kernels import linear_triton, overlap

    monkeypatch.setattr(overlap, "_can_overlap", lambda device: overlaps)
    x, weight = torch.zeros(9, 2560, dtype=BF16), torch.zeros(6144, 2560, dtype=BF16)
    linear_triton.stream(x, weight, None, linear_triton.Tile(*tile))
    made = built["_linear_kernel"]
    assert "cp.async.cg" in made
    assert instruction in made
    linear_triton.stream(x, weight, None, linear_triton.Tile(*tile[:5]), gated=True)
    assert ("_sum_kernel" in built) == (len(tile) > 5)
    assert ("griddepcontrol.wait" in made) == overlaps
    if overlaps and len(tile) > 5:
        assert made.index("prefetch.global.L2") < made.index("griddepcontrol.wait") < made.index("cp.async.cg")


def test_selection(built: dict[str, str]) -> None:
    from agentkv.kernels.page_bounds_triton import write_layer_bounds
    from agentkv.kernels.page_columns_triton import PagedKeys, paged_columns, paged_lse
    from agentkv.kernels.page_scores_triton import score_pages
    from agentkv.kernels.paged_decode import paged_decode, plan_decode
    from agentkv.kernels.place_rows_triton import write_rows
    from agentkv.kernels.slot_mass_triton import peaks_of_slots
    from agentkv.kernels.top_positions_triton import select_positions

    q, pages, bounds = torch.zeros(2, 32, 128, dtype=BF16), paged()[0], torch.zeros(64, 8, 2, 128, dtype=BF16)
    lens, heads, place = (torch.zeros(*dims, dtype=torch.int32) for dims in ((2,), (2, 8), (4,)))
    write_layer_bounds(pages, 2, 0, place.long(), bounds.unsqueeze(1), place.long())
    score_pages(q, bounds, torch.zeros(2, 512, dtype=torch.int32), lens, lens, "max")
    assert "mma.sync" in built["_page_kernel"]
    assert "cp.async" in built["_page_kernel"]
    for length, lines in ((8194, 8), (131104, 1)):
        scores, values = torch.zeros(2, lines, length), torch.zeros(2, length, dtype=torch.int32)
        select_positions(scores, 256, heads[:, :lines], heads[:, :lines], 0, 1, False, values, 17 - lines)
    assert {"_held_kernel", "_count_kernel", "_block_kernel", "_write_kernel"} <= built.keys()
    plan = plan_decode(heads, torch.arange(2), 40)
    paged_decode(q, pages, torch.zeros(2, 4096, dtype=torch.int64), plan, 0.1, by_slot=True)
    assert "cp.async" in built["_piece_kernel"]
    paged_decode(q, pages, paged()[1], plan_decode(lens, torch.arange(2), 40), 0.1, scores=torch.zeros(2, 32, 256))
    assert "cp.async" in built["_piece_kernel"]
    keys, queries = PagedKeys(pages, 0, place.long(), 0, 60), torch.zeros(3, 32, 32, 128, dtype=BF16)
    lse = paged_lse(queries, keys, torch.zeros(32, dtype=torch.int32), 0.1)
    paged_columns(queries, keys, lse, torch.zeros(32, dtype=torch.int32), 0.1, by_head=True)
    for name in ("_page_lse_kernel", "_page_column_kernel"):
        assert "wgmma" in built[name]
        assert re.search(r"cp\.async\.c[ag]\.shared\.global .*, 0x10", built[name])
    peaks_of_slots(torch.zeros(2, 32, 256), torch.zeros(2, 32), lens)
    write_rows(torch.zeros(2, 32, 32, 128, dtype=BF16), place.long(), place.long(), q, place.long())
    assert {"_bounds_kernel", "_peak_kernel", "_place_kernel"} <= built.keys()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_decode_over_codes(built: dict[str, str], bits: int, biased: bool) -> None:
    """Products are of halves, tiles are on their way by 16 bytes, and two codes become numbers at once."""
    from agentkv.kernels.dequant_decode_triton import paged_dequant_decode
    from agentkv.kernels.paged_decode import plan_decode
    from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages

    for layout in (PageLayout(8, 32, 128, bits, 32, 32), *([PageLayout(8, 16, 128, dtype=torch.float32)] if bits == 8 else [])):
        pages = QuantizedPages(torch.zeros(8, layout.page_bytes, dtype=torch.uint8), layout)
        plan = plan_decode(torch.zeros(2, dtype=torch.int32), torch.arange(2), 10)
        q, table = torch.zeros(2, 32, 128, dtype=BF16), torch.zeros(2, 16, dtype=torch.int32)
        paged_dequant_decode(q, pages, table, plan, 0.1, bias=torch.zeros(2, 512) if biased else None)
        code = built["fp8_kernel" if layout.fp8 else "groups_kernel"]
        assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in code
        assert re.search(r"cp\.async\.c[ag]\.shared\.global .*, 0x10", code)
        assert ("cvt.rn.f16x2.e4m3x2" if layout.fp8 else "fma.rn.f16x2") in code


def test_store_of_slots(built: dict[str, str]) -> None:
    from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages
    from agentkv.kernels.store_fp8_triton import put_fp8

    layout = PageLayout(8, 16, 128, dtype=torch.float32)
    pages = QuantizedPages(torch.zeros(8, layout.page_bytes, dtype=torch.uint8), layout)
    heads, place = torch.zeros(8, 48, 128, dtype=BF16), torch.zeros(8, dtype=torch.int64)
    put_fp8(pages, place, place, heads[:, 32:40], heads[:, 40:])
    assert "_store_kernel" in built


def test_store_of_pages(built: dict[str, str]) -> None:
    from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages
    from agentkv.kernels.store_pages_triton import put_pages

    layout, x = PageLayout(8, 32, 128, 4, 32, 32), torch.zeros(3, 8, 32, 128, dtype=BF16)
    pages = QuantizedPages(torch.zeros(8, layout.page_bytes, dtype=torch.uint8), layout)
    put_pages(pages, torch.zeros(3, dtype=torch.int64), x, x)
    assert "_page_kernel" in built


def test_pages_from_any_place_of_a_list_are_stored_by_one_kernel() -> None:
    """What launches are told apart by, as triton itself says: a new kind of one would compile amid an answer."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from agentkv.kernels.store_pages_triton import _page_kernel

    kernel = _page_kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    entries, x = torch.zeros(4, dtype=torch.int64), torch.zeros(64, dtype=BF16)
    constants = (8, 32, 128, 4, 32, 32, 1.0, False)
    kinds = [str(bind(x, x, part, x, x, *[4096] * 8, *constants)[1]) for part in (entries, entries[1:], entries[2:])]
    assert entries[1:].data_ptr() % 16 == 8
    assert len({*kinds}) == 1


def coded(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, outs, ins = shape
    return torch.zeros(*shape, dtype=torch.float8_e4m3fn), torch.zeros(*lead, outs // 128, ins // 128)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_linear_by_block_fp8(built: dict[str, str], num_rows: int) -> None:
    from agentkv.kernels.block_fp8_triton import few_rows

    few_rows(torch.zeros(num_rows, 2048, dtype=BF16), *coded(5120, 2048), torch.zeros(5120, dtype=BF16))
    assert "cp.async" in built["_few_rows_kernel"]
    assert "cvt.rn.f16x2.e4m3x2" in built["_few_rows_kernel"]
    assert "cvt.bf16.f16" not in built["_few_rows_kernel"]  # at a quarter of the rate that the bytes come in


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("num_tokens", [64, 2048])
def test_experts(built: dict[str, str], blocks: bool, num_tokens: int) -> None:
    from agentkv.kernels import experts_triton as fused

    maps = [coded(128, 1536, 2048), coded(128, 2048, 768)]
    gate_up, down = maps if blocks else [(weight.to(BF16), None) for weight, _ in maps]
    chosen, weights = fused.route(torch.zeros(num_tokens, 128, dtype=BF16), 8, True)
    order, starts = fused.group(chosen, 128)
    inner = fused.gate_up(torch.zeros(num_tokens, 2048, dtype=BF16), order, starts, *gate_up)
    fused.down(inner, order, starts, weights, *down)
    assert {"_route_kernel", "_group_kernel"} <= built.keys()
    for name in ("_gate_up_kernel", "_down_kernel"):
        assert "cp.async" in built[name]
        assert "wgmma" in built[name]
