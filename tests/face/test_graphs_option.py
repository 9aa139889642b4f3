"""The runtime's `graphs`: a bool, and nothing on a CPU."""

from __future__ import annotations

import pytest

from agentkv import Runtime
from agentkv.errors import BadRequest


def test_a_cpu_has_none() -> None:
    with Runtime("micro", db=None, memory="16MiB") as runtime:
        assert runtime.stats()["graphs"] is None


@pytest.mark.parametrize("given", [1, "yes", None])
def test_anything_but_a_bool_is_refused(given: object) -> None:
    with pytest.raises(BadRequest, match="graphs"):
        Runtime("micro", db=None, memory="16MiB", graphs=given)  # type: ignore[arg-type]
