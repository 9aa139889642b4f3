"""What `agentkv doctor` finds: problems (something will not work) and advice (it works, and could be better)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentkv.errors import AgentkvError


@dataclass(slots=True)
class Findings:
    """Each is a row of part (what it concerns), text (what, and why) and hint (what to do)."""

    problems: list[dict[str, str]] = field(default_factory=list)
    advice: list[dict[str, str]] = field(default_factory=list)

    def problem(self, part: str, text: str, hint: str = "") -> None:
        """Something will not work."""
        self.problems.append({"part": part, "text": text, "hint": hint})

    def advise(self, part: str, text: str, hint: str = "") -> None:
        """Something works, and could be better."""
        self.advice.append({"part": part, "text": text, "hint": hint})

    @contextmanager
    def looking_at(self, part: str) -> Iterator[None]:
        """An error of ours inside is a problem of that part, and looking goes on after the block."""
        try:
            yield
        except AgentkvError as error:
            self.problem(part, error.message, error.hint)
