"""The only door to transformers' tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentkv.engine.checkpoint import find_gguf
from agentkv.errors import BadModel, BadRequest

if TYPE_CHECKING:
    from agentkv.engine.gguf import GGUFFile

_TOOL_WORDS = ("tool", "python_tag", "function")  # a special token with one of these in its text is kept when decoding
_HALF = "\N{REPLACEMENT CHARACTER}"
_BLANK = "\u2581"  # a space, in vocabularies of the sentencepiece kind
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_DIGITS = ("smollm", "starcoder", "refact")  # splits of GGUF files: each digit alone, then as GPT-2
_MOST_HELD = 16  # tokens; longer is no character but bytes that are not text


class Tokenizer:
    """Text to token ids and back, and the chat template. Immutable; safe to share between threads."""

    def __init__(self, inner: Any, generation: Mapping[str, Any], backend: Backend | None = None) -> None:
        self._inner = inner
        self._backend: Backend = backend or inner.backend_tokenizer
        self._added = {each_id: each.content for each_id, each in self._backend.get_added_tokens_decoder().items()}
        self._plain = _without_added(self._backend)
        special = {each_id for each_id, each in self._backend.get_added_tokens_decoder().items() if each.special}
        self._hidden = frozenset(each for each in special if not any(word in self._added[each] for word in _TOOL_WORDS))
        ids = generation.get("eos_token_id")
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        own = inner.eos_token_id
        self.eos_ids: frozenset[int] = frozenset(int(each) for each in (*listed, *([] if own is None else [own])))
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a model directory or a GGUF file. UnknownModel where there is none, BadModel where no tokenizer is usable.

        A tokenizer.json is read as it is, also beside a GGUF file; else a GGUF's own vocabulary is converted.
        """
        file = find_gguf(path)
        folder = file.parent if file else Path(path)
        exact = (folder / "tokenizer.json").is_file()  # read as it is, not rebuilt by a family's class
        kind: Any = PreTrainedTokenizerFast if exact or file else AutoTokenizer
        hint = "tokenizer.json is needed" + (", beside the file" if file else "")
        options = {"gguf_file": file.name} if file and not exact else {}
        try:
            inner = kind.from_pretrained(str(folder), local_files_only=True, **options)
            backend = inner.backend_tokenizer
        except Exception as error:  # noqa: BLE001 - the library raises many kinds, down to bare Exception
            why = "cannot be read" if exact or file else "is missing"
            raise BadModel(f"the tokenizer in {file or folder} {why}: {_first_line(error)}", hint=hint) from None
        if backend.get_vocab_size() == 0:
            raise BadModel(f"the tokenizer in {file or folder} is empty", hint=hint)
        generation = _generation(folder)
        if file is not None:
            gguf = _open(file)
            generation = {"eos_token_id": gguf.end_ids()}
            backend = backend if exact else _corrected(backend, gguf)
        loaded = cls(inner, generation, backend)
        loaded._check_template(file or folder)
        return loaded

    def check_fits(self, vocab_size: int) -> None:
        """BadModel where text or the end of a turn would be ids that a model of `vocab_size` has not. An added token may be
        one (Gemma's text models have none for images): a prompt that holds it is refused."""
        last = max((*self._backend.get_vocab(with_added_tokens=False).values(), *self.eos_ids), default=0)
        if last >= vocab_size:
            raise BadModel(
                f"the tokenizer has ids up to {last}, the model embeds {vocab_size}",
                hint="Take tokenizer and weights of the same model",
            )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of text; nothing is added in front or behind.

        special False: text that looks like a special or added token is plain text. True: it becomes that token.
        """
        if special:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        return ids if self._added.keys().isdisjoint(ids) else self._split(ids)

    def _split(self, ids: Sequence[int]) -> list[int]:
        """Replace added tokens that the model's own vocabulary produced by the ids of their characters."""
        out: list[int] = []
        for each in ids:
            parts = [each]
            if each in self._added:
                parts = [part for char in self._added[each] for part in self._plain.encode(char, add_special_tokens=False).ids]
            out += [part for part in parts if part not in self._added or len(self._added[part]) == 1]
        return out

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids. Special tokens are left out, tool markers excepted; special True keeps them all."""
        kept = list(ids) if special else [each for each in ids if each not in self._hidden]
        return str(self._backend.decode(kept, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """The token on its own; bytes that are no whole character are U+FFFD."""
        data = self.token_bytes(token_id)
        return self._added[token_id] if data is None else data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """What the token adds to the text, None for one that `decode` leaves out."""
        if token_id in self._hidden:
            return None
        piece = self._added.get(token_id)
        if piece is None:
            piece = self._backend.id_to_token(token_id) or ""  # a model may have more ids than its tokenizer
            if self._letters:
                return bytes(self._letters.get(letter, 0x3F) for letter in piece)
            if _BYTE.fullmatch(piece):
                return bytes([int(piece[3:5], 16)])
            piece = piece.replace(_BLANK, " ")
        return piece.encode()

    @cached_property
    def _letters(self) -> dict[str, int]:
        """The byte that each letter of a byte-level vocabulary stands for; {} for other kinds."""
        if '"ByteLevel"' not in json.dumps(json.loads(self._backend.to_str())["decoder"]):
            return {}
        visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these stand for themselves
        others = [byte for byte in range(0x100) if byte not in visible]
        return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        """Incremental `decode`."""
        return Detokenizer(self, special)

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        """Render a conversation; encode the result with special=True. BadRequest where the template refuses it."""
        try:
            return str(
                self._inner.apply_chat_template(
                    [dict(each) for each in messages],
                    tools=[dict(each) for each in tools] if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **template_args,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRequest(f"the chat template refused the messages: {_first_line(error)}", param="messages") from None

    @property
    def template(self) -> str:
        """Source of the chat template."""
        return str(self._inner.get_chat_template())

    @cached_property
    def template_hash(self) -> str:
        """SHA-256 of the chat template."""
        return hashlib.sha256(self.template.encode()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokenizer and template."""
        return hashlib.sha256((self._backend.to_str() + self.template_hash).encode()).hexdigest()

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The token that the template writes after an assistant's text, None where it writes none."""
        probe = "agentkv-probe"
        answer = {"role": "assistant", "content": probe}
        for messages in ([{"role": "user", "content": "x"}], []):
            try:
                rendered = self.apply_template([*messages, answer], add_generation_prompt=False)
            except BadRequest:
                continue
            ids = self.encode(rendered.rpartition(probe)[2], special=True)
            return next((each for each in ids if each in self._added), None)
        return None

    def _check_template(self, place: Path) -> None:
        try:
            self._inner.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            raise BadModel(f"the chat template in {place} does not parse: {_first_line(error)}") from None
        except Exception:  # noqa: BLE001 - a template may refuse this probe; what matters is that there is one
            if not self._inner.chat_template:
                hint = "Add chat_template.jinja, or chat_template in tokenizer_config.json"
                if place.is_file():
                    hint = "Put the model's tokenizer.json and tokenizer_config.json with a chat_template beside the file"
                raise BadModel(f"{place} has no chat template", hint=hint) from None


