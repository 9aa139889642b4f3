"""Any order of verbs, compared after each with a naive model that keeps lists and recounts everything."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_fakes import ASSISTANT, CALL, END, SYSTEM, THINK, TOOL, USER, FakeBackend, Reply

from agentkv.errors import AgentkvError, BadRequest, Cancelled, EngineFault, OpenCalls
from agentkv.memory.session import Session
from agentkv.memory.store import SessionStore
from agentkv.types import Policy

PLACEHOLDER = "[x]"
POLICIES = (
    None,
    Policy(prune_after=0),
    Policy(prune_after=2, by_tool={"f": 1}, keep="edges:2"),
    Policy(prune_after=1, exclude_tools=("g",), mode="rebuild"),
)


@dataclass
class Item:
    """One message of the naive model. turn: the committed turn that rendered it, None while pending."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    turn: int | None = None
    assistant: int = 0  # for an assistant: its ordinal; for a result: of the one it answers
    call_id: str = ""
    tool: str = ""
    lag: int | None = None
    keep: str = "drop"
    pinned: bool = False
    pruned: tuple[str, str] | None = None  # mode, keep
    was_due: bool = False


@dataclass
class Model:
    """What a session should be. tails: does a turn's answer end with the end of a message?"""

    items: list[Item] = field(default_factory=list)
    turns: int = 0
    policy: Policy | None = None

    def results(self) -> list[Item]:
        return [item for item in self.items if item.role == "tool"]

    def open(self) -> list[str]:
        answered = {item.call_id for item in self.results()}
        return [call[0] for item in self.items for call in item.calls if call[0] not in answered]

    def age(self, item: Item) -> int | None:
        if item.turn is None:
            return None
        return sum(other.turn is not None and other.assistant > item.assistant for other in self.results())

    def lag(self, item: Item) -> int | None:
        if item.lag is not None or self.policy is None:
            return item.lag
        return self.policy.lag(item.tool)

    def keep(self, item: Item) -> str:
        return self.policy.keep if item.lag is None and item.keep == "drop" and self.policy is not None else item.keep

    def due(self, item: Item) -> bool:
        age, lag = self.age(item), self.lag(item)
        if age is None or item.pruned or item.pinned or len(cut(item.text, self.keep(item))) == 0:
            return False
        return item.was_due or (lag is not None and age >= lag)

    def state(self, item: Item) -> str:
        return "pruned" if item.pruned else "pinned" if item.pinned else "due" if self.due(item) else "live"

    def spell(self) -> tuple[list[int], set[int], dict[int, tuple[int, int]]]:
        """All committed ids, the positions whose KV was pruned in place, and the body of each item by its index."""
        ids: list[int] = [SYSTEM, *map(ord, "sys"), END]
        gone: set[int] = set()
        bodies: dict[int, tuple[int, int]] = {}
        for index, item in enumerate(self.items):
            if item.turn is None:
                continue
            ids.append({"user": USER, "tool": TOOL, "assistant": ASSISTANT}[item.role])
            if item.role == "tool":
                ids += map(ord, f"{item.call_id}:")
            if item.reasoning:
                ids += [THINK, *map(ord, item.reasoning), THINK]
            text = item.text
            removed = cut(text, item.pruned[1]) if item.pruned else range(0)
            if item.pruned and item.pruned[0] == "rebuild":
                text = text[: removed.start] + PLACEHOLDER[: len(removed)] + text[removed.stop :]
            elif item.pruned:
                gone |= {len(ids) + at for at in removed}
            bodies[index] = (len(ids), len(ids) + len(text))
            ids += map(ord, text)
            for _, name, arguments in item.calls:
                generated = item.role == "assistant" and item.call_id == "generated"
                ids += [CALL, *map(ord, name + arguments), CALL] if generated else [*map(ord, name + arguments)]
            ids.append(END)
        return (ids if self.turns else []), gone, bodies

    def rebuild(self, chosen: list[Item], keep: dict[int, str]) -> None:
        _, _, bodies = self.spell()
        places = {id(item): bodies[index][0] for index, item in enumerate(self.items) if index in bodies}
        start = min(places[id(item)] + cut(item.text, keep[id(item)]).start for item in chosen)
        for item in self.results():
            in_place = item.pruned is not None and item.pruned[0] == "in_place"
            if in_place and places[id(item)] + cut(item.text, item.pruned[1]).start >= start:
                item.pruned = ("rebuild", item.pruned[1])
        for item in chosen:
            item.pruned = ("rebuild", keep[id(item)])

    def start_turn(self) -> list[Item]:
        """Prune what is due; returns it."""
        mode = self.policy.mode if self.policy else "in_place"
        least = len(PLACEHOLDER) if mode == "rebuild" else 0
        due = [item for item in self.results() if self.due(item) and len(cut(item.text, self.keep(item))) > least]
        keep = {id(item): self.keep(item) for item in due}
        if due and mode == "rebuild":
            self.rebuild(due, keep)
        for item in due:
            item.pruned, item.was_due = (mode, keep[id(item)]), False
        return due


