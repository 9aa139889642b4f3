"""The session verbs over HTTP: `Client` for a server started with `agentkv serve`, and `AsyncClient`, its async twin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
import msgspec

from agentkv.aio import AsyncSession, Threads
from agentkv.client_http import Http, Unreachable
from agentkv.client_session import RemoteSession, RemoteStream, Shown
from agentkv.errors import BadRequest
from agentkv.tools.registry import Toolbox
from agentkv.types import Frozen, Policy, SessionInfo

__all__ = ["AsyncClient", "Client", "RemoteSession", "RemoteStream", "Unreachable"]

DEFAULT_URL = "http://127.0.0.1:8000"


class _Sessions(Frozen, frozen=True, kw_only=True):
    sessions: list[SessionInfo]


class _Models(Frozen, frozen=True, kw_only=True):
    data: list[dict[str, Any]]


class Client:
    """A connection to a server. The same verbs, values and exceptions as `Runtime`.

    timeout: seconds without any byte from the server before a request gives up; None waits for as long as a turn takes.
    retries: how often a request that found no Capacity is sent again, after the time the server asks for; nothing else is
    ever sent twice. transport: an httpx transport instead of the network.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = Http(base_url, api_key, timeout=timeout, retries=retries, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def session(
        self,
        *,
        id: str | None = None,
        system: str | None = None,
        tools: Iterable[Callable[..., Any] | Mapping[str, Any]] = (),
        method: str | None = None,
        policy: Policy | Mapping[str, Any] | None = None,
        history: str | None = None,
        on_window: str | None = None,
        placeholder: str | None = None,
        **sampling: Any,
    ) -> RemoteSession:
        """A new session. tools: typed functions, which `run` calls here, or OpenAI schemas. sampling: defaults of generate."""
        toolbox = Toolbox(tools)
        body: dict[str, Any] = {
            "id": id,
            "system": system,
            "tools": toolbox.schemas or None,
            "method": method,
            "policy": None if policy is None else msgspec.to_builtins(policy),
            "history": history,
            "on_window": on_window,
            "placeholder": placeholder,
            "sampling": {name: value for name, value in sampling.items() if value is not None} or None,
        }
        body = {name: value for name, value in body.items() if value is not None}
        return RemoteSession(self._http, self._http.call("POST", "/v1/sessions", body, kind=Shown), toolbox)

    def resume(self, id: str, *, tools: Iterable[Callable[..., Any] | Mapping[str, Any]] = ()) -> RemoteSession:
        """A session that is there. tools: functions for the tools it was made with; the others need `run(execute=)`."""
        shown = self._http.call("GET", _path(id), kind=Shown)
        given = Toolbox(tools)
        known = Toolbox(shown.tools)
        strange = [name for name in given.names if name not in known]
        if strange:
            raise BadRequest(
                f"session {id!r} was made without a tool {strange[0]!r}",
                hint=f"Its tools: {', '.join(known.names) or 'none'}",
                param="tools",
            )
        return RemoteSession(self._http, shown, known.with_functions(given))

    def sessions(self) -> list[SessionInfo]:
        """One line about every session."""
        return self._http.call("GET", "/v1/sessions", kind=_Sessions).sessions

    def delete(self, id: str) -> None:
        """Remove a session, its KV and its text."""
        self._http.call("DELETE", _path(id), kind=dict)

    def models(self) -> list[dict[str, Any]]:
        """The models the server serves, with their window (max_model_len)."""
        return self._http.call("GET", "/v1/models", kind=_Models).data

    def close(self) -> None:
        """Close the connections; sessions on the server stay as they are."""
        self._http.close()


class AsyncClient:
    """`Client`, awaitable."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._client = Client(base_url, api_key, timeout=timeout, retries=retries, transport=transport)
        self._threads = Threads("agentkv-client")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def session(
        self,
        *,
        id: str | None = None,
        system: str | None = None,
        tools: Iterable[Callable[..., Any] | Mapping[str, Any]] = (),
        method: str | None = None,
        policy: Policy | Mapping[str, Any] | None = None,
        history: str | None = None,
        on_window: str | None = None,
        placeholder: str | None = None,
        **sampling: Any,
    ) -> AsyncSession[RemoteSession]:
        """A new session."""
        options: dict[str, Any] = {"id": id, "system": system, "tools": tools, "method": method, "policy": policy}
        options |= {"history": history, "on_window": on_window, "placeholder": placeholder, **sampling}
        return await self._session(lambda: self._client.session(**options))

    async def resume(
        self, id: str, *, tools: Iterable[Callable[..., Any] | Mapping[str, Any]] = ()
    ) -> AsyncSession[RemoteSession]:
        """A session that is there."""
        return await self._session(lambda: self._client.resume(id, tools=tools))

    async def _session(self, open: Callable[[], RemoteSession]) -> AsyncSession[RemoteSession]:
        return AsyncSession(await self._threads.call(open), self._threads)

    async def sessions(self) -> list[SessionInfo]:
        """One line about every session."""
        return await self._threads.call(self._client.sessions)

    async def delete(self, id: str) -> None:
        """Remove a session, its KV and its text."""
        await self._threads.call(lambda: self._client.delete(id))

    async def models(self) -> list[dict[str, Any]]:
        """The models the server serves."""
        return await self._threads.call(self._client.models)

    async def close(self) -> None:
        """Close the connections; sessions on the server stay as they are."""
        await self._threads.call(self._client.close)


def _path(id: str) -> str:
    return f"/v1/sessions/{quote(id, safe='')}"
