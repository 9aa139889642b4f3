"""Sessions: the ledger of their spans, the rules of pruning, the store. KV is reached through `memory.backend.KVBackend`."""
