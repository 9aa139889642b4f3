"""Where a chat request sits: the session it continues, forks or opens. One request a session at a time.

A session key names a set of chains. The newest boundary of an idle session is advanced in place; any other boundary is
forked, so a request without an explicit id never waits for another one and never changes its chain.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from agentkv.errors import AgentkvError, BadRequest, Busy
from agentkv.server.auth import salt_of
from agentkv.server.ports import ConversationPort, MatchPort, RuntimePort, SessionPort
from agentkv.server.wire import ChatRequest
from agentkv.types import Miss, Policy

PREFIX = "chat-"


Claim = tuple[str, str]
"""(tenant, session id) of a session that a request is using."""


@dataclass(slots=True)
class Seat:
    """A session claimed for one request. matched: messages it already has; turn: where it stands.

    fresh: the request made this session (new or forked), so it goes away when the request fails.
    """

    session: SessionPort
    matched: int
    turn: int
    fresh: bool
    stateless: bool
    named: str | None = None
    miss: Miss | None = None


@dataclass(slots=True)
class _Stored:
    """Chat sessions of a tenant that a former process left: ids by key prefix, and by the calls they wait for."""

    by_prefix: dict[str, list[str]] = field(default_factory=dict)
    by_call: dict[str, str] = field(default_factory=dict)


class Seats:
    """Gives each request its session. Thread safe; the verbs block."""

    def __init__(self, runtime: RuntimePort, policy: Policy | None = None) -> None:
        self._runtime = runtime
        self._index = runtime.continuation
        self._policy = policy
        self._lock = threading.Lock()
        self._taken: set[Claim] = set()
        self._loose: set[Claim] = set()  # sessions that may have uncommitted messages
        self._stored: dict[str, _Stored] = {}

    @contextlib.contextmanager
    def take(self, tenant: str, ask: ChatRequest, conversation: ConversationPort) -> Iterator[Seat]:
        """The seat of a request, for as long as it runs. Raises Busy only for an explicit id. When the body raises, the
        session is put back to where it stood."""
        named = self._named(tenant, ask)
        self._restore(tenant, ask.key, named, conversation)
        match, held = self._match(tenant, ask.key, named, conversation)
        try:
            seat = self._sit(tenant, ask, conversation, match, named, held is not None)
            held = self._hold(held, (tenant, seat.session.id))
            try:
                yield seat
            except BaseException:
                self._undo(tenant, seat)
                raise
        finally:
            self._hold(held, None)
        self._trim()

    def names(self, tenant: str, ask: ChatRequest) -> list[str]:
        """Ids for the forks that the further choices of a request are made in."""
        return [_new_id(tenant, ask.key) for _ in range(ask.n - 1)]

    def refresh(self, tenant: str, session: SessionPort) -> None:
        """A verb outside chat changed this session: index it anew, if it is indexed."""
        if session.closed:
            self._index.forget(tenant, session.id)
        elif self._index.knows(tenant, session.id):
            self._learn(tenant, None, session)

    # -- finding

    def _named(self, tenant: str, ask: ChatRequest) -> str | None:
        """The session that the request names explicitly."""
        if ask.chain_id:
            return self._index.of_chain(tenant, ask.chain_id) or ask.session_id
        return ask.session_id

    def _match(
        self, tenant: str, key: str | None, named: str | None, conversation: ConversationPort
    ) -> tuple[MatchPort | None, Claim | None]:
        """The boundary to continue from, and the session if it was claimed with it: looking and claiming are one step."""
        with self._lock:
            match = self._index.lookup(
                tenant, key, conversation, named=named, busy=lambda session_id: (tenant, session_id) in self._taken
            )
            running = named is not None and (tenant, named) in self._taken
            first = match is None and named is not None and not self._index.stands(tenant, named)
            if running and (first or (match is not None and match.session_id == named)):
                raise Busy(f"session {named!r} is running another turn", kept=match.turn if match else 0)
            if first and named is not None:
                claim = (tenant, named)
            elif match is not None and match.newest and (tenant, match.session_id) not in self._taken:
                claim = (tenant, match.session_id)
            else:
                return match, None
            self._taken.add(claim)
            return match, claim

    def _sit(
        self,
        tenant: str,
        ask: ChatRequest,
        conversation: ConversationPort,
        match: MatchPort | None,
        named: str | None,
        held: bool,
    ) -> Seat:
        if match is not None:
            with contextlib.suppress(BadRequest):  # the session was deleted behind the index
                session = self._runtime.resume(match.session_id, tenant=tenant)
                if held and session.turns == match.turn and not session.busy:
                    self._tidy(tenant, session)
                    return Seat(session, match.matched_messages, match.turn, False, named != session.id, named)
                if session.busy and session.id == named:
                    raise Busy(f"session {named!r} is running another turn", kept=match.turn)
                if session.turns >= match.turn:
                    return self._fork(tenant, ask, conversation, match, session, named)
            self._index.forget(tenant, match.session_id)
        elif held and named is not None and self._index.knows(tenant, named):
            with contextlib.suppress(BadRequest):
                session = self._runtime.resume(named, tenant=tenant)
                if session.turns == 0 and not session.busy and self._index.same_head(tenant, named, conversation):
                    self._tidy(tenant, session)  # opened by other means, and waiting for its first turn
                    return Seat(session, 0, 0, False, False, named)
        return self._open(tenant, ask, conversation, named)

    def _fork(
        self,
        tenant: str,
        ask: ChatRequest,
        conversation: ConversationPort,
        match: MatchPort,
        parent: SessionPort,
        named: str | None,
    ) -> Seat:
        try:
            child = parent.fork(at=match.turn, session_id=_new_id(tenant, ask.key))
        except (Busy, BadRequest):  # it cannot be forked there: what it shares is found through the prefix cache
            return self._open(tenant, ask, conversation, named)
        self._hold(None, (tenant, child.id))  # before anyone can find it
        self._index.register_fork(
            tenant, parent.id, session_id=child.id, chain_id=child.chain_id, matched=match.matched_messages
        )
        seat = Seat(child, match.matched_messages, match.turn, True, True, named)
        if any(message.role == "assistant" for message in conversation.messages[match.matched_messages :]):
            seat.miss = self._index.explain(tenant, ask.key, conversation, named=named)
        return seat

    def _open(self, tenant: str, ask: ChatRequest, conversation: ConversationPort, named: str | None) -> Seat:
        """A session of its own for this request."""
        miss = self._index.explain(tenant, ask.key, conversation, named=named)
        if miss is None and any(message.role == "assistant" for message in conversation.messages):
            miss = Miss(reason="new", detail="no session here has this history")
        if miss is None and ask.chain_id and named is None:
            miss = Miss(reason="new", field="agentkv.chain_id", detail="no such chain here; after a restart send session_id")
        wanted = ask.session_id if ask.session_id and not self._index.knows(tenant, ask.session_id) else None
        options: dict[str, Any] = {
            "tools": list(self._index.spelling(conversation)),
            "template_args": conversation.template_args,
        }
        session = self._runtime.session(
            id=wanted or _new_id(tenant, ask.key),
            system=conversation.system or None,
            policy=ask.policy or self._policy,
            tenant=tenant,
            kind="chat",
            **options,
        )
        return Seat(session, 0, 0, True, wanted is None, named, miss)

    def _hold(self, old: Claim | None, new: Claim | None) -> Claim | None:
        """Give up one claim for another."""
        with self._lock:
            if old is not None:
                self._taken.discard(old)
            if new is not None:
                self._taken.add(new)
        return new

    def _tidy(self, tenant: str, session: SessionPort) -> None:
        """Messages that another verb added since the boundary would stand twice: the request has the whole history."""
        if (tenant, session.id) in self._loose:
            self._loose.discard((tenant, session.id))
            session.rollback(to=session.turns)

    def _trim(self) -> None:
        with self._lock:
            running = {session_id for _, session_id in self._taken}
        for tenant, session_id in self._index.trim(running.__contains__):
            with contextlib.suppress(AgentkvError):
                self._runtime.delete(session_id, tenant=tenant)

    def _undo(self, tenant: str, seat: Seat) -> None:
        """After a failure: what the request added goes; the client will send it again."""
        session_id = seat.session.id
        with contextlib.suppress(AgentkvError):
            if seat.fresh:
                self._index.forget(tenant, session_id)
                self._runtime.delete(session_id, tenant=tenant)
            else:
                seat.session.rollback(to=seat.turn)
            return
        self._index.forget(tenant, session_id)

    # -- sessions of a former process

    def _restore(self, tenant: str, key: str | None, named: str | None, conversation: ConversationPort) -> None:
        """Index stored sessions that the request may continue and that this process has not seen yet."""
        if named is not None and not self._index.knows(tenant, named):
            self._load(tenant, key, named)
        with self._lock:
            stored = self._stored.get(tenant)
            if stored is None:
                stored = self._stored[tenant] = self._list(tenant)
            wanted = stored.by_prefix.pop(_prefix(tenant, key), []) if key else []
            if not key and stored.by_call:
                calls = {call.id for message in conversation.messages for call in message.tool_calls}
                wanted = [stored.by_call.pop(call_id) for call_id in calls & stored.by_call.keys()]
        for session_id in wanted:
            if not self._index.knows(tenant, session_id):
                self._load(tenant, key, session_id)

    def _list(self, tenant: str) -> _Stored:
        stored = _Stored()
        for info in self._runtime.sessions(tenant=tenant):
            if not info.id.startswith(PREFIX) or info.state == "closed":
                continue
            stored.by_prefix.setdefault(info.id[: len(_prefix(tenant, "any"))], []).append(info.id)
            stored.by_call.update(dict.fromkeys(info.open_calls, info.id))
        return stored

    def _load(self, tenant: str, key: str | None, session_id: str) -> None:
        with contextlib.suppress(BadRequest):
            self._learn(tenant, key, self._runtime.resume(session_id, tenant=tenant))

    def _learn(self, tenant: str, key: str | None, session: SessionPort) -> None:
        messages = session.messages()
        if session.system and not (messages and messages[0].get("role") == "system"):
            messages = [{"role": "system", "content": session.system}, *messages]
        args = dict(getattr(session, "template_args", {}) or {})
        conversation = self._index.read(messages, tools=list(session.tools), template_args=args, salt=salt_of(tenant))
        self._index.restore(
            tenant,
            key,
            conversation,
            session_id=session.id,
            chain_id=session.chain_id,
            turns=session.turns,
            stateless=session.id.startswith(PREFIX),
        )
        self._loose.add((tenant, session.id))


def _new_id(tenant: str, key: str | None) -> str:
    return _prefix(tenant, key) + uuid.uuid4().hex[:12]


def _prefix(tenant: str, key: str | None) -> str:
    """How the ids of a key's chat sessions begin, so that a later process finds them."""
    return PREFIX + sha256(f"{len(tenant)}:{tenant}{key!r}".encode("utf-8", "surrogatepass")).hexdigest()[:12] + "-"
