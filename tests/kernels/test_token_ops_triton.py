"""Norm, rotation, gate and store in one launch each: against float64 formulas, here in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import only_interpreted, only_without_gpu, pass_interpreted
from torch import Tensor

pytest.importorskip("triton")
EPS = 1e-6
DEVICES = [
    pytest.param("cpu", torch.float32, 2e-6, id="interpreter", marks=only_interpreted),
    pytest.param("cuda", torch.float32, 2e-6, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
]


def drawn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got.cpu().double() - want.cpu()).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


@pytest.fixture(params=[False, True], ids=["few", "many"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has one head of a token, as of few tokens, or several."""
    from agentkv.kernels import token_ops_triton as fused

    monkeypatch.setattr(fused, "FEW", 0 if request.param else 16)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("size", [8, 100, 2560])
def test_norm_with_and_without_a_sum(device: str, dtype: torch.dtype, tolerance: float, size: int) -> None:
    from agentkv.kernels import token_ops_triton as fused

    wide, delta, weight = (drawn(device, dtype, *shape, seed=i) for i, shape in enumerate(((5, 2 * size), (5, size), (size,))))
    x = wide[:, size:]  # not contiguous
    near(fused.norm(x, weight, EPS)[1], normed(x, weight), tolerance)
    total, y = fused.norm(x, weight, EPS, delta)
    assert torch.equal(total, x + delta)
    near(y, normed(total, weight), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("num_heads", "dim"), [(3, 12), (5, 128), (19, 24)])
@pytest.mark.usefixtures("cut")
def test_rotation_with_and_without_a_norm(
    device: str, dtype: torch.dtype, tolerance: float, norms: bool, num_heads: int, dim: int
) -> None:
    from agentkv.kernels import token_ops_triton as fused

    x = drawn(device, dtype, 7, num_heads + 2, dim)[:, :num_heads]
    angle = drawn("cpu", torch.float64, 7, 1, dim // 2, seed=1)
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    weight = drawn(device, dtype, num_heads, dim, seed=2) if norms else None
    head = (normed(x, weight) if weight is not None else x.double()).cpu()
    turned = torch.view_as_complex(torch.stack(head.chunk(2, -1), -1)) * torch.polar(torch.ones_like(angle), angle)
    near(fused.turn(x, cos, sin, weight, EPS), torch.cat((turned.real, turned.imag), -1), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("size", [6, 1500])
def test_gate(device: str, dtype: torch.dtype, tolerance: float, size: int) -> None:
    from agentkv.kernels import token_ops_triton as fused

    x = drawn(device, dtype, 3, 2 * size) * 4
    wide = x.double()
    near(fused.swiglu(x), wide[:, :size] * torch.sigmoid(wide[:, :size]) * wide[:, size:], tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.usefixtures("cut")
def test_store_writes_those_slots_and_no_others(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from agentkv.kernels import token_ops_triton as fused

    page, heads, dim = 4, 3, 24
    arena = drawn(device, dtype, 9 * heads * 2 * page * dim)
    pages = arena.as_strided((5, heads, 2, page, dim), (2 * heads * page * dim * 2, 2 * page * dim, page * dim, dim, 1))
    want = pages.clone()
    entries, offsets = torch.tensor([3, 0, 3], device=device), torch.tensor([1, 3, 0], device=device)
    kv = drawn(device, dtype, 3, heads * 2, dim, seed=1)
    k, v = kv[:, :heads], kv[:, heads:]
    fused.put(pages, entries, offsets, k, v)
    for token, (entry, offset) in enumerate(zip(entries.tolist(), offsets.tolist(), strict=True)):
        want[entry, :, 0, offset], want[entry, :, 1, offset] = k[token], v[token]
    assert torch.equal(pages, want)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 2), (12, 4)])
@pytest.mark.usefixtures("cut")
def test_rotation_and_store_together_are_what_both_are(
    device: str, dtype: torch.dtype, tolerance: float, norms: bool, heads: int, kv_heads: int
) -> None:
    from agentkv.kernels import token_ops_triton as fused
    from agentkv.kernels.store_kv import Places

    page, dim = 4, 24
    qkv = drawn(device, dtype, 3, heads + 2 * kv_heads, dim)
    angle = drawn("cpu", torch.float64, 3, 1, dim // 2, seed=1)
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    weight = drawn(device, dtype, heads + kv_heads, dim, seed=2) if norms else None
    arena = drawn(device, dtype, 9 * kv_heads * 2 * page * dim, seed=3)
    strides = (2 * kv_heads * page * dim * 2, 2 * page * dim, page * dim, dim, 1)
    pages = arena.clone().as_strided((5, kv_heads, 2, page, dim), strides)
    want = arena.clone().as_strided(pages.shape, strides)
    entries, offsets = torch.tensor([3, 0, 3], device=device), torch.tensor([1, 3, 0], device=device)
    q = fused.turn_and_put(qkv, heads, cos, sin, weight, EPS, Places(pages, entries, offsets))
    turned = fused.turn(qkv[:, : heads + kv_heads], cos, sin, weight, EPS)
    fused.put(want, entries, offsets, turned[:, heads:], qkv[:, heads + kv_heads :])
    assert torch.equal(q, turned[:, :heads])
    assert torch.equal(pages, want)


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 27)


@pytest.mark.gpu
def test_the_callers_take_these_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentkv.kernels import token_ops_triton as fused
    from agentkv.kernels.gate import gate
    from agentkv.kernels.rms_norm import add_rms_norm, rms_norm
    from agentkv.kernels.rotate import rotate

    called: list[str] = []
    for name in ("norm", "turn", "swiglu"):
        original: Any = getattr(fused, name)
        monkeypatch.setattr(
            fused, name, lambda *given, name=name, original=original: (called.append(name), original(*given))[1]
        )
    x, weight = drawn("cuda", torch.bfloat16, 3, 64), drawn("cuda", torch.bfloat16, 64)
    rms_norm(x, weight, EPS)
    add_rms_norm(x, x, weight, EPS)
    gate(x)
    rotate(x.view(3, 4, 16), *torch.ones(2, 3, 1, 8, device="cuda").bfloat16().unbind(0), weight.view(4, 16), EPS)
    assert called == ["norm", "norm", "swiglu", "turn"]
