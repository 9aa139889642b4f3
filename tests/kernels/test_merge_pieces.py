"""Parts of pieces, merged: more of them than are read at once, and another part beside them."""

from __future__ import annotations

import pytest
import torch
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted

pytest.importorskip("triton")


def check(device: str, *, beside: bool) -> None:
    """Against sums in float64. The largest log-sum-exp of a line is in its last block, its first, or all are -inf."""
    from agentkv.kernels.merge_pieces_triton import TOGETHER, merge_kernel

    counts, heads, group, dim = (1, 64, 65, 200, 2), 2, 2, 12  # TOGETHER is 64
    generator = torch.Generator().manual_seed(5)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    total, num_rows = int(ends[-1]), len(counts)
    parts = torch.randn(total * heads, group, dim, generator=generator)
    lse = torch.randn(total * heads, group, generator=generator) * 4
    lse[int(ends[1]) * heads : int(ends[2]) * heads] += torch.arange(65 * heads).view(-1, 1)  # grows, up to the last
    lse[int(ends[2]) * heads] += 90.0
    lse[int(ends[3]) * heads :] = -torch.inf
    own = torch.randn(num_rows, heads * group, dim, generator=generator)
    own_lse = torch.randn(num_rows, heads * group, generator=generator) * 3
    out, found = torch.empty(own.shape, device=device), torch.empty(own_lse.shape, device=device)
    given = [each.to(device) for each in (parts, lse, ends)]
    more = {"beside_ptr": own.to(device), "beside_lse_ptr": own_lse.to(device)} if beside else {}
    merge_kernel[(num_rows, heads * group, 2)](
        *given, out, found, HEADS=heads, GROUP=group, QUERIES=1, PER_HEAD=False, DIM=dim, SHARE=8, AT_ONCE=TOGETHER, **more
    )
    for row, count in enumerate(counts):
        first = int(ends[row]) - count
        for head in range(heads * group):
            items = [(first + number) * heads + head // group for number in range(count)]
            logs = lse[items, head % group].double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
            values = parts[items, head % group].double()
            if beside:
                logs, values = torch.cat((logs, own_lse[row, head : head + 1])), torch.cat((values, own[row, head : head + 1]))
            want = logs.logsumexp(0)
            assert found[row, head].item() == pytest.approx(want.item(), rel=1e-5)
            weights = torch.exp(logs - want) if want > -torch.inf else torch.zeros_like(logs)
            assert torch.allclose(out[row, head].cpu().double(), weights @ values.double(), atol=1e-5)


@only_interpreted
@pytest.mark.parametrize("beside", [False, True])
def test_merge_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    numpy_scalars(monkeypatch)
    check("cpu", beside=beside)


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [False, True])
def test_merge_on_a_gpu(beside: bool) -> None:
    check("cuda", beside=beside)


@only_without_gpu
def test_merge_with_pieces_of_any_number() -> None:
    pass_interpreted(__file__, 2)
