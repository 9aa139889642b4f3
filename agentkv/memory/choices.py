"""Several answers to one prompt: the first is the session's own turn, each other one is the turn of a fork."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from agentkv.errors import AgentkvError, BadRequest
from agentkv.memory.turn import RunningTurn
from agentkv.types import Event, Sampling, Turn, check_choices

if TYPE_CHECKING:
    from agentkv.memory.session import Session

S = TypeVar("S", bound="Session")
Make = Callable[[S, int, RunningTurn | None], RunningTurn]
"""The turn of a session: which choice it is, and the running turn whose prompt it shares."""


def choice_sampling(sampling: Sampling, index: int) -> Sampling:
    """The sampling of choice `index`. A seed becomes one of its own: the first 8 bytes of BLAKE2b over "seed:index", but for
    choice 0, which is what a single answer would be."""
    if sampling.seed is None or index == 0:
        return sampling
    digest = blake2b(f"{sampling.seed}:{index}".encode(), digest_size=8).digest()
    made: Sampling = sampling.replace(seed=int.from_bytes(digest, "big") >> 1)
    return made


class ChoiceStream(Generic[S]):
    """`with session.choices(n) as choices: for index, event in choices: ...`. The prompt is computed once.

    All or nothing: leaving early, or an error of any of them, rolls the session back and removes the forks. sessions: whose
    turns they are, the session itself first. names: ids for the forks.
    """

    def __init__(self, session: S, n: int, make: Make[S], names: Sequence[str] = ()) -> None:
        self._n = check_choices(n)
        self._make = make
        self._names = list(names)
        self._before = session.turns
        self._running: list[RunningTurn] = []
        self._readers: list[threading.Thread] = []
        self._said: SimpleQueue[tuple[int, Event] | BaseException | None] = SimpleQueue()
        self._left = 0
        self.sessions: list[S] = [session]

    def __enter__(self) -> Self:
        if self._running:
            raise BadRequest("these choices have been entered before", hint="Call session.choices() again")
        try:
            first = self._start(self.sessions[0], 0, None)  # prunes what is due, so that the forks share what is left
            for index in range(1, self._n):
                name = self._names[index - 1] if index <= len(self._names) else None
                self.sessions.append(self.sessions[0].fork(session_id=name))
                self._start(self.sessions[-1], index, first)
        except BaseException:
            self._undo()
            raise
        for index, running in enumerate(self._running):
            self._readers.append(threading.Thread(target=self._read, args=(index, running), daemon=True))
        self._left = self._n
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if any(running.turn is None for running in self._running) or self._left:
            self._undo()

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        while self._left:
            said = self._said.get()
            if said is None:
                self._left -= 1
            elif isinstance(said, BaseException):
                raise said
            else:
                yield said

    @property
    def begun(self) -> Turn:
        """The first choice as it stands: see `TurnStream.begun`."""
        return self._running[0].begun()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The committed turns, in order of the choices; BadRequest until all are."""
        turns = tuple(running.turn for running in self._running if running.turn is not None)
        if len(turns) < self._n:
            raise BadRequest("not every choice is committed", hint="Read the choices to their end first")
        return turns

    def cancel(self) -> None:
        """Ask for the rollback of all, from any thread; whoever reads the choices gets Cancelled."""
        for running in tuple(self._running):
            running.cancel()

    def _start(self, session: S, index: int, beside: RunningTurn | None) -> RunningTurn:
        running = self._make(session, index, beside)
        self._running.append(running)
        running.start()
        return running

    def _read(self, index: int, running: RunningTurn) -> None:
        try:
            for event in running.events():
                self._said.put((index, event))
        except BaseException as error:  # noqa: BLE001 - raised where the events are read
            self._said.put(error)
        else:
            self._said.put(None)

    def _undo(self) -> None:
        self.cancel()
        for reader in self._readers:
            reader.join()
        for running in self._running:
            running.abandon()
        own, *forks = self.sessions
        for fork in forks:
            with suppress(AgentkvError):
                fork.erase()
        if own.turns > self._before:
            own.rollback(to=self._before)
