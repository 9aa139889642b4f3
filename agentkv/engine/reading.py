"""What a sequence reads next: chunks of its prompt, and what is replayed behind it before the seal."""

from __future__ import annotations

from agentkv.engine.cache.intervals import clip
from agentkv.engine.core import Sequence


def in_chunks(seq: Sequence) -> bool:
    """Is it forwarded in chunks? An answer that a preemption cost is decoded again where there are seals, so that whatever
    falls between or into decode steps falls where it fell."""
    answers = seq.state is not None and seq.state.form.seals and seq.num_forwarded >= seq.num_prompt_tokens
    return bool(seq.seal_at) or (seq.prefilling and not answers)


def wanted(seq: Sequence) -> int:
    """Tokens that it could forward in one chunk, which ends before an edit, where others begin to hold what it holds, and where
    its prompt is sealed."""
    if seq.replays:
        return len(seq.replays[0]) - seq.replayed
    end = seq.pending_edits[0].at - 1 if seq.pending_edits else len(seq.token_ids)
    for stop in (seq.shared_until, seq.seal_at):
        if seq.num_forwarded < stop:
            end = min(end, stop)
    return end - seq.num_forwarded


def next_run(seq: Sequence) -> tuple[int, ...] | None:
    """The run that is to be replayed behind the prompt, which has been read; None when the seal is due."""
    state = seq.state
    assert state is not None
    if seq.replays is None:
        seq.replays, seq.run, replay = [], 0, state.form.replay
        if replay is not None:
            kept = clip(state.runs, state.floor, seq.seal_at)
            ids = [token for start, end in kept for token in seq.token_ids[start:end]]
            seq.replays = [run for run in replay(state.held(True), ids) if run]
    return seq.replays[0] if seq.replays else None


def look_again(seq: Sequence) -> None:
    """Queries stay with the row: whoever loses it amid a prompt forwards those that its seal looks at once more."""
    state = seq.state
    if state is None or not seq.seal_at or not state.form.looks_back:
        return
    length = max(state.sealed_at, seq.num_forwarded - state.form.looks_back)
    if length and state.usable(length) == length:
        state.cut(length)
    else:
        state.release()
        seq.state = None
