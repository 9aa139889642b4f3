"""Block-FP8 linear maps against the matrix in float64; the kernel in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from coded_weights import coded, drawn, error
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted

from agentkv.kernels.block_fp8 import block_linear, dequantize_blocks

DEVICES = [
    pytest.param("cpu", torch.float32, 1e-5, id="interpreter", marks=only_interpreted),
    pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, 6e-3, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("outs", "ins"), [(128, 128), (256, 384), (100, 130), (1, 1), (2600, 70)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_twin_equals_the_matrix_in_float64(outs: int, ins: int, biased: bool) -> None:
    weight, scale, matrix = coded(outs, ins)
    x, bias = drawn(5, ins).double(), drawn(outs, seed=3).double() if biased else None
    want = x @ matrix.T + (0 if bias is None else bias)
    assert torch.equal(dequantize_blocks(weight, scale, torch.float64), matrix)
    assert error(block_linear(x, weight, scale, bias), want) < 1e-14
    single = block_linear(x.float(), weight, scale, None if bias is None else bias.float())
    assert single.dtype == torch.float32
    assert error(single, want) < 1e-6


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 64, 128), (17, 192, 256), (70, 32, 384), (3, 96, 512)])
def test_few_rows(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, tolerance: float, rows: int, outs: int, ins: int
) -> None:
    from agentkv.kernels.block_linear_triton import few_rows

    numpy_scalars(monkeypatch)
    weight, scale, matrix = coded(outs, ins)
    x = drawn(rows, 2 * ins).to(device, dtype)[:, ins:]  # not contiguous
    bias = drawn(outs, seed=3).to(device, dtype) if rows == 17 else None
    want = x.double().cpu() @ matrix.T + (0 if bias is None else bias.double().cpu())
    assert error(few_rows(x, weight.to(device), scale.to(device), bias), want) < tolerance


def half_step(values: torch.Tensor) -> torch.Tensor:
    """Half of what lies between the e4m3 numbers around each value: three bits of mantissa, steps of 2**-9 below 2**-6."""
    return 2 ** (values.abs().clamp(min=2.0**-6).log2().floor() - 4)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
def test_rows_as_two_terms(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Each term is e4m3 to the nearest; together they are within 2**-8, or within 2**-23 of a row's largest. Rows are of any
    size and step; zeros stay zero. The interpreter divides exactly: there the terms are those of torch's own conversion, to
    even at half. A GPU's quotient may be two roundings off, which decides what lies that close to half."""
    from agentkv.kernels.block_fp8_triton import split_rows

    x = (drawn(9, 2, 200) * torch.exp(drawn(9, 1, 200, seed=2) * 4)).to(device, dtype)[:, 1]
    x[4] = 0
    x[5, ::2] *= 2e-5  # below the smallest normal of the first term
    codes, scale = split_rows(x)
    assert codes.shape == (9, 2, 200)
    wide, first, second = x.float().cpu(), codes[:, 0].float().cpu(), codes[:, 1].float().cpu()
    if device == "cpu":
        scaled = (wide / scale[:, None]).clamp(-448, 448)
        assert torch.equal(first, scaled.to(torch.float8_e4m3fn).float())
        assert torch.equal(second, ((scaled - first) * 16).to(torch.float8_e4m3fn).float())
    exact = (wide.double() / scale.cpu().double()[:, None]).clamp(-448, 448)
    quotient = exact.abs() * 2**-22
    assert ((first - exact).abs() <= half_step(exact) + quotient).all()
    left = (exact - first) * 16
    assert ((second - left).abs() <= half_step(left) + 16 * quotient).all()
    assert not codes[4].float().any()
    back = (first.double() + second.double() / 16) * scale.cpu().double()[:, None]
    most = wide.abs().amax(1, keepdim=True).double()
    assert ((back - wide).abs() <= (wide.abs().double() * 2**-8).maximum(most * 2**-22.8) * (1 + 1e-6)).all()


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 5)
