"""The session's view of one model behind an engine: implements memory's `KVBackend` over `EngineWorker`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from agentkv.constraint import Constraint
from agentkv.engine.core import Edit, Request
from agentkv.engine.core import Sequence as EngineSequence
from agentkv.engine.grammar import GrammarCompiler
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.worker import EngineWorker, Ticket
from agentkv.errors import Cancelled
from agentkv.memory.backend import Counts, Delta, Freed, Generation, Held, History, Message, Parsed, Rendered
from agentkv.runtime_constraint import Constraints
from agentkv.runtime_logprobs import LogprobLog
from agentkv.tools.parse import THINK, StreamParser, call_format, opens_thinking
from agentkv.tools.render import Renderer
from agentkv.types import Exactness, Interval, Sampling

FIRST_GUESS_PREFILL = 1000.0
"""Prompt tokens per second assumed before anything was measured."""

CALL_FORMAT = "hermes"
"""How the model writes tool calls."""


PROMPT_TAIL = 8
"""Tokens of a prompt's end that are read to see if it opens a think block."""


class EngineGeneration:
    """One running generation: tokens become deltas as they arrive."""

    def __init__(self, backend: EngineBackend, ticket: Ticket, *, tools: bool, thinking: bool) -> None:
        self._backend = backend
        self._ticket = ticket
        self._parser = StreamParser(tools=tools, thinking=thinking, format=CALL_FORMAT)
        self._ids: list[int] = []
        request = ticket.seq.request
        self._logprobs = LogprobLog(backend.tokenizer, request.stop_ids) if request.sampling.logprobs else None
        self._cancelled = False
        self._drained = False

    def __iter__(self) -> Iterator[Delta]:
        """Yield deltas until the model has finished or the generation was cancelled."""
        while not self._drained:
            output = self._ticket.outputs.get()
            if output is None:
                self._drained = True
                break
            self._ids.extend(output.token_ids)
            if self._logprobs is not None:
                self._logprobs.add(output)
            yield from self._told(self._parser.push(output.text))
        if not self._cancelled and self._ticket.seq.finish_reason is not None:
            yield from self._told(self._parser.flush(self._ticket.seq.finish_reason, cut=self._cut))

    def _told(self, deltas: list[Delta]) -> list[Delta]:
        return deltas if self._logprobs is None else self._logprobs.ride(deltas, self._parser.decided)

    def result(self) -> Parsed:
        """The finished answer; raises what ended the generation otherwise."""
        for _ in self:
            pass
        seq = self._ticket.seq
        if seq.fault is not None:
            raise seq.fault
        if self._cancelled or seq.finish_reason is None:
            raise Cancelled("the turn was cancelled")
        ids = self._ids if seq.kept_ids is None else seq.kept_ids
        parsed = self._parser.parsed(ids, self._texts(ids), seq.finish_reason, cut=self._cut, encode=self._backend.encode)
        if self._logprobs is None:
            return parsed
        told: Parsed = parsed.replace(logprobs=self._logprobs.of(parsed.ids))
        return told

    @property
    def seq(self) -> EngineSequence:
        """The engine's sequence."""
        return self._ticket.seq

    @property
    def _cut(self) -> bool:
        """Was the answer cut off, by its length or by a stop string?"""
        return self._ticket.seq.finish_reason == "length" or self._ticket.seq.stop_text is not None

    def _texts(self, ids: list[int]) -> list[str]:
        """What each id adds to the visible text."""
        detokenizer = self._backend.tokenizer.detokenizer()
        texts = ["" if each in self._ticket.seq.request.stop_ids else detokenizer.push(each) for each in ids]
        if texts:
            texts[-1] += detokenizer.flush()
        return texts

    def counts(self) -> Counts:
        """What the engine measured so far."""
        seq = self._ticket.seq
        resident, evicted = (seq.state.resident, seq.state.evicted) if seq.state is not None else (0, 0)
        return Counts(
            cached_tokens=max(0, seq.num_prompt_tokens - seq.num_prefilled_tokens),
            prefilled_tokens=seq.num_prefilled_tokens,
            resident_tokens=resident,
            evicted_tokens=evicted,
            generated_tokens=seq.num_generated,
            miss=seq.miss,
        )

    def commit(self, ids: list[int]) -> Counts:
        """Advance the chain to the end of the prompt plus these ids."""
        worker, seq = self._backend.worker, self._ticket.seq

        def end() -> Counts:
            counts = self.counts()
            worker.llm.commit(seq, ids)
            info = worker.llm.chain_info(seq.request.chain_id) if seq.request.chain_id else None
            if info is not None:
                counts = counts.replace(resident_tokens=info.resident_tokens, evicted_tokens=info.evicted_tokens)
            return counts

        counts: Counts = worker.call(end)
        self._backend.observe(self._ticket, counts.prefilled_tokens)
        return counts

    def cancel(self, *, late: bool = False) -> None:
        """Stop; the chain stands at its last boundary. late: because its timeout has passed."""
        self._cancelled = True
        self._backend.worker.abort(self._ticket, late=late)


