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
SHARED = 227 << 10
"""Most bytes of shared memory that a program has on an H200."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A launch compiles and does not run; kernel's name -> its assembly. What needs more shared memory than there is fails."""
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
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.metadata.shared <= SHARED, f"{self.__name__} asks for {compiled.metadata.shared} bytes of shared memory"
        made[self.__name__] = compiled.asm["ptx"]

    monkeypatch.setattr(JITFunction, "run", run)
    return made


def paged(num_rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, 8, 2, 16, 128, dtype=BF16), torch.zeros(num_rows, 16, dtype=torch.int32)


@pytest.mark.parametrize("merge", ["after", "overlap"])
def test_decode(built: dict[str, str], merge: Any) -> None:
    from agentkv.kernels.paged_decode import paged_decode, plan_decode, tuning

    pages, table = paged()
    plan = plan_decode(torch.zeros(2, dtype=torch.int32), torch.arange(2), 10)
    tuned = tuning(256)._replace(stages=3, merge=merge)
    paged_decode(torch.zeros(2, 32, 128, dtype=BF16), pages, table, plan, 0.1, tuned=tuned)
    assert "cp.async" in built["piece_kernel"]  # tiles are on their way while others are worked on
    assert ("griddepcontrol.wait" in built["piece_kernel"]) == (merge == "overlap")
    assert ("griddepcontrol.wait" in built["merge_kernel"]) == (merge == "overlap")
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", built["piece_kernel"])
    assert "3" in waits  # the loop goes on while queries, keys and values of the next tile are not there yet


@pytest.mark.parametrize(("num_tokens", "head_dim"), [(100, 128), (1000, 128), (1000, 64), (1000, 256)])
def test_prefill_over_pages(built: dict[str, str], monkeypatch: pytest.MonkeyPatch, num_tokens: int, head_dim: int) -> None:
    """Alone, and behind a history that a library attended to."""
    from agentkv.kernels import paged_prefill as module

    pages, q = torch.zeros(64, 8, 2, 16, head_dim, dtype=BF16), torch.zeros(num_tokens, 32, head_dim, dtype=BF16)
    monkeypatch.setattr(module, "_cudnn", lambda *given: (q, torch.zeros(32, num_tokens).t()))
    monkeypatch.setattr(module, "gather_pages", lambda *given: given[:2])
    routes: tuple[module.Route, ...] = ("pages", "cudnn")
    for route in routes:
        module.paged_prefill(q, pages, paged()[1][0], 4000, 0.1, route=route)
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
    monkeypatch.setattr(fused, "FEW", 0)
    fused.turn_and_put(heads, 32, angle, angle, torch.zeros(40, 128, dtype=BF16), 1e-6, Places(paged()[0], place, place))
    fused.put(paged()[0], place, place, heads[:, 32:40], heads[:, 40:])
    for name in ("_rotate_kernel", "_store_kernel"):  # of many tokens 16 bytes a thread
        assert "ld.global.v4" in built[name]
        assert "st.global.v4" in built[name]


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
    assert "cp.async" in built["piece_kernel"]
    paged_decode(q, pages, paged()[1], plan_decode(lens, torch.arange(2), 40), 0.1, scores=torch.zeros(2, 32, 256))
    assert "cp.async" in built["piece_kernel"]
    keys, queries = PagedKeys(pages, 0, place.long(), 0, 60), torch.zeros(3, 32, 32, 128, dtype=BF16)
    lse = paged_lse(queries, keys, torch.zeros(32, dtype=torch.int32), 0.1)
    paged_columns(queries, keys, lse, torch.zeros(32, dtype=torch.int32), 0.1, by_head=True)
    for name in ("_page_lse_kernel", "_page_column_kernel"):
        assert "wgmma" in built[name]
        assert re.search(r"cp\.async\.c[ag]\.shared\.global .*, 0x10", built[name])
    peaks_of_slots(torch.zeros(2, 32, 256), torch.zeros(2, 32), lens)
    write_rows(torch.zeros(2, 32, 32, 128, dtype=BF16), place.long(), place.long(), q, place.long())
    assert {"_bounds_kernel", "_peak_kernel", "_place_kernel"} <= built.keys()


