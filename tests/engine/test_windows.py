"""First visible slots of sliding windows, against a count over every position."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from agentkv.engine.cache.intervals import merged
from agentkv.engine.windows import first_slots


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(1, 12), st.integers(1, 70))
def test_first_slots_count_the_kept_positions_before_the_window(held: set[int], first: int, count: int, window: int) -> None:
    held = {position for position in held if position < first} | set(range(first, first + count))
    kept = merged((position, position + 1) for position in held)
    slots = sorted(held)  # slot -> position
    want = [
        next(slot for slot, position in enumerate(slots) if position > query - window) for query in range(first, first + count)
    ]
    assert first_slots(kept, first, count, window) == want
