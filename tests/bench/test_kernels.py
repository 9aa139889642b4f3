"""`agentkv bench kernels`."""

from __future__ import annotations

import pytest
import torch

from agentkv.bench import kernels
from agentkv.errors import BadRequest


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(BadRequest, match="GPU"):
        kernels.run_kernels()


@pytest.mark.gpu
def test_a_row_has_every_repeat_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHAPES", (kernels.Shape("small", (2048, 160), 8, 2, 0.0),))
    result = kernels.run_kernels(repeats=5)
    (row,) = result["decode_attention"]
    assert len(row["us"]) == 5
    assert row["met"]
    assert row["tb_per_s"] == pytest.approx((2048 + 160) * 2 * 2 * 128 * 2 / row["median_us"] / 1e6)
    assert 0.5 < result["copy_tb_per_s"] < 50
