"""Eight-bit floats: against all 254 finite values by brute force, and at their edges."""

from __future__ import annotations

import pytest
import torch
from devices import NoWaiting
from quantised_oracle import e4m3

from agentkv.kernels.quantize_fp8 import dequantize_fp8, fp8_bytes_per_token, quantize_fp8, quantize_fp8_static

FINITE = sorted((e4m3(code), code) for code in range(256) if code & 0x7F != 0x7F and code != 0x80)


def nearest(value: float) -> float:
    """The finite value nearest to it, that with an even code at half."""
    return min(FINITE, key=lambda each: (abs(each[0] - value), each[1] & 1))[0]


def samples() -> torch.Tensor:
    """All finite values, all midpoints, a step beside each, and noise down to subnormals."""
    finite = torch.tensor([value for value, _ in FINITE])
    middle = (finite[1:] + finite[:-1]) / 2
    noise = torch.randn(500, generator=torch.Generator().manual_seed(2)) * torch.logspace(-4, 2, 500)
    beside = [torch.nextafter(middle, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    return torch.cat((finite, middle, *beside, noise)).clamp(-448, 448)


def test_rounding_is_to_the_nearest_to_even_at_half() -> None:
    x = samples()
    coded = quantize_fp8_static(x.view(-1, 1, 1), torch.ones(1))
    got = dequantize_fp8(coded, torch.float64).flatten().tolist()
    assert got == [nearest(value) for value in x.double().tolist()]


def test_the_scale_of_a_token_and_head_maps_its_largest_to_448() -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 4, 15).view(5, 3, 1)
    coded = quantize_fp8(x)
    assert coded.scale.shape == (5, 3, 1)
    for token in range(5):
        for head in range(3):
            most = float(x[token, head].abs().max())
            scale = float(coded.scale[token, head])
            assert scale == pytest.approx(most / 448, rel=1e-6)
            back = [e4m3(code) * scale for code in coded.codes[token, head].tolist()]
            assert max(map(abs, back)) == pytest.approx(most, rel=1e-6)
            for value, wanted in zip(back, x[token, head].tolist(), strict=True):
                assert abs(value - wanted) <= max(abs(wanted) / 16, scale * 2**-10) * (1 + 1e-6)
    assert torch.allclose(dequantize_fp8(coded), x, rtol=1 / 16 + 1e-6, atol=1e4 * 2**-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_are_made_for_the_scale_as_stored(dtype: torch.dtype) -> None:
    x = torch.randn(40, 2, 8, generator=torch.Generator().manual_seed(4))
    coded = quantize_fp8(x, dtype)
    assert coded.scale.dtype == dtype
    again = quantize_fp8_static(x.view(-1, 1, 8).transpose(0, 1), coded.scale.flatten())
    assert torch.equal(again.codes.transpose(0, 1).reshape(40, 2, 8), coded.codes)


def test_zeros_and_what_lies_outside() -> None:
    coded = quantize_fp8(torch.zeros(2, 1, 4))
    assert not dequantize_fp8(coded).any()
    x = torch.tensor([449.0, -1e30, 1e-30, 464.0]).view(1, 1, 4)
    coded = quantize_fp8_static(x, torch.ones(1))
    assert dequantize_fp8(coded).flatten().tolist() == [448, -448, 0, 448]
    by_head = quantize_fp8_static(torch.full((1, 2, 1), 100.0), torch.tensor([0.1, 1.0]))
    assert dequantize_fp8(by_head).flatten().tolist() == pytest.approx([44.8, 96])  # 100 lies between 96 and 104


def test_bytes_and_no_host_reads() -> None:
    assert fp8_bytes_per_token(128) == 264
    assert fp8_bytes_per_token(128, torch.float16) == 260
    x = torch.randn(3, 2, 128)
    with NoWaiting():
        coded = quantize_fp8(x)
        dequantize_fp8(coded)
        quantize_fp8_static(x, torch.ones(2))
    assert 2 * sum(part.numel() * part.itemsize for part in coded) == 6 * fp8_bytes_per_token(128)
