"""Decode attention on a GPU over pages of e4m3 codes, a scale for each token and head.

Sixteen bits hold the codes of an even and an odd channel; one instruction makes two halves of two codes, exactly. Scales stay
off the codes: those of keys are multiplied into scores, those of values into weights. Scores stand with tokens in rows and
query heads in columns, eight of which fill the matrix units.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import triton
import triton.language as tl

from agentkv.kernels.overlap import follow


@triton.jit
def _numbers(words, ODD: tl.constexpr, WIDE: tl.constexpr):
    """What the codes of the even or the odd channels stand for, of words int16 [ROWS, COLUMNS]."""
    if WIDE:
        code = (words.to(tl.int32) >> (8 * ODD)) & 0xFF
        numbers = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        PICK: tl.constexpr = 0x3131 if ODD else 0x2020
        numbers = tl.inline_asm_elementwise(
            f"{{ .reg .b32 a; .reg .b16 two, more; prmt.b32 a, $1, $1, {PICK}; mov.b32 {{two, more}}, a; "
            "cvt.rn.f16x2.e4m3x2 $0, two; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return numbers


@triton.jit(do_not_specialize=["num_lines"])
def fp8_kernel(
    q_ptr, words_ptr, scales_ptr, table_ptr, bias_ptr, lens_ptr, ends_ptr, pieces_ptr, part_ptr, part_lse_ptr,
    scale, num_lines, q_token_stride, q_head_stride, word_stride, scale_stride, row_stride, bias_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, MEMBERS_PAD: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WORDS_PAD: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Pieces number pid, pid + grid, ...: each one's part of out (float32, normalised) and its log-sum-exp (base 2)."""
    MEMBERS: tl.constexpr = GROUP * QUERIES
    WORDS: tl.constexpr = DIM // 2
    follow(OVERLAP)
    total = tl.load(ends_ptr + num_lines - 1) * HEADS
    dtype: tl.constexpr = tl.float32 if WIDE else tl.float16
    member, word = tl.arange(0, MEMBERS_PAD), tl.arange(0, WORDS_PAD)
    live_word = word < WORDS
    live_q = live_word[:, None] & (member < MEMBERS)[None, :]
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        piece = pieces_ptr + (item // HEADS) * 4
        row, low, stop, table_line = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
        head = item % HEADS
        token_of = (row * QUERIES + member // GROUP).to(tl.int64)
        q_at = (
            q_ptr + (token_of * q_token_stride + (head * GROUP + member % GROUP) * q_head_stride)[None, :] + 2 * word[:, None]
        )
        even = tl.load(q_at, mask=live_q, other=0.0).to(tl.float32)
        odd = tl.load(q_at + 1, mask=live_q, other=0.0).to(tl.float32)
        most = tl.maximum(tl.maximum(tl.max(tl.abs(even), 0), tl.max(tl.abs(odd), 0)), 1e-30)[None, :]
        even, odd = (even / most).to(dtype), (odd / most).to(dtype)  # no query is too large for a half
        unit = most * scale
        last = tl.load(lens_ptr + row) - QUERIES + member // GROUP  # the slot of the member's own token
        table_row = table_ptr + table_line.to(tl.int64) * row_stride
        top = tl.full([MEMBERS_PAD], -1e30, tl.float32)  # not -inf: a member may see nothing of a block
        sums = tl.zeros([BLOCK, MEMBERS_PAD], tl.float32)
        acc_even = tl.zeros([WORDS_PAD, MEMBERS_PAD], tl.float32)
        acc_odd = tl.zeros([WORDS_PAD, MEMBERS_PAD], tl.float32)
        for first in tl.range(low, stop, BLOCK, num_stages=NUM_STAGES):
            token = first + tl.arange(0, BLOCK)
            live, slot = token < stop, token % PAGE
            entry = tl.load(table_row + token // PAGE, mask=live, other=0).to(tl.int64)
            place = words_ptr + entry * word_stride + (head * 2 * PAGE + slot) * WORDS
            scales = scales_ptr + entry * scale_stride + head * 2 * PAGE + slot
            k = tl.load(place[:, None] + word[None, :], mask=live[:, None] & live_word[None, :], other=0)
            score = tl.dot(_numbers(k, False, WIDE), even, input_precision="ieee")
            score = tl.dot(_numbers(k, True, WIDE), odd, score, input_precision="ieee")
            score *= tl.load(scales, mask=live, other=0.0).to(tl.float32)[:, None] * unit
            if HAS_BIAS:
                bias = tl.load(bias_ptr + row.to(tl.int64) * bias_stride + token, mask=live, other=0.0)
                score += (bias * 1.4426950408889634)[:, None]
            seen = live[:, None]
            if CAUSAL and QUERIES > 1:
                seen = seen & (token[:, None] <= last[None, :])
            score = tl.where(seen, score, float("-inf"))
            v_scale = tl.load(scales + PAGE, mask=live, other=0.0).to(tl.float32)[:, None]
            # weights with their scales are 2**14 at most: few are too small for a half
            new_top = tl.maximum(top, tl.max(score + tl.log2(tl.maximum(v_scale, 1e-25)), 0) - 14)
            weight = tl.exp2(score - new_top[None, :])
            shrink = tl.exp2(top - new_top)[None, :]
            sums = sums * shrink + weight
            top = new_top
            weight = (weight * v_scale).to(dtype)
            v = tl.load(place[None, :] + (PAGE * WORDS + word)[:, None], mask=live[None, :] & live_word[:, None], other=0)
            acc_even = tl.dot(_numbers(v, False, WIDE), weight, acc_even * shrink, input_precision="ieee")
            acc_odd = tl.dot(_numbers(v, True, WIDE), weight, acc_odd * shrink, input_precision="ieee")

        all_sums = tl.sum(sums, 0)
        safe = tl.where(all_sums > 0, all_sums, 1.0)
        lse = tl.where(all_sums > 0, top + tl.log2(safe), float("-inf"))
        out = member.to(tl.int64) + item * MEMBERS
        place_out = part_ptr + out[None, :] * DIM + 2 * word[:, None]
        tl.store(place_out, acc_even / safe[None, :], mask=live_q)
        tl.store(place_out + 1, acc_odd / safe[None, :], mask=live_q)
        tl.store(part_lse_ptr + out, lse, mask=member < MEMBERS)
