"""agentkv: sessions whose turns, tool calls and tool results drive the KV cache of a sparse-first LLM engine.

The names below load on first use, so that `import agentkv` costs next to nothing (no torch, no sqlalchemy).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentkv.client import AsyncClient as AsyncClient
    from agentkv.client import Client as Client
    from agentkv.errors import AgentkvError as AgentkvError
    from agentkv.runtime import Runtime as Runtime
    from agentkv.runtime_async import AsyncRuntime as AsyncRuntime
    from agentkv.types import Plan as Plan
    from agentkv.types import Policy as Policy
    from agentkv.types import Span as Span
    from agentkv.types import Turn as Turn
    from agentkv.types import Usage as Usage

__version__ = "0.1.0"

_HOMES = {
    "Runtime": "agentkv.runtime",
    "AsyncRuntime": "agentkv.runtime_async",
    "Client": "agentkv.client",
    "AsyncClient": "agentkv.client",
    "AgentkvError": "agentkv.errors",
    "Plan": "agentkv.types",
    "Policy": "agentkv.types",
    "Span": "agentkv.types",
    "Turn": "agentkv.types",
    "Usage": "agentkv.types",
}

__all__ = [
    "AgentkvError",
    "AsyncClient",
    "AsyncRuntime",
    "Client",
    "Plan",
    "Policy",
    "Runtime",
    "Span",
    "Turn",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentkv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
