"""Decode attention on a GPU over pages of codes in groups, made plain on their way into the products.

Sixteen bits of a page hold codes of several channels. Shifted into the mantissa of a half, a code c reads 2**bits + c, so
that one fused multiply-add makes two numbers plain, and scores and sums are products of halves: keys and values must lie within
2**15. Scores stand with tokens in rows and query heads in columns, eight of which fill the matrix units.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import triton
import triton.language as tl

from agentkv.kernels.overlap import follow


@triton.jit
def _plain(words, scale, start, SHIFT: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr):
    """(2**BITS + code) * scale + start of the codes that lie SHIFT bits up in each word, int16 [ROWS, COLUMNS]; scale and start
    [1, COLUMNS]."""
    if WIDE:
        code = (words.to(tl.int32) >> SHIFT) & ((1 << BITS) - 1)
        numbers = (code + (1 << BITS)).to(tl.float32) * scale + start
    else:
        UP: tl.constexpr = 10 - BITS - SHIFT  # the code becomes the upper bits of a mantissa of ten
        MOVE: tl.constexpr = f"shl.b32 a, $1, {UP}" if UP > 0 else f"shr.b32 a, $1, {-UP}"
        MASK: tl.constexpr = (((1 << BITS) - 1) << (10 - BITS)) * 0x10001
        BASE: tl.constexpr = ((15 + BITS) << 10) * 0x10001
        numbers = tl.inline_asm_elementwise(
            f"{{ .reg .b32 a; {MOVE}; lop3.b32 a, a, {MASK}, {BASE}, 0xEA; fma.rn.f16x2 $0, a, $2, $3; }}",
            "=r,r,r,r", [words, scale, start], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return numbers


@triton.jit
def _scales(params_ptr, pairs_ptr, at, live, BITS: tl.constexpr, WIDE: tl.constexpr):
    """Scale, and zero - 2**BITS * scale, [1, n] of the pairs number `at`."""
    if WIDE:
        scale = tl.load(params_ptr + 2 * at, mask=live, other=0.0).to(tl.float32)
        start = tl.load(params_ptr + 2 * at + 1, mask=live, other=0.0).to(tl.float32) - scale * (1 << BITS)
    else:
        pair = tl.load(pairs_ptr + at, mask=live, other=0)
        LESS: tl.constexpr = ((15 + BITS) << 10 | 0x8000) * 0x10001  # -2**BITS, twice
        scale = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [pair], dtype=tl.float16, is_pure=True, pack=2
        )
        start = tl.inline_asm_elementwise(
            f"{{ .reg .b32 s, z, c; mov.b32 c, {LESS}; prmt.b32 s, $1, $2, 0x5410; prmt.b32 z, $1, $2, 0x7632; "
            "fma.rn.f16x2 $0, s, c, z; }",
            "=r,r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return scale[None, :], start[None, :]


@triton.jit(do_not_specialize=["num_lines"])
def groups_kernel(
    q_ptr, words_ptr, params_ptr, pairs_ptr, table_ptr, bias_ptr, lens_ptr, ends_ptr, pieces_ptr, part_ptr, part_lse_ptr,
    scale, num_lines, q_token_stride, q_head_stride, word_stride, param_stride, pair_stride, row_stride, bias_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, MEMBERS_PAD: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr, SPAN: tl.constexpr, SPAN_PAD: tl.constexpr, WORDS_PAD: tl.constexpr, WIDE: tl.constexpr,
    NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Pieces number pid, pid + grid, ...: each one's part of out (float32, normalised) and its log-sum-exp (base 2).

    A step of the loop is one group of keys. SPAN: words of a value that are read together, all codes of each plane of which
    are in one group of values. params_ptr, pairs_ptr: the pages as numbers, and as pairs of a scale and a zero.
    """
    MEMBERS: tl.constexpr = GROUP * QUERIES
    PLANES: tl.constexpr = 8 // BITS  # byte j holds channels j, j + BYTES, ...: a word has PLANES even and PLANES odd ones
    BYTES: tl.constexpr = DIM // PLANES
    WORDS: tl.constexpr = BYTES // 2
    GROUPS: tl.constexpr = DIM // VALUE_GROUP
    PAIRS: tl.constexpr = PAGE // KEY_GROUP * DIM  # of keys; those of values follow
    follow(OVERLAP)
    total = tl.load(ends_ptr + num_lines - 1) * HEADS
    dtype: tl.constexpr = tl.float32 if WIDE else tl.float16
    member = tl.arange(0, MEMBERS_PAD)
    word, part_word = tl.arange(0, WORDS_PAD), tl.arange(0, SPAN_PAD)
    live_q = (member < MEMBERS)[None, :]
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        piece = pieces_ptr + (item // HEADS) * 4
        row, low, stop, table_line = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
        head = item % HEADS
        token_of = (row * QUERIES + member // GROUP).to(tl.int64)
        q_at = q_ptr + (token_of * q_token_stride + (head * GROUP + member % GROUP) * q_head_stride)[None, :]
        q, most = (), tl.full([MEMBERS_PAD], 1e-30, tl.float32)
        for plane in tl.static_range(2 * PLANES):
            channel = plane // 2 * BYTES + 2 * word + plane % 2
            mine = tl.load(q_at + channel[:, None], mask=(word < WORDS)[:, None] & live_q, other=0.0).to(tl.float32)
            q, most = q + (mine,), tl.maximum(most, tl.max(tl.abs(mine), 0))
        halves = ()
        for plane in tl.static_range(2 * PLANES):
            halves = halves + ((q[plane] / most[None, :]).to(dtype),)  # no query is too large for a half
        unit = (most * scale)[None, :]
        last = tl.load(lens_ptr + row) - QUERIES + member // GROUP  # the slot of the member's own token
        table_row = table_ptr + table_line.to(tl.int64) * row_stride
        top = tl.full([MEMBERS_PAD], -1e30, tl.float32)  # not -inf: a member may see nothing of a group
        sums = tl.zeros([KEY_GROUP, MEMBERS_PAD], tl.float32)
        acc = ()
        for _plane in tl.static_range(WORDS // SPAN * 2 * PLANES):
            acc = acc + (tl.zeros([SPAN_PAD, MEMBERS_PAD], tl.float32),)
        for first in tl.range(low // KEY_GROUP * KEY_GROUP, stop, KEY_GROUP, num_stages=NUM_STAGES):
            token = first + tl.arange(0, KEY_GROUP)
            slot = first % PAGE + tl.arange(0, KEY_GROUP)
            entry = tl.load(table_row + first // PAGE).to(tl.int64)
            codes = words_ptr + entry * word_stride + head * 2 * PAGE * WORDS + slot * WORDS
            params = params_ptr + entry * param_stride
            pairs = pairs_ptr + entry * pair_stride
            own = head * (PAIRS + PAGE * GROUPS)
            k = tl.load(codes[:, None] + word[None, :], mask=(word < WORDS)[None, :], other=0)
            score = tl.zeros([KEY_GROUP, MEMBERS_PAD], tl.float32)
            for plane in tl.static_range(2 * PLANES):
                at = own + first % PAGE // KEY_GROUP * DIM + plane // 2 * BYTES + 2 * word + plane % 2
                k_scale, k_start = _scales(params, pairs, at, word < WORDS, BITS, WIDE)
                keys = _plain(k, k_scale, k_start, plane // 2 * BITS + plane % 2 * 8, BITS, WIDE)
                score = tl.dot(keys, halves[plane], score, input_precision="ieee")
            score *= unit
            live = (token >= low) & (token < stop)
            seen = live[:, None]
            if HAS_BIAS:
                bias = tl.load(bias_ptr + row.to(tl.int64) * bias_stride + token, mask=live, other=0.0)
                score += (bias * 1.4426950408889634)[:, None]
            if CAUSAL and QUERIES > 1:
                seen = seen & (token[:, None] <= last[None, :])
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 0) - 14)  # weights reach 2**14: few are too small for a half
            weight = tl.exp2(score - new_top[None, :])
            shrink = tl.exp2(top - new_top)[None, :]
            sums = sums * shrink + weight
            top = new_top
            new = ()
            for span in tl.static_range(WORDS // SPAN):
                held = part_word < SPAN
                at_v = PAGE * WORDS + span * SPAN + part_word
                v = tl.load(codes[None, :] + at_v[:, None], mask=held[:, None], other=0)
                for plane in tl.static_range(2 * PLANES):
                    group = (plane // 2 * BYTES + 2 * span * SPAN) // VALUE_GROUP
                    at = own + PAIRS + group * PAGE + slot
                    v_scale, v_start = _scales(params, pairs, at, live, BITS, WIDE)  # unused ones may be no numbers
                    values = _plain(v, v_scale, v_start, plane // 2 * BITS + plane % 2 * 8, BITS, WIDE)
                    before = acc[span * 2 * PLANES + plane] * shrink
                    new = new + (tl.dot(values, weight.to(dtype), before, input_precision="ieee"),)
            acc = new

        all_sums = tl.sum(sums, 0)
        safe = tl.where(all_sums > 0, all_sums, 1.0)
        lse = tl.where(all_sums > 0, top + tl.log2(safe), float("-inf"))
        out = member.to(tl.int64) + item * MEMBERS
        for span in tl.static_range(WORDS // SPAN):
            for plane in tl.static_range(2 * PLANES):
                channel = plane // 2 * BYTES + 2 * (span * SPAN + part_word) + plane % 2
                place = part_ptr + out[None, :] * DIM + channel[:, None]
                mask = (part_word < SPAN)[:, None] & live_q
                tl.store(place, acc[span * 2 * PLANES + plane] / safe[None, :], mask=mask)
        tl.store(part_lse_ptr + out, lse, mask=member < MEMBERS)
