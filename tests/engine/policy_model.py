"""The scheduling policy once more, in plain numbers: an engine whose pages hold one token and which caches nothing.

Written from the rules in docs/design.md section 11, by brute force: every step tries everything anew, orders by sorting, tries
victims one by one and hands out tokens one by one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Job:
    """held: tokens with KV. made: tokens drawn. paid: charged and not forwarded."""

    number: int
    priority: int
    tenant: str
    deadline: float
    prompt: int
    most: int
    held: int = 0
    made: int = 0
    passed: int = 0
    paid: int = 0
    guaranteed: bool = False

    @property
    def whole(self) -> int:
        return self.prompt + self.most - 1

    @property
    def known(self) -> int:
        return max(self.prompt, self.prompt + self.made - 1)


class PolicyModel:
    """units tokens of memory, rows sequences at once, step_tokens a step."""

    def __init__(self, units: int, rows: int, step_tokens: int, patience: int) -> None:
        self.units, self.rows, self.step_tokens, self.patience = units, rows, step_tokens, patience
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.served: dict[str, int] = {}
        self.floor = 0
        self.preempted = 0

    def add(self, job: Job) -> None:
        here = {other.tenant for other in (*self.waiting, *self.running)}
        if job.tenant not in here:
            self._level(here)
            self.served[job.tenant] = max(self.floor, self.served.get(job.tenant, 0))
        self.waiting.append(job)

    def remove(self, job: Job) -> None:
        (self.waiting if job in self.waiting else self.running).remove(job)
        self.served[job.tenant] -= job.paid
        here = {other.tenant for other in (*self.waiting, *self.running)}
        if job.tenant not in here:
            self._level(here)

    def _level(self, here: set[str]) -> None:
        if here:
            self.floor = max(self.floor, min(self.served[tenant] for tenant in here))
        else:
            self.served, self.floor = {}, 0

    def step(self, now: float) -> list[Job]:
        """Those that finished or were late."""
        late = [job for job in (*self.waiting, *self.running) if job.deadline <= now]
        for job in late:
            self.remove(job)
        self._start_all()
        prompts = [job for job in self.running if job.held < job.known]
        for job in self.running:
            if job not in prompts:
                self._serve(job, 1)
        for job, count in self._tokens(prompts).items():
            self._serve(job, count)
        ran = list(self.running)
        for job in self.waiting:
            job.passed += self._passed_over(job, ran)
        done = [job for job in self.running if job.made == job.most]
        for job in done:
            self.remove(job)
        return [*late, *done]

    # -- who runs

    def order(self, job: Job) -> tuple[float, ...]:
        return (-job.priority, self.served[job.tenant], job.deadline, job.number)

    def _start_all(self) -> None:
        owed = [job for job in self.waiting if job.passed >= self.patience]
        if owed and not any(job.guaranteed for job in self.running):
            elder = min(owed, key=lambda job: job.number)
            elder.guaranteed = self._start(elder, elder=True)
        tried: list[Job] = []
        held_up, here = False, list(self.waiting)
        while left := [job for job in here if job in self.waiting and job not in tried]:
            job = min(left, key=self.order)
            tried.append(job)
            if not held_up:
                held_up = not self._start(job)
            elif len(self.running) < self.rows and self._spare() - (job.whole - job.held) >= self.units / 20:
                self._take(job)

    def _spare(self) -> int:
        return self.units - sum(job.whole for job in self.running) - sum(job.held for job in self.waiting)

    def _start(self, job: Job, *, elder: bool = False) -> bool:
        rivals = [other for other in self.running if self._makes_way(other, job, elder)]
        rivals.sort(key=lambda other: (other.priority, -other.number))
        for count in range(len(rivals) + 1):
            stay = [other for other in self.running if other not in rivals[:count]]
            if len(stay) < self.rows and sum(other.whole for other in stay) + job.whole <= self.units:
                for other in rivals[:count]:
                    self.running.remove(other)
                    self.waiting.append(other)
                    self.preempted += 1
                self._take(job)
                return True
        return False

    def _makes_way(self, other: Job, job: Job, elder: bool) -> bool:
        if other.guaranteed:
            return False
        if other.priority < job.priority:
            return True
        return elder and (other.number > job.number or (other.priority == job.priority and self._crowds(other, job)))

    def _crowds(self, other: Job, job: Job) -> bool:
        tenants = [each.tenant for each in self.running]
        return job.tenant not in tenants and tenants.count(other.tenant) > 1

    def _passed_over(self, job: Job, ran: list[Job]) -> bool:
        return any(other.number > job.number or (other.priority <= job.priority and self._crowds(other, job)) for other in ran)

    def _take(self, job: Job) -> None:
        self.waiting.remove(job)
        for other in sorted(self.waiting, key=self.order, reverse=True):
            short = job.whole - self._spare()
            if short > 0:
                other.held = other.held - short if other.held > short else 0
        self.running.append(job)
        due = max(0, job.known - job.held - job.paid)
        self.served[job.tenant] += due
        job.paid += due

    # -- what runs

    def _serve(self, job: Job, count: int) -> None:
        due = max(0, count - job.paid)
        self.served[job.tenant] += due
        job.paid -= count - due
        job.held += count
        job.made += job.held == job.prompt + job.made

    def _tokens(self, prompts: list[Job]) -> dict[Job, int]:
        given = dict.fromkeys(sorted(prompts, key=lambda job: (not job.guaranteed, self.order(job))), 1)
        left = self.step_tokens - len(self.running)
        wants = {job: job.prompt + job.made - job.held for job in given}
        by_length = sorted(given, key=lambda job: (-job.priority, wants[job]))
        for number in range(left):
            hungry = [job for job in (list(given) if 2 * number < left else by_length) if given[job] < wants[job]]
            if hungry:
                given[hungry[0]] += 1
        return given
