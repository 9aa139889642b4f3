"""A sequence's text as it grows: what may be shown, and where a stop string ended it."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """Text that the token completes; "" while a character is not whole."""
        ...

    def flush(self) -> str:
        """What is held back, at the end."""
        ...


class TextTokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def detokenizer(self) -> Detokenizer:
        """A fresh one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        ...


class TextStream:
    """Text of the generated tokens of one sequence, with stop strings found across token borders.

    Text that could be the beginning of a stop string is held back until that is decided. stop_text: the stop string that was
    met; kept_ids: then the generated ids whose text is what was shown (a token that the stop string cut in two is replaced by
    the tokens of its first part).

        text    a b c d e f g h          tokens |a b|c d e|f g h|, stop "ef"
        shown   a b c d                  kept_ids |a b| + encode("cd")
    """

    def __init__(self, tokenizer: TextTokenizer, stop: tuple[str, ...]) -> None:
        self.stop_text: str | None = None
        self.kept_ids: list[int] | None = None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop = stop
        self._ids: list[int] = []
        self._ends: list[int] = []  # length of the text when each token was in
        self._text = ""
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add a generated token; the text that may be shown because of it. Look at `stop_text` afterwards."""
        fresh = self._detokenizer.push(token_id)
        self._ids.append(token_id)
        return self._add(fresh)

    def close(self) -> str:
        """No more tokens come: the rest of the text, "" after a stop string."""
        if self.stop_text is not None:
            return ""
        return self._add(self._detokenizer.flush(), last=True)

    def _add(self, fresh: str, *, last: bool = False) -> str:
        searched = len(self._text)
        self._text += fresh
        if not last:
            self._ends.append(len(self._text))
        longest = max((len(stop) for stop in self._stop), default=0)
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, max(0, searched - longest + 1))) >= 0]
        if found:
            end, self.stop_text = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._keep(end)
        else:
            end = len(self._text) - (0 if last else self._undecided())
        text, self._shown = self._text[self._shown : end], max(self._shown, end)
        return text

    def _undecided(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        return max((self._overlap(stop) for stop in self._stop), default=0)

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._text))
        return next((size for size in range(longest, 0, -1) if self._text.endswith(stop[:size])), 0)

    def _keep(self, end: int) -> None:
        """The most tokens whose text, on its own, is the beginning of what is shown; then the tokens of what is missing."""
        for count in range(bisect_right(self._ends, end), -1, -1):
            text = self._decode(self._ids[:count])  # a token may end inside a character: then fewer are kept
            if self._text.startswith(text) and len(text) <= end:
                rest = self._tokenizer.encode(self._text[len(text) : end]) if len(text) < end else []
                self.kept_ids = self._ids[:count] + rest
                return

    def _decode(self, ids: list[int]) -> str:
        detokenizer = self._tokenizer.detokenizer()
        return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])
