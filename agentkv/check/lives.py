"""What a session goes through leaves no trace: the same tokens, as likely, and the same free units as without it."""

from __future__ import annotations

from agentkv.check.outcome import Failed, Skipped, require
from agentkv.check.scene import PAGE, Answer, Case, Scene, difference, same

FEW = 16
"""Tokens of a step where prompts are to take several."""


def append(case: Case) -> str:
    """Many tokens at once are the same tokens one by one: as a prompt, and as guesses behind the last token."""
    method = case.method
    if method.exactness != "exact":
        raise Skipped(f"it is {method.exactness}: a token may be decoded otherwise than it is read in a prompt")
    (answer,) = case.plain(1)
    scene = case.scene()
    (at_once,) = scene.finish(scene.start([*case.ids(1), *answer.ids[:-1]], new=1))
    last = answer._replace(ids=answer.ids[-1:], logprobs=answer.logprobs[-1:])
    _alike(last, at_once, "after the same tokens as a prompt")
    if not method.truncates:
        return "as a prompt"
    ids = case.ids(1, 7) * 9
    with_guesses = case.scene(lookup=8)
    _alike(case.scene().turn(ids, new=24), with_guesses.turn(ids, new=24), "with guesses behind the last token")
    return f"as a prompt, and as {with_guesses.llm.decoding.drafted} guesses"


def chunk(case: Case) -> str:
    """A prompt in chunks of a page, one token less and one more is the prompt at once."""
    (whole,) = case.plain(1)
    for size in (PAGE - 1, PAGE, PAGE + 1):
        _alike(whole, case.scene(step_tokens=size).turn(case.ids(1), "a"), f"in chunks of {size}")
    return f"chunks of {PAGE - 1}, {PAGE} and {PAGE + 1}"


def fork(case: Case) -> str:
    """Parent and child go on in the same steps, each as if it were alone; the child leaves nothing."""
    scene, ids = case.scene(), case.ids(1)
    first = scene.turn(ids, "a")
    scene.llm.fork("a", "b", len(ids) + len(first.ids))
    left, right = scene.finish(scene.start(case.more(ids, first, 2), "a"), scene.start(case.more(ids, first, 3), "b"))
    _alike(case.plain(1, 2)[1], left, "the parent, while its child runs")
    _alike(case.plain(1, 3)[1], right, "the child")
    scene.llm.drop("b")
    _units(case.plain_used(1, 2), scene, "after its child is gone")
    return "parent and child as if alone"


def rollback(case: Case) -> str:
    """A long turn taken back, another one in its place."""
    scene, ids = case.scene(), case.ids(1)
    first = scene.turn(ids, "a")
    scene.turn([*case.more(ids, first, 3), *case.ids(4, 3 * PAGE)], "a")
    scene.llm.rollback("a", len(ids) + len(first.ids))
    _alike(case.plain(1, 2)[1], scene.turn(case.more(ids, first, 2), "a"), "after a rollback")
    _units(case.plain_used(1, 2), scene, "after a rollback")
    return "one turn back"


def suspend(case: Case) -> str:
    """To host memory and back, while another session takes the units that it had."""
    scene, ids = case.scene(), case.ids(1)
    first = scene.turn(ids, "a")
    scene.llm.suspend("a")
    scene.turn(case.ids(5), "b")
    again = scene.turn(case.more(ids, first, 2), "a")
    require(scene.llm.stats().restores == 1, "the session was not brought back from host memory")
    _alike(case.plain(1, 2)[1], again, "after a suspend")
    scene.llm.drop("b")
    _units(case.plain_used(1, 2), scene, "after a suspend")
    return "once through host memory"


def abort(case: Case) -> str:
    """Aborted while a prompt is read and while an answer is made, in a first turn and in a later one."""
    ids, small = case.ids(1), {"step_tokens": FEW}
    plain = case.scene(**small)
    first = plain.turn(ids, "a")
    again = plain.turn(case.more(ids, first, 2), "a")
    scene = case.scene(**small)
    _cut_short(scene, case.ids(5), 3)
    scene.turn(ids, "a")
    for count in (4, 1):
        _cut_short(scene, case.more(ids, first, 3), count)
    _alike(again, scene.turn(case.more(ids, first, 2), "a"), "after aborts")
    _units(plain.used, scene, "after aborts")
    return "in a prompt and in an answer"


def _cut_short(scene: Scene, ids: list[int], steps: int) -> None:
    seq = scene.start(ids, "a")
    scene.steps(steps)
    scene.llm.abort(seq)


def _alike(wanted: Answer, found: Answer, when: str) -> None:
    if not same(wanted, found):
        raise Failed(f"{when}, {difference(wanted, found)}")


def _units(wanted: int, scene: Scene, when: str) -> None:
    require(scene.used == wanted, f"{when}, {scene.used} bytes are held instead of {wanted}")
