"""Whole units in bytes: against the plain twin, in chunks, and above 4 GiB."""

from __future__ import annotations

import random

import pytest
import torch

from agentkv.kernels import move_units as kernel
from agentkv.kernels import reference
from agentkv.kernels.move_units import move_units, unit_rows

GRANULE = 256


def noise(granules: int) -> torch.Tensor:
    return torch.randint(0, 256, (granules * GRANULE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(granules))


@pytest.mark.parametrize("chunk_bytes", [1, 2000, 64 << 20])
@pytest.mark.parametrize("granules", [1, 3, 11])
def test_moves_equal_the_twin(monkeypatch: pytest.MonkeyPatch, granules: int, chunk_bytes: int) -> None:
    """Slides down, own source overlapped, and jumps past everything that is still to be read."""
    monkeypatch.setattr(kernel, "CHUNK_BYTES", chunk_bytes)
    rng = random.Random(granules)
    total, room = 40 * granules, 8 * granules
    for _ in range(20):
        source = sorted(rng.sample(range(2, 40 - 8), 9))
        source = [unit * granules + rng.randrange(granules) if i % 2 else unit * granules for i, unit in enumerate(source)]
        source = [unit for i, unit in enumerate(source) if not i or unit >= source[i - 1] + granules]
        target, position, far = [], rng.randrange(granules), total - room
        for unit in source:
            if rng.random() < 0.7 and position <= unit:
                target.append(position)
                position += granules
            elif far + granules <= total:
                target.append(far)
                far += granules
            else:
                target.append(unit)
                position = unit + granules
        arena = noise(total)
        want = arena.clone()
        reference.move_units(want, granules * GRANULE, GRANULE, source, target)
        rows = unit_rows(arena, granules * GRANULE, GRANULE)
        assert rows.shape == (total - granules + 1, granules * GRANULE // 8)
        move_units(rows, torch.tensor(source), torch.tensor(target))
        assert torch.equal(arena, want)


def test_rows_above_four_gib_on_untouched_memory() -> None:
    """Offsets in 64 bits: units beyond byte 2^32 move between themselves and to below."""
    arena = torch.empty((4 << 30) + (1 << 20), dtype=torch.uint8)
    high, unit_bytes = (4 << 30) // GRANULE, 3 * GRANULE
    rows = unit_rows(arena, unit_bytes, GRANULE)
    unit = noise(3)
    arena[high * GRANULE : high * GRANULE + unit_bytes] = unit
    move_units(rows, torch.tensor([high]), torch.tensor([high + 7]))
    move_units(rows, torch.tensor([high + 7]), torch.tensor([5]))
    assert torch.equal(arena[(high + 7) * GRANULE :][:unit_bytes], unit)
    assert torch.equal(arena[5 * GRANULE :][:unit_bytes], unit)


def test_rows_of_a_half_terabyte_arena_are_addressed_without_it() -> None:
    arena = torch.empty(2**31 * GRANULE, dtype=torch.uint8, device="meta")
    rows = unit_rows(arena, 9 * GRANULE, GRANULE)
    assert rows.shape == (2**31 - 8, 9 * 32)
    last = rows[2**31 - 9]
    assert last.storage_offset() * 8 == (2**31 - 9) * GRANULE
    assert last.storage_offset() * 8 + last.numel() * 8 == arena.numel()