def test_bounds_of_wide_keys_fit(built: dict[str, str]) -> None:
    from agentkv.kernels.page_scores_triton import score_pages

    bounds, lens = torch.zeros(64, 2, 2, 256), torch.zeros(2, dtype=torch.int32)
    score_pages(torch.zeros(2, 8, 256), bounds, torch.zeros(2, 512, dtype=torch.int32), lens, lens, "max")
    assert "_page_kernel" in built


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("num_queries", [1, 8, 500])
def test_what_holds_tiles_of_wide_keys_fits(built: dict[str, str], dtype: torch.dtype, num_queries: int) -> None:
    """Heads of 256: the widest that are served, and the widest dtype. A tile's bytes follow from both."""
    from agentkv.kernels.attention_columns import attention_lse, reduce_columns
    from agentkv.kernels.page_columns_triton import PagedKeys, paged_columns, paged_lse
    from agentkv.kernels.paged_decode import paged_decode, plan_decode
    from agentkv.kernels.paged_prefill import paged_prefill
    from agentkv.kernels.slot_mass_triton import mass_of_slots

    pages, table, rows = torch.zeros(64, 2, 2, 16, 256, dtype=dtype), torch.zeros(2, 2, 16, dtype=torch.int32), torch.arange(2)
    q, ends = torch.zeros(3, num_queries, 8, 256, dtype=dtype), torch.zeros(num_queries, dtype=torch.int32)
    keys = PagedKeys(pages, 0, torch.zeros(4, dtype=torch.int64), 0, 60)
    lse = paged_lse(q, keys, ends, 0.1)
    paged_columns(q, keys, lse, ends, 0.1, by_head=True)
    paged_columns(q, keys, lse, ends, 0.1)
    k, ends = torch.zeros(2, 60, 256, dtype=dtype), ends.expand(2, -1)
    reduce_columns(q[0], k, attention_lse(q[0], k, ends, 0.1), ends, 0.1, bias=torch.zeros(2, 60))
    if num_queries <= 8:
        together, lens = torch.zeros(2, 2, 4 * num_queries, 256, dtype=dtype), torch.zeros(2, 2, dtype=torch.int32)
        mass_of_slots(together, pages, table, rows, lens, torch.zeros(together.shape[:3]), 0.1, 256, False)
        plan, bias = plan_decode(lens, rows, 40), torch.zeros(2, 2, 256)
        paged_decode(together.flatten(1, 2), pages, table, plan, 0.1, bias=bias)
        paged_decode(together.flatten(1, 2), pages, torch.zeros(2, 4096, dtype=torch.int64), plan, 0.1, by_slot=True)
        given, plan = torch.zeros(2 * num_queries, 8, 256, dtype=dtype), plan_decode(lens[:, 0].contiguous(), rows, 10)
        paged_decode(given, pages, table[:, 0], plan, 0.1, queries=num_queries)
    elif dtype == BF16:
        paged_prefill(q[0], pages, table[0, 0], 600, 0.1, route="pages")


def test_kept_scores(built: dict[str, str]) -> None:
    from agentkv.kernels import kept_scores_triton as fused
    from agentkv.kernels.kept_scores import ScorePages
    from agentkv.kernels.slot_mass_triton import mass_of_slots

    lens, table = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 8, 16, dtype=torch.int32)
    bias, firsts = torch.zeros(2, 8, 256), torch.zeros(2, dtype=torch.int32)
    rows = torch.arange(2)
    mass_of_slots(torch.zeros(2, 8, 4, 128, dtype=BF16), paged()[0], table, rows, lens, bias[..., :4], 0.1, 256, False, bias)
    units = torch.zeros(64, 36, 8, 16)
    for ends in (torch.zeros(2, 36, 8, dtype=torch.int32), firsts.view(-1, 1, 1).expand(-1, 36, 8)):
        scores = ScorePages(units, torch.zeros(2, 16, dtype=torch.int64), firsts, ends)
        fused.grow(scores, 3, bias)
        fused.hiding(scores, 3)
        fused.strike_lowest(scores, scores, firsts)
    assert {"_mass_kernel", "_grow_kernel", "_hiding_kernel", "_strike_kernel"} <= built.keys()


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


