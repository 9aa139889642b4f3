"""The inference engine: token ids in, token ids out. Read `core` first, then `llm`."""
