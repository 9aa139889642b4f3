"""The engine: requests in, tokens out. Start reading at `LLM.step`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from secrets import randbits
from time import monotonic, perf_counter
from typing import Literal

from agentkv.engine.accounts import Decoding, EngineStats, check, measure
from agentkv.engine.cache.chain import Chain, ChainCache
from agentkv.engine.cache.intervals import common_prefix, merged, normal_edits, size
from agentkv.engine.cache.pools import KVPools
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.cache.tiers import WarmTier
from agentkv.engine.core import Batch, ChainInfo, Drawn, EngineConfig, Request, RowWork, Sequence, Status, StepOutput
from agentkv.engine.demands import check_drawn, check_sampling, equip, head_of, leader_of, promote
from agentkv.engine.device_memory import DeviceMemory
from agentkv.engine.flights import Flight, Flights
from agentkv.engine.lookup import agreed
from agentkv.engine.oracle import PagedOracle
from agentkv.engine.output import TextStream, TextTokenizer
from agentkv.engine.reuse import Reuse
from agentkv.engine.runner_protocol import Runner
from agentkv.engine.scheduler import Scheduler
from agentkv.engine.units import NOTHING, Units
from agentkv.errors import BadRequest, Busy, Cancelled, Capacity, ContextOverflow, EngineFault
from agentkv.types import Interval, check_priority, check_timeout

DEFAULT_MAX_TOKENS = 4096


class LLM:
    """One model behind a runner. Not thread-safe: everything is called from one thread, between steps.

    tokenizer None: no text and no stop strings. reuse: "radix" shares prefixes between all requests of a salt; "chain" only
    continues chains (methods whose KV is no function of the token prefix). fingerprint: what KV depends on beside its tokens.
    clock: seconds, for deadlines.

    A sequence ends FINISHED and keeps its state until `commit` or `abort`; one that faults is closed at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        tokenizer: TextTokenizer | None = None,
        reuse: Literal["radix", "chain"] = "radix",
        fingerprint: str = "",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        if config.step_tokens < config.max_rows:
            raise BadRequest(
                f"step_tokens={config.step_tokens} is less than max_rows={config.max_rows}: decodes would starve prompts",
                param="step_tokens",
            )
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        tick = count(1).__next__
        self.pools = KVPools.over(runner.num_granules, runner.groups, runner.forms)
        self.arena = self.pools.arena
        self.memory = DeviceMemory(runner, lambda: self.scheduler.batch)
        self.arena.mover = self.memory.move_units
        self.radix = RadixCache(self.pools, tick, enabled=reuse == "radix")
        self.tier = WarmTier(self.pools, self.memory, config.warm_memory, fingerprint)
        self.chains = ChainCache(self.pools, self.radix, tick, config.checkpoints, self.tier)
        self.reuse = Reuse(self.pools, self.radix, self.chains, self._restore)
        self.oracle = PagedOracle(self.pools, self.radix, self.chains, config.step_tokens)
        self.scheduler = Scheduler(config, self.oracle, self.reuse.resume, self.reuse.unshare)
        self._clock = clock
        self.decoding = Decoding()
        self._ids = count(1)
        self._open: dict[int, Sequence] = {}
        self._streams: dict[int, TextStream] = {}
        self._lost: list[Drawn] = []
        self._flights = Flights(runner, self.memory)
        self._flight: Flight | None = None

    def step(self) -> list[StepOutput]:
        """Forward one batch; what it made for each sequence that got a token or ended.

        Nothing can run while every free unit is held by finished sequences that were not committed or aborted.
        """
        started, late = perf_counter(), self._expire()
        flight = self._under_way() or self._flights.launch(self._schedule())
        self._end_failed()
        self._flight = self._follow(flight)
        if flight.fault is None:
            self._seal_prompts()
        drawn = flight.land()
        outputs = self._collect(self._accept(flight.batch, drawn))
        self.decoding.add(flight.batch, outputs, perf_counter() - started)
        return late + outputs

    @property
    def has_work(self) -> bool:
        """Is a sequence waiting or running, or was one ended that no step has told of yet?"""
        return bool(self.scheduler.waiting or self.scheduler.running or self._lost)

    @property
    def peak_bytes(self) -> int:
        """Most arena bytes that were held at once since `reset_peak`."""
        return self.arena.peak_bytes

    def reset_peak(self) -> None:
        """Start measuring `peak_bytes` from what is held now."""
        self.arena.reset_peak()

    # -- sequences

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises at once, and changes nothing: Busy (its chain has a sequence), ContextOverflow (no token would fit the window),
        Capacity (it would not fit the empty arena), BadRequest.
        """
        chain = self.chains.chains.get(request.chain_id) if request.chain_id is not None else None
        if chain is not None and chain.active is not None:
            raise Busy(f"chain {chain.chain_id!r} is advanced by another request", retry_after=1.0)
        if not 0 <= request.form < len(self.pools.forms):
            raise BadRequest(f"form={request.form}: the engine has {len(self.pools.forms)}", param="method")
        if not request.token_ids:
            raise BadRequest("a request needs at least one token", param="token_ids")
        last, size = max(request.token_ids), self.runner.vocab_size
        if last >= size:  # on the device it would end the step of everybody
            raise BadRequest(f"token {last} is none of the model's {size}", param="token_ids")
        check_sampling(request.sampling, self.runner.vocab_size, text=self.tokenizer is not None)
        check_priority(request.priority)
        check_timeout(request.timeout)
        max_tokens = self._max_tokens(request)
        seed = request.sampling.seed if request.sampling.seed is not None else randbits(63)
        prompt = list(request.token_ids)
        seq = Sequence(next(self._ids), request, prompt, len(prompt), max_tokens, seed)
        if request.timeout is not None:
            seq.deadline = self._clock() + request.timeout
        equip(seq, self.runner.vocab_size, self.config.lookup if self.pools.forms[request.form].truncates else 0)
        seq.leader = leader_of(request)
        seq.head = self._head(seq) if chain is None or not chain.token_ids else None
        self.chains.open(request, seq)
        self._open[seq.seq_id] = seq
        if self.tokenizer is not None:
            self._streams[seq.seq_id] = TextStream(self.tokenizer, request.sampling.stop)
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence, *, late: bool = False) -> None:
        """End a sequence in any state; its chain stands at its last boundary. Idempotent. late: its timeout has passed."""
        if seq.status is Status.CLOSED:
            return
        self.scheduler.tally.deadline_misses += late
        self.scheduler.remove(seq)
        self._close(seq)

    def commit(self, seq: Sequence, generated_ids: list[int]) -> None:
        """Advance the chain to the prompt plus these ids (those of the sequence, or `kept_ids`), and close the sequence.

        KV reaches as far as these ids were forwarded; the last one has none yet. Without a chain the KV is left in the prefix
        cache. Raises BadRequest for a sequence that waits or is closed; a running one ends here.
        """
        if seq.state is None:
            raise BadRequest(f"sequence {seq.seq_id} cannot be committed: it is {seq.status.value}")
        ids = seq.token_ids[: seq.num_prompt_tokens] + generated_ids
        length = min(common_prefix(ids, seq.token_ids), len(ids) - 1, seq.num_forwarded)
        chain = self.chains.chains.get(seq.request.chain_id or "")
        state = self.reuse.cut_out(seq, chain, length)
        if chain is not None:
            self.chains.advance(chain, ids, state, seq.request, length)
        else:
            self.radix.insert(seq.request.key, ids, state, None)
            state.release()
        self.scheduler.remove(seq)
        self._close(seq)

    # -- chains

    def prune(self, chain_id: str, intervals: Iterable[Interval]) -> tuple[int, int]:
        """Remove the slots of these logical intervals from the chain and its checkpoints: (tokens, bytes) freed.

        The history's next request must carry the edit at the chain's present length. Frees nothing where the chain is not
        wholly resident (it is applied when the request replays). Raises Busy.
        """
        chain = self._idle(chain_id)
        if chain is None:
            return 0, 0
        intervals = merged(intervals)
        freed = self.price(chain_id, intervals)
        try:
            works = self.chains.prune(chain, intervals, lambda units: self._acquire(units, chain))
            self.scheduler.settle()
        except EngineFault as fault:
            self._lose_all(fault)
            raise
        self.scheduler.memory_changed()
        try:
            self.memory.carry_out(works)
        except EngineFault:
            self.chains.lose(chain, "reclaimed")  # pages are used again while they are read: nothing can be trusted
            raise
        self.chains.shrink_sealed(chain, works)
        return freed

    def price(self, chain_id: str, intervals: Iterable[Interval]) -> tuple[int, int]:
        """What `prune` would free now, without doing it. Bytes that others share stay and do not count."""
        chain = self.chains.chains.get(chain_id)
        if chain is None:
            return 0, 0
        tokens, units = self.chains.price(chain, intervals)
        return tokens, max(0, self.pools.bytes(units))

    def fork(self, chain_id: str, new_chain_id: str, length: int) -> None:
        """A new chain that shares the first `length` committed tokens; a busy chain gives its last boundary.

        Nothing happens for a chain that is not known, and past its end: the child's first request prefills. Raises BadRequest
        for a negative length or a new name that is taken.
        """
        chain = self.chains.chains.get(chain_id)
        if chain is not None:
            self.chains.fork(chain, new_chain_id, length)

    def rollback(self, chain_id: str, length: int) -> None:
        """Cut the chain back to its first `length` tokens. Raises Busy, BadRequest for a negative length."""
        chain = self._idle(chain_id)
        if chain is not None:
            self.chains.rollback(chain, length)
            self.scheduler.memory_changed()

    def suspend(self, chain_id: str) -> None:
        """Its KV goes to host memory where there is room, and is reclaimed before that of other chains otherwise, until the
        next request."""
        chain = self.chains.chains.get(chain_id)
        if chain is not None:
            chain.suspended = True
            if self.chains.demote(chain):
                self.scheduler.memory_changed()

    def drop(self, chain_id: str) -> None:
        """Forget the chain; what other chains and requests share stays. Raises Busy."""
        chain = self._idle(chain_id)
        if chain is not None:
            self.chains.drop(chain)
            self.scheduler.memory_changed()

    def chain_info(self, chain_id: str) -> ChainInfo | None:
        """What is held for the chain; None for a chain that is not known."""
        chain = self.chains.chains.get(chain_id)
        if chain is None:
            return None
        return ChainInfo(
            chain_id=chain_id,
            logical_length=len(chain.token_ids),
            resident_tokens=chain.state.resident if chain.state is not None else 0,
            bytes_held=self.pools.bytes(self.pools.distinct(chain.slices())),
            bytes_unique=self.pools.bytes(self.chains.unique_units(chain)),
            busy=chain.active is not None,
            checkpoints=tuple(checkpoint.length for checkpoint in chain.checkpoints),
            evicted_tokens=chain.state.evicted if chain.state is not None else 0,
            warm_tokens=chain.warm.length if chain.warm is not None and not chain.warm.lost else 0,
        )

    # -- accounts

    def stats(self) -> EngineStats:
        """Where the memory is. Walks every table: for metrics, not for every step."""
        return measure(self.pools, self.radix, self.chains, self.scheduler, self.tier)

    def check(self) -> None:
        """Integrity of every account, found by walking all holders. Raises ArenaError or AssertionError."""
        check(self.pools, self.radix, self.chains, self.scheduler, self.tier)
        queued = {seq.seq_id for seq in self.scheduler.sequences()}
        assert queued == set(self._open)
        assert self.tokenizer is None or queued == set(self._streams)

    # -- inside

    def _max_tokens(self, request: Request) -> int:
        """Tokens the sequence may generate. Raises ContextOverflow and Capacity."""
        prompt, window, wanted = len(request.token_ids), self.config.window, request.sampling.max_tokens
        edits = normal_edits(request.edits, prompt)
        if prompt + 1 > window:
            pruned = sum(size(edit.removed) for edit in edits)
            raise ContextOverflow(
                f"{prompt} tokens leave no room in a window of {window}",
                logical=prompt,
                resident=prompt - pruned,
                limit=window,
                freeable=pruned,
            )

        def peak(max_tokens: int) -> Units:
            return self.oracle.cost(None, edits, prompt + max_tokens - 1, form=request.form, prompt=prompt).peak

        def fits(max_tokens: int) -> bool:
            return self.oracle.fits(peak(max_tokens))

        most = min(wanted or DEFAULT_MAX_TOKENS, window - prompt)
        least = most if wanted is not None else 1
        if not fits(least):
            needs = self.pools.shortfall(peak(least))
            raise Capacity(f"{prompt} prompt tokens and {least} to generate need {needs}")
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if fits(middle) else (least, middle - 1)
        return least

    def _head(self, seq: Sequence) -> Sequence | None:
        """Whose prompt it waits for, to find a part of its own in the prefix cache."""
        request = seq.request
        if not self.radix.enabled or self.pools.windowed or self.pools.forms[request.form].reuse != "radix" or request.edits:
            return None
        return head_of(
            seq, self._open.values(), self.radix.match(request.key, request.token_ids, len(request.token_ids)).length
        )

    def _expire(self) -> list[StepOutput]:
        """End those whose deadline has passed, wherever they are; their chains stand at their last boundaries."""
        now, queue = self._clock(), self.scheduler
        late = [seq for seq in (*queue.waiting, *queue.running) if seq.deadline <= now]
        for seq in late:
            where = "while it waited for room" if seq.status is Status.WAITING else f"after {seq.num_generated} tokens"
            seq.fault = Cancelled(f"timeout={seq.request.timeout:g} s passed {where}")
            self.abort(seq, late=True)
        return [StepOutput(seq, (), "", True) for seq in late]

    def _schedule(self) -> Batch:
        try:
            return self.scheduler.schedule()
        except EngineFault as fault:
            self._lose_all(fault)
            return Batch(rows=[])

    def _under_way(self) -> Flight | None:
        """The step that was launched ahead, if any of its rows still counts."""
        flight, self._flight = self._flight, None
        return flight if flight is not None and any(self._running(work) for work in flight.batch.rows) else None

    def _follow(self, flight: Flight) -> Flight | None:
        """Launch the step behind it where it is known already; see `flights`."""
        if not self.runner.ahead or flight.fault is not None or not flight.batch.rows:
            return None
        batch = self.scheduler.follow(flight.batch)
        return self._flights.launch(batch, flight) if batch.rows else None

    def _running(self, work: RowWork) -> Sequence | None:
        """The sequence of a row, if it runs; one that a step was launched ahead for may have ended."""
        seq = self._open.get(work.seq_id)
        return seq if seq is not None and seq.status is Status.RUNNING else None

    def _accept(self, batch: Batch, drawn: list[int | None] | EngineFault) -> list[Drawn]:
        """Which draws count: the first, and each behind a guess that came true. The sequences that got a token or ended."""
        touched, self._lost = self._lost, []
        for index, work in enumerate(batch.rows):
            seq = self._running(work)
            if seq is None:
                continue
            if seq.num_forwarded == seq.shared_until and not isinstance(drawn, EngineFault):
                self.reuse.revive(seq)
            if not work.replay:
                seq.num_prefilled_tokens += max(0, min(len(work.tokens), seq.num_known - work.position))
            if isinstance(drawn, EngineFault):
                seq.fault = drawn
            else:
                check_drawn(seq, drawn[index])
            if isinstance(drawn, EngineFault) or seq.fault is not None:
                self.abort(seq)
                touched.append((seq, []))
                continue
            token = drawn[index]
            if token is not None:
                touched.append((seq, agreed(work, token)))
        return touched

    def _seal_prompts(self) -> None:
        """Seal the prompts that the step ends, before anything else is done with their sequences: behind the step on the device
        and while that is under way, since what it draws changes nothing of it."""
        try:
            self.scheduler.seal_prompts()
            self.memory.settle()
        except EngineFault as fault:
            self._lose_all(fault)
        self._end_failed()

    def _collect(self, touched: list[Drawn]) -> list[StepOutput]:
        """Turn new tokens into text and end what is complete."""
        outputs, ahead = [], {work.seq_id for work in self._flight.batch.rows} if self._flight is not None else set()
        for seq, draws in touched:
            text, made = "", len(seq.token_ids)
            for token, _ in draws:
                seq.token_ids.append(token)
                if seq.num_generated == 1:
                    self.reuse.share(seq)
                    self.scheduler.memory_changed()  # those beside it need wait no longer
                text += self._text(seq, token)
                if seq.finish_reason is not None:
                    break
            if draws and seq.num_forwarded >= len(seq.token_ids) and seq.seq_id not in ahead:
                self.scheduler.take_back(seq)
            if seq.finish_reason is not None:
                self.memory.failed.pop(seq.seq_id, None)  # the seal of a next token that it does not have
                self.scheduler.finish(seq)
            tokens = tuple(seq.token_ids[made:])
            scores = tuple(score for _, score in draws[: len(tokens)] if score is not None)
            outputs.append(StepOutput(seq, tokens, text, seq.status is not Status.RUNNING, scores))
        self.scheduler.confirm()
        return outputs

    def _text(self, seq: Sequence, token: int) -> str:
        """Visible text of a new token; sets finish_reason when it is the last."""
        stream, text = self._streams.get(seq.seq_id), ""
        if token in seq.request.stop_ids:
            seq.finish_reason = "stop"
        elif stream is not None:
            text = stream.push(token)
        if stream is not None and stream.stop_text is not None:
            seq.finish_reason, seq.stop_text, seq.kept_ids = "stop", stream.stop_text, stream.kept_ids
        elif seq.finish_reason is None and seq.num_generated >= seq.max_tokens:
            seq.finish_reason = "length"
        if stream is not None and seq.finish_reason is not None:
            text += stream.close()
        return text

    def _close(self, seq: Sequence) -> None:
        self._open.pop(seq.seq_id, None)
        self._streams.pop(seq.seq_id, None)
        self.chains.leave(seq)
        self.reuse.unshare(seq)
        seq.head = None
        promote(seq, self._open.values())

    def _idle(self, chain_id: str) -> Chain | None:
        chain = self.chains.chains.get(chain_id)
        if chain is not None and chain.active is not None:
            raise Busy(f"chain {chain_id!r} is advanced by a request", retry_after=1.0)
        return chain

    def _restore(self, chain: Chain) -> None:
        self.chains.restore(chain, lambda units: units.within(self._acquire(units, chain)))
        self.scheduler.settle()

    def _acquire(self, units: Units, chain: Chain) -> Units:
        """Claim so many units more than sequences have reserved; what may be used, nothing if they cannot be had."""
        claimed = self.scheduler.reserved_units + units
        if not self.oracle.claim(claimed):
            self.oracle.reclaim(claimed, keep=chain.chain_id)
            if not self.oracle.claim(claimed):
                return NOTHING
        return self.scheduler.spare_units()

    def _end_failed(self) -> None:
        """Sequences whose seals failed end (the next step tells of them); their chains stand at their last boundaries. Those
        that may turn out to have ended before wait."""
        failed: dict[int, Exception] = {seq.seq_id: seq.fault for seq in self.scheduler.running if seq.fault is not None}
        failed |= self.memory.failed
        ahead = {seq_id for seq_id in failed if seq_id in self._open and self._open[seq_id].before is not None}
        self.memory.failed = {seq_id: fault for seq_id, fault in self.memory.failed.items() if seq_id in ahead}
        for seq_id, fault in failed.items():
            if seq_id in self._open and seq_id not in ahead:
                seq = self._open[seq_id]
                seq.fault = fault
                self.abort(seq)
                self._lost.append((seq, []))

    def _lose_all(self, fault: EngineFault) -> None:
        """Units were moved in the accounts but not on the device: no KV can be trusted. Running sequences end (the next step
        tells of them), the others and all chains keep their tokens and go on without KV."""
        for seq in list(self.scheduler.running):
            seq.fault = fault
            self.abort(seq)
            self._lost.append((seq, []))
        for seq in self.scheduler.finished:
            if seq.state is not None:
                seq.state.cut(0)
        for seq in self.scheduler.waiting:  # one that was about to be admitted
            if seq.state is not None:
                seq.state.release()
                seq.state = None
        for chain in self.chains.chains.values():
            self.chains.lose(chain, "reclaimed")
        self.radix.clear()
        self.scheduler.settle()
        self.scheduler.batch = Batch(rows=[])
        self.scheduler.memory_changed()
