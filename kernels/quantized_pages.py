"""Where codes, scales and zeros lie in a page of quantised keys and values, and reading and writing them there.

A page is bytes: `[kv head][K codes, V codes]`, then `[kv head][K scales, K zeros, V scales, V zeros]`. Codes are
`[page_size, code_bytes]`, as `quantize_blocks` packs them. Codes in e4m3 (`quantize_fp8`) have a scale a token and no zeros: a
page of them is `[kv head][K, V][page_size]`[codes, scale], so that a slot's bytes move as one when a slot is moved.
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
        if self.params_start % self.dtype.itemsize:
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
    def slot_bytes(self) -> int:
        """From the codes of one slot to those of the next."""
        return self.code_bytes + self.dtype.itemsize * self.fp8

    @property
    def key_params(self) -> tuple[int, int]:
        """Shape of one head's key scales (and of its zeros)."""
        return (self.page_size, 1) if self.fp8 else (self.page_size // self.key_group, self.head_dim)

    @property
    def value_params(self) -> tuple[int, int]:
        """Shape of one head's value scales (and of its zeros)."""
        return (self.page_size, 1) if self.fp8 else (self.page_size, self.head_dim // self.value_group)

    @property
    def params_start(self) -> int:
        """Where the scales of the first head begin; e4m3: the first."""
        return self.code_bytes if self.fp8 else self.num_kv_heads * 2 * self.page_size * self.code_bytes

    @property
    def head_params(self) -> int:
        """Scales and zeros of one head, counted in items."""
        return 2 * (self.key_params[0] * self.key_params[1] + self.value_params[0] * self.value_params[1])

    @property
    def page_bytes(self) -> int:
        """The whole page."""
        if self.fp8:
            return self.num_kv_heads * 2 * self.page_size * self.slot_bytes
        return self.params_start + self.num_kv_heads * self.head_params * self.dtype.itemsize


class Fields(NamedTuple):
    """Views of pages. Codes uint8 `[num_pages, num_kv_heads, page_size, code_bytes]`; scales and zeros `[num_pages,
    num_kv_heads, *key_params]` and `*value_params`; no zeros for e4m3."""

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    k_zero: Tensor | None
    v_zero: Tensor | None


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """A layer's pages: uint8 `[num_granules, >= page_bytes]`, rows may overlap, a table entry picks the real ones."""

    pages: Tensor
    layout: PageLayout

    def __post_init__(self) -> None:
        if self.pages.dtype != torch.uint8 or self.pages.dim() != 2 or self.pages.shape[1] < self.layout.page_bytes:
            given = f"{self.pages.dtype} {tuple(self.pages.shape)}"
            raise ValueError(f"pages are uint8 [num_granules, {self.layout.page_bytes} or more], not {given}")

    def fields(self) -> Fields:
        """Views of every page; writing through them writes the pages."""
        return split_pages(self.pages, self.layout)


def split_pages(pages: Tensor, layout: PageLayout) -> Fields:
    """Views of pages uint8 `[num_pages, >= page_bytes]`."""
    heads, start = layout.num_kv_heads, layout.params_start
    if layout.fp8:
        items = layout.slot_bytes // layout.dtype.itemsize
        lines, numbers = (
            torch.unflatten(each, 1, (heads, 2, layout.page_size, -1))
            for each in (pages[:, : layout.page_bytes], pages[:, : layout.page_bytes].view(layout.dtype))
        )
        codes, scales = lines[..., : layout.code_bytes], numbers[..., items - 1 :]
        return Fields(codes[:, :, 0], codes[:, :, 1], scales[:, :, 0], scales[:, :, 1], None, None)
    codes = torch.unflatten(pages[:, :start], 1, (heads, 2, layout.page_size, layout.code_bytes))
    params = torch.unflatten(pages[:, start : layout.page_bytes].view(layout.dtype), 1, (heads, -1))
    shapes = [shape for shape in (layout.key_params, layout.value_params) for _ in range(2)]
    parts = torch.split_with_sizes(params, [rows * columns for rows, columns in shapes], -1)
    views = [torch.unflatten(part, -1, shape) for part, shape in zip(parts, shapes, strict=True)]
    return Fields(codes[:, :, 0], codes[:, :, 1], views[0], views[2], views[1], views[3])


def read_pages(payload: QuantizedPages, entries: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """K and V `[num_pages, num_kv_heads, page_size, head_dim]` of the pages at `entries`, int64 `[num_pages]` granules."""
    layout = payload.layout
    fields = split_pages(_gather(payload.pages, entries), layout)
    if fields.k_zero is None or fields.v_zero is None:
        return dequantize_fp8(Fp8(fields.k, fields.k_scale), dtype), dequantize_fp8(Fp8(fields.v, fields.v_scale), dtype)
    k = dequantize_channels(Codes(fields.k, fields.k_scale, fields.k_zero), layout.bits, dtype)
    return k, dequantize_tokens(Codes(fields.v, fields.v_scale, fields.v_zero), layout.bits, dtype)


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


def store_keys(payload: QuantizedPages, entries: Tensor, groups: Tensor, k: Tensor, against: Against = "stored") -> None:
    """Quantise whole groups of keys into their pages, by channel.

    k: `[num_groups, num_kv_heads, key_group, head_dim]`. entries: int64 `[num_groups]`, granule of each one's page; groups:
    int64, its number in the page. No two may share a place.
    """
    layout, fields = payload.layout, payload.fields()
    if fields.k_zero is None:
        raise ValueError("these pages hold e4m3 codes: store_fp8")
    codes = quantize_channels(k, layout.bits, layout.key_group, layout.dtype, against)
    torch.unflatten(fields.k, 2, (-1, layout.key_group))[entries, :, groups] = codes.packed
    fields.k_scale[entries, :, groups] = codes.scale.squeeze(2)
    fields.k_zero[entries, :, groups] = codes.zero.squeeze(2)


def store_values(payload: QuantizedPages, entries: Tensor, offsets: Tensor, v: Tensor, against: Against = "stored") -> None:
    """Quantise values into their pages, by token.

    v: `[num_tokens, num_kv_heads, head_dim]`. entries: int64 `[num_tokens]`, granule of each one's page; offsets: int64, its
    slot in the page. No two may share a slot.
    """
    layout, fields = payload.layout, payload.fields()
    if fields.v_zero is None:
        raise ValueError("these pages hold e4m3 codes: store_fp8")
    codes = quantize_tokens(v.unsqueeze(2), layout.bits, layout.value_group, layout.dtype, against)
    fields.v[entries, :, offsets] = codes.packed.squeeze(2)
    fields.v_scale[entries, :, offsets] = codes.scale.squeeze(2)
    fields.v_zero[entries, :, offsets] = codes.zero.squeeze(2)


def store_fp8(payload: QuantizedPages, entries: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Cast keys and values to e4m3 with a scale a token and head, into their slots. Shapes as `store_kv`."""
    layout, fields = payload.layout, payload.fields()
    if not layout.fp8:
        raise ValueError("these pages hold groups: store_keys and store_values")
    for part, codes, scales in ((k, fields.k, fields.k_scale), (v, fields.v, fields.v_scale)):
        coded = quantize_fp8(part, layout.dtype)
        codes[entries, :, offsets] = coded.codes
        scales[entries, :, offsets] = coded.scale
