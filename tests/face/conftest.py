"""The public face over both ways in: the in-process runtime, and the client against a server on loopback."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from agentkv import Client, Runtime
from agentkv.server.app import create_app

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))  # where a library's stand-in lies


@contextmanager
def serving(runtime: Runtime, **options: Any) -> Iterator[str]:
    """Serve a runtime on an ephemeral loopback port; yields the base URL."""
    options.setdefault("log", lambda line: None)
    server = uvicorn.Server(uvicorn.Config(create_app(runtime, **options), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)


@pytest.fixture
def serve() -> Any:
    """`serving`, for tests that need a server of their own."""
    return serving


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with Runtime("micro", memory="256MiB", db=tmp_path_factory.mktemp("face") / "face.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def base_url(runtime: Runtime) -> Iterator[str]:
    with serving(runtime) as url:
        yield url


@pytest.fixture(params=["runtime", "client"])
def face(request: pytest.FixtureRequest, runtime: Runtime, base_url: str) -> Iterator[Any]:
    """Something with session(), resume(), sessions(), delete(): a Runtime or a Client."""
    if request.param == "runtime":
        yield runtime
    else:
        with Client(base_url) as client:
            yield client
