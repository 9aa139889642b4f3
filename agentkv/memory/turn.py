"""One generation of a session, from its start to its commit or its rollback."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agentkv.constraint import Constraint
from agentkv.errors import BadRequest, Busy, Cancelled, ContextOverflow, EngineFault
from agentkv.memory.backend import Counts, Generation, History, Parsed, Rendered
from agentkv.memory.branch import Branch
from agentkv.memory.draft import Draft
from agentkv.types import Event, Miss, ReasoningDelta, Sampling, TextDelta, ToolCallReady, Turn, TurnDone, Usage

log = logging.getLogger(__name__)


class RunningTurn:
    """A turn of a branch. The thread that runs it commits it or rolls it back; `cancel` only asks for the latter.

    beside: a running turn whose prompt is the same: it is computed once.
    """

    def __init__(
        self,
        branch: Branch,
        sampling: Sampling,
        *,
        tools: bool,
        constraint: Constraint | None = None,
        timeout: float | None = None,
        priority: int = 0,
        beside: RunningTurn | None = None,
    ) -> None:
        self._branch = branch
        self._sampling = sampling
        self._tools = tools
        self._constraint = constraint
        self._beside = beside
        self._timeout = timeout
        self._priority = priority
        self._guard = threading.Lock()
        self._generation: Generation | None = None
        self._rendered = Rendered(ids=[], pieces=())
        self._timer: threading.Timer | None = None
        self._cancelled = self._abandoned = False
        self._timed_out = False
        self._decided = False  # too late to cancel
        self._started = threading.Event()  # the engine has it, or it failed to start
        self._began = time.perf_counter()
        self.turn: Turn | None = None

    def start(self) -> None:
        """Prune what is due, render what is pending, and let the engine begin. Raises and changes nothing where it may not."""
        branch = self._branch
        self._begin()
        try:
            with branch.kept():
                with branch.lock:
                    branch.unreported += branch.prune(*branch.due())
                    messages = branch.ledger.pending_messages
                    ids = branch.ledger.ids
                    closed = bool(ids) and branch.backend.closes_turn(ids[-1])
                    first = not ids
                settings = branch.settings
                with branch.engine("rendering"):
                    self._rendered = branch.backend.render(
                        messages,
                        first=first,
                        closed=closed,
                        system=settings.system,
                        tools=settings.tools,
                        template_args=settings.template_args,
                    )
                with branch.lock:
                    branch.make_room(len(self._rendered.ids), self._sampling.max_tokens)
                    history = branch.history()
                self._arm()
                self._generate(history)
        except BaseException:
            self.abandon()
            raise
        finally:
            self._started.set()

    def end(self) -> None:
        """Cancel from another thread and wait until the turn holds nothing: one that is just starting must not start later."""
        self.cancel()
        self._started.wait()
        self.abandon()

    def _begin(self) -> None:
        branch = self._branch
        with branch.verb():
            if branch.running is not None:
                raise Busy("a turn of this session is running")
            branch.check_answered()
            if not branch.ledger.length and not branch.ledger.pending_messages:
                raise BadRequest("there is nothing to answer", hint="Call add_user first")
            branch.running = self
            branch.suspended = False

    def _generate(self, history: History) -> None:
        branch = self._branch
        try:
            with branch.engine("starting a generation"):
                generation = branch.backend.generate(
                    branch.chain_id,
                    history,
                    self._rendered.ids,
                    self._sampling,
                    salt=branch.salt,
                    tools=self._tools,
                    constraint=self._constraint,
                    beside=None if self._beside is None else self._beside._generation,
                    priority=self._priority,
                    timeout=self._timeout,
                )
        except ContextOverflow as error:
            branch.overflow(error)
            raise
        with self._guard:
            self._generation = generation
            cancelled = self._cancelled
        if cancelled:
            generation.cancel(late=self._timed_out)

    def _arm(self) -> None:
        if self._timeout is not None:
            self._timer = threading.Timer(min(self._timeout, threading.TIMEOUT_MAX), self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        self._timed_out = True
        self.cancel()

    def cancel(self) -> None:
        """Ask for the rollback. Any thread, more than once; too late once the turn is being committed."""
        with self._guard:
            if self._decided:
                return
            self._cancelled = True
            generation = self._generation
        if generation is not None:
            with suppress(Exception):
                generation.cancel(late=self._timed_out)

    def events(self) -> Iterator[Event]:
        """What the model says, then the committed turn. Leaving before the end rolls back."""
        try:
            assert self._generation is not None, "events() before start()"
            deltas = iter(self._generation)
            while True:
                with self._engine():
                    delta = next(deltas, None)
                if delta is None:
                    break
                if delta.reasoning:
                    yield ReasoningDelta(text=delta.reasoning, logprobs=delta.logprobs)
                if delta.text:
                    yield TextDelta(text=delta.text, logprobs=delta.logprobs)
                if delta.call is not None:
                    yield ToolCallReady(call=delta.call)
            self.turn = self._commit()
        except BaseException:
            self.abandon()
            raise
        yield TurnDone(turn=self.turn)

    @contextmanager
    def _engine(self) -> Iterator[None]:
        """Errors of the generation, with where the session stands; a cancel says why."""
        try:
            with self._branch.kept(), self._branch.engine("generating"):
                yield
        except Cancelled as error:
            raise self._why() from error

    def _why(self) -> Cancelled:
        kept = self._branch.ledger.number
        if self._timed_out or (self._timeout is not None and time.perf_counter() - self._began >= self._timeout):
            return Cancelled(
                f"the turn took longer than timeout={self._timeout:g} s and was rolled back",
                kept=kept,
                hint="Generate again with a longer timeout or fewer max_tokens; what was added is still there",
            )
        return Cancelled("the turn was cancelled and rolled back", kept=kept)

    def _commit(self) -> Turn:
        """Write the turn down, then advance the chain: once the store has it, it is committed whatever happens to KV."""
        branch, generation = self._branch, self._generation
        assert generation is not None
        with self._engine():
            parsed = generation.result()
            counts = generation.counts()
        with branch.lock, branch.kept():
            with self._guard:
                if self._cancelled or branch.running is not self:
                    raise self._why()
                self._decided = True
            if any(branch.ledger.knows_call(call.id) for call in parsed.tool_calls):
                raise EngineFault("the model's dialect gave a call id that is in use")
            draft = branch.ledger.draft(self._rendered, parsed)
            turn = self._told(parsed, counts)
            usage = add_usage(branch.usage, turn.usage)
            milliseconds = (time.perf_counter() - self._began) * 1000
            branch.journal.committed(branch.ledger, draft, turn.replace(logprobs=None), usage, milliseconds)
            try:
                turn = self._told(parsed, generation.commit(parsed.ids))
            except BaseException as error:
                log.warning("the chain of session %s is lost after its turn was stored: %s", branch.session_id, error)
                with suppress(Exception):
                    branch.backend.drop(branch.chain_id)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._settle(draft, turn)
        return turn

    def _settle(self, draft: Draft, turn: Turn) -> None:
        branch = self._branch
        branch.ledger.apply(draft, turn.replace(logprobs=None))  # they are the caller's: large, and made once
        branch.usage = add_usage(branch.usage, turn.usage)
        branch.unreported = []
        branch.epoch, branch.rebuilt, branch.refingered = None, False, False
        branch.running = None
        self.turn = turn
        if self._timer is not None:
            self._timer.cancel()

    def begun(self) -> Turn:
        """The turn before it is committed, without what the model says."""
        if self.turn is not None:
            return self.turn
        assert self._generation is not None, "begun() before start()"
        nothing = Parsed(text="", reasoning="", tool_calls=(), pieces=(), ids=[], finish_reason="stop")
        return self._told(nothing, self._generation.counts())

    def _told(self, parsed: Parsed, counts: Counts) -> Turn:
        branch, prompt = self._branch, self._branch.ledger.length + len(self._rendered.ids)
        recomputed = max(0, counts.prefilled_tokens - len(self._rendered.ids))
        miss = counts.miss
        if miss is not None and miss.reason == "new" and branch.ledger.length:  # new to the engine, not to us
            miss = miss.replace(
                reason="reclaimed", tokens=recomputed, detail="no KV of this session was left; prefilled from the stored ids"
            )
        if branch.rebuilt:
            miss = Miss(reason="rebuild", tokens=recomputed)
        elif branch.refingered and recomputed:
            miss = Miss(reason="fingerprint", tokens=recomputed, detail="model, method or settings changed since the last turn")
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=counts.generated_tokens or len(parsed.ids),
            cached_tokens=max(0, prompt - counts.prefilled_tokens),
            prefilled_tokens=counts.prefilled_tokens,
            resident_tokens=counts.resident_tokens,
            pruned_tokens=branch.ledger.removed,
            evicted_tokens=counts.evicted_tokens,
            reusable_tokens=branch.ledger.length,
        )
        return Turn(
            number=branch.ledger.number + 1,
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            finish_reason=parsed.finish_reason,
            usage=usage,
            miss=miss,
            exactness=branch.exactness,
            pruned_now=tuple(branch.unreported),
            chain_id=branch.chain_id,
            logprobs=parsed.logprobs,
        )

    @property
    def over(self) -> bool:
        """Is it committed or given up?"""
        return self.turn is not None or self._abandoned

    def abandon(self) -> None:
        """Roll the turn back: the chain stands at its last boundary, what was added stays pending. Nothing once committed."""
        branch = self._branch
        if self._timer is not None:
            self._timer.cancel()
        if self.over:
            return
        self._abandoned = True
        with self._guard:
            self._cancelled = True
        if self._generation is not None:
            try:
                self._generation.cancel(late=self._timed_out)
            except Exception:
                log.warning("the chain of session %s could not be rolled back and is dropped", branch.session_id, exc_info=True)
                with suppress(Exception):
                    branch.backend.drop(branch.chain_id)
        with branch.lock:
            if branch.running is self:
                branch.running = None


def add_usage(total: Usage, one: Usage) -> Usage:
    """Tokens that were worked on add up; what is resident, pruned or evicted is as the last turn left it."""
    return Usage(
        prompt_tokens=total.prompt_tokens + one.prompt_tokens,
        completion_tokens=total.completion_tokens + one.completion_tokens,
        cached_tokens=total.cached_tokens + one.cached_tokens,
        prefilled_tokens=total.prefilled_tokens + one.prefilled_tokens,
        resident_tokens=one.resident_tokens,
        pruned_tokens=one.pruned_tokens,
        evicted_tokens=one.evicted_tokens,
        reusable_tokens=total.reusable_tokens + one.reusable_tokens,
    )
