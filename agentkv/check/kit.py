"""The kit: every check, and running them on a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentkv.check import company, declared, lives, pruning, reading
from agentkv.check.models import opened
from agentkv.check.outcome import Failed, Outcome, Skipped
from agentkv.check.scene import Case
from agentkv.check.subject import ready, subjects
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import SparseMethod

Check = Callable[[Case], str]
"""What was seen; raises Failed or Skipped."""

CHECKS: Mapping[str, Check] = {
    each.__name__: each
    for each in (
        reading.budget,
        reading.reference,
        reading.reads,
        lives.append,
        lives.chunk,
        lives.fork,
        lives.rollback,
        lives.suspend,
        pruning.prune,
        pruning.uneven,
        lives.abort,
        company.batched,
        company.several,
        company.shared,
        company.hidden,
        declared.units,
        declared.memory,
        declared.evicts,
        declared.reuse,
        declared.counts,
        declared.graph,
        declared.needs,
        declared.waits,
    )
}


@dataclass(frozen=True, slots=True)
class Report:
    """A method with its options, a model, and every check."""

    method: str
    model: str
    checks: list[Outcome]

    @property
    def passed(self) -> bool:
        """Did no check fail?"""
        return all(each.result != "failed" for each in self.checks)


def run(target: str, model: str = "tiny", options: Mapping[str, Any] | None = None, device: str = "cpu") -> Iterator[Report]:
    """Check the method of a name, or those of a file, on the models of a name; see `subject` and `models.opened`. A method that
    must be prepared for a model is prepared here, where no file is given. A report is yielded when it is complete. BadRequest,
    BadModel."""
    loaded = opened(model, device)
    for method in subjects(target, options or {}):
        for each in loaded:
            name = each.fingerprint if model == "tiny" else model
            with ready(method, each) as mine:
                yield Report(mine.fingerprint.partition(":")[2], name, check(mine, each))


def check(method: SparseMethod, loaded: LoadedModel) -> list[Outcome]:
    """Every check of one configured method on one model. BadRequest where it does not serve the model."""
    case = Case(method, loaded)
    case.scene()
    return [_outcome(name, each, case) for name, each in CHECKS.items()]


def _outcome(name: str, each: Check, case: Case) -> Outcome:
    try:
        return Outcome(name, "passed", each(case))
    except Failed as failed:
        return Outcome(name, "failed", str(failed))
    except Skipped as skipped:
        return Outcome(name, "skipped", str(skipped))
    except Exception as error:  # noqa: BLE001 (a method may raise anything anywhere)
        return Outcome(name, "failed", f"{type(error).__name__}: {error}")
