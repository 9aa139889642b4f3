"""The index against a brute-force oracle, and its bounds."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.memory.continuation import ContinuationIndex
from agentkv.types import ToolCall

TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object", "required": ["a", "b"]}}} for n in "rw"]
HEADS = [("", []), ("sys", TOOLS), ("sys", TOOLS[:1]), ("sum", [])]


class World:
    """Sessions as plain lists of what was said, and the index told the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.index = ContinuationIndex()
        self.sessions: dict[str, dict] = {}
        self.made = 0

    def name(self, kind: str) -> str:
        self.made += 1
        return f"{kind}{self.made}"

    def extend(self, session: dict | None, tenant: str, key: str | None) -> None:
        """Commit a turn on a session's newest boundary, or open one."""
        r = self.random
        if session is None:
            head = r.choice(HEADS)
            session = {"id": self.name("s"), "tenant": tenant, "key": key, "head": head, "log": [], "ends": [0]}
            self.sessions[session["id"]] = session
        calls = session["log"][-1].get("calls", []) if session["log"] else []
        added = [{"role": "tool", "id": call["id"], "text": r.choice("xyz")} for call in calls] or [
            {"role": "user", "text": r.choice(["go", "", "go on"])}
        ]
        answer = {"role": "assistant", "text": r.choice(["", "ok", "fine"]), "thought": r.choice(["", "hm", "so"]), "calls": []}
        for _ in range(r.choice([0, 0, 1, 2])):
            answer["calls"].append(
                {"id": self.name("c"), "name": r.choice("rw"), "args": {"a": r.choice([1, 2]), "b": [r.choice("pq")]}}
            )
        request = self.spell(session, [*session["log"], *added])
        matched = session["ends"][-1]
        session["log"] += [*added, answer]
        session["ends"].append(len(session["log"]))
        self.index.register(
            session["tenant"],
            session["key"],
            request,
            session_id=session["id"],
            chain_id="ch" + session["id"],
            turn=len(session["ends"]) - 1,
            matched=matched,
            text=answer["text"],
            reasoning=answer["thought"],
            tool_calls=[ToolCall(id=c["id"], name=c["name"], arguments=c["args"]) for c in answer["calls"]],
        )

    def fork(self, session: dict) -> None:
        at = self.random.randrange(len(session["ends"]))
        child = {**session, "id": self.name("s"), "ends": session["ends"][: at + 1]}
        child["log"] = session["log"][: child["ends"][-1]]
        if child["key"] is None:
            child["root"] = session.get("root", session["id"])
        self.sessions[child["id"]] = child
        self.index.register_fork(
            child["tenant"], session["id"], session_id=child["id"], chain_id="ch" + child["id"], matched=child["ends"][-1]
        )

    def spell(self, session: dict, log: list[dict], head=None):
        """A history as some client would send it, read by the index."""
        r = self.random
        system, tools = head or session["head"]
        messages = [{"role": "system", "content": self.text(system)}] if system or r.random() < 0.2 else []
        for said in log:
            message = {"role": said["role"], "content": self.text(said["text"])}
            if message["content"] is None and r.random() < 0.5:
                del message["content"]
            if said["role"] == "tool":
                message["tool_call_id"] = said["id"]
                if r.random() < 0.5:
                    message["name"] = "r"
            if said.get("calls"):
                message["tool_calls"] = [
                    {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": self.arguments(c["args"])}}
                    for c in said["calls"]
                ]
            if said.get("thought") and said.get("sent", r.random() < 0.5):
                message[r.choice(["reasoning", "reasoning_content"])] = said["thought"]
            messages.append(message)
            if said["role"] == "tool" and r.random() < 0.1:
                messages.append(dict(message))
        tools = [self.shuffled(tool) for tool in r.sample(tools, len(tools))]
        return self.index.read(messages, tools=tools, salt=session["tenant"])

    def text(self, text: str):
        r = self.random
        if not text:
            return r.choice([None, "", []])
        cut = r.randrange(len(text) + 1)
        parts = [
            {"type": "text", "text": text[:cut]},
            {"type": "text", "text": text[cut:], "cache_control": {"type": "ephemeral"}},
        ]
        return r.choice([text, parts])

    def arguments(self, args: dict) -> str:
        r = self.random
        items = list(args.items())
        r.shuffle(items)
        return json.dumps(dict(items), indent=r.choice([None, 1]), separators=r.choice([None, (",", ":")]))

    def shuffled(self, value):
        if not isinstance(value, dict):
            return value
        items = [(key, self.shuffled(item)) for key, item in value.items()]
        self.random.shuffle(items)
        return dict(items)

    def oracle(self, tenant: str, key: str | None, head, log: list[dict]):
        """(messages matched, sessions that match there) by comparing everything with everything."""
        same_set = self.set_of(tenant, key, log)
        for count in range(len(log), 0, -1):
            found = {
                s["id"]
                for s in self.sessions.values()
                if s["id"] in same_set
                and s["head"] == head
                and count in s["ends"]
                and all(equal(a, b) for a, b in zip(s["log"][:count], log[:count], strict=True))
            }
            if found:
                return count, found
        return None

    def set_of(self, tenant: str, key: str | None, log: list[dict]) -> set[str]:
        mine = [s for s in self.sessions.values() if s["tenant"] == tenant]
        if key is not None:
            return {s["id"] for s in mine if s["key"] == key}
        for said in reversed(log):
            for call in said.get("calls", []):
                owners = [s for s in mine if any(c["id"] == call["id"] for m in s["log"] for c in m.get("calls", []))]
                if owners:
                    root = group(owners[0])
                    return {s["id"] for s in mine if group(s) == root}
        return set()


def group(session: dict):
    return ("key", session["key"]) if session["key"] is not None else ("own", session.get("root", session["id"]))


def equal(ours: dict, theirs: dict) -> bool:
    if theirs.get("sent") and theirs.get("thought") and ours.get("thought") != theirs["thought"]:
        return False
    plain = [{k: v for k, v in side.items() if k not in ("thought", "sent")} for side in (ours, theirs)]
    return plain[0] == plain[1]


def mutated(r: random.Random, log: list[dict]) -> list[dict]:
    """The same history with one message changed."""
    log = [dict(said) for said in log]
    said = log[r.randrange(len(log))]
    if said.get("calls") and r.random() < 0.5:
        said["calls"] = [{**call, "args": {**call["args"], "z": 0}} for call in said["calls"]]
    elif said["role"] == "assistant" and r.random() < 0.4:
        said["thought"], said["sent"] = r.choice(["hm", "so", "other"]), True
    else:
        said["text"] += "!"
    return log


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_longest_match_is_the_oracles(seed):
    world = World(seed)
    r = world.random
    for _ in range(r.randrange(1, 14)):
        sessions = list(world.sessions.values())
        if sessions and r.random() < 0.25:
            world.fork(r.choice(sessions))
        else:
            world.extend(r.choice([None, *sessions]), r.choice("tu"), r.choice([None, "k", "l"]))
    for _ in range(12):
        session = r.choice(list(world.sessions.values()))
        log = [{**said, "sent": r.random() < 0.5} for said in session["log"]]
        if r.random() < 0.5 and log:
            log = mutated(r, log)
        ends = [end for end in session["ends"] if end <= len(log)]
        log = log[: r.choice(ends)] if r.random() < 0.4 else log
        log += [{"role": "tool", "id": c["id"], "text": "new"} for c in (log[-1].get("calls", []) if log else [])]
        log += [{"role": "user", "text": "next"}] if not log or log[-1]["role"] != "tool" else []
        head = session["head"] if r.random() < 0.8 else r.choice(HEADS)
        tenant = session["tenant"] if r.random() < 0.8 else r.choice("tu")
        key = session["key"] if r.random() < 0.7 else r.choice([None, "k", "l"])
        request = world.spell({**session, "tenant": tenant}, log, head)
        match = world.index.lookup(tenant, key, request)
        expected = world.oracle(tenant, key, head, log)
        if expected is None:
            assert match is None
            continue
        count, found = expected
        assert match is not None
        assert match.matched_messages == count
        assert match.session_id in found
        told = world.sessions[match.session_id]
        assert told["ends"][match.turn] == count
        assert match.newest == (told["ends"][-1] == count)
        assert match.newest or not any(world.sessions[name]["ends"][-1] == count for name in found)
    for session in world.sessions.values():
        world.index.forget(session["tenant"], session["id"])
    inside = world.index
    assert [*inside._records, *inside._groups, *inside._boundaries, *inside._issued] == []
    assert inside._bytes == 0


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_the_first_difference_is_named(seed):
    world = World(seed)
    r = world.random
    world.extend(None, "t", "k")
    (session,) = world.sessions.values()
    for _ in range(r.randrange(1, 5)):
        world.extend(session, "t", "k")
    log = mutated(r, session["log"])
    first = next((i for i, (a, b) in enumerate(zip(session["log"], log, strict=True)) if not equal(a, b)), None)
    if first is None:
        return
    request = world.spell(session, log)
    miss = world.index.explain("t", "k", request)
    assert miss.reason == "diverged"
    assert miss.message_index == request.messages[first].index
    assert miss.field in ("content", "tool_calls", "reasoning")
    assert miss.ours != miss.theirs


def turn(index, tenant, key, log, session_id, text="ok", turn=1, matched=0, **more):
    request = index.read([{"role": role, "content": content} for role, content in log])
    index.register(
        tenant, key, request, session_id=session_id, chain_id="c" + session_id, turn=turn, matched=matched, text=text, **more
    )
    return request


def asked(index, *log, **head):
    return index.read([{"role": role, "content": content} for role, content in log], **head)


def test_differences_in_the_head_are_named():
    index = ContinuationIndex()
    turn(index, "t", "k", [("system", "be brief"), ("user", "x")], "s")
    miss = index.explain("t", "k", asked(index, ("system", "be brief!"), ("user", "x")))
    assert (miss.message_index, miss.field, miss.ours, miss.theirs) == (0, "system", "be brief", "be brief!")
    same = [("system", "be brief"), ("user", "x")]
    assert index.explain("t", "k", asked(index, *same, tools=TOOLS)).field == "tools"
    assert index.explain("t", "k", asked(index, *same, tools=TOOLS)).message_index == -1
    miss = index.explain("t", "k", asked(index, *same, template_args={"think": False}))
    assert (miss.field, miss.message_index) == ("template_args", -1)
    assert index.explain("t", "other", asked(index, *same)) is None
    ends = index.explain("t", "k", asked(index, *same))
    assert (ends.field, ends.message_index) == ("messages", 1)


def test_snippets_are_short_and_show_the_place():
    index = ContinuationIndex()
    turn(index, "t", "k", [("user", "a" * 5000 + "b" + "c" * 5000)], "s")
    miss = index.explain("t", "k", asked(index, ("user", "a" * 5000 + "X" + "c" * 5000)))
    assert "ab" in miss.ours
    assert "aX" in miss.theirs
    assert max(len(miss.ours), len(miss.theirs)) <= 81


def test_a_rollback_takes_its_boundaries_with_it():
    index = ContinuationIndex()
    turn(index, "t", "k", [("user", "1")], "s")
    log = [("user", "1"), ("assistant", "ok"), ("user", "2")]
    turn(index, "t", "k", log, "s", turn=2, matched=2)
    longer = asked(index, *log, ("assistant", "ok"), ("user", "3"))
    assert index.lookup("t", "k", longer).turn == 2
    index.rolled_back("t", "s", 1)
    match = index.lookup("t", "k", longer)
    assert (match.turn, match.matched_messages, match.newest) == (1, 2, True)
    turn(index, "t", "k", log, "s", text="other", turn=2, matched=2)
    assert index.lookup("t", "k", longer).turn == 1


def test_busy_and_named_sessions():
    index = ContinuationIndex()
    turn(index, "t", "k", [("user", "1")], "a")
    turn(index, "t", "k", [("user", "1")], "b")
    longer = asked(index, ("user", "1"), ("assistant", "ok"), ("user", "2"))
    assert index.lookup("t", "k", longer).session_id == "b"
    assert index.lookup("t", "k", longer, busy={"b"}.__contains__).session_id == "a"
    assert index.lookup("t", None, longer) is None
    assert index.lookup("t", None, longer, named="a").session_id == "a"
    assert index.of_chain("t", "ca") == "a"
    assert index.of_chain("u", "ca") is None


def test_a_fork_is_found_by_its_calls_when_its_parent_is_gone():
    index = ContinuationIndex()
    call = ToolCall(id="call_x", name="r", arguments={})
    turn(index, "t", None, [("user", "1")], "a", tool_calls=[call])
    index.register_fork("t", "a", session_id="b", chain_id="cb", matched=2)
    index.forget("t", "a")
    history = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "ok"},
        {"role": "tool", "tool_call_id": "call_x"},
    ]
    history[1]["tool_calls"] = [{"id": "call_x", "function": {"name": "r", "arguments": "{}"}}]
    assert index.lookup("t", None, index.read(history)).session_id == "b"
    assert index.lookup("u", None, index.read(history)) is None


