"""The GPU decode kernel against its plain twin: here in Triton's interpreter, on a GPU as it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from agentkv.kernels import reference

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASES = [
    # lens, page_size, num_heads, num_kv_heads, head_dim, first slots that are read (None: all are)
    ((1, 5, 17), 4, 6, 2, 12, None),
    ((300, 16, 257), 16, 4, 4, 16, None),
    ((520,), 16, 8, 2, 64, None),
    ((1, 5, 17), 4, 6, 2, 12, (0, 4, 3)),
    ((300, 16, 700), 16, 4, 1, 16, (37, 0, 443)),
]


def numpy_scalars(patch: pytest.MonkeyPatch) -> None:
    """This release's interpreter takes loop bounds by int(array of one element), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


def check(device: str, dtype: torch.dtype, tolerance: float, case: tuple) -> None:
    from agentkv.kernels.split_decode import split_decode

    lens, page_size, num_heads, num_kv_heads, head_dim, starts = case
    firsts = starts or (0,) * len(lens)
    generator = torch.Generator().manual_seed(3)
    num_pages = [-(-length // page_size) for length in lens]
    order = torch.randperm(sum(num_pages), generator=generator)
    pages = torch.randn(sum(num_pages), num_kv_heads, 2, page_size, head_dim, generator=generator).to(dtype)
    table = torch.full((len(lens) + 2, max(num_pages)), -1, dtype=torch.int32)
    rows = torch.arange(len(lens)).flip(0) + 1
    start = 0
    for row, count in zip(rows.tolist(), num_pages, strict=True):
        table[row, :count] = order[start : start + count]
        start += count
    q = torch.randn(len(lens), num_heads, head_dim, generator=generator).to(dtype)
    out, lse = split_decode(
        q.to(device), pages.to(device), table.to(device), rows.to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        max(length - first for length, first in zip(lens, firsts, strict=True)), head_dim**-0.5,
        None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device),
    )  # fmt: skip
    for index, length in enumerate(lens):
        k, v = reference.read_row(pages, table[rows[index]].tolist(), length)
        seen = slice(firsts[index], length)
        want, want_lse = reference.attention(q[index : index + 1], k[seen], v[seen], head_dim**-0.5)
        assert (out[index].cpu().double() - want[0]).abs().max() < tolerance
        assert (lse[index].cpu().double() - want_lse[0]).abs().max() < max(tolerance, 1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="run by the test below, in a process where Triton is interpreted")
@pytest.mark.parametrize("case", CASES)
def test_equals_the_twin_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, case: tuple) -> None:
    numpy_scalars(monkeypatch)
    check("cpu", torch.float32, 1e-5, case)


@pytest.mark.skipif(CUDA or INTERPRETED, reason="for machines without a GPU")
def test_interpreter_cases_pass() -> None:
    """In a child: Triton decides when it is first imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(CASES)} passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, ((1, 20000, 333), 16, 32, 8, 128, None), ((1, 20000, 900), 16, 4, 1, 256, (0, 19488, 388))]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_equals_the_twin_on_a_gpu(case: tuple, dtype: torch.dtype, tolerance: float) -> None:
    check("cuda", dtype, tolerance, case)