class EngineBackend:
    """See `agentkv.memory.backend.KVBackend`."""

    def __init__(
        self,
        worker: EngineWorker,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        fingerprint: str,
        exactness: Exactness,
        window: int,
        token_bytes: int,
        form: int = 0,
    ) -> None:
        self.form = form
        self.worker = worker
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.fingerprint = fingerprint
        self.exactness = exactness
        self.window = window
        self.token_bytes = token_bytes
        self._renderer = Renderer(tokenizer)
        compiler = GrammarCompiler(tokenizer, worker.llm.runner.vocab_size)
        self._constraints = Constraints(compiler, call_format(CALL_FORMAT), thinks=THINK in tokenizer.template)
        self._prefill_rate = FIRST_GUESS_PREFILL

    def of_form(self, form: int, *, fingerprint: str, exactness: Exactness, token_bytes: int) -> EngineBackend:
        """The same model by another of the runner's forms."""
        other = copy(self)
        other.form, other.fingerprint, other.exactness, other.token_bytes = form, fingerprint, exactness, token_bytes
        return other

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
        """Ids of new messages and the generation prompt; the committed history is never rendered again."""
        return self._renderer.render(
            messages, first=first, closed=closed, system=system, tools=tools, template_args=template_args
        )

    def encode(self, text: str) -> list[int]:
        """Plain text to ids."""
        return self.tokenizer.encode(text)

    def closes_turn(self, token_id: int) -> bool:
        """Is this the template's end-of-turn token?"""
        return token_id == self.tokenizer.end_of_turn_id

    def generate(
        self,
        chain_id: str,
        history: History,
        suffix: list[int],
        sampling: Sampling,
        *,
        salt: str,
        tools: bool,
        constraint: Constraint | None = None,
        beside: Generation | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> EngineGeneration:
        """Continue the chain; raises Busy, Capacity, ContextOverflow, and BadRequest for a constraint, at once."""
        thinking = opens_thinking(self.tokenizer.decode(suffix[-PROMPT_TAIL:], special=True))
        request = Request(
            token_ids=[*history.ids, *suffix],
            sampling=sampling,
            chain_id=chain_id,
            edits=tuple(Edit(at, removed) for at, removed in history.edits),
            salt=salt,
            stop_ids=self.tokenizer.eos_ids,
            mask=None if constraint is None else self._constraints.mask(constraint, thinking=thinking),
            form=self.form,
            beside=beside.seq if isinstance(beside, EngineGeneration) else None,
            priority=priority,
            timeout=timeout,
        )
        return EngineGeneration(self, self.worker.submit(request), tools=tools, thinking=thinking)

    def prune(self, chain_id: str, intervals: Sequence[Interval]) -> Freed:
        """Remove the slots of these logical intervals from the chain and its checkpoints."""
        tokens, size = self.worker.call(lambda: self.worker.llm.prune(chain_id, tuple(intervals)))
        return Freed(tokens=tokens, bytes=size)

    def price(self, chain_id: str, intervals: Sequence[Interval]) -> Freed:
        """What `prune` would free."""
        tokens, size = self.worker.call(lambda: self.worker.llm.price(chain_id, tuple(intervals)))
        return Freed(tokens=tokens, bytes=size)

    def fork(self, chain_id: str, new_chain_id: str, length: int) -> None:
        """Let a new chain share the first `length` logical tokens."""
        self.worker.call(lambda: self.worker.llm.fork(chain_id, new_chain_id, length))

    def rollback(self, chain_id: str, length: int) -> None:
        """Cut the chain back to `length` logical tokens."""
        self.worker.call(lambda: self.worker.llm.rollback(chain_id, length))

    def suspend(self, chain_id: str) -> None:
        """Demote this chain to host memory, or reclaim it first when memory is short."""
        self.worker.call(lambda: self.worker.llm.suspend(chain_id))

    def drop(self, chain_id: str) -> None:
        """Free the chain's KV."""
        self.worker.call(lambda: self.worker.llm.drop(chain_id))

    def held(self, chain_id: str) -> Held | None:
        """What is resident for the chain now."""
        info = self.worker.call(lambda: self.worker.llm.chain_info(chain_id))
        if info is None:
            return None
        return Held(
            logical_length=info.logical_length,
            resident_tokens=info.resident_tokens,
            bytes_held=info.bytes_held,
            bytes_unique=info.bytes_unique,
            warm_tokens=info.warm_tokens,
        )

    def prefill_rate(self) -> float:
        """Measured prompt tokens per second."""
        return self._prefill_rate

    def observe(self, ticket: Ticket, prefilled: int) -> None:
        """Learn the prefill rate from a finished turn: a moving average of prompt tokens over time to first token."""
        if ticket.first_token is not None and prefilled >= 32:
            rate = prefilled / max(1e-6, ticket.first_token - ticket.submitted)
            self._prefill_rate += 0.3 * (rate - self._prefill_rate)
