"""Full attention over every token: exact, and what the other methods are measured against.

The base class already stores every token and reads every page, so nothing is left to say but what the method is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from agentkv.engine.sparse import SparseMethod
from agentkv.types import Exactness


@dataclass(frozen=True)
class Dense(SparseMethod):
    """No options. Prefixes are shared by content, since KV depends on the tokens alone."""

    family: ClassVar[str] = "dense"
    reuse: ClassVar[Literal["radix", "chain"]] = "radix"
    exactness: ClassVar[Exactness] = "exact"
