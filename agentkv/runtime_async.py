"""`AsyncRuntime`: the runtime's verbs, awaitable."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from agentkv.aio import AsyncSession, Threads
from agentkv.runtime import Runtime, Session
from agentkv.types import SessionInfo


class AsyncRuntime:
    """`Runtime`, awaitable: the same arguments and verbs; its sessions are `AsyncSession`s. Opening blocks: use `open`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runtime = Runtime(*args, **options)
        self._threads = Threads("agentkv-runtime")

    @classmethod
    async def open(cls, *args: Any, **options: Any) -> Self:
        """Load the model in a thread."""
        return await Threads("agentkv-open").call(lambda: cls(*args, **options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def runtime(self) -> Runtime:
        """The sync runtime below."""
        return self._runtime

    async def session(self, **options: Any) -> AsyncSession[Session]:
        """See `Runtime.session`."""
        return AsyncSession(await self._threads.call(lambda: self._runtime.session(**options)), self._threads)

    async def resume(self, id: str, *, tenant: str = "", tools: Iterable[Any] | None = None) -> AsyncSession[Session]:
        """See `Runtime.resume`."""
        found = await self._threads.call(lambda: self._runtime.resume(id, tenant=tenant, tools=tools))
        return AsyncSession(found, self._threads)

    async def sessions(self, *, tenant: str = "") -> list[SessionInfo]:
        """See `Runtime.sessions`."""
        return await self._threads.call(lambda: self._runtime.sessions(tenant=tenant))

    async def delete(self, id: str, *, tenant: str = "") -> None:
        """See `Runtime.delete`."""
        await self._threads.call(lambda: self._runtime.delete(id, tenant=tenant))

    async def close(self) -> None:
        """See `Runtime.close`."""
        await self._threads.call(self._runtime.close)
