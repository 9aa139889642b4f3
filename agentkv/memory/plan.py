"""The price of a prune before it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentkv.errors import UnknownOption
from agentkv.memory.branch import Branch, Chosen
from agentkv.types import Interval, Plan, PruneMode

OTHERS = "other chains or partly filled pages"


def chosen(branch: Branch, edit: Any, keep: str | None, mode: PruneMode | None) -> tuple[list[Chosen], PruneMode]:
    """What an edit would prune: None for what is due; spans; or a mapping with spans, keep and mode."""
    if edit is None:
        due, own = branch.due()
        return due, mode or own
    if isinstance(edit, Mapping):
        unknown = sorted(set(edit) - {"spans", "keep", "mode"})
        if unknown:
            raise UnknownOption(f"plan: unknown option {unknown[0]!r}", hint="Known: keep, mode, spans", param=unknown[0])
        keep, mode = edit.get("keep") or keep, edit.get("mode") or mode
        if edit.get("spans") is None:
            return chosen(branch, None, keep, mode)
        edit = edit["spans"]
    wanted: PruneMode = mode or "in_place"
    return branch.choose(branch.pick(edit), keep or "drop", wanted, "planned"), wanted


def price(branch: Branch, edit: Sequence[Chosen], mode: PruneMode) -> Plan:
    """See `Plan`. In place costs nothing; a rebuild computes again what is resident after its start.

    turns_to_pay_back of a rebuild: turns until the resident tokens it saves add up to the tokens it computes again.
    """
    if not edit:
        return Plan(turns_to_pay_back=None)
    intervals = sorted(record.removable(keep) for record, keep, _ in edit)
    names = tuple(record.id for record, _, _ in edit)
    if mode == "rebuild":
        return _rebuild(branch, edit, names)
    with branch.engine("pricing a prune"):
        freed = branch.backend.price(branch.chain_id, intervals)
    held = max(0, freed.tokens * branch.backend.token_bytes - freed.bytes)
    return Plan(
        frees_now=freed.bytes,
        frees_tokens=sum(end - start for start, end in intervals),
        held_by={OTHERS: held} if held else {},
        turns_to_pay_back=0,
        spans=names,
    )


def _rebuild(branch: Branch, edit: Sequence[Chosen], names: tuple[str, ...]) -> Plan:
    ledger = branch.ledger
    rebuilt = ledger.rebuild(edit, branch.placeholder())
    with branch.engine("pricing a rebuild"):
        held = branch.backend.held(branch.chain_id)
        resident = 0 if held is None or not held.resident_tokens else held.logical_length
        gone: list[Interval] = [(low, high) for low, high, _ in rebuilt.replacements if high <= resident]
        freed = branch.backend.price(branch.chain_id, gone) if gone else None
        rate = branch.backend.prefill_rate()
    taken = sum(high - low - len(stand_in) for low, high, stand_in in rebuilt.replacements if high <= resident)
    again = max(0, resident - rebuilt.start - taken)
    return Plan(
        frees_now=0 if freed is None else freed.bytes,
        frees_tokens=rebuilt.frees,
        prefill_tokens=again,
        milliseconds=1000.0 * again / rate if rate > 0 else 0.0,
        turns_to_pay_back=-(-again // rebuilt.frees) if rebuilt.frees > 0 else None,
        spans=names,
    )
