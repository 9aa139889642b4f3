"""Where a session stands: everything about it that can be read, also while a turn runs."""

from __future__ import annotations

from typing import Any

from agentkv.memory.branch import Branch
from agentkv.memory.transcript import openai_message
from agentkv.types import Exactness, Policy, Sampling, SessionInfo, Span, ToolCall, Turn, Usage


class Standing:
    """The read-only half of a session."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def __repr__(self) -> str:
        ledger = self._branch.ledger
        return f"<{type(self).__name__} {self.id} turn {ledger.number}, {ledger.length} tokens>"

    @property
    def id(self) -> str:
        """Name of the session."""
        return self._branch.session_id

    @property
    def chain_id(self) -> str:
        """Name of its chain."""
        return self._branch.chain_id

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._branch.tenant

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._branch.settings.system

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Schemas of its tools."""
        return self._branch.settings.tools

    @property
    def policy(self) -> Policy | None:
        """The pruning policy; change it with set_policy."""
        return self._branch.policy

    @property
    def sampling(self) -> Sampling:
        """Defaults of generate."""
        return self._branch.settings.sampling

    @property
    def template_args(self) -> dict[str, Any]:
        """Extra arguments of its chat template."""
        return dict(self._branch.settings.template_args)

    @property
    def exactness(self) -> Exactness:
        """The worst of the method's exactness and of the prunes made so far."""
        with self._branch.lock:
            return self._branch.exactness

    @property
    def closed(self) -> bool:
        """Was close called?"""
        return self._branch.closed

    @property
    def stale(self) -> bool:
        """Has the store gone on without this process (or let go of the session)?"""
        with self._branch.lock:
            journal = self._branch.journal
            return journal.store is not None and journal.store.version(self.chain_id) != journal.version

    @property
    def running(self) -> bool:
        """Is a turn running now?"""
        return self._branch.running is not None

    @property
    def turns(self) -> int:
        """Turns committed; the number of the last one."""
        return self._branch.ledger.number

    @property
    def last_turn(self) -> Turn | None:
        """The last committed turn."""
        with self._branch.lock:
            turns = self._branch.ledger.turns
            return turns[-1] if turns else None

    @property
    def tokens(self) -> int:
        """Logical tokens committed."""
        return self._branch.ledger.length

    @property
    def usage(self) -> Usage:
        """Token counts over all turns made here; resident, pruned and evicted as the last turn left them."""
        return self._branch.usage

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """Calls that have no result yet, in the order they were made."""
        with self._branch.lock:
            return tuple(self._branch.ledger.open.values())

    def spans(self) -> list[Span]:
        """The ledger: every span of the branch in order."""
        with self._branch.lock:
            return [self._branch.span(record) for record in self._branch.ledger.records]

    def messages(self) -> list[dict[str, Any]]:
        """The transcript in OpenAI's form, pending messages included; pruned results have their full text."""
        with self._branch.lock:
            told = list(self._branch.ledger.messages)
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return head + [openai_message(message) for message in told]

    def info(self) -> SessionInfo:
        """One line about it. state: hot (KV resident), idle (suspended, in host memory, or nothing said yet), stored (no KV:
        the next turn prefills) or closed."""
        branch = self._branch
        with branch.lock, branch.kept():
            with branch.engine("looking up a chain"):
                held = None if branch.closed else branch.backend.held(branch.chain_id)
            warm = held is not None and held.warm_tokens > 0
            state = "idle" if branch.suspended or warm or not branch.ledger.length else "hot"
            if branch.ledger.length and not warm and (held is None or not held.resident_tokens):
                state = "stored"
            return SessionInfo(
                id=self.id,
                state="closed" if branch.closed else state,
                turns=branch.ledger.number,
                tokens=branch.ledger.length,
                resident_tokens=0 if held is None else held.resident_tokens,
                model=branch.settings.model,
                open_calls=tuple(branch.ledger.open),
            )
