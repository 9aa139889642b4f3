"""What a check comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check of one method on one model. detail: what was seen, or why not."""

    check: str
    result: Literal["passed", "failed", "skipped"]
    detail: str


class Failed(Exception):
    """The method breaks the contract; the message says what was seen."""


class Skipped(Exception):
    """There is nothing to check: the method does not promise it."""


def require(holds: bool, otherwise: str) -> None:
    """Failed unless it holds."""
    if not holds:
        raise Failed(otherwise)


def table(outcomes: Sequence[Outcome]) -> str:
    """Lines of check, result and detail."""
    width = max(len(each.check) for each in outcomes)
    return "\n".join(f"{each.check:{width}}  {each.result:7}  {each.detail}" for each in outcomes)
