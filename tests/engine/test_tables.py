"""Page tables cut in two: what is read of each is what was read of the whole."""

from __future__ import annotations

import pytest
import torch

from agentkv.engine.tables import RowTable


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1, 5)])
@pytest.mark.parametrize("firsts", [None, (0, 9, 13)])
def test_slots_before_a_step_and_its_own(counts: tuple[int, ...], firsts: tuple[int, ...] | None) -> None:
    lengths, size = (7, 22, 30), 4
    entries = torch.randperm(60, dtype=torch.int32).view(4, 15)
    starts = None if firsts is None else [first for first, count in zip(firsts, counts, strict=True) for _ in range(count)]
    table = RowTable(
        entries,
        torch.tensor([2, 0, 3]),
        torch.tensor(lengths, dtype=torch.int32),
        (2, 0, 3),
        lengths,
        size,
        None if starts is None else torch.tensor(starts, dtype=torch.int32),
        () if firsts is None else tuple((first,) * count for first, count in zip(firsts, counts, strict=True)),
    )
    before, own = table.apart(counts)
    for row, (line, length, count) in enumerate(zip((2, 0, 3), lengths, counts, strict=True)):
        slots = range(0 if firsts is None else firsts[row], length)
        want = [(int(entries[line, slot // size]), slot % size) for slot in slots]
        assert [*read(before, row), *read(own, row)] == want
        assert len(read(own, row)) == count
    assert before.lens.tolist() == list(before.host_lens)
    for each in (before, own):
        assert each.starts is not None
        assert each.starts.tolist() == [start for starts in each.host_starts for start in starts]
    assert table.apart(counts)[0] is before


def read(table: RowTable, row: int) -> list[tuple[int, int]]:
    found, offsets = table.chunk_plan[row]
    line = table.entries[table.rows[row]]
    slots = range(table.first_slots[row], int(table.lens[row]))
    assert found.tolist() == [int(line[slot // table.page_size]) for slot in slots]
    return list(zip(found.tolist(), offsets.tolist(), strict=True))