def cut(text: str, keep: str) -> range:
    """Places of a body that a prune takes."""
    edge = 0 if keep == "drop" else int(keep.split(":")[1])
    return range(edge, max(edge, len(text) - edge))


class SessionMachine(RuleBasedStateMachine):
    """Up to three branches at once, over one backend and one store."""

    @initialize(policy=st.sampled_from(POLICIES), rounds=st.integers(0, 4))
    def open(self, policy: Policy | None, rounds: int) -> None:
        self.backend = FakeBackend()
        self.store = SessionStore(":memory:")
        session = Session(self.backend, self.store, system="sys", policy=policy, placeholder=PLACEHOLDER)
        self.branches = [(session, Model(policy=policy))]
        self.words = 0
        if rounds:
            self.work(0, rounds, ["f", "g"], None)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    def at(self, number: int) -> tuple[Session, Model]:
        return self.branches[number % len(self.branches)]

    def text(self, size: int) -> str:
        self.words += 1
        return (f"{self.words}:" + "abcdefghij" * 3)[:size]

    @rule(number=st.integers(0, 2), size=st.integers(0, 12))
    def add_user(self, number: int, size: int) -> None:
        session, model = self.at(number)
        if model.open():
            with pytest.raises(OpenCalls):
                session.add_user("x")
            return
        text = self.text(size)
        session.add_user(text)
        model.items.append(Item("user", text))

    @rule(number=st.integers(0, 2), calls=st.lists(st.sampled_from(["f", "g"]), max_size=2))
    def add_assistant(self, number: int, calls: list[str]) -> None:
        from agentkv.types import ToolCall

        session, model = self.at(number)
        if model.open():
            return
        made = [ToolCall(id=self.backend.new_call_id(), name=name, arguments={}, raw="{}") for name in calls]
        text = self.text(6)
        session.add_assistant(text, made)
        model.items.append(self.assistant(model, text, [(call.id, call.name, "{}") for call in made]))

    def assistant(self, model: Model, text: str, calls: list[tuple[str, str, str]]) -> Item:
        ordinal = 1 + sum(item.role == "assistant" for item in model.items)
        return Item("assistant", text, calls=calls, assistant=ordinal)

    @rule(
        number=st.integers(0, 2),
        calls=st.lists(st.sampled_from(["f", "g"]), max_size=3),
        ends=st.sampled_from(["well", "well", "well", "error", "cancel", "kv gone"]),
    )
    def generate(self, number: int, calls: list[str], ends: str) -> None:
        session, model = self.at(number)
        if model.open():
            with pytest.raises(OpenCalls):
                session.generate()
            return
        if not model.items:
            with pytest.raises(BadRequest):
                session.generate()
            return
        if ends == "kv gone":
            self.backend.drop(session.chain_id)
        text = self.text(5)
        reply = Reply(text, calls=tuple((name, {"n": 1}) for name in calls), reasoning="r" if len(calls) == 1 else "")
        reply.error = RuntimeError("lost") if ends == "error" else None
        self.backend.say(reply)
        model.start_turn()
        if ends == "error":
            with pytest.raises(EngineFault):
                session.generate()
            return
        if ends == "cancel":
            with session.stream() as stream:
                next(stream)
                stream.cancel()
                with pytest.raises(Cancelled):
                    stream.finish()
            return
        turn = session.generate()
        assert turn.usage.prompt_tokens == turn.usage.cached_tokens + turn.usage.prefilled_tokens
        model.turns += 1
        for item in model.items:
            item.turn = item.turn or model.turns
        made = self.assistant(model, turn.text, [(call.id, call.name, json.dumps(call.arguments)) for call in turn.tool_calls])
        made.turn, made.call_id, made.reasoning = model.turns, "generated", reply.reasoning
        model.items.append(made)

    @rule(
        number=st.integers(0, 2),
        size=st.integers(0, 20),
        lag=st.sampled_from([None, None, 0, 1, 3]),
        keep=st.sampled_from(["drop", "drop", "edges:2"]),
        pin=st.booleans(),
        last=st.booleans(),
    )
    def add_tool_result(self, number: int, size: int, lag: int | None, keep: str, pin: bool, last: bool) -> None:
        session, model = self.at(number)
        waiting = model.open()
        if not waiting:
            return
        call_id = waiting[-1 if last else 0]
        maker = next(item for item in model.items for call in item.calls if call[0] == call_id)
        name = next(call[1] for call in maker.calls if call[0] == call_id)
        text = self.text(size)
        span = session.add_tool_result(call_id, text, prune_after=lag, keep=keep, pin=pin)
        assert session.add_tool_result(call_id, text).id == span.id
        model.items.append(
            Item("tool", text, assistant=maker.assistant, call_id=call_id, tool=name, lag=lag, keep=keep, pinned=pin)
        )

    @rule(number=st.integers(0, 2), which=st.integers(0, 50), keep=st.sampled_from(["drop", "edges:1"]), rebuild=st.booleans())
    def prune(self, number: int, which: int, keep: str, rebuild: bool) -> None:
        session, model = self.at(number)
        if not model.results():
            return
        ready = [item for item in model.results() if item.turn is not None and not item.pruned and not item.pinned]
        among = ready if ready and which % 4 else model.results()
        item = among[which // 4 % len(among)]
        span = session.spans()[self.span_index(session, item.call_id)]
        mode = "rebuild" if rebuild else "in_place"
        least = len(PLACEHOLDER) if rebuild else 0
        allowed = item.turn is not None and not item.pinned and len(cut(item.text, keep)) > least
        if item.pruned and not (rebuild and item.pruned[0] == "in_place"):
            allowed = False
        if not allowed:
            for verb in (session.plan, session.prune):
                with pytest.raises(BadRequest):
                    verb(span, keep=keep, mode=mode)  # type: ignore[operator]
            return
        plan = session.plan(span, keep=keep, mode=mode)  # type: ignore[arg-type]
        before = session.tokens
        (gone,) = session.prune(span, keep=keep, mode=mode)  # type: ignore[arg-type]
        assert gone.tokens == len(cut(item.text, keep)) - least
        if rebuild:
            model.rebuild([item], {id(item): keep})
            assert plan.frees_tokens == before - session.tokens
        else:
            assert plan.frees_tokens == gone.tokens
        item.pruned, item.was_due = (mode, keep), False

    def span_index(self, session: Session, call_id: str) -> int:
        return next(i for i, s in enumerate(session.spans()) if s.call_id == call_id and s.kind == "tool_result")

    @rule(number=st.integers(0, 2), which=st.integers(0, 50), pin=st.booleans())
    def pin(self, number: int, which: int, pin: bool) -> None:
        session, model = self.at(number)
        if not model.results():
            return
        item = model.results()[which % len(model.results())]
        span = session.spans()[self.span_index(session, item.call_id)]
        if pin and item.pruned:
            with pytest.raises(BadRequest):
                session.pin(span)
            return
        (session.pin if pin else session.unpin)(span)
        item.pinned = pin

    @rule(number=st.integers(0, 2), policy=st.sampled_from(POLICIES))
    def set_policy(self, number: int, policy: Policy | None) -> None:
        session, model = self.at(number)
        session.set_policy(policy)
        if policy != model.policy:
            for item in [item for item in model.results() if model.due(item)]:
                item.was_due = True
        model.policy = policy

    @rule(
        number=st.integers(0, 2),
        rounds=st.integers(1, 3),
        calls=st.lists(st.sampled_from(["f", "g"]), min_size=1, max_size=2),
        lag=st.sampled_from([None, None, 1]),
    )
    def work(self, number: int, rounds: int, calls: list[str], lag: int | None) -> None:
        """What agents do: calls and results, several times, the last of them read."""
        for _ in range(rounds):
            self.add_user(number, 3)
            self.answer(number, lag)
            self.generate(number, calls, "well")
        self.answer(number, lag)
        self.generate(number, [], "well")

    @rule(number=st.integers(0, 2), which=st.lists(st.integers(1, 50), min_size=2, max_size=3), rebuild=st.booleans())
    def prune_then_go_on(self, number: int, which: list[int], rebuild: bool) -> None:
        """Prunes of both kinds between two turns, perhaps a turn back, and a turn."""
        for at, one in enumerate(which):
            self.prune(number, one, "drop", rebuild and at == 0)
        if not rebuild:
            self.rollback(number, None)
        self.answer(number, None)
        self.generate(number, [], "well")

    def answer(self, number: int, lag: int | None) -> None:
        for _ in self.at(number)[1].open():
            self.add_tool_result(number, 20, lag, "drop", False, False)

    @precondition(lambda self: len(self.branches) < 3)
    @rule(number=st.integers(0, 2), at=st.one_of(st.none(), st.integers(0, 6)))
    def fork(self, number: int, at: int | None) -> None:
        session, model = self.at(number)
        at = None if at is None else at % (model.turns + 1)
        twin = copy.deepcopy(model)
        if at is not None:
            self.back(twin, at)
        self.branches.append((session.fork(at), twin))

    def back(self, model: Model, to: int) -> None:
        if to < model.turns:
            for item in model.items:
                item.was_due = False
        model.items = [item for item in model.items if item.turn is not None and item.turn <= to]
        model.turns = to

    @rule(number=st.integers(0, 2), to=st.one_of(st.none(), st.integers(0, 6)))
    def rollback(self, number: int, to: int | None) -> None:
        session, model = self.at(number)
        if to is None and not model.turns:
            with pytest.raises(BadRequest):
                session.rollback()
            return
        to = model.turns - 1 if to is None else to % (model.turns + 1)
        assert session.rollback(to) == to
        self.back(model, to)

    @rule(number=st.integers(0, 2))
    def suspend(self, number: int) -> None:
        self.at(number)[0].suspend()

    @rule(number=st.integers(0, 2), lose=st.booleans())
    def resume(self, number: int, lose: bool) -> None:
        session, model = self.at(number)
        if lose:
            self.backend.drop(session.chain_id)
        again = Session.resume(self.backend, self.store, session.id)
        self.branches[self.branches.index((session, model))] = (again, model)

    @precondition(lambda self: len(self.branches) > 1)
    @rule(number=st.integers(0, 2), delete=st.booleans())
    def close(self, number: int, delete: bool) -> None:
        session, model = self.at(number)
        session.close()
        assert session.chain_id not in self.backend.chains
        with pytest.raises(AgentkvError):
            session.add_user("x")
        if delete:
            self.store.delete(session.id)
            self.branches.remove((session, model))
        else:
            self.branches[self.branches.index((session, model))] = (
                Session.resume(self.backend, self.store, session.id),
                model,
            )

    @invariant()
    def as_the_model_says(self) -> None:
        for session, model in getattr(self, "branches", ()):
            self.check(session, model)
            twin = Session.resume(FakeBackend(), self.store, session.id)
            assert twin.spans() == session.spans()
            assert twin._branch.history() == session._branch.history()
            assert twin.messages() == session.messages()
            assert twin.open_calls == session.open_calls
        assert not getattr(self, "backend", FakeBackend()).mismatches

    def check(self, session: Session, model: Model) -> None:
        ids, gone, bodies = model.spell()
        assert list(session._branch.ledger.ids) == ids
        assert session.turns == model.turns
        assert [call.id for call in session.open_calls] == model.open()
        told = session.messages()[1:]
        assert [(m["role"], m["content"] or "") for m in told] == [(item.role, item.text) for item in model.items]
        spans = [span for span in session.spans() if span.kind == "tool_result"]
        assert [span.state for span in spans] == [model.state(item) for item in model.results()]
        assert [span.age for span in spans] == [model.age(item) for item in model.results()]
        placed = [index for index, item in enumerate(model.items) if item.role == "tool"]
        assert [(s.start, s.end) for s in spans] == [bodies.get(index, (None, None)) for index in placed]
        assert session._branch.exactness == ("lossy" if gone else "exact")
        due = [item for item in model.results() if model.due(item)]
        if model.policy is None or model.policy.mode == "in_place":
            assert session.plan().frees_tokens == sum(len(cut(item.text, model.keep(item))) for item in due)
        chain = self.backend.chains.get(session.chain_id)
        if chain is not None and len(chain.ids) == len(ids) and chain.forwarded == len(ids) - 1:
            assert set(chain.kv) == set(range(len(ids) - 1)) - gone


SessionMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSessionMachine = SessionMachine.TestCase