def test_the_index_is_bounded_by_count_and_by_bytes():
    index = ContinuationIndex(max_sessions=3)
    for name in "abcd":
        turn(index, "t", name, [("user", name)], name, stateless=name != "a")
    assert index.trim() == []  # 'a' goes, but is not stateless
    assert not index.knows("t", "a")
    turn(index, "t", "e", [("user", "e")], "e")
    index.lookup("t", "b", asked(index, ("user", "b"), ("assistant", "ok"), ("user", "x")))  # used again
    assert index.trim() == [("t", "c")]
    index.max_bytes = 100_000
    turn(index, "t", "f", [("user", "x" * 99_000)], "f")
    assert index.trim(busy={"d"}.__contains__) == [("t", "e"), ("t", "b")]
    turn(index, "t", "g", [("user", "x" * 200_000)], "g")
    assert index.trim() == [("t", "d"), ("t", "f")]
    assert index.knows("t", "g")


def test_a_transcript_is_indexed_again():
    index = ContinuationIndex()
    log = [("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b"), ("user", "pending")]
    index.restore("t", "k", asked(index, *log), session_id="s", chain_id="c", turns=2)
    match = index.lookup("t", "k", asked(index, *log[:4], ("user", "3")))
    assert (match.turn, match.matched_messages, match.newest) == (2, 4, True)
    assert index.lookup("t", "k", asked(index, *log[:2], ("user", "3"))).turn == 1
    index.restore("t", "k", asked(index, *log), session_id="s", chain_id="c", turns=1)  # one answer came from elsewhere
    assert index.lookup("t", "k", asked(index, *log[:4], ("user", "3"))).turn == 1
    assert index.lookup("t", "k", asked(index, *log[:2], ("user", "3"))) is None


def test_tools_keep_their_first_spelling():
    index = ContinuationIndex()
    first = asked(index, ("user", "x"), tools=TOOLS)
    other = asked(index, ("user", "y"), tools=list(reversed(TOOLS)))
    assert index.spelling(first) == tuple(TOOLS)
    assert index.spelling(other) == tuple(TOOLS)


@pytest.mark.parametrize("count", [400])
def test_a_long_history_is_cheap(count):
    import time

    index = ContinuationIndex()
    log = [(role, f"{i} " + "text " * 400) for i in range(count) for role in ("user", "assistant")]
    index.restore("t", "k", asked(index, *log), session_id="s", chain_id="c", turns=count)
    began = time.perf_counter()
    assert index.lookup("t", "k", asked(index, *log, ("user", "new"))).turn == count
    assert time.perf_counter() - began < 0.5
