"""The async twins of the sync API: `AsyncSession` over a session, and the threads that runtimes and clients share."""

from __future__ import annotations

from agentkv.aio.session import AsyncSession, AsyncStream
from agentkv.aio.threads import Bridge, Threads

__all__ = ["AsyncSession", "AsyncStream", "Bridge", "Threads"]
