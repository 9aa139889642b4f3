"""Opening a database: the URL, the connections' settings, the transactions, the migrations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.pool import StaticPool

from agentkv.errors import BadRequest, StoreFault

HEAD = "v0002"
"""The migration that this code needs; a test holds it to the newest file in migrations/versions."""
WAIT = 10.0
"""Seconds to wait for another process that holds the database."""
WRITE_KEY = 7_164_051
"""Of the advisory lock that writers of a PostgreSQL database take."""


def parse_where(where: str | PathLike[str]) -> URL:
    """A path, ':memory:' or a URL, as a URL."""
    text = fspath(where)
    if "://" in text:
        try:
            return make_url(text)
        except ArgumentError as error:
            hint = "sqlite:///path or postgresql+psycopg://user@host/name"
            raise BadRequest(f"db={text!r} is not a database URL: {error}", hint=hint) from None
    if text == ":memory:":
        return URL.create("sqlite")
    return URL.create("sqlite", database=str(Path(text).expanduser().absolute()))


class Database:
    """One database, migrated. `write` and `read` give a connection inside a transaction."""

    def __init__(self, where: str | PathLike[str]) -> None:
        url = parse_where(where)
        self.shown = url.render_as_string(hide_password=True)
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self.one_connection = self.is_sqlite and url.database in (None, "", ":memory:")
        self._engine = self._connect(url)
        self._writer = self._engine.execution_options(agentkv_write=True)
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    def _connect(self, url: URL) -> Engine:
        if not self.is_sqlite:
            engine = create_engine(url, pool_pre_ping=True)
            event.listen(engine, "begin", _begin_postgresql)
            return engine
        more: dict[str, Any] = {"connect_args": {"check_same_thread": False, "timeout": WAIT}}
        if self.one_connection:
            more["poolclass"] = StaticPool
        elif url.database is not None:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url, **more)
        event.listen(engine, "connect", _set_up)
        event.listen(engine, "begin", _begin)
        return engine

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that has the write lock from its first moment."""
        with self._writer.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state."""
        with self._engine.begin() as connection:
            yield connection

    def forget(self) -> None:
        """Make deleted text leave the files: move the write-ahead log into the database and empty it."""
        if self.is_sqlite and not self.one_connection:
            with suppress(OperationalError), self._engine.connect() as connection:  # busy elsewhere: that reader's end does it
                raw = connection.connection.dbapi_connection
                if raw is not None:
                    raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _migrate(self) -> None:
        with self.read() as connection:
            if self._version(connection) == HEAD:
                return
        with self.write() as connection:
            if self._version(connection) == HEAD:  # another process was first
                return
            self._upgrade(connection)

    def _version(self, connection: Connection) -> str | None:
        from sqlalchemy import inspect

        if not inspect(connection).has_table("alembic_version"):
            return None
        found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
        return None if found is None else str(found)

    def _upgrade(self, connection: Connection) -> None:
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, HEAD)
        except CommandError as error:
            said = f"{self.shown} was not made by this version of agentkv: {error}"
            raise StoreFault(said, hint="Upgrade agentkv, or name another database") from error


def _set_up(raw: Any, _record: Any) -> None:
    """Settings of a new SQLite connection. Transactions are begun by `_begin`, not by the driver."""
    raw.isolation_level = None
    raw.execute(f"PRAGMA busy_timeout={int(WAIT * 1000)}")
    _patiently(lambda: raw.execute("PRAGMA journal_mode=WAL"))  # the busy timeout does not hold for this one
    for pragma in ("synchronous=NORMAL", "foreign_keys=ON", "secure_delete=ON", "temp_store=MEMORY"):
        raw.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("agentkv_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _begin_postgresql(connection: Connection) -> None:
    """Writers come one after another, as in SQLite: what a verb has looked up holds until it has written. A reader sees one
    state."""
    if connection.get_execution_options().get("agentkv_write", False):
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{int(WAIT * 1000)}ms'")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITE_KEY})")
    else:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")


def _patiently(action: Callable[[], Any]) -> None:
    import sqlite3

    deadline = time.monotonic() + WAIT
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
