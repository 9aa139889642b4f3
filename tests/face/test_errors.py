"""Every class of the exception tree is raised by something a user can do, says what was kept, and what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentkv import Runtime, errors
from agentkv.world.dialect import NATIVE
from agentkv.world.task import make_task


def classes(root: type[errors.AgentkvError] = errors.AgentkvError) -> list[type[errors.AgentkvError]]:
    return [root, *(found for child in root.__subclasses__() for found in classes(child))]


def fresh(runtime: Runtime, **options: Any) -> Any:
    session = runtime.session(system=NATIVE.system, tools=list(NATIVE.tools), **options)
    session.add_user(make_task(6).prompt)
    return session


def with_open_call(runtime: Runtime) -> Any:
    session = fresh(runtime)
    session.generate()
    return session


def raised(error: type[errors.AgentkvError], action: Callable[[], Any], *, kept: int | None) -> errors.AgentkvError:
    with pytest.raises(error) as caught:
        action()
    found = caught.value
    assert type(found) is error
    assert found.hint
    assert found.kept == kept
    assert found.message
    wire = errors.from_wire(found.to_wire())
    assert type(wire) is error
    assert (wire.message, wire.kept, wire.hint, wire.retry_after) == (found.message, found.kept, found.hint, found.retry_after)
    return found


def test_bad_request(runtime: Runtime) -> None:
    session = with_open_call(runtime)
    raised(errors.BadRequest, lambda: session.prune(session.spans()[0].id), kept=1)
    raised(errors.BadRequest, lambda: session.recall("x"), kept=1)
    session.close()


def test_unknown_option(runtime: Runtime) -> None:
    raised(errors.UnknownOption, lambda: runtime.session(nonsense=1), kept=None)


def test_unknown_model(tmp_path: Path) -> None:
    raised(errors.UnknownModel, lambda: Runtime(tmp_path / "nowhere", db=None), kept=None)


def test_bad_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    raised(errors.BadModel, lambda: Runtime(tmp_path, db=None), kept=None)


def test_orphan_open_calls_and_conflict(runtime: Runtime) -> None:
    session = with_open_call(runtime)
    call = session.open_calls[0]
    raised(errors.OrphanResult, lambda: session.add_tool_result("call_never", "x"), kept=1)
    found = raised(errors.OpenCalls, session.generate, kept=1)
    assert list(found.details["ids"]) == [call.id]
    session.add_tool_result(call.id, "one")
    raised(errors.Conflict, lambda: session.add_tool_result(call.id, "two"), kept=1)
    session.close()


def test_context_overflow() -> None:
    with Runtime("micro", db=None, window=256) as runtime:
        session = fresh(runtime)
        found = raised(errors.ContextOverflow, session.generate, kept=0)
        assert found.details["logical"] > found.details["limit"] == 256
        assert {"resident", "freeable"} <= set(found.details)
        assert found.http_status == 400


def test_busy_leaves_the_running_turn_alone(runtime: Runtime) -> None:
    session = runtime.session()
    session.add_user("babble")
    with session.stream(max_tokens=400, temperature=2.0, seed=1) as stream:
        next(iter(stream))
        found = raised(errors.Busy, session.generate, kept=0)
        assert found.http_status == 409
        for _ in stream:
            pass
    assert stream.turn.number == 1
    session.close()


def test_capacity_for_what_never_fits() -> None:
    with Runtime("micro", db=None, memory="4MiB") as runtime:
        session = runtime.session()
        session.add_user("x" * 2000)
        found = raised(errors.Capacity, session.generate, kept=0)
        assert found.retry_after is None
        runtime.check()


def test_cancelled_rolls_back(runtime: Runtime) -> None:
    session = runtime.session()
    session.add_user("babble")

    def cancelled_on_the_way() -> None:
        with session.stream(max_tokens=4000, temperature=2.0, seed=1) as stream:
            next(stream)
            threading.Thread(target=session.cancel).start()
            list(stream)

    raised(errors.Cancelled, cancelled_on_the_way, kept=0)
    assert session.turns == 0
    raised(errors.Cancelled, lambda: session.generate(max_tokens=4000, temperature=2.0, seed=1, timeout=0.001), kept=0)
    runtime.check()
    session.close()


def test_engine_fault_keeps_the_session(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    session = runtime.session()
    session.add_user("hello")
    runner = runtime._engine.worker.llm.runner
    with monkeypatch.context() as patch:

        def broken(batch: Any) -> Any:
            raise RuntimeError("a bit fell over")

        patch.setattr(runner, "execute", broken)
        raised(errors.EngineFault, lambda: session.generate(max_tokens=4), kept=0)
    runtime.check()
    assert session.generate(max_tokens=4).number == 1
    session.close()


def test_store_fault(tmp_path: Path) -> None:
    raised(errors.StoreFault, lambda: Runtime("micro", db=tmp_path), kept=None)  # a folder is no database


def test_every_class_is_covered_here() -> None:
    text = Path(__file__).read_text()
    ours = [kind for kind in classes() if kind.__module__ == "agentkv.errors" and kind is not errors.AgentkvError]
    assert len(ours) == 13
    assert [kind.__name__ for kind in ours if f"errors.{kind.__name__}, " not in text] == []


def test_an_unknown_code_from_a_newer_server_is_still_an_agentkv_error() -> None:
    found = errors.from_wire({"code": "from_the_future", "message": "hm"})
    assert type(found) is errors.AgentkvError
    assert found.message == "hm"
