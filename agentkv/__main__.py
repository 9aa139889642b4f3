"""`python -m agentkv`."""

from agentkv.cli import main

main()
