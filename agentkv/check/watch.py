"""Looking at a method while it runs: the same method, with somebody around its hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from agentkv.engine.sparse import SparseMethod

IN_A_STEP = (
    "on_step_begin",
    "project",
    "store",
    "select",
    "view",
    "finish",
    "on_attention_end",
    "on_window_mass",
    "on_layer_end",
    "on_chunk_end",
    "on_step_end",
)
HOOKS = (*IN_A_STEP, "on_pages", "seal")


class Watcher:
    """Sees every hook call. Subclasses look at what goes in and comes out, or change it."""

    def around(self, hook: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make the call; what the engine gets of it."""
        return call(*args)


def watched(method: SparseMethod, watcher: Watcher) -> SparseMethod:
    """The method with `watcher` around its hooks. It has the same options, fingerprint and capabilities."""
    kind = type(method)

    def around(hook: str) -> Callable[..., Any]:
        inner = getattr(kind, hook)

        def call(self: SparseMethod, *args: Any) -> Any:
            return watcher.around(hook, lambda *given: inner(self, *given), args)

        return call

    body: dict[str, Any] = {hook: around(hook) for hook in HOOKS}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made: SparseMethod = type(kind.__name__, (kind,), body)(
        **{each.name: getattr(method, each.name) for each in fields(method) if each.init}
    )
    return made
