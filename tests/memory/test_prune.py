"""Pruning by hand and by policy, its price, rebuilds, and that a replay sees what the resident chain saw."""

from __future__ import annotations

from typing import Any

import pytest
from memory_fakes import FakeBackend, Reply, spell

from agentkv.errors import BadRequest, EngineFault
from agentkv.memory.session import Session
from agentkv.types import Policy, Span

BODY = "abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def played(backend: FakeBackend, turns: int = 4, **options: Any) -> Session:
    """A session with one result after each of some turns, the last of them read."""
    session = Session(backend, system="sys", **options)
    session.add_user("go")
    for number in range(turns):
        backend.say(Reply(f"turn {number}", calls=(("f", {"n": number}),)))
        session.generate()
        session.add_tool_result(session.open_calls[0].id, f"{number}{BODY}")
    session.generate()
    return session


def results(session: Session) -> list[Span]:
    return [span for span in session.spans() if span.kind == "tool_result"]


def bad(call: Any, match: str) -> None:
    with pytest.raises(BadRequest, match=match) as raised:
        call()
    assert raised.value.hint
    assert raised.value.kept is not None


def text(session: Session, span: Span) -> str:
    return spell(session._branch.ledger.ids[span.start : span.end])


def answer_after_losing_kv(session: Session, backend: FakeBackend) -> tuple[str, str]:
    """The next answer with the resident KV, and of a twin whose KV is gone."""
    twin = session.fork()
    backend.drop(twin.chain_id)
    for branch in (session, twin):
        for call in branch.open_calls:
            branch.add_tool_result(call.id, "same answer")
        branch.add_user("same question")
    return session.generate().text, twin.generate().text


def test_in_place_frees_the_body_and_moves_nothing(backend: FakeBackend) -> None:
    session = played(backend)
    before, span = session.tokens, results(session)[1]
    plan = session.plan(span)
    assert (plan.frees_tokens, plan.frees_now, plan.prefill_tokens, plan.turns_to_pay_back) == (37, 37 * 8, 0, 0)
    assert plan.spans == (span.id,)
    (gone,) = session.prune(span)
    assert (gone.span_id, gone.call_id, gone.tokens) == (span.id, span.call_id, 37)
    assert session.tokens == before
    after = results(session)[1]
    assert (after.state, after.start, after.end, after.why) == ("pruned", span.start, span.end, "asked for")
    chain = backend.chains[session.chain_id]
    assert span.start is not None
    assert span.end is not None
    assert set(range(before - 1)) - set(chain.kv) == set(range(span.start, span.end))
    session.add_user("on")
    turn = session.generate()
    assert (turn.exactness, turn.miss, turn.pruned_now) == ("lossy", None, ())
    assert turn.usage.pruned_tokens == 37
    assert turn.usage.resident_tokens == session.tokens - 1 - 37
    assert session.messages()[5]["content"] == f"1{BODY}"
    assert not backend.mismatches


def test_edges_keep_the_ends_of_the_body(backend: FakeBackend) -> None:
    session = played(backend)
    span = results(session)[0]
    assert session.plan(span, keep="edges:5").frees_tokens == 27
    (gone,) = session.prune(span, keep="edges:5")
    assert gone.tokens == 27
    assert results(session)[0].keep == "edges:5"
    bad(lambda: session.prune(results(session)[1], keep="edges:19"), "frees nothing")
    bad(lambda: session.prune(results(session)[1], keep="edges:0"), "keep")
    bad(lambda: session.prune(results(session)[1], keep="middle"), "keep")
    assert session._branch.exactness == "lossy"


def test_what_cannot_be_pruned_is_refused_and_nothing_changes(backend: FakeBackend) -> None:
    session = played(backend)
    first, second = results(session)[:2]
    session.prune(first)
    session.pin(second)
    user = next(span for span in session.spans() if span.kind == "user")
    before = session.spans()
    bad(lambda: session.prune(first), "pruned already")
    bad(lambda: session.prune([results(session)[2], first]), "pruned already")
    bad(lambda: session.prune(second), "pinned")
    bad(lambda: session.prune(user), "user span")
    bad(lambda: session.prune("sp_none"), "no span")
    bad(lambda: session.prune([]), "no span to prune")
    bad(lambda: session.prune(results(session)[2], mode="gently"), "mode")  # type: ignore[arg-type]
    bad(lambda: session.plan(first), "pruned already")
    bad(lambda: session.pin(first), "pruned already")
    backend.say(Reply("t", calls=(("f", {}),)))
    session.add_user("on")
    session.generate()
    waiting = session.add_tool_result(session.open_calls[0].id, "not read yet")
    bad(lambda: session.prune(waiting), "not been rendered")
    backend.say(Reply("t", calls=(("f", {}),)))
    session.generate()
    empty = session.add_tool_result(session.open_calls[0].id, "")
    session.generate()
    bad(lambda: session.prune(empty), "frees nothing")
    assert [span.state for span in session.spans()][: len(before)] == [span.state for span in before]


