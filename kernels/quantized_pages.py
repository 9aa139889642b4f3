"""Where codes, scales and zeros lie in a page of quantised keys and values, and reading and writing them there.

A page is bytes. Of codes in groups: `[kv head][K codes, V codes]`, then `[kv head][K pairs, V pairs]`. Codes are `[page_size,
code_bytes]`, as `quantize_blocks` packs them; a pair is a scale and a zero, of keys by group and channel, of values by group
and token, so that a reader fetches what belongs to a row of its tile side by side.

Codes in e4m3 (`quantize_fp8`) have a scale a token and no zeros: a page is `[kv head][K, V][page_size]` of codes, then of
scales, which may also lie elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentkv.kernels.quantize_blocks import (
    BITS,
    Against,
    Codes,
    dequantize_channels,
    dequantize_tokens,
    quantize_channels,
    quantize_tokens,
)
from agentkv.kernels.quantize_fp8 import Fp8, dequantize_fp8, quantize_fp8


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One page of one layer. bits: of a code. key_group: tokens of a group of keys, and value_group: channels of a group of
    values, both 0 where codes are e4m3 with a scale a token and head. dtype: of scales and zeros. Sizes are bytes.

    Raises ValueError where groups do not divide a page, or fields would not start at a multiple of their item's size.
    """

    num_kv_heads: int
    page_size: int
    head_dim: int
    bits: int = 8
    key_group: int = 0
    value_group: int = 0
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.head_dim * self.bits % 8:
            raise ValueError(f"{self.head_dim} codes of {self.bits} bits do not fill bytes, or not of 2, 4 or 8 bits")
        if self.fp8 and (self.value_group or self.bits != 8):
            raise ValueError("e4m3 codes have 8 bits and no groups")
        if self.fp8 and self.head_dim % self.dtype.itemsize:
            raise ValueError(f"a scale of {self.dtype} cannot stand behind {self.head_dim} codes")
        if not self.fp8 and (self.page_size % self.key_group or not self.value_group or self.head_dim % self.value_group):
            raise ValueError(
                f"groups of {self.key_group} tokens and {self.value_group} channels do not divide a page of {self.page_size} "
                f"tokens and {self.head_dim} channels"
            )
        if not self.fp8 and self.params_start % self.dtype.itemsize:
            raise ValueError(f"scales of {self.dtype} would start at byte {self.params_start} of a page")

    @property
    def fp8(self) -> bool:
        """Are codes e4m3?"""
        return not self.key_group

    @property
    def code_bytes(self) -> int:
        """Codes of one key or value."""
        return self.head_dim * self.bits // 8

    @property
    def params_start(self) -> int:
        """Where the scales begin."""
        return self.num_kv_heads * 2 * self.page_size * self.code_bytes

    @property
    def head_pairs(self) -> tuple[int, int]:
        """Pairs of one head's keys and values."""
        return self.page_size // self.key_group * self.head_dim, self.page_size * self.head_dim // self.value_group

    @property
    def page_bytes(self) -> int:
        """The whole page."""
        if self.fp8:
            return 2 * self.num_kv_heads * self.page_size * (self.head_dim + self.dtype.itemsize)
        return self.params_start + self.num_kv_heads * sum(self.head_pairs) * 2 * self.dtype.itemsize


class GroupFields(NamedTuple):
    """Views of pages of codes in groups. k, v: uint8 `[num_pages, num_kv_heads, page_size, code_bytes]`. k_pairs: `[num_pages,
    num_kv_heads, page_size / key_group, head_dim, 2]`, scale and zero; v_pairs: `[num_pages, num_kv_heads, page_size,
    head_dim / value_group, 2]`."""

    k: Tensor
    v: Tensor
    k_pairs: Tensor
    v_pairs: Tensor


