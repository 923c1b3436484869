"""Entry point of the console script.

Owns: the list of commands, exit codes, the one line an error becomes.
Does not know: any command's flags or work; a command's module is imported when it is asked for.
Invariants: exit code 0 done, 1 failed, 2 misused (flags, configuration), 130 interrupted; `serve` says so when a signal
ends it before it listens (130 and 143).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from aengine import __version__
from aengine.cli.signals import ends_at_once
from aengine.errors import AengineError, ConfigError

COMMANDS = {
    "serve": "start the server: OpenAI-compatible API and a chat page",
    "chat": "chat with a model in the terminal",
    "generate": "complete one prompt and print the text",
    "batch": "answer a file of requests (OpenAI batch format)",
    "bench": "measure a running server",
    "trace": "fetch the timeline of a running server",
    "doctor": "show what this machine offers and what is wrong",
}
SERVE_ENDED = "aengine serve: ended by {} before it listened"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    try:
        with ends_at_once(SERVE_ENDED) if command == "serve" else nullcontext():
            return _run(command, arguments[1:])
    except AengineError as error:
        name = f"aengine {command}" if command in COMMANDS else "aengine"
        print(f"{name}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: str, rest: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command in ("-V", "--version"):
        print(f"aengine {__version__}")
        return 0
    if command not in COMMANDS:
        from aengine.cli.options import UsageError
        from aengine.cli.settings import near

        raise UsageError(f"unknown command {command!r}{near(command, COMMANDS)} (see aengine --help)")
    module = import_module(f"aengine.cli.{command}")
    try:
        args: argparse.Namespace = module.parser().read(rest)
    except SystemExit as done:  # argparse printed the help
        return int(done.code or 0)
    code: int = module.run(args)
    return code


def _help() -> str:
    listed = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    return (
        "usage: aengine COMMAND [options]\n\n"
        "An asyncio LLM inference engine.\n\n"
        f"commands:\n{listed}\n\n"
        "aengine COMMAND --help lists a command's options. Each setting can also be given as a variable\n"
        "(AENGINE_MAX_NUM_SEQS=16) or in a YAML file (--config). A flag wins over a variable, that over the file.\n"
        "AENGINE_HOME is where models are kept (default: ~/.cache/aengine)."
    )


if __name__ == "__main__":
    raise SystemExit(main())
