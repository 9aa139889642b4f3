"""The nouns everyone shares: what a session is made of, what a turn returns, what travels on the wire.

Standard library and msgspec only. All token intervals are half open, `[start, end)`, in logical positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, Literal, TypedDict

import msgspec

from agentkv.errors import BadRequest, UnknownOption

Exactness = Literal["exact", "bounded", "lossy"]
FinishReason = Literal["stop", "tool_calls", "length", "cancelled"]
SpanKind = Literal["system", "tools", "user", "reasoning", "text", "tool_call", "tool_result", "summary"]
SpanState = Literal["live", "pinned", "due", "pruned", "recalled", "redacted"]
PruneMode = Literal["in_place", "rebuild"]
Interval = tuple[int, int]

MAX_CHOICES = 16
"""Answers to one prompt."""

_EXACTNESS_ORDER: tuple[Exactness, ...] = ("exact", "bounded", "lossy")


def worst(*grades: Exactness) -> Exactness:
    """The least exact of the given grades."""
    return max(grades, key=_EXACTNESS_ORDER.index)


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Base of immutable values; `.replace(**changes)` returns a changed copy."""

    def replace(self, **changes: Any) -> Any:
        """A copy with these fields changed."""
        return msgspec.structs.replace(self, **changes)


class Sampling(Frozen, frozen=True, kw_only=True):
    """How the next token is drawn, and when generation ends.

    temperature 0 is greedy. top_k 0 means no limit. min_p: the least probability that counts, as a share of the largest.
    max_tokens None means what the window leaves, at most 4,096. seed None draws a fresh one; a seed gives the same tokens
    whatever else is in the batch.

    repetition_penalty divides the positive and multiplies the negative logits of tokens in the prompt or the answer.
    presence_penalty and frequency_penalty are subtracted once, and once for each time that the answer has the token.
    logit_bias is added after them, by token id. They hold for greedy drawing, too.

    logprobs: return the log-probability of each token, and of the top_logprobs likeliest in its place. They are the model's
    own: at temperature 1, before penalties, biases and limits.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: bool = False
    top_logprobs: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise BadRequest(f"{name}={getattr(self, name)!r} is out of range: {rule}", param=name)

        def within(name: str, low: float, high: float) -> bool:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BadRequest(f"{name}={value!r}: a number", param=name)
            return low <= value <= high  # not a number is in no range

        def whole(name: str) -> bool:
            value = getattr(self, name)
            return isinstance(value, int) and not isinstance(value, bool)

        need(within("temperature", 0.0, 10.0), "temperature", "0 to 10")
        need(within("top_p", 0.0, 1.0) and self.top_p > 0, "top_p", "above 0, at most 1")
        need(whole("top_k") and 0 <= self.top_k < 2**31, "top_k", "0 (no limit) or more, below 2**31")
        need(within("min_p", 0.0, 1.0), "min_p", "0 to 1")
        need(within("presence_penalty", -2.0, 2.0), "presence_penalty", "-2 to 2")
        need(within("frequency_penalty", -2.0, 2.0), "frequency_penalty", "-2 to 2")
        need(within("repetition_penalty", 0.01, 100.0), "repetition_penalty", "0.01 to 100")
        msgspec.structs.force_setattr(self, "logit_bias", _read_bias(self.logit_bias))
        need(isinstance(self.logprobs, bool), "logprobs", "true or false")
        need(whole("top_logprobs") and 0 <= self.top_logprobs <= 20, "top_logprobs", "0 to 20")
        need(self.logprobs or not self.top_logprobs, "top_logprobs", "0 without logprobs")
        need(self.seed is None or (whole("seed") and abs(self.seed) < 2**63), "seed", "an int of 64 bits")
        need(self.max_tokens is None or (whole("max_tokens") and 1 <= self.max_tokens < 2**31), "max_tokens", "at least 1")
        stops = isinstance(self.stop, tuple) and all(isinstance(each, str) and each for each in self.stop)
        need(stops and len(self.stop) <= 16, "stop", "at most 16 non-empty strings")

    @property
    def penalised(self) -> bool:
        """Does the draw depend on which tokens there were?"""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class SamplingOptions(TypedDict, total=False):
    """What a call may say about its sampling; None and left out are the session's default. See `Sampling`."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: bool | None
    top_logprobs: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    max_tokens: int | None