class Detokenizer:
    """Text of a growing list of tokens, piece by piece. The pieces joined, with `flush`, are the text of `decode`.

    A character split over tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context: list[int] = []  # tokens whose text is out already: some decoders look one piece back
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that the token completes, "" while a character is not whole."""
        self._pending.append(token_id)
        text = self._text(self._pending)
        if not text.endswith(_HALF):
            return self._release(len(self._pending), text)
        return self._relieve(text) if len(self._pending) > _MOST_HELD else ""

    def flush(self) -> str:
        """What is held back, at the end; an incomplete character becomes U+FFFD."""
        return self._release(len(self._pending), self._text(self._pending))

    def _text(self, tokens: list[int]) -> str:
        before = self._tokenizer.decode(self._context, special=self._special)
        return self._tokenizer.decode(self._context + tokens, special=self._special)[len(before) :]

    def _release(self, count: int, text: str) -> str:
        if text:
            self._context, self._pending = self._pending[:count], self._pending[count:]
        return text

    def _relieve(self, text: str) -> str:
        """Let go of invalid bytes: up to a cut that later tokens cannot change (a character has at most four bytes)."""
        for cut in range(len(self._pending) - 4, 0, -1):
            head = self._text(self._pending[:cut])
            if head and head + self._tokenizer.decode(self._pending[cut:], special=self._special) == text:
                return self._release(cut, head)
        return ""


def _without_added(backend: Backend) -> Backend:
    """The same tokenizer that knows no added token, so that no text can spell one."""
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = []
    spec["post_processor"] = None
    return Backend.from_str(json.dumps(spec))


def _open(file: Path) -> GGUFFile:
    from agentkv.engine.gguf import GGUFFile  # only here: most models do without the package

    return GGUFFile(file)


def _corrected(converted: Backend, gguf: GGUFFile) -> Backend:
    """The library's conversion of a file's vocabulary, without the tokens that it invents and with the file's split of text.

    BadModel where that split is not known: the library would split like GPT-2 and say nothing.
    """
    spec = json.loads(converted.to_str())
    most = gguf.count("tokenizer.ggml.tokens")
    spec["added_tokens"] = [each for each in spec["added_tokens"] if each["id"] < most]
    backend = Backend.from_str(json.dumps(spec))
    split = str(gguf.meta("tokenizer.ggml.pre", "none"))
    if gguf.meta("tokenizer.ggml.model") != "gpt2" or split == "gpt-2":
        return backend
    if split in _DIGITS:
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        raise BadModel(
            f"{gguf.path.name} splits text in a way that is not known here: tokenizer.ggml.pre is {split!r}",
            hint="Put the model's tokenizer.json and tokenizer_config.json beside the file",
        )
    return backend


def _generation(folder: Path) -> dict[str, Any]:
    """generation_config.json, or config.json where there is none: the end-of-text ids."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            try:
                loaded = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise BadModel(f"{name} in {folder} cannot be read: {error}") from None
            return loaded if isinstance(loaded, dict) else {}
    return {}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
