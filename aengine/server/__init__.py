"""The HTTP server: OpenAI's surface over the engine's façade.

Owns: the public names of this room.
Does not know: how the engine works; see facade.py for all that the server asks of it.
Invariants: importing this package imports neither torch nor the engine.
"""

from aengine.server.app import create_app
from aengine.server.run import run_server

__all__ = ["create_app", "run_server"]
