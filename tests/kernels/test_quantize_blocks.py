"""Codes by group: against loops in float64 and by closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import NoWaiting
from quantised_oracle import quantise_group

from agentkv.kernels.quantize_blocks import (
    Codes,
    bytes_per_token,
    dequantize_channels,
    dequantize_tokens,
    pack,
    quantize_channels,
    quantize_tokens,
    unpack,
)

NUMBERS = {torch.float16: np.float16, torch.float32: np.float32}


def noise(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3 + 1).to(dtype)


@pytest.mark.parametrize("against", ["stored", "exact"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_group_equals_a_loop_in_float64(bits: int, dtype: torch.dtype, against: str) -> None:
    x = noise(2, 2, 6, 8)
    number = NUMBERS[dtype]
    stored = number if against == "stored" else None
    keys = quantize_channels(x, bits, 3, dtype, against)
    values = quantize_tokens(x, bits, 4, dtype, against)
    assert keys.scale.shape == keys.zero.shape == (2, 2, 2, 8)
    assert values.scale.shape == values.zero.shape == (2, 2, 6, 2)
    assert keys.packed.shape == values.packed.shape == (2, 2, 6, bits)
    levels = unpack(keys.packed, bits), unpack(values.packed, bits)
    for block in range(2):
        for head in range(2):
            for group in range(2):
                for channel in range(8):
                    codes, scale, zero = quantise_group(x[block, head, group * 3 :, channel][:3].tolist(), bits, stored)
                    assert levels[0][block, head, group * 3 :, channel][:3].tolist() == codes
                    assert float(keys.scale[block, head, group, channel]) == float(number(scale))
                    assert float(keys.zero[block, head, group, channel]) == float(number(zero))
                for token in range(6):
                    codes, scale, zero = quantise_group(x[block, head, token, group * 4 :][:4].tolist(), bits, stored)
                    assert levels[1][block, head, token, group * 4 :][:4].tolist() == codes
                    assert float(values.scale[block, head, token, group]) == float(number(scale))
                    assert float(values.zero[block, head, token, group]) == float(number(zero))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_at_most_half_a_step(bits: int, dtype: torch.dtype) -> None:
    """And what rounding of scale and zero to dtype moves the ends of a group by."""
    x = noise(3, 2, 64, 32, dtype=torch.float32)
    loss = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    for quantize, dequantize, axis in (
        (quantize_channels, dequantize_channels, -2),
        (quantize_tokens, dequantize_tokens, -1),
    ):
        codes = quantize(x, bits, 16, dtype)
        error = (dequantize(codes, bits) - x).abs().double()
        half = codes.scale.double().repeat_interleave(16, axis) / 2
        low = codes.zero.double().repeat_interleave(16, axis).abs()
        assert (error <= half * (1 + loss) + loss * (low + 2 * half * (2**bits - 1))).all()
        assert error.max() > half.max() / 4


def test_a_group_with_one_value_is_exact() -> None:
    x = torch.tensor([1.5, -3.25, 0.0, 100.0]).expand(1, 1, 4, 4).contiguous()
    for bits in (2, 4, 8):
        keys = quantize_channels(x, bits, 4)
        assert torch.equal(dequantize_channels(keys, bits), x)
        assert not keys.packed.any()
        assert not keys.scale.any()
        values = quantize_tokens(x.transpose(2, 3), bits, 4)
        assert torch.equal(dequantize_tokens(values, bits), x.transpose(2, 3))
        assert torch.equal(dequantize_channels(quantize_channels(x[:, :, :1], bits, 1), bits), x[:, :, :1])


def test_values_on_the_grid_come_back_exactly() -> None:
    """Two bits carry four values, eight carry 256."""
    for bits in (2, 4, 8):
        levels = torch.randint(0, 2**bits, (2, 3, 64, 16), generator=torch.Generator().manual_seed(bits)).float()
        levels[:, :, 0], levels[:, :, 1] = 0, 2**bits - 1
        x = levels * 0.25 - 2
        assert torch.equal(dequantize_channels(quantize_channels(x, bits, 64), bits), x)
        assert torch.equal(dequantize_tokens(quantize_tokens(x.transpose(2, 3), bits, 64), bits), x.transpose(2, 3))


def test_wide_codes_are_near_identity_and_each_doubling_of_bits_helps() -> None:
    x = noise(2, 2, 32, 64, dtype=torch.float32)
    worst = []
    for bits in (2, 4, 8):
        worst.append(float((dequantize_channels(quantize_channels(x, bits, 32, torch.float32), bits) - x).abs().max()))
    span = float((x.amax(2) - x.amin(2)).max())
    assert worst[2] <= span / 255 / 2 * 1.001
    assert worst[0] > 4 * worst[1] > 40 * worst[2]


def test_halves_round_to_even_and_ends_saturate() -> None:
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0]).view(1, 1, 5, 1).expand(1, 1, 5, 4)
    assert unpack(quantize_channels(x, 2, 5).packed, 2)[0, 0, :, 0].tolist() == [0, 0, 2, 2, 3]
    huge = torch.tensor([-1e9, 1e9]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    assert torch.isfinite(dequantize_channels(quantize_channels(huge, 4, 2), 4)).all()


def test_planes_are_as_described() -> None:
    codes = torch.tensor([[0, 1, 2, 3, 3, 2, 1, 0]], dtype=torch.uint8)
    assert pack(codes, 2).tolist() == [[0 | 2 << 2 | 3 << 4 | 1 << 6, 1 | 3 << 2 | 2 << 4 | 0 << 6]]
    assert pack(codes, 4).tolist() == [[0 | 3 << 4, 1 | 2 << 4, 2 | 1 << 4, 3]]
    for bits in (2, 4, 8):
        assert torch.equal(unpack(pack(codes, bits), bits), codes)


def test_streamed_groups_equal_those_of_one_call() -> None:
    x = noise(1, 2, 96, 16, dtype=torch.float32)
    whole = quantize_channels(x, 4, 32)
    for begin in range(0, 96, 32):
        part = quantize_channels(x[:, :, begin : begin + 32], 4, 32)
        assert torch.equal(part.packed, whole.packed[:, :, begin : begin + 32])
        assert torch.equal(part.scale, whole.scale[:, :, begin // 32 :][:, :, :1])


@pytest.mark.parametrize(("bits", "group", "wanted"), [(2, 32, 96), (4, 32, 160), (2, 64, 80), (4, 128, 136), (8, 128, 264)])
def test_bytes_are_those_of_the_tensors(bits: int, group: int, wanted: int) -> None:
    """Two bits in groups of 32 make 3 effective bits of 128 channels: 96 bytes a token and head."""
    assert bytes_per_token(bits, group, 128) == wanted
    x = noise(1, 1, 128, 128, dtype=torch.float32)
    for dtype in (torch.float16, torch.float32):
        held = [*quantize_channels(x, bits, group, dtype), *quantize_tokens(x, bits, group, dtype)]
        assert sum(part.numel() * part.itemsize for part in held) == 128 * bytes_per_token(bits, group, 128, dtype)


def test_blocks_that_cannot_be_quantised_are_refused() -> None:
    x = torch.zeros(1, 1, 6, 6)
    for call in (
        lambda: quantize_channels(x, 3, 2),
        lambda: quantize_channels(x, 4, 4),
        lambda: quantize_tokens(x, 4, 4),
        lambda: quantize_channels(x, 2, 2),
        lambda: quantize_channels(x[0], 4, 2),
    ):
        with pytest.raises(ValueError, match=r"bits|divide|fill|blocks are"):
            call()


def test_nothing_is_read_on_the_host() -> None:
    x = noise(1, 1, 8, 8, dtype=torch.float32)
    with NoWaiting():
        for quantize, dequantize in ((quantize_channels, dequantize_channels), (quantize_tokens, dequantize_tokens)):
            codes = quantize(x, 4, 4)
            dequantize(Codes(*codes), 4)