def test_several_at_once_by_id_and_by_call(backend: FakeBackend) -> None:
    session = played(backend)
    one, two, three, _ = results(session)
    gone = session.prune([one.id, two.call_id or "", three, one])
    assert [row.span_id for row in gone] == [one.id, two.id, three.id]
    assert answer_after_losing_kv(session, backend)[0] == session.last_turn.text  # type: ignore[union-attr]


def test_a_replay_gives_the_same_tokens_as_the_resident_chain(backend: FakeBackend) -> None:
    session = played(backend, policy=Policy(prune_after=1, keep="edges:3"))
    session.prune(results(session)[2])
    resident, replayed = answer_after_losing_kv(session, backend)
    assert resident == replayed
    session.rollback()
    session.rollback()
    resident, replayed = answer_after_losing_kv(session, backend)
    assert resident == replayed
    assert not backend.mismatches


def test_a_policy_prunes_when_the_next_turn_starts(backend: FakeBackend) -> None:
    session = played(backend, turns=2, policy=Policy(prune_after=1))
    assert [span.state for span in results(session)] == ["due", "live"]
    plan = session.plan()
    assert (plan.frees_tokens, plan.spans) == (37, (results(session)[0].id,))
    session.add_user("on")
    turn = session.generate()
    assert [row.span_id for row in turn.pruned_now] == list(plan.spans)
    assert session.plan().spans == ()
    assert session.plan({"mode": "rebuild"}).frees_tokens == 0


def test_pruned_now_waits_for_a_turn_that_commits(backend: FakeBackend) -> None:
    session = played(backend, turns=2, policy=Policy(prune_after=1))
    session.add_user("on")
    backend.say(Reply("half", error=RuntimeError("lost")))
    with pytest.raises(EngineFault):
        session.generate()
    assert results(session)[0].state == "pruned"
    assert [row.span_id for row in session.generate().pruned_now] == [results(session)[0].id]


def test_a_policy_skips_what_would_free_nothing(backend: FakeBackend) -> None:
    session = played(backend, policy=Policy(prune_after=0, keep="edges:50"))
    assert [span.state for span in results(session)] == ["live"] * 4
    assert session.plan().spans == ()


def test_when_kv_cannot_be_pruned_it_goes_and_the_record_stands(backend: FakeBackend) -> None:
    session = played(backend)
    backend.errors["prune"] = RuntimeError("device lost")
    assert session.prune(results(session)[0])[0].tokens == 37
    assert session.chain_id not in backend.chains
    assert results(session)[0].state == "pruned"
    session.add_user("on")
    turn = session.generate()
    assert (turn.exactness, turn.usage.cached_tokens) == ("lossy", 0)
    backend.errors["rollback"] = EngineFault("device lost")
    assert session.rollback() == 5
    assert session.chain_id not in backend.chains


# -- rebuild


