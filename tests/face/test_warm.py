"""`warm_memory`: a suspended session's KV waits in host memory, and its next turn is the one it would have been."""

from __future__ import annotations

import pytest

from agentkv import Runtime
from agentkv.errors import BadRequest
from agentkv.server.metrics import Metrics


def test_a_suspended_session_goes_on_from_host_memory() -> None:
    with Runtime("micro", memory="64MiB", warm_memory="32MiB", db=None) as runtime:
        told = {}
        for name in ("stays", "goes"):
            with_suspend = name == "goes"
            session = runtime.session(id=name)
            told[name] = []
            for text in ("Read the notes, then say what they are about. " * 8, "And what else?"):
                session.add_user(text)
                turn = session.generate(max_tokens=12)
                told[name].append((turn.text, turn.finish_reason, turn.usage))
                if with_suspend:
                    session.suspend()
                    stats = runtime.stats()
                    assert stats["warm"]["bytes"] > 0
                    assert session.info().state == "idle"
                    assert session.info().resident_tokens == 0
                    runtime.check()
            assert turn.miss is None
            assert turn.usage.reusable_share > 0.99
            session.close()
        assert told["goes"] == told["stays"]
        assert runtime.stats()["warm"] == {"bytes": 0, "demotions": 2, "restores": 1}
        seen = Metrics(runtime).render().decode()
        assert "agentkv_demotions_total 2.0" in seen
        assert "agentkv_restores_total 1.0" in seen
        assert "agentkv_warm_bytes 0.0" in seen
        assert 'agentkv_arena_fragmented_bytes{unit="group 0"} 0.0' in seen
        assert "agentkv_arena_moved_bytes_total 0.0" in seen


@pytest.mark.parametrize("bad", ["much", -1, "0.1B"])
def test_a_budget_that_is_none_is_refused(bad: object) -> None:
    with pytest.raises(BadRequest, match="warm_memory"):
        Runtime("micro", memory="64MiB", warm_memory=bad, db=None)  # type: ignore[arg-type]
