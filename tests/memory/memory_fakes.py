"""A backend over dictionaries: a scripted model whose answers and whose KV depend on exactly what is resident.

Ids are code points; roles and ends of messages are ids above them. The KV of a token is a number mixed from the token, its
position and the sum of all KV that is visible when it is forwarded, so any slip in the bookkeeping of prunes shows up.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkv.dialogue import Delta, Message, Parsed, Piece, Rendered
from agentkv.errors import Busy, Cancelled, ContextOverflow
from agentkv.memory.backend import Counts, Freed, Held, History
from agentkv.types import Exactness, Interval, Miss, Sampling, ToolCall

BASE = 0x110000
SYSTEM, TOOLS, USER, TOOL, ASSISTANT, END, THINK, CALL, STOP = range(BASE, BASE + 9)


def mix(token: int, position: int, seen: int) -> int:
    return (token * 1_000_003 + position * 7_919 + seen * 31 + 17) % 4_294_967_291


def spell(ids: Sequence[int]) -> str:
    return "".join(chr(i) for i in ids if i < BASE)


@dataclass
class Reply:
    """What the model says next. echo: append four hex digits of what it can see."""

    text: str = "ok"
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    reasoning: str = ""
    echo: bool = True
    error: Exception | None = None
    hold: threading.Event | None = None
    held: threading.Event = field(default_factory=threading.Event)


@dataclass
class Chain:
    ids: list[int] = field(default_factory=list)
    kv: dict[int, int] = field(default_factory=dict)
    forwarded: int = 0
    active: bool = False

    def forward(self, ids: Sequence[int], edits: Sequence[tuple[int, tuple[Interval, ...]]], upto: int) -> int:
        """Forward ids up to a length, with edits at their boundaries; returns how many were forwarded."""
        before, total = self.forwarded, sum(self.kv.values())
        while True:
            for at, intervals in edits:
                if at - 1 == self.forwarded:
                    total -= self.remove(intervals)
            if self.forwarded >= upto:
                return self.forwarded - before
            self.kv[self.forwarded] = mix(ids[self.forwarded], self.forwarded, total)
            total += self.kv[self.forwarded]
            self.forwarded += 1

    def remove(self, intervals: Sequence[Interval]) -> int:
        return sum(self.kv.pop(p, 0) for start, end in intervals for p in range(start, end))

    def cut(self, length: int) -> None:
        self.forwarded = min(self.forwarded, length)
        self.kv = {p: value for p, value in self.kv.items() if p < self.forwarded}


class Running:
    """One generation of the fake."""

    def __init__(
        self, backend: FakeBackend, chain: Chain, work: Chain, ids: list[int], reply: Reply, counts: Counts, most: int
    ):
        self.backend, self.chain, self.work, self.ids, self.reply = backend, chain, work, ids, reply
        self.prompt, self._counts = len(ids), counts
        said = reply.text + (f"-{sum(work.kv.values()) % 65_536:04x}" if reply.echo else "")
        self.calls = [
            ToolCall(id=backend.new_call_id(), name=name, arguments=args, raw=json.dumps(args)) for name, args in reply.calls
        ]
        self.said = said
        self.out: list[int] = [*([THINK, *map(ord, reply.reasoning), THINK] if reply.reasoning else []), *map(ord, said)]
        for call in self.calls:
            self.out += [CALL, *map(ord, f"{call.name}{call.raw}"), CALL]
        self.out.append(END)
        self.cut = len(self.out) > most
        self.out = self.out[:most]
        self.cancelled = threading.Event()
        self.open = True

    def __iter__(self) -> Iterator[Delta]:
        if self.reply.reasoning:
            yield Delta(reasoning=self.reply.reasoning)
        for char in self.said:
            if self.cancelled.is_set():
                return
            yield Delta(text=char)
        if self.reply.hold is not None:
            self.reply.held.set()
            while not self.reply.hold.wait(0.01):
                if self.cancelled.is_set():
                    return
        if self.reply.error is not None:
            raise self.reply.error
        for call in () if self.cut else self.calls:
            yield Delta(call=call)

    def result(self) -> Parsed:
        if self.cancelled.is_set():
            raise Cancelled("cancelled in the engine")
        if self.cut:
            return Parsed(text=spell(self.out), reasoning="", tool_calls=(), pieces=(), ids=self.out, finish_reason="length")
        pieces, at = [], 0
        if self.reply.reasoning:
            pieces.append(Piece(kind="reasoning", start=1, end=1 + len(self.reply.reasoning), text=self.reply.reasoning))
            at = len(self.reply.reasoning) + 2
        if self.said:
            pieces.append(Piece(kind="text", start=at, end=at + len(self.said), text=self.said))
        at += len(self.said)
        for call in self.calls:
            size = len(call.name) + len(call.raw) + 2
            pieces.append(Piece(kind="tool_call", start=at, end=at + size, call=call, text=call.raw))
            at += size
        return Parsed(
            text=self.said,
            reasoning=self.reply.reasoning,
            tool_calls=tuple(self.calls),
            pieces=tuple(pieces),
            ids=self.out,
            finish_reason="tool_calls" if self.calls else "stop",
        )

    def counts(self) -> Counts:
        return self._counts.replace(resident_tokens=len(self.work.kv) + len(self.out) - 1)

    def commit(self, ids: list[int]) -> Counts:
        if self.backend.commit_error is not None:
            raise self.backend.commit_error
        whole = self.ids + ids
        self.work.forward(whole, (), len(whole) - 1)
        self.chain.ids, self.chain.kv, self.chain.forwarded = whole, self.work.kv, self.work.forwarded
        self.chain.active = self.open = False
        return self._counts.replace(resident_tokens=len(self.chain.kv))

    def cancel(self, *, late: bool = False) -> None:
        if self.open:
            self.cancelled.set()
            self.chain.active = self.open = False
            if not self.chain.ids:
                self.backend.chains = {name: one for name, one in self.backend.chains.items() if one is not self.chain}
            if self.backend.cancel_error is not None:
                raise self.backend.cancel_error


class FakeBackend:
    """See `agentkv.memory.backend.KVBackend`. Everything a test may want to look at is public."""

    exactness: Exactness = "exact"
    fingerprint = "fake-1"
    model_name = "fake"
    token_bytes = 8

    def __init__(self, window: int = 100_000) -> None:
        self.window = window
        self.chains: dict[str, Chain] = {}
        self.replies: deque[Reply] = deque()
        self.mismatches: list[str] = []
        self.suspended: list[str] = []
        self.salts: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.commit_error: BaseException | None = None
        self.cancel_error: Exception | None = None
        self.calls = 0
        self.prefix = f"{id(self):x}"
        self.template_system = ""

    def new_call_id(self) -> str:
        self.calls += 1
        return f"call_{self.prefix}_{self.calls}"

    def say(self, *replies: Reply | str) -> None:
        self.replies.extend(Reply(reply) if isinstance(reply, str) else reply for reply in replies)

    def _may_fail(self, verb: str) -> None:
        error = self.errors.pop(verb, None)
        if error is not None:
            raise error

    def render(
        self,
        messages: Sequence[Message],
        *,
        first: bool,
        closed: bool,
        system: str | None,
        tools: Sequence[dict[str, Any]],
        template_args: dict[str, Any],
    ) -> Rendered:
        self._may_fail("render")
        ids: list[int] = []
        pieces: list[Piece] = []

        def body(kind: Any, text: str, index: int | None, call: ToolCall | None = None) -> None:
            pieces.append(Piece(kind=kind, start=len(ids), end=len(ids) + len(text), index=index, call=call, text=text))
            ids.extend(map(ord, text))

        if first:
            text = system if system is not None else self.template_system
            if text:
                ids.append(SYSTEM)
                body("system", text, None)
                ids.append(END)
            if tools:
                ids.append(TOOLS)
                body("tools", json.dumps(list(tools)), None)
                ids.append(END)
        elif not closed:
            ids.append(END)
        for index, message in enumerate(messages):
            ids.append({"user": USER, "tool": TOOL, "assistant": ASSISTANT}[message.role])
            if message.role == "tool":
                ids.extend(map(ord, f"{message.call_id}:"))
                body("tool_result", message.content, index)
            elif message.role == "user":
                body("user", message.content, index)
            else:
                if message.reasoning:
                    ids.append(THINK)
                    body("reasoning", message.reasoning, index)
                    ids.append(THINK)
                if message.content:
                    body("text", message.content, index)
                for call in message.tool_calls:
                    body("tool_call", f"{call.name}{call.raw}", index, call)
            ids.append(END)
        ids.append(ASSISTANT)
        return Rendered(ids=ids, pieces=tuple(pieces))

    def encode(self, text: str) -> list[int]:
        self._may_fail("encode")
        return [ord(char) for char in text]

    def closes_turn(self, token_id: int) -> bool:
        return token_id == END

    def generate(
        self, chain_id: str, history: History, suffix: list[int], sampling: Sampling, *, salt: str, tools: bool, **_: Any
    ) -> Running:
        self._may_fail("generate")
        chain = self.chains.setdefault(chain_id, Chain())
        if chain.active:
            raise Busy("chain is busy")
        ids = [*history.ids, *suffix]
        most = sampling.max_tokens or 4096
        if len(ids) + 1 > self.window:
            raise ContextOverflow("too long", logical=len(ids), resident=len(chain.kv), limit=self.window, freeable=0)
        self.salts.append(salt)
        work, miss = Chain(kv=dict(chain.kv), forwarded=chain.forwarded), None
        expected = Chain()
        expected.forward(ids, history.edits, work.forwarded)
        if expected.kv != work.kv:
            self.mismatches.append(f"{chain_id}: resident {sorted(work.kv)} is not what a replay gives: {sorted(expected.kv)}")
            work = Chain()
        if not chain.kv:
            miss = Miss(reason="new", tokens=len(ids))
        elif work.forwarded < len(history.ids) - 1:
            miss = Miss(reason="reclaimed", tokens=len(history.ids) - 1 - work.forwarded)
        done = work.forward(ids, history.edits, len(ids))
        counts = Counts(
            cached_tokens=len(ids) - done, prefilled_tokens=done, resident_tokens=len(work.kv), evicted_tokens=0, miss=miss
        )
        chain.active = True
        reply = self.replies.popleft() if self.replies else Reply()
        return Running(self, chain, work, ids, reply, counts, most)

    def prune(self, chain_id: str, intervals: Sequence[Interval]) -> Freed:
        self._may_fail("prune")
        freed = self.price(chain_id, intervals)
        chain = self.chains.get(chain_id)
        if chain is not None and chain.forwarded == len(chain.ids) - 1:
            chain.remove(intervals)
        return freed

    def price(self, chain_id: str, intervals: Sequence[Interval]) -> Freed:
        chain = self.chains.get(chain_id)
        if chain is None or chain.forwarded != len(chain.ids) - 1:
            return Freed(tokens=0, bytes=0)
        count = sum(p in chain.kv for start, end in intervals for p in range(start, end))
        return Freed(tokens=count, bytes=count * self.token_bytes)

    def fork(self, chain_id: str, new_chain_id: str, length: int) -> None:
        self._may_fail("fork")
        chain = self.chains.get(chain_id)
        if chain is not None:
            assert length <= len(chain.ids)
            child = Chain(ids=chain.ids[:length], kv=dict(chain.kv), forwarded=chain.forwarded)
            child.cut(max(0, length - 1))
            self.chains[new_chain_id] = child

    def rollback(self, chain_id: str, length: int) -> None:
        self._may_fail("rollback")
        chain = self.chains.get(chain_id)
        if chain is not None:
            assert length <= len(chain.ids)
            chain.ids = chain.ids[:length]
            chain.cut(max(0, length - 1))

    def suspend(self, chain_id: str) -> None:
        self._may_fail("suspend")
        self.suspended.append(chain_id)

    def drop(self, chain_id: str) -> None:
        self._may_fail("drop")
        self.chains.pop(chain_id, None)

    def held(self, chain_id: str) -> Held | None:
        chain = self.chains.get(chain_id)
        if chain is None or not chain.kv:
            return None
        size = len(chain.kv) * self.token_bytes
        return Held(logical_length=len(chain.ids), resident_tokens=len(chain.kv), bytes_held=size, bytes_unique=size)

    def prefill_rate(self) -> float:
        return 1000.0
