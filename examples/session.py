"""A session in process: the tool loop with lag-based pruning, a price before an edit, a fork, and going on another day.

    python examples/session.py

Uses the bundled model and a task of its small world; with your own model, pass its directory and your own functions.
"""

from agentkv import Runtime
from agentkv.world.dialect import NATIVE
from agentkv.world.env import World
from agentkv.world.task import make_task


def main() -> None:
    with World(make_task(24)) as world, Runtime("micro") as runtime:
        with runtime.session(system=NATIVE.system, tools=[world.bash]) as session:
            session.add_user(world.task.prompt)
            turn = session.run(max_turns=20, prune_after=1)
            print("solved:", world.verdict(), "|", turn.usage)
            for span in session.spans():
                print(f"  {span.kind:12} {span.state:8} {span.tokens:5} tokens")
            print("what is due now would free:", session.plan().frees_tokens, "tokens")
        session_id = session.id  # suspended: its KV may be reclaimed, its text stays

        again = runtime.resume(session_id)  # works in another process, too
        branch = again.fork()
        branch.add_user("what did you answer?")
        print("the fork says:", branch.generate(max_tokens=16).text)
        branch.close()
        for each in (branch.id, session_id):
            runtime.delete(each)


if __name__ == "__main__":
    main()
