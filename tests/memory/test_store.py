"""The store: round trips, other processes, faults, and that deleted text is gone."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from memory_fakes import FakeBackend, Reply

from agentkv.errors import AgentkvError, BadRequest, Conflict, StoreFault
from agentkv.memory.session import Session
from agentkv.memory.store import SessionStore
from agentkv.memory.store_database import HEAD, Database, parse_where
from agentkv.memory.tables import metadata
from agentkv.types import Policy, Sampling, ToolCall

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "sessions.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest) -> str:
    """A new database."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("path"))
    made: str = request.getfixturevalue("new_postgresql")()
    return made


@pytest.fixture
def store(where: str) -> Any:
    with SessionStore(where) as opened:
        yield opened


@pytest.fixture
def file_store(path: Path) -> Any:
    with SessionStore(path) as opened:
        yield opened


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def played(backend: FakeBackend, store: SessionStore | None, turns: int = 3, **options: Any) -> Session:
    session = Session(backend, store, system="sys", tools=[{"name": "f"}], **options)
    session.add_user("go")
    for number in range(turns):
        backend.say(Reply(f"turn {number}", calls=(("f", {"n": number}),), reasoning="hm"))
        session.generate()
        session.add_tool_result(session.open_calls[0].id, f"{number} the body of a result")
    return session


def same(one: Session, two: Session) -> None:
    """Two sessions that stand at the same place."""
    assert one.spans() == two.spans()
    assert one.messages() == two.messages()
    assert one.open_calls == two.open_calls
    assert one.usage == two.usage
    assert one.last_turn == two.last_turn
    assert one._branch.history() == two._branch.history()
    assert one._branch.settings == two._branch.settings
    assert one._branch.ledger.boundaries == two._branch.ledger.boundaries
    assert one._branch.ledger._results == two._branch.ledger._results
    assert list(one._branch.ledger._unpruned) == list(two._branch.ledger._unpruned)


def reopened(session: Session, store: SessionStore) -> Session:
    again = Session.resume(FakeBackend(), store, session.id, chain_id=session.chain_id)
    same(session, again)
    return again