def test_a_rebuild_puts_the_placeholder_in_and_starts_at_the_body(backend: FakeBackend) -> None:
    session = played(backend)
    before, span = session.tokens, results(session)[1]
    plan = session.plan(span, mode="rebuild")
    assert plan.frees_tokens == 37 - 8
    assert span.start is not None
    assert plan.prefill_tokens == before - 29 - span.start
    assert plan.milliseconds == plan.prefill_tokens
    assert plan.turns_to_pay_back == -(-plan.prefill_tokens // 29)
    (gone,) = session.prune(span, mode="rebuild")
    assert gone.tokens == 29
    assert session.tokens == before - 29
    assert len(backend.chains[session.chain_id].kv) == span.start - 1
    assert [text(session, row) for row in results(session)] == [f"0{BODY}", "[pruned]", f"2{BODY}", f"3{BODY}"]
    session.add_user("on")
    turn = session.generate()
    assert turn.miss is not None
    assert turn.miss.reason == "rebuild"
    assert turn.exactness == "exact"
    assert turn.usage.cached_tokens == span.start - 1
    session.add_user("on")
    assert session.generate().miss is None
    bad(lambda: session.prune(span, mode="rebuild"), "pruned already")
    bad(lambda: session.prune(results(session)[3], keep="edges:15", mode="rebuild"), "longer than the placeholder")
    assert not backend.mismatches


def test_a_rebuild_takes_later_in_place_prunes_with_it(backend: FakeBackend) -> None:
    session = played(backend)
    first, second, third, fourth = results(session)
    session.prune([first, third], keep="edges:2")
    assert session._branch.exactness == "lossy"
    session.prune(second, mode="rebuild")
    assert [text(session, row) for row in results(session)] == [f"0{BODY}", "[pruned]", "2a[pruned]89", f"3{BODY}"]
    assert session._branch.history().edits == ((second.start, ((first.start + 2, first.end - 2),)),)  # type: ignore[operator]
    assert session._branch.exactness == "lossy"
    resident, replayed = answer_after_losing_kv(session, backend)
    assert resident == replayed
    session.prune(first, mode="rebuild")
    assert session._branch.history().edits == ()
    assert session._branch.exactness == "exact"
    session.prune(fourth)
    resident, replayed = answer_after_losing_kv(session, backend)
    assert resident == replayed
    assert not backend.mismatches


def test_in_place_right_after_a_rebuild(backend: FakeBackend) -> None:
    session = played(backend)
    first, second, third, fourth = results(session)
    session.prune(third, mode="rebuild")
    session.prune([first, fourth])
    session.prune(second, mode="rebuild")
    child = session.fork()
    assert session.rollback(to=3) == 3
    for branch in (session, child):
        resident, replayed = answer_after_losing_kv(branch, backend)
        assert resident == replayed
    assert not backend.mismatches


def test_what_is_pruned_in_place_before_the_new_epoch_has_kv(backend: FakeBackend) -> None:
    session = played(backend)
    first, _, third, fourth = results(session)
    session.prune(third, mode="rebuild")
    child = session.fork()
    for branch in (session, child):
        branch.prune([first, fourth])
        assert [at for at, _ in branch._branch.history().edits] == [third.start, branch.tokens]
        resident, replayed = answer_after_losing_kv(branch, backend)
        assert resident == replayed
        assert branch.last_turn is not None
        assert branch.last_turn.miss is not None
        assert branch.last_turn.miss.reason == "rebuild"
    assert not backend.mismatches


def test_rolling_back_over_a_rebuild(backend: FakeBackend) -> None:
    session = played(backend)
    first, _, third, _ = results(session)
    session.prune(first, mode="rebuild")
    session.prune(third, mode="rebuild")
    session.rollback(to=2)
    assert [text(session, row) for row in results(session)] == ["[pruned]"]
    (call,) = session.open_calls
    session.add_tool_result(call.id, "other")
    turn = session.generate()
    assert turn.miss is not None
    assert turn.miss.reason == "rebuild"
    assert not backend.mismatches


def test_a_policy_may_rebuild(backend: FakeBackend) -> None:
    session = played(backend, policy=Policy(prune_after=1, mode="rebuild"), placeholder="")
    assert results(session)[0].tokens == 0
    assert [span.state for span in results(session)] == ["pruned", "pruned", "due", "live"]
    assert session._branch.exactness == "exact"
    assert session.last_turn is not None
    assert session.last_turn.miss is not None
    assert not backend.mismatches


def test_a_rebuild_is_free_when_the_kv_is_gone(backend: FakeBackend) -> None:
    session = played(backend)
    backend.drop(session.chain_id)
    plan = session.plan(results(session)[0], mode="rebuild")
    assert (plan.prefill_tokens, plan.turns_to_pay_back, plan.frees_now) == (0, 0, 0)
    assert plan.frees_tokens == 29


def test_on_window_rebuild_gives_positions_back(backend: FakeBackend) -> None:
    session = played(backend, policy=Policy(prune_after=0))
    backend.window = session.tokens + 60
    session.add_user("on")
    turn = session.generate(max_tokens=60)
    assert turn.miss is not None
    assert turn.miss.reason == "rebuild"
    assert all(prune.mode == "rebuild" for prune in session._branch.ledger.prunes.values())
    assert "window" in (results(session)[0].why or "")
    assert session.tokens < backend.window
    assert not backend.mismatches


def test_pin_and_unpin_are_idempotent(backend: FakeBackend) -> None:
    session = played(backend)
    span = results(session)[0]
    assert session.unpin(span).state == "live"
    assert session.pin(span).state == "pinned"
    assert session.pin(span.id).state == "pinned"
    assert session.unpin(span).state == "live"
    bad(lambda: session.pin([span, results(session)[1]]), "one span")  # type: ignore[arg-type]


def test_a_lag_can_be_given_later(backend: FakeBackend) -> None:
    session = played(backend)
    first, second = results(session)[:2]
    assert session.set_prune_after(first, 2).state == "due"
    assert session.set_prune_after(second, 5).state == "live"
    assert session.set_prune_after(first, None).state == "due"  # what is due stays due
    bad(lambda: session.set_prune_after(session.spans()[0], 1), "system span")
    session.add_user("on")
    assert [row.span_id for row in session.generate().pruned_now] == [first.id]
