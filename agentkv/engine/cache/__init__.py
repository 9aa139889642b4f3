"""KV memory on the host: the arena, extents, states, the prefix cache and the chains. No torch."""