def other_process(code: str, *args: str) -> Any:
    """Run code in another process; what it prints last, as JSON."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


# -- round trips


def test_everything_comes_back_after_every_verb(backend: FakeBackend, store: SessionStore) -> None:
    policy = Policy(prune_after=1, by_tool={"g": None}, exclude_tools=("plan",), keep="edges:3")
    sampling = Sampling(temperature=0.5, stop=("END",))
    session = Session(backend, store, system="sys", policy=policy, sampling=sampling, tenant="t", template_args={"a": 1})
    reopened(session, store)
    session.add_user("go")
    reopened(session, store)
    for number in range(4):
        backend.say(Reply("t", calls=(("f", {"n": number}), ("g", {})), reasoning="hm"))
        session.generate()
        reopened(session, store)
        for call in session.open_calls:
            session.add_tool_result(call.id, f"{number} the body of a result", prune_after=number, error=number == 2)
            reopened(session, store)
    session.generate()
    results = [span for span in session.spans() if span.kind == "tool_result"]
    live = [span for span in results if span.state != "pruned"]
    session.pin(live[0])
    reopened(session, store)
    session.prune(live[1])
    reopened(session, store)
    session.set_policy(Policy(prune_after=0, mode="rebuild"))
    reopened(session, store)
    session.set_prune_after(live[2], 9)
    reopened(session, store)
    session.prune(live[2], mode="rebuild")
    reopened(session, store)
    session.add_user("on")
    session.generate()
    reopened(session, store)
    child = session.fork()
    earlier = session.fork(at=2)
    for branch in (child, earlier):
        assert branch.usage.prompt_tokens == 0
        same(branch, Session.resume(FakeBackend(), store, branch.id))
    session.unpin(live[0])
    session.rollback()
    reopened(session, store)
    session.rollback(to=1)
    reopened(session, store)
    session.rollback(to=0)
    reopened(session, store)
    same(child, Session.resume(FakeBackend(), store, child.id))
    same(earlier, Session.resume(FakeBackend(), store, earlier.id))


def test_history_brought_along_comes_back(backend: FakeBackend, store: SessionStore) -> None:
    session = Session(backend, store)
    session.add_user("q")
    session.add_assistant("because", [ToolCall(id="c1", name="f", arguments={"a": 1}, raw='{"a":1}')], "deep")
    again = reopened(session, store)
    assert again.open_calls == session.open_calls
    text = "half a surrogate \ud800, a whole one \ud83d\ude00, zeros \0 \x01\0\x010 \0"
    span = session.add_tool_result("c1", text)
    assert session.add_tool_result("c1", text) == span
    assert session.messages()[-1]["content"] == "half a surrogate \ufffd, a whole one \U0001f600, zeros \0 \x01\0\x010 \0"
    session.generate()
    reopened(session, store)


def test_names_that_a_model_makes_may_be_long(backend: FakeBackend, store: SessionStore) -> None:
    """SQLite takes any length, PostgreSQL what its columns say."""
    session = Session(backend, store, system="s" * 300, tools=[{"name": "f"}])
    session.add_user("go")
    backend.say(Reply("t", calls=(("f" * 300, {}),)))
    session.generate()
    call = session.open_calls[0]
    session.add_tool_result(call.id, "r")
    session.add_assistant("", [ToolCall(id="c" * 300, name="g" * 300, arguments={}, raw="{}")])
    session.add_tool_result("c" * 300, "r")
    reopened(session, store)


def test_arguments_with_half_a_surrogate_can_be_stored(backend: FakeBackend, store: SessionStore) -> None:
    session = Session(backend, store)
    session.add_user("go")
    backend.say(Reply("t", calls=(("f", {"a": ["\ud800", {"\ud800": 1}], "n": 10**30}),)))
    turn = session.generate()
    assert turn.tool_calls[0].arguments["a"][0] == "\ud800"
    assert "\ufffd" in session.messages()[-1]["tool_calls"][0]["function"]["arguments"]
    again = Session.resume(FakeBackend(), store, session.id)
    assert again.open_calls[0].arguments == {"a": ["\ufffd", {"\ufffd": 1}], "n": 10**30}


def test_a_resumed_session_gives_the_same_tokens(backend: FakeBackend, store: SessionStore) -> None:
    uninterrupted = FakeBackend()
    uninterrupted.prefix = backend.prefix
    session = played(backend, store, policy=Policy(prune_after=0))
    elsewhere = FakeBackend()
    again = Session.resume(elsewhere, store, session.id)
    turn = again.generate()
    session.close()
    assert turn.pruned_now
    assert turn.miss is not None
    fresh = played(uninterrupted, None, policy=Policy(prune_after=0))
    assert fresh.generate().text == turn.text
    assert not elsewhere.mismatches


def test_another_process_goes_on(backend: FakeBackend, where: str) -> None:
    with SessionStore(where) as store:
        session = played(backend, store)
        told = other_process(
            """
import json, sys
from memory_fakes import FakeBackend
from agentkv.memory.session import Session
from agentkv.memory.store import SessionStore
with SessionStore(sys.argv[1]) as store:
    with Session.resume(FakeBackend(), store, sys.argv[2]) as session:
        before = [span.id for span in session.spans()]
        turn = session.generate()
print(json.dumps([before, turn.number, turn.text, session.messages()]))
""",
            where,
            session.id,
        )
        assert told[0] == [span.id for span in session.spans()]
        assert told[1] == 4
        assert Session.resume(FakeBackend(), store, session.id).messages() == told[3]
        with pytest.raises(Conflict) as raised:
            session.generate()
        assert raised.value.kept == 3
        assert "Resume" in raised.value.hint
        with pytest.raises(Conflict):
            session.add_user("x")
        assert session.turns == 3
        assert not session.running


def test_a_session_that_was_closed_can_be_resumed(backend: FakeBackend, store: SessionStore) -> None:
    session = played(backend, store)
    session.close()
    assert store.info(session.id).state == "closed"
    again = Session.resume(backend, store, session.id)
    again.generate()
    assert store.info(session.id).state == "stored"


def test_a_crash_between_the_store_and_the_return(where: str) -> None:
    """The process dies when the turn is stored and has not been handed out: the turn is there."""
    code = """