class SlotFields(NamedTuple):
    """Views of pages of e4m3. codes: uint8 `[num_pages, num_kv_heads, 2, page_size, head_dim]`, of keys and values. scales:
    `[num_pages, num_kv_heads, 2, page_size]`."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """A layer's pages: uint8 `[num_granules, >= page_bytes]`, rows may overlap, a table entry picks the real ones. apart: the
    scales of e4m3 where they do not lie behind the codes, `[num_granules, num_kv_heads, 2, page_size]`, at the same entries."""

    pages: Tensor
    layout: PageLayout
    apart: Tensor | None = None

    def __post_init__(self) -> None:
        least = self.layout.page_bytes if self.apart is None else self.layout.params_start
        if self.pages.dtype != torch.uint8 or self.pages.dim() != 2 or self.pages.shape[1] < least:
            given = f"{self.pages.dtype} {tuple(self.pages.shape)}"
            raise ValueError(f"pages are uint8 [num_granules, {least} or more], not {given}")
        if self.apart is not None and (not self.layout.fp8 or self.apart.dtype != self.layout.dtype):
            raise ValueError(f"scales that lie apart are those of e4m3, {self.layout.dtype}, not {self.apart.dtype}")

    def groups(self) -> GroupFields:
        """Views of every page; writing through them writes the pages. ValueError where codes are e4m3."""
        return split_groups(self.pages, self.layout)

    def slots(self) -> SlotFields:
        """The same where codes are e4m3; ValueError where they are not."""
        return split_slots(self.pages, self.layout, self.apart)


def split_groups(pages: Tensor, layout: PageLayout) -> GroupFields:
    """Views of pages uint8 `[num_pages, >= page_bytes]`."""
    if layout.fp8:
        raise ValueError("these pages hold e4m3 codes: store_fp8")
    heads, start, size = layout.num_kv_heads, layout.params_start, layout.page_size
    codes = torch.unflatten(pages[:, :start], 1, (heads, 2, size, layout.code_bytes))
    pairs = torch.unflatten(pages[:, start : layout.page_bytes].view(layout.dtype), 1, (heads, -1, 2))
    k, v = torch.split_with_sizes(pairs, layout.head_pairs, 2)
    v = torch.unflatten(v, 2, (-1, size)).transpose(2, 3)
    return GroupFields(codes[:, :, 0], codes[:, :, 1], torch.unflatten(k, 2, (-1, layout.head_dim)), v)


def split_slots(pages: Tensor, layout: PageLayout, apart: Tensor | None = None) -> SlotFields:
    """Views of pages uint8 `[num_pages, >= page_bytes]`, or of codes and of scales that lie apart."""
    if not layout.fp8:
        raise ValueError("these pages hold groups: store_keys and store_values")
    dims = (layout.num_kv_heads, 2, layout.page_size)
    codes = torch.unflatten(pages[:, : layout.params_start], 1, (*dims, layout.head_dim))
    if apart is None:
        apart = torch.unflatten(pages[:, layout.params_start : layout.page_bytes].view(layout.dtype), 1, dims)
    return SlotFields(codes, apart)


def read_pages(payload: QuantizedPages, entries: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """K and V `[num_pages, num_kv_heads, page_size, head_dim]` of the pages at `entries`, int64 `[num_pages]` granules."""
    layout, pages = payload.layout, _gather(payload.pages, entries)
    if layout.fp8:
        codes, scales = split_slots(pages, layout, None if payload.apart is None else payload.apart[entries])
        both = dequantize_fp8(Fp8(codes, scales.unsqueeze(-1)), dtype)
        return both[:, :, 0], both[:, :, 1]
    held = split_groups(pages, layout)
    k = dequantize_channels(Codes(held.k, held.k_pairs[..., 0], held.k_pairs[..., 1]), layout.bits, dtype)
    return k, dequantize_tokens(Codes(held.v, held.v_pairs[..., 0], held.v_pairs[..., 1]), layout.bits, dtype)


def _gather(pages: Tensor, entries: Tensor) -> Tensor:
    """Pages uint8 `[num_pages, page_bytes]` at those granules, by words of 8 bytes where they are made of such."""
    if any(size % 8 for size in (pages.shape[1], pages.stride(0), pages.storage_offset())):
        return pages[entries]
    return pages.view(torch.int64)[entries].view(torch.uint8)


def gather_dequantised(
    payload: QuantizedPages, entries: Tensor, length: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """K and V `[num_kv_heads, length, head_dim]` of a row's first `length` slots. entries: int32, the row of the table."""
    pages = entries[: -(-length // payload.layout.page_size)].to(torch.int64)
    k, v = (part.transpose(0, 1).flatten(1, 2)[:, :length] for part in read_pages(payload, pages, dtype))
    return k, v


def store_pages(payload: QuantizedPages, entries: Tensor, k: Tensor, v: Tensor, against: Against = "stored") -> None:
    """Quantise whole pages: keys by channel, values by token. k, v: `[num_pages, num_kv_heads, page_size, head_dim]`. entries:
    int64 `[num_pages]`, granules, no two the same."""
    layout = payload.layout
    if k.is_cuda:
        from agentkv.kernels import store_pages_triton as fused  # needs triton, which a CPU-only platform may lack

        if fused.serves(layout, k, v):
            fused.put_pages(payload, entries, k, v, against)
            return
    groups = torch.arange(layout.page_size // layout.key_group, device=entries.device).repeat(len(entries))
    by_group = torch.unflatten(k, 2, (-1, layout.key_group)).transpose(1, 2).flatten(0, 1)
    store_keys(payload, entries.repeat_interleave(layout.page_size // layout.key_group), groups, by_group, against)
    slots = torch.arange(layout.page_size, device=entries.device).repeat(len(entries))
    store_values(payload, entries.repeat_interleave(layout.page_size), slots, v.transpose(1, 2).flatten(0, 1), against)


def store_keys(payload: QuantizedPages, entries: Tensor, groups: Tensor, k: Tensor, against: Against = "stored") -> None:
    """Quantise whole groups of keys into their pages, by channel.

    k: `[num_groups, num_kv_heads, key_group, head_dim]`. entries: int64 `[num_groups]`, granule of each one's page; groups:
    int64, its number in the page. No two may share a place.
    """
    layout, held = payload.layout, payload.groups()
    codes = quantize_channels(k, layout.bits, layout.key_group, layout.dtype, against)
    torch.unflatten(held.k, 2, (-1, layout.key_group))[entries, :, groups] = codes.packed
    held.k_pairs[entries, :, groups] = torch.stack((codes.scale, codes.zero), -1).squeeze(2)


def store_values(payload: QuantizedPages, entries: Tensor, offsets: Tensor, v: Tensor, against: Against = "stored") -> None:
    """Quantise values into their pages, by token.

    v: `[num_tokens, num_kv_heads, head_dim]`. entries: int64 `[num_tokens]`, granule of each one's page; offsets: int64, its
    slot in the page. No two may share a slot.
    """
    layout, held = payload.layout, payload.groups()
    codes = quantize_tokens(v.unsqueeze(2), layout.bits, layout.value_group, layout.dtype, against)
    held.v[entries, :, offsets] = codes.packed.squeeze(2)
    held.v_pairs[entries, :, offsets] = torch.stack((codes.scale, codes.zero), -1).squeeze(2)


def store_fp8(payload: QuantizedPages, entries: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Cast keys and values to e4m3 with a scale a token and head, into their slots. Shapes as `store_kv`."""
    if k.is_cuda:
        from agentkv.kernels import store_fp8_triton as fused  # needs triton, which a CPU-only platform may lack

        if payload.layout.fp8 and fused.serves(k, v):
            fused.put_fp8(payload, entries, offsets, k, v)
            return
    layout, held = payload.layout, payload.slots()
    codes, scale = quantize_fp8(torch.stack((k, v), 2), layout.dtype)
    held.codes[entries, :, :, offsets] = codes
    held.scales[entries, :, :, offsets] = scale.squeeze(3)