@pytest.mark.parametrize("rank", [256, 512])
def test_decode_over_latents(built: dict[str, str], rank: int) -> None:
    """Keys are rebuilt by products of whole warp groups where tiles have 64 tokens."""
    from agentkv.kernels.low_rank_decode import LowRankPages
    from agentkv.kernels.low_rank_decode_triton import paged_low_rank_decode
    from agentkv.kernels.paged_decode import plan_decode

    latents = torch.zeros(64, 16, 2, rank, dtype=BF16)
    factors = (torch.zeros(8, rank, 128, dtype=BF16) for _ in "kv")
    payload = LowRankPages(latents, latents, *factors, torch.zeros(64), k_norm=torch.zeros(8, 128, dtype=BF16))
    plan = plan_decode(torch.zeros(2, dtype=torch.int32), torch.arange(2), 10)
    q, table = torch.zeros(2, 32, 128, dtype=BF16), torch.zeros(2, 16, dtype=torch.int32)
    paged_low_rank_decode(q, payload, table, plan, 0.1)
    assert ("wgmma.mma_async" in built["_piece_kernel"]) is (rank == 256)


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


@pytest.mark.parametrize(
    "tile", [(8, 16, 4, 0, 4, 2), (8, 16, 2, 5, 2), (64, 64, 1, 4, 4, 2, 2), (64, 64, 1, 3, 4, 1, 1, True)]
)
def test_linear_by_block_fp8(built: dict[str, str], monkeypatch: pytest.MonkeyPatch, tile: tuple[int, ...]) -> None:
    """Codes come 16 bytes a thread, all that are held before rows are waited for, and two become numbers at once."""
    from agentkv.kernels import block_linear_triton, overlap

    monkeypatch.setattr(overlap, "_can_overlap", lambda device: True)
    cut = block_linear_triton.Tile(*tile)
    x, bias = torch.zeros(64 if cut.rows > 16 else 9, 2048, dtype=BF16), torch.zeros(5120, dtype=BF16)
    block_linear_triton.few_rows(x, *coded(5120, 2048), bias, cut)
    made = built["_held_kernel" if cut.stages == 0 else "_turns_kernel" if cut.ways == 1 else "_ways_kernel"]
    assert ("_sum_kernel" in built) == (cut.split > 1)
    assert ("wgmma" if cut.ways == 1 else "mma.sync") in made
    assert ("cvt.rn.f16x2.e4m3x2" in made) != cut.terms
    assert "cvt.bf16.f16" not in made  # at a quarter of the rate that the bytes come in
    assert made.index("griddepcontrol.launch_dependents") < made.index("griddepcontrol.wait")
    if cut.stages == 0:
        codes = cut.outs * 2048 // cut.split
        assert made.partition("griddepcontrol.wait")[0].count("ld.global.v4") == codes // 16 // (32 * cut.warps)
    else:
        assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", made)
    assert cut.terms == ("_terms_kernel" in built)


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


@pytest.mark.parametrize("heads", [False, True])
def test_extend(built: dict[str, str], heads: bool) -> None:
    from agentkv.kernels.paged_extend import paged_extend
    from agentkv.kernels.query_tiles import QueryTiles

    pages, table = paged()
    tiles = QueryTiles(32, *(torch.zeros(count, dtype=torch.int64) for count in (4, 4, 2, 64)))
    lens = torch.zeros(2, 8, dtype=torch.int32) if heads else torch.zeros(2, dtype=torch.int32)
    paged_extend(torch.zeros(64, 32, 128, dtype=BF16), pages, table, torch.arange(2), lens, tiles, 0.1, most=32768)
    assert "wgmma" in built["_extend_kernel"]
    assert "cp.async" in built["_extend_kernel"]
    assert "_merge_kernel" in built