import os, sys
from memory_fakes import FakeBackend, Running
from agentkv.memory.session import Session
from agentkv.memory.store import SessionStore
store = SessionStore(sys.argv[1])
session = Session(FakeBackend(), store, session_id=sys.argv[2])
session.add_user("go")
session.generate()
session.add_user("and on")
if sys.argv[2] == "before":
    store.commit = lambda *args: os._exit(9)
Running.commit = lambda self, ids: os._exit(9)
session.generate()
"""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    for moment, turns in (("before", 1), ("after", 2)):
        done = subprocess.run([sys.executable, "-c", code, where, moment], env=env, timeout=60, check=False)
        assert done.returncode == 9
        with SessionStore(where) as store:
            session = Session.resume(FakeBackend(), store, moment)
            assert session.turns == turns
            assert [message["content"] for message in session.messages() if message["role"] == "user"] == ["go", "and on"]
            assert session.generate().number == turns + 1


# -- sessions as a whole


def test_listing(backend: FakeBackend, store: SessionStore) -> None:
    first = played(backend, store, tenant="a")
    second = played(backend, store, tenant="b")
    second.generate()
    child = first.fork()
    assert [info.id for info in store.list()] == [child.id, second.id, first.id]
    assert [info.id for info in store.list("b")] == [second.id]
    info = store.info(first.id)
    assert (info.state, info.turns, info.tokens, info.model) == ("stored", 3, first.tokens, "fake")
    assert info.open_calls == ()
    first.rollback()
    assert store.info(first.id).open_calls == tuple(call.id for call in first.open_calls)
    assert store.info(first.id).updated >= info.updated >= info.created > 0
    assert store.spans(first.id) == first.spans()
    requests = store.requests(second.id)
    assert [row["turn"] for row in requests] == [1, 2, 3, 4]
    assert requests[-1]["usage"] == second.last_turn.usage  # type: ignore[union-attr]
    for verb in (store.load, store.info, store.spans, store.delete, store.requests):
        for name, tenant in (("nobody", None), (first.id, "b")):
            with pytest.raises(BadRequest, match="no session") as raised:
                verb(name, tenant=tenant)  # type: ignore[operator]
            assert raised.value.hint
    with pytest.raises(BadRequest, match="no chain"):
        store.load(first.id, chain_id=second.chain_id)


def test_a_name_is_taken_once(backend: FakeBackend, store: SessionStore) -> None:
    Session(backend, store, session_id="mine")
    with pytest.raises(Conflict, match="exists"):
        Session(backend, store, session_id="mine")


def test_several_chains_of_one_session(backend: FakeBackend, store: SessionStore) -> None:
    session = played(backend, store)
    side = session.fork(at=1, session_id=session.id)
    assert side.id == session.id
    assert [info.id for info in store.list()] == [session.id]
    reopened(side, store)
    assert Session.resume(FakeBackend(), store, session.id).chain_id == session.chain_id
    store.delete(session.id)
    assert store.list() == []


def test_delete_removes_the_text_and_spares_a_fork(backend: FakeBackend, file_store: SessionStore, path: Path) -> None:
    store = file_store
    secret, shared = "SECRET-OF-THE-PARENT", "SHARED-WITH-THE-FORK"
    session = Session(backend, store)
    session.add_user(shared)
    session.generate()
    child = session.fork()
    backend.say(Reply(secret, calls=(("f", {"key": secret}),)))
    session.add_user(secret)
    session.generate()
    session.add_tool_result(session.open_calls[0].id, secret)
    assert secret in text_on_disk(path)
    store.delete(session.id)
    assert secret not in text_on_disk(path)
    assert shared in text_on_disk(path)
    again = reopened(child, store)
    again.add_user("on")
    assert again.generate().number == 2
    store.delete(child.id)
    assert shared not in text_on_disk(path)
    assert rows_in(path) == 0
    with pytest.raises(Conflict):
        session.add_tool_result(session.open_calls[0].id, "x") if session.open_calls else session.add_user("x")


def test_rollback_leaves_no_rows_of_its_own(backend: FakeBackend, store: SessionStore, where: str) -> None:
    session = Session(backend, store)
    session.add_user("go")
    session.generate()
    before = rows_in(where, but=("requests",))
    child = session.fork()
    with_child = rows_in(where, but=("requests",))
    for branch in (session, child):
        for _ in range(3):
            branch.add_user("on")
            branch.generate()
        branch.rollback(to=1)
    assert rows_in(where, but=("requests",)) == with_child
    store.delete(child.id)
    assert rows_in(where, but=("requests",)) == before


def text_on_disk(path: Path) -> str:
    return "".join(part.read_bytes().decode("latin-1") for part in path.parent.glob(path.name + "*"))


def rows_in(where: str | Path, but: tuple[str, ...] = ()) -> int:
    engine = sa.create_engine(parse_where(where))
    with engine.connect() as raw:
        names = [table.name for table in metadata.sorted_tables if table.name not in but]
        found = sum(raw.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one() for name in names)
    engine.dispose()
    return found


# -- faults


class Broken:
    """Stands in for a transaction that cannot be had."""

    def __enter__(self) -> Any:
        raise sa.exc.OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    def __exit__(self, *_: object) -> None: ...


def test_a_store_that_fails_changes_nothing(backend: FakeBackend, store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    session = played(backend, store, policy=Policy(prune_after=0))
    span = next(span for span in session.spans() if span.kind == "tool_result" and span.state == "due")
    spans, messages = session.spans(), session.messages()
    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", lambda self: Broken())
        for verb in (
            session.generate,
            lambda: session.add_user("x"),
            lambda: session.prune(span),
            lambda: session.prune(span, mode="rebuild"),
            lambda: session.pin(span),
            lambda: session.set_policy(None),
            session.rollback,
            session.fork,
        ):
            with pytest.raises(StoreFault, match="disk is full") as raised:
                verb()
            assert raised.value.kept == 3
            assert raised.value.hint
            assert not session.running
        assert session.spans() == spans
        assert session.messages() == messages
    assert session.generate().number == 4
    assert not backend.mismatches
    reopened(session, store)


def test_a_turn_that_cannot_be_stored_is_rolled_back(backend: FakeBackend, store: SessionStore, monkeypatch: Any) -> None:
    session = played(backend, store)
    chain = backend.chains[session.chain_id]
    before = (list(chain.ids), dict(chain.kv))

    def full(*_: object) -> None:
        raise StoreFault("committing a turn failed: disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "commit", full)
        with pytest.raises(StoreFault) as raised:
            session.generate()
        assert raised.value.kept == 3
    assert (chain.ids, chain.kv, chain.active) == (*before, False)
    assert session.usage.completion_tokens == sum(turn.usage.completion_tokens for turn in session._branch.ledger.turns)
    assert session.generate().number == 4


def test_close_frees_kv_even_if_the_store_fails(backend: FakeBackend, store: SessionStore) -> None:
    session = played(backend, store)
    store.close()
    with pytest.raises(StoreFault, match="store is closed") as raised:
        session.close()
    assert raised.value.kept == 3
    assert session.closed
    assert session.chain_id not in backend.chains


def test_what_is_no_database_is_a_store_fault(tmp_path: Path) -> None:
    junk = tmp_path / "junk.db"
    junk.write_bytes(b"this is no database" * 100)
    for where in (junk, tmp_path, "sqlite:////proc/nowhere/x.db"):
        with pytest.raises(StoreFault) as raised:
            SessionStore(where)
        assert raised.value.hint
    with pytest.raises(AgentkvError):
        SessionStore("nodialect://x")
    with pytest.raises(BadRequest):
        SessionStore("://")


def test_another_model_is_refused_and_another_fingerprint_is_a_miss(backend: FakeBackend, store: SessionStore) -> None:
    session = played(backend, store)
    other = FakeBackend()
    other.model_name = "other"
    with pytest.raises(BadRequest, match="was made with model 'fake'") as raised:
        Session.resume(other, store, session.id)
    assert raised.value.kept == 3
    changed = FakeBackend()
    changed.fingerprint = "fake-2"
    turn = Session.resume(changed, store, session.id).generate()
    assert turn.miss is not None
    assert turn.miss.reason == "fingerprint"


def test_resuming_where_the_chain_still_is(backend: FakeBackend, store: SessionStore) -> None:
    session = played(backend, store)
    session.generate()
    results = [span for span in session.spans() if span.kind == "tool_result"]
    session.prune(results[2], mode="rebuild")
    again = Session.resume(backend, store, session.id)
    again.prune(results[0])
    again.rollback(to=3)
    assert again.generate().usage.cached_tokens > 0 if not again.open_calls else True
    ahead = Session.resume(backend, store, again.id)
    backend.chains[again.chain_id].ids += [1, 2, 3]
    ahead = Session.resume(backend, store, again.id)
    assert len(backend.chains[again.chain_id].ids) == ahead.tokens
    assert not backend.mismatches


# -- migrations


def test_the_migrations_make_the_tables_of_the_code(where: str, store: SessionStore) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = sa.create_engine(parse_where(where))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()
    versions = sorted((ROOT / "agentkv/memory/migrations/versions").glob("v*.py"))
    assert versions[-1].stem.split("_")[0] == HEAD


def test_a_newer_database_is_refused(where: str) -> None:
    SessionStore(where).close()
    engine = sa.create_engine(parse_where(where))
    with engine.begin() as raw:
        raw.exec_driver_sql("UPDATE alembic_version SET version_num = 'v9999'")
    engine.dispose()
    with pytest.raises(StoreFault, match="not made by this version"):
        SessionStore(where)


def test_two_processes_open_a_new_database_at_once(where: str) -> None:
    code = """
