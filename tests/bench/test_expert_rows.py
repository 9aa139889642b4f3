"""Rows of experts in sizes for a CPU: which bytes and operations they count."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from agentkv.bench.expert_rows import drawn_blocks, expert_rows
from agentkv.bench.gpu_rows import Rig


def test_rows_count_the_experts_that_are_read() -> None:
    rig = Rig(torch.device("cpu"), 3, tiny=True)
    rig.copy, rig.matmul = 2.0, 4.0
    coarse, plain, many, maps = (row.measure(rig) for row in expert_rows())
    one = 3 * 128 * 128  # weights of an expert
    for found, itemsize in ((coarse, 1), (plain, 4)):
        read = found.more["tb_per_s"] * median(found.us) * 1e6
        assert round(read / itemsize) % one == 0
        assert 2 * one <= read / itemsize <= 8 * one * (1 + 1e-9)
        assert found.value == pytest.approx(found.more["tb_per_s"] / 2)
    assert many.value == pytest.approx(2 * 12 * 2 * one / median(many.us) / 1e6 / 4)
    assert [each["rows"] for each in maps.more["sweep"]] == [1, 8, 64, 128]
    assert maps.value == min(256 * 128 / each["us"] / 1e6 / 2 for each in maps.more["sweep"])


def test_drawn_blocks_have_the_size_they_say() -> None:
    weight, scale = drawn_blocks(torch.device("cpu"), 3, 256, 384)
    assert (weight.shape, weight.dtype, scale.shape) == ((3, 256, 384), torch.float8_e4m3fn, (3, 2, 3))
    assert 60 < weight.float().std() < 68
