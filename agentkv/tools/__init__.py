"""Tools: schemas from functions, calls read from a model's output, results rendered back, and the loop around them.

The names below load on first use. `agentkv.tools.bash` is UNRESTRICTED and never used unless you pass it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentkv.tools.registry import Toolbox as Toolbox
    from agentkv.tools.registry import schema_of as schema_of
    from agentkv.tools.registry import tool as tool
    from agentkv.tools.run import ALLOW as ALLOW
    from agentkv.tools.run import WAIT as WAIT
    from agentkv.tools.run import ToolFinished as ToolFinished
    from agentkv.tools.run import ToolStarted as ToolStarted
    from agentkv.tools.run import reject as reject

_HOMES = {
    "Toolbox": "registry",
    "schema_of": "registry",
    "tool": "registry",
    "ALLOW": "run",
    "WAIT": "run",
    "ToolFinished": "run",
    "ToolStarted": "run",
    "reject": "run",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentkv.tools' has no attribute {name!r}")
    return getattr(import_module(f"agentkv.tools.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
