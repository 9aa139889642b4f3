"""The agent world: tasks in real directories, their expert, a safe tool, and the training of `micro`.

`make_task(seed)` gives a task, `World(task)` its real directory with the tool `bash` and the
verdict, `run_suite` plays many seeds with sessions.  Importing this loads no torch.
"""

from agentkv.world.dialect import BASH_TOOL, NATIVE, SYSTEM, Dialect
from agentkv.world.env import World
from agentkv.world.suite import run_suite
from agentkv.world.task import FAMILIES, Followup, Task, family_of, make_task

__all__ = [
    "BASH_TOOL",
    "FAMILIES",
    "NATIVE",
    "SYSTEM",
    "Dialect",
    "Followup",
    "Task",
    "World",
    "family_of",
    "make_task",
    "run_suite",
]
