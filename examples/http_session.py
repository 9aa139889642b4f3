"""The same verbs over HTTP. Start `agentkv serve micro` first.

python examples/http_session.py [http://127.0.0.1:8000]
"""

import sys

from agentkv import Client
from agentkv.errors import AgentkvError


def main(base_url: str = "http://127.0.0.1:8000") -> None:
    with Client(base_url) as client, client.session() as session:
        session.add_user("hello")
        try:
            turn = session.generate(max_tokens=16)
            print(repr(turn.text), turn.usage)
        except AgentkvError as error:
            print(error.code, error)
        session.close()
        client.delete(session.id)


if __name__ == "__main__":
    main(*sys.argv[1:2])
