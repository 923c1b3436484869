"""A remote engine, used like the one in process.

Owns: `AsyncClient`. Does not know: schedulers, models, torch; only the wire.
Invariants: its `generate` and `chat` take and yield what `AsyncEngine`'s do.
"""
