"""The core loop, the output task and the public engine.

Owns: AsyncEngine and LLM. Does not know: HTTP.
Invariants: see core.py and async_engine.py.
"""
