"""Who goes next: priority, then fairness between tenants, then deadline, then arrival; and who is owed service.

No torch, no memory: what fits is the scheduler's question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from agentkv.engine.core import Sequence

Order = tuple[int, int, float, int]


class TenantClock:
    """Service of each tenant in tokens forwarded; a prompt counts from its start. A tenant that comes, or comes back, stands
    level with the least served of those that are here, so absence earns nothing; one that leaves ahead of them and returns is
    still ahead.

    Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) with equal weights.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._here: Counter[str] = Counter()
        self._floor = 0

    def served(self, tenant: str) -> int:
        """Tokens on the tenant's account; only differences mean something."""
        return self._served.get(tenant, self._floor)

    def enter(self, seq: Sequence) -> None:
        """The sequence is in the engine."""
        tenant = seq.request.salt
        if tenant not in self._here:
            self._raise_floor()
            self._served[tenant] = max(self._floor, self.served(tenant))
        self._here[tenant] += 1

    def leave(self, seq: Sequence) -> None:
        """It needs no more service; what it has paid for and not had is given back."""
        tenant = seq.request.salt
        self._served[tenant] -= seq.paid
        self._here[tenant] -= 1
        seq.paid = 0
        if not self._here[tenant]:
            del self._here[tenant]
            self._raise_floor()

    def pay(self, seq: Sequence, tokens: int) -> None:
        """It will get so many tokens for certain: they are charged at once, so that who starts next knows of it."""
        due = max(0, tokens - seq.paid)
        self._served[seq.request.salt] += due
        seq.paid += due

    def serve(self, seq: Sequence, tokens: int) -> None:
        """It gets so many tokens; what was not paid for is charged."""
        due = max(0, tokens - seq.paid)
        self._served[seq.request.salt] += due
        seq.paid -= tokens - due

    def _raise_floor(self) -> None:
        """Accounts of absent tenants at or below the floor say nothing and are forgotten; with nobody here, all do."""
        if not self._here:
            self._served, self._floor = {}, 0
            return
        self._floor = max(self._floor, min(self._served[tenant] for tenant in self._here))
        here, floor = self._here, self._floor
        self._served = {tenant: served for tenant, served in self._served.items() if tenant in here or served > floor}


class WaitingQueue:
    """Waiting sequences in the order in which they are tried.

    A sequence is **passed over** in a step if one that arrived later runs; or if another tenant runs two or more, one of them
    of no higher priority, while its own runs none. Passed over for `patience` steps it is **owed** service, and of those the
    one that arrived first is the **elder**, unless one that was the elder runs still. The elder may go before everybody else
    and is never preempted, so every request's turn comes; that there is one at a time leaves the rest to priority.

    One that is held (`Sequence.held`: it waits for another's prompt, to share it) is not tried and not passed over.
    """

    def __init__(self, patience: int) -> None:
        self.clock = TenantClock()
        self._patience = patience
        self._waiting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def add(self, seq: Sequence) -> None:
        """It waits."""
        self._waiting[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """It waits no longer. KeyError if it did not."""
        del self._waiting[seq.seq_id]

    def order(self, seq: Sequence) -> Order:
        """Smaller goes first; no two are equal."""
        return -seq.request.priority, self.clock.served(seq.request.salt), seq.deadline, seq.seq_id

    def first(self) -> Sequence | None:
        """The next."""
        return min(self._tried(), key=self.order, default=None)

    def ordered(self) -> Iterator[Sequence]:
        """Those that wait now, the next first; who is started on the way changes the order of the rest."""
        heap = [(self.order(seq), seq) for seq in self._tried()]
        heapify(heap)
        while heap:
            place, seq = heappop(heap)
            if seq.held:  # by one that has just been started
                continue
            if self.order(seq) > place:
                heappush(heap, (self.order(seq), seq))
            else:
                yield seq

    def elder(self, running: Iterable[Sequence]) -> Sequence | None:
        """The first to have come of those that are owed service; None while a guaranteed sequence runs."""
        if any(seq.guaranteed for seq in running):
            return None
        owed = (seq for seq in self._tried() if seq.passed_over >= self._patience)
        return min(owed, key=lambda seq: seq.seq_id, default=None)

    def pass_over(self, running: list[Sequence]) -> bool:
        """Count a step in which these run; is somebody owed service who was not before?"""
        by_tenant = Counter(seq.request.salt for seq in running)
        newest = max((seq.seq_id for seq in running), default=0)
        crowds = [seq.request.priority for seq in running if by_tenant[seq.request.salt] > 1]
        least = min(crowds, default=None)
        owed = False
        for seq in self._tried():
            crowded = least is not None and least <= seq.request.priority and not by_tenant[seq.request.salt]
            if seq.seq_id < newest or crowded:
                seq.passed_over += 1
                owed |= seq.passed_over == self._patience
        return owed

    def _tried(self) -> Iterator[Sequence]:
        return (seq for seq in self if not seq.held)


def shares(budget: int, wants: list[int], ranks: list[int]) -> list[int]:
    """Tokens of a step for each prompt: `wants` in order of claim, ranks[i]: a larger one goes before a smaller one.

    Everyone gets a token. Of the rest one half goes to the first in order, as much as it wants, then to the next; the other
    half to the shortest of the highest rank, and so on. So the first always has half a step, and a short prompt is done soon
    whatever stands before it. budget must be at least the number of prompts.
    """
    given = [min(1, want) for want in wants]
    left = budget - sum(given)
    shortest = sorted(range(len(wants)), key=lambda i: (-ranks[i], wants[i], i))
    for indices, most in ((range(len(wants)), -(-left // 2)), (shortest, left)):
        most = min(most, left)
        for i in indices:
            more = min(most, wants[i] - given[i])
            given[i] += more
            most -= more
            left -= more
    return given
