"""When a tool result is due: pure functions of what happened on the branch.

The **age** of a result is the number of tool results on the same branch that answer a *later* assistant turn; results of one
assistant turn never age one another; errors, rejections and pruned results count. Age is read at the commit: results that
no generation has read yet neither have an age nor give one. A result is **due** when its age has reached its lag, so lag 0
means "read once".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from agentkv.memory.span import Record
from agentkv.types import Policy


def age(answers: Sequence[int], own: int, committed: int) -> int:
    """Age of a committed result that answers assistant turn `own`.

    answers: for each result of the branch, in order, the assistant turn it answers; never decreasing, because a branch goes
    on only when all calls of a turn are answered. The first `committed` of them have been read by a generation.
    """
    return committed - bisect_right(answers, own, 0, committed)


def lag_of(record: Record, policy: Policy | None) -> int | None:
    """The prune_after that applies: the result's own, else the policy's."""
    if record.lag is not None or policy is None:
        return record.lag
    return policy.lag(record.tool_name)


def keep_of(record: Record, policy: Policy | None) -> str:
    """The keep rule that applies: a result with a lag or a rule of its own keeps it, else the policy's."""
    if record.lag is not None or record.keep != "drop" or policy is None:
        return record.keep
    return policy.keep


def reason(lag: int | None, reached: int, policy: Policy | None, record: Record) -> str:
    """Why a due result was pruned, for people."""
    if lag is None:
        return f"was due before the policy changed, age {reached}"
    source = "its own prune_after" if record.lag is not None else "policy prune_after"
    if record.lag is None and policy is not None and record.tool_name in policy.by_tool:
        source = f"policy by_tool[{record.tool_name}]"
    return f"age {reached} reached {source}={lag}"


def least_lag(policy: Policy | None) -> int | None:
    """The smallest lag that a policy can give to a result; None if it prunes nothing."""
    lags = () if policy is None else (policy.prune_after, *policy.by_tool.values())
    return min((lag for lag in lags if lag is not None), default=None)
