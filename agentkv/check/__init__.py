"""The conformance kit: does an attention method keep the contract of `engine.sparse`? `agentkv methods check NAME|FILE.py`."""
