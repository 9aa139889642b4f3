"""The durable store of sessions: SQLAlchemy over SQLite (WAL) or PostgreSQL, migrated by Alembic when it is opened.

One transaction a verb. Every write names the version of the chain that its caller has seen: a session that was resumed in two
processes goes on in one of them, and the other gets Conflict. Whatever the database says becomes a StoreFault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Self

import msgspec
from sqlalchemy import CTE, ColumnElement, Connection, and_, bindparam, delete, exists, insert, literal, not_, select, update
from sqlalchemy.exc import SQLAlchemyError

from agentkv.errors import BadRequest, Conflict, StoreFault
from agentkv.memory import rows
from agentkv.memory.restore import restored
from agentkv.memory.saved import Saved, SavedTurn, Settings
from agentkv.memory.span import HEAD, Prune, Record
from agentkv.memory.store_database import Database
from agentkv.memory.tables import chains, marks, prunes, requests, sessions, spans, turns
from agentkv.types import Frozen, Miss, SessionInfo, Span, Turn, Usage

Infos = list[SessionInfo]
Spans = list[Span]
Rows = list[dict[str, Any]]


class Commit(Frozen, frozen=True, kw_only=True):
    """What a committed turn writes. parent: the turn's row before it. base: logical position of the turn's first id."""

    parent: int | None
    turn: Turn
    ids: bytes
    base: int
    tokens: int
    placed: list[Record]
    made: list[Record]
    usage: Usage
    milliseconds: float


class Overlay(Frozen, frozen=True, kw_only=True):
    """What one branch did to its spans, all of it."""

    prunes: Sequence[Prune] = ()
    pins: Sequence[str] = ()
    was_due: Sequence[str] = ()
    lags: Sequence[tuple[str, int | None]] = ()


class SessionStore:
    """Sessions on disk. `where`: a path, ':memory:', or an SQLAlchemy URL. Thread safe; processes may share a file."""

    def __init__(self, where: str | PathLike[str] = ":memory:") -> None:
        self._closed = False
        self._lock = threading.RLock()
        with _faults("opening the database"):
            self._database = Database(where)
        self.url = self._database.shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the database. Twice is once."""
        self._closed = True
        self._database.close()

    # -- sessions as a whole

    def create(self, session_id: str, chain_id: str, tenant: str, settings: Settings) -> int:
        """A new session with one empty branch; returns the branch's version."""
        with self._write("creating a session") as db:
            if db.execute(select(sessions.c.id).where(sessions.c.id == session_id)).first():
                raise Conflict(f"a session {session_id!r} exists", hint="Resume it, delete it, or take another id")
            self._insert_chain(db, session_id, chain_id, tenant, settings)
        return 0

    def _insert_chain(
        self, db: Connection, session_id: str, chain_id: str, tenant: str, settings: Settings, **more: Any
    ) -> None:
        now = time.time()
        if not db.execute(select(sessions.c.id).where(sessions.c.id == session_id)).first():
            db.execute(insert(sessions), {"id": session_id, "tenant": tenant, "chain_id": chain_id, "created": now})
        row = {"parent": None, "head": None, "turns": 0, "tokens": 0, **more}
        row |= {"id": chain_id, "session_id": session_id, "version": 0, "closed": False, "created": now, "updated": now}
        row |= {"model": settings.model, "settings": rows.dumped(settings), "usage": rows.dumped(Usage())}
        db.execute(insert(chains), row)

    def load(self, session_id: str, *, chain_id: str | None = None, tenant: str | None = None) -> Saved:
        """Everything about a session (or one chain of it), as it was committed."""
        with self._read("loading a session") as db:
            session, chain = self._chain(db, session_id, chain_id, tenant)
            path = _path(chain["head"])
            branch = db.execute(select(turns).join(path, turns.c.id == path.c.id).order_by(turns.c.number)).mappings().all()
            shared = select(spans).join(path, spans.c.turn == path.c.id)
            told = db.execute(shared.order_by(spans.c.number, spans.c.message, spans.c.id)).mappings().all()
            own = select(spans).where(spans.c.chain_id == chain["id"])
            pending = db.execute(own.order_by(spans.c.message, spans.c.id)).mappings().all()
            cut = db.execute(select(prunes).where(prunes.c.chain_id == chain["id"]).order_by(prunes.c.id)).mappings().all()
            marked = db.execute(select(marks).where(marks.c.chain_id == chain["id"])).mappings().all()
        by_turn: dict[int, list[Record]] = {}
        for row in told:
            by_turn.setdefault(row["turn"], []).append(rows.span_record(row))
        return Saved(
            session_id=session_id,
            chain_id=chain["id"],
            tenant=session["tenant"],
            version=chain["version"],
            settings=msgspec.json.decode(chain["settings"], type=Settings),
            usage=msgspec.json.decode(chain["usage"], type=Usage),
            turns=tuple(
                SavedTurn(
                    node=row["id"],
                    turn=msgspec.json.decode(row["answer"], type=Turn),
                    ids=row["ids"],
                    records=tuple(by_turn.get(row["id"], ())),
                )
                for row in branch
            ),
            pending=tuple(rows.span_record(row) for row in pending),
            prunes=tuple(rows.prune_record(row) for row in cut),
            pins=tuple(row["span_id"] for row in marked if row["mark"] == "pinned"),
            was_due=tuple(row["span_id"] for row in marked if row["mark"] == "due"),
            lags=tuple((row["span_id"], row["value"]) for row in marked if row["mark"] == "lag"),
        )

    def _chain(self, db: Connection, session_id: str, chain_id: str | None, tenant: str | None) -> tuple[Any, Any]:
        session = db.execute(select(sessions).where(sessions.c.id == session_id)).mappings().first()
        if session is None or tenant not in (None, session["tenant"]):
            raise BadRequest(f"no session {session_id!r}", hint="Known ids: Runtime.sessions() or `agentkv sessions ls`")
        wanted = and_(chains.c.id == (chain_id or session["chain_id"]), chains.c.session_id == session_id)
        chain = db.execute(select(chains).where(wanted)).mappings().first()
        if chain is None:
            raise BadRequest(f"session {session_id!r} has no chain {chain_id!r}", hint="Leave chain_id out to open its first")
        return session, chain

    def known(self, session_id: str) -> bool:
        """Is there a session of that id?"""
        with self._read("looking up a session") as db:
            return db.execute(select(sessions.c.id).where(sessions.c.id == session_id)).first() is not None

    def version(self, chain_id: str) -> int | None:
        """How often the branch was written to; None for one that is not (or no longer) there."""
        with self._read("looking up a branch") as db:
            found: int | None = db.execute(select(chains.c.version).where(chains.c.id == chain_id)).scalar()
            return found

    def list(self, tenant: str | None = None) -> Infos:
        """Every session, the one touched last first. Their KV is somebody else's matter: state is 'closed' or 'stored'."""
        with self._read("listing sessions") as db:
            return self._infos(db, sessions.c.tenant == tenant if tenant is not None else None)

    def info(self, session_id: str, *, tenant: str | None = None) -> SessionInfo:
        """One line about a session."""
        with self._read("looking up a session") as db:
            self._chain(db, session_id, None, tenant)
            return self._infos(db, sessions.c.id == session_id)[0]

    def _infos(self, db: Connection, only: ColumnElement[bool] | None) -> Infos:
        found = select(chains, sessions.c.created.label("born"), turns.c.answer)
        found = found.join(sessions, chains.c.id == sessions.c.chain_id).outerjoin(turns, turns.c.id == chains.c.head)
        waiting = select(spans.c.chain_id, spans.c.kind, spans.c.call_id)
        waiting = waiting.join(sessions, spans.c.chain_id == sessions.c.chain_id)
        waiting = waiting.where(spans.c.kind.in_(("tool_call", "tool_result"))).order_by(spans.c.message, spans.c.id)
        if only is not None:
            found, waiting = found.where(only), waiting.where(only)
        since: dict[str, list[tuple[str, str]]] = {}
        for chain_id, kind, call_id in db.execute(waiting):
            since.setdefault(chain_id, []).append((kind, call_id))
        return [
            SessionInfo(
                id=row["session_id"],
                state="closed" if row["closed"] else "stored",
                turns=row["turns"],
                tokens=row["tokens"],
                model=row["model"],
                created=row["born"],
                updated=row["updated"],
                open_calls=_open_calls(row["answer"], since.get(row["id"], ())),
            )
            for row in db.execute(found.order_by(chains.c.updated.desc())).mappings()
        ]

    def spans(self, session_id: str, *, tenant: str | None = None) -> Spans:
        """The ledger of a session, without opening it."""
        saved = self.load(session_id, tenant=tenant)
        ledger = restored(saved)
        return [ledger.span(record, saved.settings.policy) for record in ledger.records]

    def requests(self, session_id: str, *, tenant: str | None = None) -> Rows:
        """What each committed request of a session cost, and why it missed."""
        with self._read("reading requests") as db:
            _, chain = self._chain(db, session_id, None, tenant)
            found = db.execute(select(requests).where(requests.c.chain_id == chain["id"]).order_by(requests.c.id)).mappings()
            return [
                dict(row)
                | {"usage": msgspec.json.decode(row["usage"], type=Usage)}
                | {"miss": msgspec.json.decode(row["miss"], type=Miss) if row["miss"] else None}
                for row in found
            ]

    def delete(self, session_id: str, *, tenant: str | None = None) -> None:
        """Remove a session with its text; turns that a fork still stands on stay with the fork."""
        with self._write("deleting a session") as db:
            self._chain(db, session_id, None, tenant)
            for chain in db.execute(select(chains).where(chains.c.session_id == session_id)).mappings().all():
                for table in (spans, prunes, marks, requests):
                    db.execute(delete(table).where(table.c.chain_id == chain["id"]))
                db.execute(delete(chains).where(chains.c.id == chain["id"]))
                _collect(db, chain["head"], None)
            db.execute(delete(sessions).where(sessions.c.id == session_id))
        with _faults("emptying the log"):
            self._database.forget()

    # -- one branch, by its owner

    def append(self, chain_id: str, version: int, records: Sequence[Record]) -> int:
        """Messages were added. Durable when it returns."""
        with self._write("adding messages") as db:
            version = self._touch(db, chain_id, version)
            db.execute(insert(spans), [rows.span_row(record, chain_id=chain_id, turn=None, base=0) for record in records])
        return version

    def commit(self, chain_id: str, version: int, commit: Commit) -> tuple[int, int]:
        """A turn was generated: its row, its spans, its ids, in one transaction. Returns the row and the new version."""
        turn, now = commit.turn, time.time()
        with self._write("committing a turn") as db:
            row = {"parent": commit.parent, "number": turn.number, "length": len(commit.ids) // 4, "ids": commit.ids}
            made = insert(turns).values(**row, answer=rows.dumped(turn), created=now).returning(turns.c.id)
            node: int = db.execute(made).scalar_one()
            chain = {"head": node, "turns": turn.number, "tokens": commit.tokens, "usage": rows.dumped(commit.usage)}
            version = self._touch(db, chain_id, version, **chain)
            waiting = [record for record in commit.placed if record.message != HEAD]
            if waiting:
                db.execute(_PLACE, [_placed(record, chain_id, node, commit.base) for record in waiting])
            new = [record for record in commit.placed if record.message == HEAD] + commit.made
            db.execute(insert(spans), [rows.span_row(record, chain_id=None, turn=node, base=commit.base) for record in new])
            miss = None if turn.miss is None else rows.dumped(turn.miss)
            told = {"chain_id": chain_id, "turn": turn.number, "outcome": turn.finish_reason, "usage": rows.dumped(turn.usage)}
            db.execute(insert(requests).values(**told, miss=miss, milliseconds=commit.milliseconds, created=now))
        return node, version

    def overlay(
        self, chain_id: str, version: int, overlay: Overlay, settings: Settings | None = None, tokens: int | None = None
    ) -> int:
        """Replace what the branch did to its spans, and its settings where they are given."""
        changed: dict[str, Any] = {} if settings is None else {"settings": rows.dumped(settings)}
        if tokens is not None:
            changed["tokens"] = tokens
        with self._write("recording prunes and pins") as db:
            version = self._touch(db, chain_id, version, **changed)
            _write_overlay(db, chain_id, overlay)
        return version

    def add_prunes(self, chain_id: str, version: int, made: Sequence[Prune]) -> int:
        """Spans were pruned in place."""
        with self._write("recording prunes") as db:
            version = self._touch(db, chain_id, version)
            db.execute(insert(prunes), [rows.prune_row(prune, chain_id) for prune in made])
        return version

    def rollback(
        self, chain_id: str, version: int, *, head: int | None, old: int | None, turn: int, tokens: int, overlay: Overlay
    ) -> int:
        """The branch stands at an earlier turn; what nobody else stands on goes."""
        with self._write("rolling back") as db:
            version = self._touch(db, chain_id, version, head=head, turns=turn, tokens=tokens)
            db.execute(delete(spans).where(spans.c.chain_id == chain_id))
            _write_overlay(db, chain_id, overlay)
            if old != head:
                _collect(db, old, head)
        return version

    def fork(
        self,
        parent: str,
        session_id: str,
        chain_id: str,
        tenant: str,
        settings: Settings,
        *,
        head: int | None,
        turn: int,
        tokens: int,
        pending: bool,
        overlay: Overlay,
    ) -> int:
        """A new branch that stands on the parent's turns. pending: what the parent has added since its last turn comes too."""
        with self._write("forking") as db:
            if head is not None and not db.execute(select(turns.c.id).where(turns.c.id == head)).first():
                raise Conflict("the turn to fork at is gone", hint="The session moved on in another process; resume it again")
            self._insert_chain(db, session_id, chain_id, tenant, settings, parent=parent, head=head, turns=turn, tokens=tokens)
            if pending:
                copied = [column for column in spans.c if column.name not in ("id", "chain_id")]
                own = select(literal(chain_id).label("chain_id"), *copied).where(spans.c.chain_id == parent)
                db.execute(insert(spans).from_select(["chain_id", *(c.name for c in copied)], own.order_by(spans.c.id)))
            _write_overlay(db, chain_id, overlay)
        return 0

    def close_chain(self, chain_id: str, version: int) -> int:
        """The session was closed; the next write opens it again."""
        with self._write("closing a session") as db:
            return self._touch(db, chain_id, version, closed=True)

    def _touch(self, db: Connection, chain_id: str, version: int, **values: Any) -> int:
        values = {"closed": False, "version": version + 1, "updated": time.time(), **values}
        mine = and_(chains.c.id == chain_id, chains.c.version == version)
        done = db.execute(update(chains).where(mine).values(**values))
        if done.rowcount != 1:
            raise Conflict(
                "the session was changed or deleted elsewhere since it was opened here",
                hint="Resume it again to go on from where it stands now; nothing was changed by this call",
            )
        return version + 1

    @contextmanager
    def _write(self, doing: str) -> Iterator[Connection]:
        with _faults(doing), self._lock:
            self._check_open()
            with self._database.write() as db:
                yield db

    @contextmanager
    def _read(self, doing: str) -> Iterator[Connection]:
        with _faults(doing):
            self._check_open()
            if self._database.one_connection:
                with self._lock, self._database.read() as db:
                    yield db
            else:
                with self._database.read() as db:
                    yield db

    def _check_open(self) -> None:
        if self._closed:
            raise StoreFault("the store is closed", hint="Open it again: a new SessionStore of the same database")


_PLACE = (
    update(spans)
    .where(spans.c.chain_id == bindparam("of_chain"), spans.c.span_id == bindparam("of_span"))
    .values(chain_id=None, turn=bindparam("node"), first=bindparam("low"), last=bindparam("high"))
)


def _placed(record: Record, chain_id: str, node: int, base: int) -> dict[str, Any]:
    start, end = record.interval
    return {"of_chain": chain_id, "of_span": record.id, "node": node, "low": start - base, "high": end - base}


def _path(head: int | None) -> CTE:
    """The turns from the head back to the first, by id."""
    path = select(turns.c.id, turns.c.parent).where(turns.c.id == head).cte("path", recursive=True)
    return path.union_all(select(turns.c.id, turns.c.parent).where(turns.c.id == path.c.parent))


def _collect(db: Connection, last: int | None, until: int | None) -> None:
    """Delete turns from `last` back to `until` (which stays), as far as no chain and no other turn stands on them."""
    children = turns.alias()
    while last is not None and last != until:
        parent = db.execute(select(turns.c.parent).where(turns.c.id == last)).scalar()
        stood_on = exists().where(chains.c.head == last)
        followed = exists().where(children.c.parent == last)
        if db.execute(select(literal(1)).where(not_(stood_on), not_(followed))).first() is None:
            return
        db.execute(delete(spans).where(spans.c.turn == last))
        db.execute(delete(turns).where(turns.c.id == last))
        last = parent


def _write_overlay(db: Connection, chain_id: str, overlay: Overlay) -> None:
    db.execute(delete(prunes).where(prunes.c.chain_id == chain_id))
    db.execute(delete(marks).where(marks.c.chain_id == chain_id))
    if overlay.prunes:
        db.execute(insert(prunes), [rows.prune_row(prune, chain_id) for prune in overlay.prunes])
    marked = rows.mark_rows(chain_id, overlay.pins, overlay.was_due, overlay.lags)
    if marked:
        db.execute(insert(marks), marked)


def _open_calls(answer: str | None, since: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Calls of the last turn, and of messages brought along since, that no result answers."""
    made = [] if answer is None else [call.id for call in msgspec.json.decode(answer, type=Turn).tool_calls]
    made += [call_id for kind, call_id in since if kind == "tool_call"]
    answered = {call_id for kind, call_id in since if kind == "tool_result"}
    return tuple(call_id for call_id in made if call_id not in answered)


@contextmanager
def _faults(doing: str) -> Iterator[None]:
    """Whatever the database says is a StoreFault."""
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        said = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise StoreFault(f"{doing} failed: {said}") from error
