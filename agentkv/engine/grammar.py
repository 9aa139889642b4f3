"""The only door to llguidance: grammars compiled for one tokenizer, and the masks that they allow.

Everything that takes time happens where `GrammarCompiler.compile` is called, never on the engine's thread. The library
spends fuel, not time: what it cannot compile or match within its limits is an error.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from agentkv.constraint import Form
from agentkv.engine.core import Mask
from agentkv.errors import BadRequest

COMPILE_SECONDS = 10.0
KEPT = 64
"""Compiled grammars that are kept for requests to come."""

_BLANKS = r"( ?|\n {0,16})"
"""Between the tokens of a JSON text: nothing, a blank, or a new line with its indent, as a model likes, but not without end."""

_ENDED = ("NoExtension", "NoExtensionBias", "EndOfSentence", "NotStopped")


class Vocabulary(Protocol):
    """What a grammar needs of a tokenizer."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end an answer."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """What the token adds to the text, None for one that adds nothing."""
        ...

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of text. special: what spells a special or added token becomes that token."""
        ...


@dataclass(frozen=True, slots=True)
class Grammar:
    """A Lark grammar (llguidance's dialect, rule `start`), and the forms that it names as @part."""

    lark: str
    parts: tuple[tuple[str, Form], ...] = ()


class GrammarCompiler:
    """Grammars to masks, for one tokenizer and a model of `vocab_size` ids. Thread safe. The last grammars are kept."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def compile(self, grammar: Grammar, param: str = "response_format") -> Mask:
        """A fresh mask for one sequence. BadRequest, with the library's words, for a grammar that cannot be served."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = _in_time(lambda: self._matcher(grammar, param), param)
            with self._lock:
                self._compiled[grammar] = matcher
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        return GrammarMask(matcher, -(-self._vocab_size // 32))

    def _matcher(self, grammar: Grammar, param: str) -> Any:
        guidance = _library()
        parts = [{"name": name, **_part(guidance, form)} for name, form in grammar.parts]
        text = json.dumps({"grammars": [{"name": "start", "lark_grammar": grammar.lark}, *parts]})
        limits = guidance.LLParserLimits(verbose_errors=False)
        matcher = guidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        problem = matcher.get_error()
        if not problem:
            allowed = matcher.compute_bitmask()  # the slow first mask, and what shows only then
            problem = matcher.get_error() or ("" if any(allowed) else "nothing can be said")
        if problem:
            raise BadRequest(
                f"{param} cannot be served: {' '.join(problem.split())}",
                hint="See docs/api.md for what schemas, patterns and grammars may use; nothing is ignored silently",
                param=param,
            )
        return matcher

    @cached_property
    def _tokenizer(self) -> Any:
        ends = sorted(self._vocabulary.eos_ids)
        if not ends:
            raise BadRequest(
                "the model has no end-of-text token, so an answer cannot be held to a form",
                hint="Name its eos_token_id in generation_config.json",
                param="response_format",
            )
        guidance = _library()
        return guidance.LLTokenizer(guidance.TokenizerWrapper(_Words(self._vocabulary, self._vocab_size, ends)), eos_token=ends)


class GrammarMask:
    """See `core.Mask`. Packed words; the matcher follows the ids generated so far, and starts anew where they differ."""

    def __init__(self, start: Any, num_words: int) -> None:
        self._start = start
        self._num_words = num_words
        self._matcher = start.deep_copy()
        self._read: list[int] = []
        self._told: memoryview | None = None  # what may follow them

    def __call__(self, made: list[int]) -> memoryview:
        """What may follow `made`. Raises ValueError for ids that are not of the grammar, BadRequest where one that it
        allowed is past the library's limits: some grammars show only on the way that they are too large."""
        done = len(self._read)
        if self._matcher.is_error() or self._read != made[:done]:  # it never leaves an error
            self._matcher, self._told, done = self._start.deep_copy(), None, 0
        fresh, told = made[done:], self._told
        if fresh:
            self._matcher.consume_tokens(fresh)
        self._read = made
        words = self._matcher.compute_bitmask()
        if self._matcher.is_error() or self._matcher.stop_reason() not in _ENDED:
            reason = " ".join((self._matcher.get_error() or str(self._matcher.stop_reason())).split())
            if told is None or len(fresh) != 1 or not told[fresh[0] // 32] >> fresh[0] % 32 & 1:
                raise ValueError(reason)
            hint = "Ask for a simpler form; the turn was rolled back"
            raise BadRequest(f"the form is too complex to go on with: {reason}", hint=hint, param="response_format")
        self._told = memoryview(words).cast("I")[: self._num_words]  # the library counts one token more
        return self._told


class _Words:
    """A vocabulary as the library reads it: the bytes of each token. Tokens without text are special: no grammar draws them."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, ends: Sequence[int]) -> None:
        texts = [vocabulary.token_bytes(token) for token in range(vocab_size)]
        self.tokens = [b"" if text is None else text for text in texts]
        self.special_token_ids = [token for token, text in enumerate(texts) if text is None]
        for token in self.special_token_ids:
            self.tokens[token] = f"<|special-{token}|>".encode()
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self._vocabulary = vocabulary
        self._silent = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Ids of text that a grammar forces: a tool marker is the model's own token, other special tokens stay spelled."""
        ids = self._vocabulary.encode(text, special=True)
        return self._vocabulary.encode(text) if self._silent.intersection(ids) else ids


def _part(guidance: Any, form: Form) -> dict[str, Any]:
    if form.kind == "grammar":
        return {"lark_grammar": form.text}
    if form.kind == "regex":
        return {"lark_grammar": f"start: /{guidance.regex_to_lark(form.text, use_ascii='dw')}/"}
    schema = json.loads(form.text)
    options = {"whitespace_flexible": True, "whitespace_pattern": _BLANKS}
    return {"json_schema": {**schema, "x-guidance": options}}


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise BadRequest("answers of a given form need the package llguidance", hint="pip install llguidance") from None
    return llguidance


def _in_time(work: Callable[[], Any], param: str) -> Any:
    """The result of `work`, BadRequest when it takes too long: then its thread runs out of fuel on its own."""
    result: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run, name="agentkv-grammar", daemon=True)
    thread.start()
    thread.join(COMPILE_SECONDS)
    if failed:
        raise failed[0]
    if not result:
        raise BadRequest(
            f"{param}: reading it takes more than {COMPILE_SECONDS:g} s", hint="Ask for a simpler form", param=param
        )
    return result[0]
