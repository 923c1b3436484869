"""The command line: serve, chat, generate, bench, doctor.

Owns: flags, files and variables turned into one config; what a person sees in the terminal.
Does not know: how the engine works; it talks to the engine's façade and to `server.app.run_server` alone.
Invariants: `aengine --help` answers in under 0.3 s, so every heavy import stands inside the function that needs it; an
AengineError becomes one line on stderr and an exit code, never a traceback.
"""
