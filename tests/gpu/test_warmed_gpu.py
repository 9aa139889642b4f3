"""Warming up on a GPU: what it compiles and captures, later requests of these methods find."""

from __future__ import annotations

from pathlib import Path

import pytest
from six_shapes import PAGE

from agentkv.engine.core import Request
from agentkv.engine.warmup import warm_up
from agentkv.runtime_engine import open_engine
from agentkv.types import Sampling

pytestmark = pytest.mark.gpu


def test_requests_behind_it_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    methods = ("dense", "quest:budget=256", "snapkv:capacity=256")
    engine = open_engine("micro", method=methods[0], methods=methods[1:], device="cuda", memory="1GiB", page_size=PAGE)
    llm = engine.worker.llm

    def compiled() -> dict[str, str]:
        return {path.parent.name: path.stem for path in tmp_path.glob("*/*.cubin")}

    try:
        for form, rows, seconds in engine.worker.call(lambda: list(warm_up(llm, (1, 2, 4, 8), 1024))):
            print(f"{methods[form]}: {rows} rows, {seconds:.1f} s")
        before = compiled()
        print(f"{len(before)} kernels compiled")
        for form in range(len(methods)):
            for rows, length in ((1, 900), (3, 700), (7, 520)):
                prompts = [[(row + at * at) % 256 for at in range(length + row)] for row in range(rows)]
                tickets = [engine.worker.submit(Request(ids, Sampling(max_tokens=9), form=form)) for ids in prompts]
                for ticket in tickets:
                    while ticket.outputs.get() is not None:
                        pass
                    assert ticket.seq.fault is None
                    engine.worker.abort(ticket)
        late = compiled()
        assert late == before, sorted(late[key] for key in late.keys() - before.keys())
    finally:
        engine.worker.close()
