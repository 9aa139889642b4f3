"""Stop strings over token borders, for every split of a text into tokens."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agentkv.engine.output import TextStream


class Pieces:
    """A tokenizer of byte strings: token i is pieces[i], every single byte is a token too. Decodes whole characters only."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [*pieces, *(bytes([i]) for i in range(256))]
        self.first_byte = len(pieces)

    def encode(self, text: str) -> list[int]:
        return [self.first_byte + byte for byte in text.encode()]

    def detokenizer(self) -> Detok:
        return Detok(self)

    def text(self, ids: list[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


class Detok:
    def __init__(self, tokenizer: Pieces) -> None:
        self.tokenizer = tokenizer
        self.held = b""

    def push(self, token_id: int) -> str:
        self.held += self.tokenizer.pieces[token_id]
        for cut in range(len(self.held), -1, -1):
            try:
                text = self.held[:cut].decode()
            except UnicodeDecodeError:
                continue
            self.held = self.held[cut:]
            return text
        return ""

    def flush(self) -> str:
        text, self.held = self.held.decode(errors="replace"), b""
        return text


def stream(text: bytes, cuts: list[int], stop: tuple[str, ...]) -> tuple[str, TextStream, list[int], Pieces]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    tokenizer = Pieces(pieces)
    out, shown, ids = TextStream(tokenizer, stop), "", []
    for token_id in range(len(pieces)):
        ids.append(token_id)
        shown += out.push(token_id)
        assert not any(stop_text in shown for stop_text in stop)
        if out.stop_text is not None:
            break
    return shown + out.close(), out, ids, tokenizer


@given(
    text=st.text("abé", max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=12),
    stop=st.lists(st.text("abé", min_size=1, max_size=3), max_size=3),
)
def test_any_split_shows_the_text_before_the_first_stop(text: str, cuts: list[int], stop: list[str]) -> None:
    shown, out, ids, tokenizer = stream(text.encode(), cuts, tuple(stop))
    ends = [text.find(each) for each in stop if each in text]
    expected = text[: min(ends)] if ends else text
    if ends:
        # a stop string is known when its last character is, so another that begins earlier and ends later may lose
        assert out.stop_text in stop
        assert out.kept_ids is not None
        assert tokenizer.text(out.kept_ids) == shown
        assert text.startswith(shown + str(out.stop_text))
        assert len(shown) >= len(expected)
        count = max(n for n in range(len(ids) + 1) if shown.startswith(tokenizer.text(ids[:n])))
        assert out.kept_ids == ids[:count] + tokenizer.encode(shown[len(tokenizer.text(ids[:count])) :])
    else:
        assert shown == expected
        assert out.stop_text is None
        assert out.kept_ids is None


@pytest.mark.parametrize(
    ("cuts", "kept"),
    [([2, 5], [0]), ([1, 2, 4], [0, 1, 2]), ([3], [0]), ([6], []), ([2, 4, 6], [0, 1])],
)
def test_kept_ids(cuts: list[int], kept: list[int]) -> None:
    shown, out, _, tokenizer = stream(b"abcdefgh", cuts, ("ef",))
    assert shown == "abcd"
    assert out.kept_ids is not None
    assert out.kept_ids[: len(kept)] == kept
    assert out.kept_ids[len(kept) :] == tokenizer.encode("abcd"[len(tokenizer.text(kept)) :])


def test_text_that_may_be_a_stop_string_waits() -> None:
    tokenizer = Pieces([b"x", b"<", b"/", b"y"])
    out = TextStream(tokenizer, ("</s>",))
    assert [out.push(i) for i in range(4)] == ["x", "", "", "</y"]
    out = TextStream(tokenizer, ("</s>",))
    assert [out.push(i) for i in range(3)] == ["x", "", ""]
    assert out.close() == "</"


def test_half_a_character_waits_and_is_not_kept() -> None:
    tokenizer = Pieces(["é".encode()[:1], "é".encode()[1:]])
    out = TextStream(tokenizer, ("é",))
    assert (out.push(0), out.push(1), out.stop_text, out.kept_ids) == ("", "", "é", [])
    out = TextStream(tokenizer, ())
    assert out.push(0) == ""
    assert out.close() == "\N{REPLACEMENT CHARACTER}"
