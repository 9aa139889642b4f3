"""Float64 loops that share nothing with the kernels: quantisation by group, page bytes by their description, attention."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def quantise_group(values: list[float], bits: int, stored: type | None) -> tuple[list[int], float, float]:
    """(codes, scale, zero) of one group; stored: numpy type that scale and zero are rounded to before codes are made."""
    low, high = min(values), max(values)
    scale, zero = (high - low) / (2**bits - 1), low
    if stored is not None:
        scale, zero = float(stored(scale)), float(stored(zero))
    codes = [0 if scale == 0 else round(min(max((value - zero) / scale, 0), 2**bits - 1)) for value in values]
    return codes, scale, zero


def e4m3(code: int) -> float:
    """Value of a bit pattern: sign, four bits of exponent with bias 7, three of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def read_slot(page: bytes, head: int, slot: int, shape: dict) -> tuple[list[float], list[float]]:
    """K and V of a slot from a page's bytes: `[kv head][K codes, V codes]`, `[kv head][K pairs, V pairs]`, those of values
    group by group; of e4m3 `[chunk][slot]`: codes `[kv head][K, V]`, then scales in that order.

    shape: heads, size, dim, bits, key_group, value_group (0 and 0: e4m3), number (numpy type of scales).
    """
    size, dim, bits = shape["size"], shape["dim"], shape["bits"]
    width, item = dim * bits // 8, np.dtype(shape["number"]).itemsize
    start = shape["heads"] * 2 * size * width

    def code(part: int, channel: int) -> int:
        byte = page[((head * 2 + part) * size + slot) * width + channel % width]
        return byte >> channel // width * bits & 2**bits - 1

    def pair(index: int) -> tuple[float, float]:
        scale, zero = np.frombuffer(page[start + index * 2 * item :][: 2 * item], shape["number"])
        return float(scale), float(zero)

    if not shape["key_group"]:
        lines = [page[((head * 2 + part) * size + slot) * dim :][:dim] for part in (0, 1)]
        scales = np.frombuffer(page[start : start + shape["heads"] * 2 * size * item], shape["number"])
        by_side = [float(scales[(head * 2 + part) * size + slot]) for part in (0, 1)]
        return tuple([e4m3(each) * scale for each in line] for line, scale in zip(lines, by_side, strict=True))
    key_count, value_count = size // shape["key_group"] * dim, size * dim // shape["value_group"]
    first = head * (key_count + value_count)
    k, v = [], []
    for channel in range(dim):
        scale, zero = pair(first + slot // shape["key_group"] * dim + channel)
        k.append(code(0, channel) * scale + zero)
        scale, zero = pair(first + key_count + channel // shape["value_group"] * size + slot)
        v.append(code(1, channel) * scale + zero)
    return k, v


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """By token and head. q: `[count, num_heads, dim]`; k, v: `[num_kv_heads, length, dim]`; seen: `[count, length]`."""
    count, num_heads, _ = q.shape
    group = num_heads // len(k)
    out = torch.zeros(count, num_heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((count, num_heads), -torch.inf, dtype=torch.float64)
    for token in range(count):
        for head in range(num_heads):
            scores = {}
            for slot in range(k.shape[1]):
                extra = 0.0 if bias is None else float(bias[slot])
                if seen[token, slot] and extra != -math.inf:
                    scores[slot] = float(q[token, head].double() @ k[head // group, slot].double()) * scale + extra
            if scores:
                top = max(scores.values())
                total = sum(math.exp(score - top) for score in scores.values())
                lse[token, head] = top + math.log(total)
                for slot, score in scores.items():
                    out[token, head] += math.exp(score - top) / total * v[head // group, slot].double()
    return out, lse