import json, sys, time
from memory_fakes import FakeBackend
from agentkv.memory.session import Session
from agentkv.memory.store import SessionStore
time.sleep(max(0, float(sys.argv[2]) - time.time()))
with SessionStore(sys.argv[1]) as store:
    session = Session(FakeBackend(), store)
    for _ in range(20):
        session.add_user("x")
print(json.dumps(session.id))
"""
    import time

    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    command = [sys.executable, "-c", code, where, str(time.time() + 2)]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ends = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], ends
    with SessionStore(where) as store:
        assert {info.id for info in store.list()} == {json.loads(out) for out, _ in ends}


def test_the_tables_compile_for_postgresql() -> None:
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateTable

    told = "".join(str(CreateTable(table).compile(dialect=postgresql.dialect())) for table in metadata.sorted_tables)
    assert told.count("BIGSERIAL") == 4
    assert "BYTEA" in told


def test_urls() -> None:
    assert str(parse_where(":memory:")) == "sqlite://"
    assert parse_where("postgresql+psycopg://me:secret@host/db").host == "host"
    assert SessionStore(":memory:").url == "sqlite://"
    home = parse_where("~/x.db").database
    assert home == str(Path("~/x.db").expanduser())


def test_in_memory_from_many_threads(backend: FakeBackend) -> None:
    import threading

    store = SessionStore(":memory:")
    problems: list[Exception] = []

    def work() -> None:
        try:
            session = played(FakeBackend(), store)
            reopened(session, store)
            store.list()
        except Exception as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not problems
    assert len(store.list()) == 4