def _read_bias(given: Any) -> dict[int, float]:
    """logit_bias with token ids as ints: JSON has only text for keys."""
    if not isinstance(given, Mapping):
        raise BadRequest("logit_bias: an object of token ids and numbers", param="logit_bias")
    bias: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise BadRequest(f"logit_bias: {key!r} is no token id", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or abs(value) > 100:
            raise BadRequest(f"logit_bias[{token}]={value!r} is out of range: -100 to 100", param="logit_bias")
        bias[token] = float(value)
    return bias


class ToolCall(Frozen, frozen=True, kw_only=True):
    """One call the model made. arguments: parsed JSON object; raw: the text the model wrote for them."""

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str = ""


class Miss(Frozen, frozen=True, kw_only=True):
    """Why something had to be recomputed.

    reason: new | diverged | template_rewrote_history | reclaimed | salt | below_page | fingerprint
    | pruned_not_accepted | corrupt (a copy in a slower tier failed its check) | cold_rejected | rebuild.
    message_index and field name the first difference where there is one; ours and theirs are short snippets of it.
    """

    reason: str
    tokens: int = 0
    message_index: int | None = None
    field: str | None = None
    ours: str = ""
    theirs: str = ""
    detail: str = ""


class Usage(Frozen, frozen=True, kw_only=True):
    """Token counts of one turn (or summed over a session). prompt_tokens = cached_tokens + prefilled_tokens.

    prompt_tokens: logical length when the prompt was complete. prefilled_tokens: what the runner really forwarded as
    prompt (recomputation, replay and rebuild included). cached_tokens: the rest; pruned tokens count as cached.
    resident_tokens: KV slots held per layer at the end of the turn. pruned_tokens, evicted_tokens: logical tokens whose KV
    was removed by pruning, or by the method. reusable_tokens: logical length at the previous turn boundary, so
    `cached_tokens / reusable_tokens` is the reusable share.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    resident_tokens: int = 0
    pruned_tokens: int = 0
    evicted_tokens: int = 0
    reusable_tokens: int = 0

    @property
    def reusable_share(self) -> float:
        """cached_tokens / logical length at the previous turn boundary; 1.0 where there was none."""
        return min(1.0, self.cached_tokens / self.reusable_tokens) if self.reusable_tokens else 1.0


class Span(Frozen, frozen=True, kw_only=True):
    """A logical interval of a chain with a meaning.

    start and end are None until the span has been rendered (results wait for the next generation). size: bytes of text.
    For a pruned span [start, end) stays its logical interval: positions never change. why: why it was pruned.
    """

    id: str
    kind: SpanKind
    turn: int
    state: SpanState = "live"
    start: int | None = None
    end: int | None = None
    tool_name: str | None = None
    call_id: str | None = None
    size: int = 0
    prune_after: int | None = None
    age: int | None = None
    keep: str = "drop"
    error: bool = False
    attention: float | None = None
    why: str | None = None

    @property
    def tokens(self) -> int:
        """Logical tokens of the span, 0 before it is rendered."""
        return 0 if self.start is None or self.end is None else self.end - self.start


class PrunedSpan(Frozen, frozen=True, kw_only=True):
    """One span that a prune removed: what went, how many tokens it freed, and why."""

    span_id: str
    call_id: str | None
    tokens: int
    why: str


class TopLogprob(Frozen, frozen=True, kw_only=True):
    """A token that could have been drawn, and its log-probability. bytes: what it adds to the text, None if it is not shown."""

    id: int
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """A token that was drawn. top_logprobs: the likeliest in its place, in order."""

    top_logprobs: tuple[TopLogprob, ...] = ()


class Turn(Frozen, frozen=True, kw_only=True):
    """What one generation returned.

    number: index of the turn in the session. miss: None when everything reusable was reused. exactness: the worst of the
    method's and of the session's prunes. pruned_now: spans removed when this turn started. state: 'waiting' when a tool
    call awaits a human. logprobs: None where they were not asked for; one for each drawn token that stays, the one that ended
    the turn included, so none for the end of a token that a stop string cut. They are not stored.
    """

    number: int
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    usage: Usage = Usage()
    miss: Miss | None = None
    exactness: Exactness = "exact"
    pruned_now: tuple[PrunedSpan, ...] = ()
    state: Literal["done", "waiting"] = "done"
    chain_id: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None


class Plan(Frozen, frozen=True, kw_only=True):
    """The price of an edit before it is made.

    frees_now: KV bytes that return to the pool. held_by: bytes that stay because others share them, by holder.
    prefill_tokens: tokens that must be recomputed. milliseconds: estimated time of that. turns_to_pay_back: turns after
    which the saving exceeds the cost, None when it never does. spans: ids of the spans affected.
    """

    frees_now: int = 0
    frees_tokens: int = 0
    held_by: dict[str, int] = {}
    prefill_tokens: int = 0
    milliseconds: float = 0.0
    turns_to_pay_back: int | None = None
    spans: tuple[str, ...] = ()


class Policy(Frozen, frozen=True, kw_only=True):
    """Lag-based pruning without code. prune_after: None = never. by_tool overrides it by tool name; exclude_tools wins.

    keep: 'drop' or 'edges:N' (the first and last N tokens of a body stay). mode: 'in_place' or 'rebuild'.
    """

    prune_after: int | None = None
    by_tool: dict[str, int | None] = {}
    exclude_tools: tuple[str, ...] = ()
    keep: str = "drop"
    mode: PruneMode = "in_place"

    def __post_init__(self) -> None:
        for lag in (self.prune_after, *self.by_tool.values()):
            check_lag(lag)
        parse_keep(self.keep)
        if self.mode not in ("in_place", "rebuild"):
            raise BadRequest(f"mode={self.mode!r}: 'in_place' or 'rebuild'", param="mode")

    def lag(self, tool_name: str | None) -> int | None:
        """The prune_after that applies to a result of that tool."""
        if tool_name in self.exclude_tools:
            return None
        if tool_name is not None and tool_name in self.by_tool:
            return self.by_tool[tool_name]
        return self.prune_after


def check_lag(lag: int | None) -> int | None:
    """Refuse a prune_after that is not an int >= 0 or None."""
    if lag is None or (isinstance(lag, int) and not isinstance(lag, bool) and 0 <= lag < 2**31):
        return lag
    raise BadRequest(f"prune_after={lag!r}: an int >= 0, or None for never", param="prune_after")


def check_choices(n: Any) -> int:
    """Refuse a number of answers that is out of range."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        hint = "Send several requests for more; they share what they have in common"
        raise BadRequest(f"n={str(n)[:20]}: 1 to {MAX_CHOICES}", hint=hint, param="n")
    return n


def check_priority(priority: int) -> int:
    """Refuse a priority that is not an int of -10 to 10."""
    if isinstance(priority, int) and not isinstance(priority, bool) and -10 <= priority <= 10:
        return priority
    raise BadRequest(f"priority={priority!r}: an int of -10 to 10, higher goes first", param="priority")


def check_timeout(timeout: float | None, param: str = "timeout") -> float | None:
    """Refuse a timeout that is not a number of seconds above 0, or None. param: what to call it."""
    if timeout is None:
        return None
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        with suppress(OverflowError):  # an int that no float holds
            if float(timeout) > 0:
                return timeout
    raise BadRequest(f"{param}={repr(timeout)[:40]}: seconds above 0, or None", param=param)


def parse_keep(keep: str) -> int:
    """Tokens kept at each edge of a pruned body: 0 for 'drop', N for 'edges:N'."""
    if not isinstance(keep, str):
        raise BadRequest(f"keep={keep!r}: 'drop' or 'edges:N' with N >= 1", param="keep")
    if keep == "drop":
        return 0
    head, _, count = keep.partition(":")
    if head == "edges" and count.isascii() and count.isdigit() and 0 < int(count) < 2**31:
        return int(count)
    raise BadRequest(f"keep={keep!r}: 'drop' or 'edges:N' with N >= 1", param="keep")


class TextDelta(Frozen, frozen=True, kw_only=True, tag="text_delta", omit_defaults=True):
    """More answer text. logprobs: of the tokens since the last event that had some; the turn has those that are left."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(Frozen, frozen=True, kw_only=True, tag="reasoning_delta", omit_defaults=True):
    """More reasoning text."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ToolCallReady(Frozen, frozen=True, kw_only=True, tag="tool_call"):
    """A complete tool call (never half of one)."""

    call: ToolCall


class TurnDone(Frozen, frozen=True, kw_only=True, tag="turn_done"):
    """The turn is committed."""

    turn: Turn


Event = TextDelta | ReasoningDelta | ToolCallReady | TurnDone


class SessionInfo(Frozen, frozen=True, kw_only=True):
    """One line of `sessions ls`. state: hot | idle | stored | closed.

    stored: no KV here, the next turn prefills. tokens: logical; resident_tokens: KV slots held.
    """

    id: str
    state: str
    turns: int
    tokens: int
    resident_tokens: int = 0
    model: str = ""
    created: float = 0.0
    updated: float = 0.0
    open_calls: tuple[str, ...] = ()


def options_of(cls: type[Frozen], given: Mapping[str, Any], where: str) -> Any:
    """Build `cls` from a mapping; an unknown key is an UnknownOption, a wrong type a BadRequest."""
    known = {field.name for field in msgspec.structs.fields(cls)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise UnknownOption(
            f"{where}: unknown option {unknown[0]!r}", hint=f"Known: {', '.join(sorted(known))}", param=unknown[0]
        )
    try:
        return msgspec.convert(dict(given), cls, str_keys=True)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {error}") from None
