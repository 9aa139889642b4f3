"""What is done to each token by itself, compiled and in torch, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from agentkv.kernels.gate import gate
from agentkv.kernels.rms_norm import rms_norm
from agentkv.kernels.rotate import rotate
from agentkv.kernels.rotate_store import rotate_store
from agentkv.kernels.store_kv import Places, store_kv

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
TOKENS = [1, 3, 16, 17, 40]
pytestmark = pytest.mark.usefixtures("cpu_kernels")


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def near(mine: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(((mine.double() - want).abs() <= TOLERANCE[mine.dtype] * (1 + want.abs())).all())


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [3, 16, 50, 576])
@pytest.mark.parametrize("tokens", TOKENS)
def test_norm(tokens: int, size: int, dtype: torch.dtype) -> None:
    x, weight = made(tokens, size, dtype=dtype) * 5, made(size, dtype=dtype)
    assert near(rms_norm(x, weight, 1e-2), normed(x, weight, 1e-2))
    wide = made(tokens, size + 7, dtype=dtype)
    assert torch.equal(rms_norm(wide[:, 2 : size + 2], weight, 1e-6), rms_norm(wide[:, 2 : size + 2].clone(), weight, 1e-6))
    assert torch.equal(rms_norm(x[-1:], weight, 1e-6)[0], rms_norm(x, weight, 1e-6)[-1])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
def test_rotation_turns_pairs_of_a_head_by_the_angle(tokens: int, with_norm: bool, dtype: torch.dtype) -> None:
    heads, dim = 5, 36
    x = made(tokens, heads + 2, dim, dtype=dtype)[:, :heads]  # a strided view, as of a packed projection
    angle = made(tokens, 1, dim // 2).double()
    weight = made(heads, dim, dtype=dtype) if with_norm else None
    turned = rotate(x, angle.cos().to(dtype), angle.sin().to(dtype), weight, 1e-2)
    start = x.double() if weight is None else normed(x, weight, 1e-2)
    as_complex = torch.complex(start[..., : dim // 2], start[..., dim // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    assert near(turned, torch.cat((as_complex.real, as_complex.imag), -1))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [1, 16, 33, 1536])
@pytest.mark.parametrize("tokens", TOKENS)
def test_gate(tokens: int, size: int, dtype: torch.dtype) -> None:
    x = made(tokens, 2 * size, dtype=dtype) * 4
    first, second = x.double().chunk(2, -1)
    assert near(gate(x), first / (1 + (-first).exp()) * second)


def test_gate_at_the_ends() -> None:
    y = gate(torch.tensor([[-1000.0, 1000.0, 0.0, math.inf, math.nan, 1.0, 2.0, 3.0, 1.0, 1.0]]))[0]
    assert y[:3].tolist() == pytest.approx([0.0, 2000.0, 0.0], abs=1e-30)
    assert y[3] == math.inf
    assert y[4].isnan()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_store_from_a_packed_projection(dtype: torch.dtype) -> None:
    pages = made(9, 2, 2, 4, 12, dtype=dtype)
    want = pages.clone()
    packed = made(3, 7, 12, dtype=dtype)
    k, v = packed[:, 1:3], packed[:, 4:6]
    entries, offsets = torch.tensor([8, 0, 8]), torch.tensor([3, 0, 2])
    store_kv(pages, entries, offsets, k, v)
    for token, (entry, offset) in enumerate(zip(entries.tolist(), offsets.tolist(), strict=True)):
        want[entry, :, 0, offset], want[entry, :, 1, offset] = k[token], v[token]
    assert torch.equal(pages, want)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float64])
def test_rotation_and_store_in_one(dtype: torch.dtype) -> None:
    """Queries and keys are turned by the angle, values are as they were, and nothing else of the pages is written."""
    heads, kv_heads, dim = 3, 2, 12
    qkv, angle = made(3, heads + 2 * kv_heads, dim, dtype=dtype), made(3, 1, dim // 2).double()
    pages = made(9, kv_heads, 2, 4, dim, dtype=dtype)
    want = pages.clone()
    entries, offsets = torch.tensor([8, 0, 8]), torch.tensor([3, 0, 2])
    q = rotate_store(qkv, heads, angle.cos().to(dtype), angle.sin().to(dtype), None, 0.0, Places(pages, entries, offsets))
    wide = qkv.double()
    as_complex = torch.complex(wide[..., : dim // 2], wide[..., dim // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    turned = torch.cat((as_complex.real, as_complex.imag), -1)
    tolerance = TOLERANCE.get(dtype, 1e-6)
    assert torch.allclose(q.double(), turned[:, :heads], rtol=tolerance, atol=tolerance)
    for token, (entry, offset) in enumerate(zip(entries.tolist(), offsets.tolist(), strict=True)):
        k = pages[entry, :, 0, offset]
        assert torch.allclose(k.double(), turned[token, heads : heads + kv_heads], rtol=tolerance, atol=tolerance)
        want[entry, :, 0, offset], want[entry, :, 1, offset] = k, qkv[token, heads + kv_heads :]
    assert torch.equal(pages, want)
