"""`aengine chat`: a conversation in the terminal.

Owns: the conversation's messages, the slash commands, what is printed.
Does not know: chat templates, how tokens come about.
Invariants: Ctrl-C stops the answer and keeps what was said; at the prompt, Ctrl-D (or /quit) leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aengine.cli.options import Parser, add_sampling, add_settings, config_of, print_config
from aengine.cli.session import EngineThread, Factory, Messages, real_engine
from aengine.config import home
from aengine.errors import ContextLengthExceeded, InvalidRequest, StepFailed
from aengine.types import RequestOutput, SamplingParams

HELP = "/new  start over   /system TEXT  set the system message, start over   /quit  leave   Ctrl-C  stop an answer"
HISTORY_LINES = 1000


def parser() -> Parser:
    made = Parser("chat", "Chat in the terminal with a model in this process.", epilog=HELP)
    made.add_argument("--system", metavar="TEXT", help="system message to begin with")
    add_sampling(made, max_tokens=None)
    made.set_defaults(temperature=0.7)
    add_settings(made, server=False)
    return made


def run(args: argparse.Namespace, factory: Factory = real_engine, ask: Callable[[str], str] = input) -> int:
    config = config_of(args)
    if args.print_config:
        return print_config(config)
    sampling = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, seed=args.seed, max_tokens=args.max_tokens
    )
    print(f"loading {config.engine.model.model} …", file=sys.stderr)
    with EngineThread(config.engine, factory) as engine:
        for line in engine.engine.report.lines:
            print(line, file=sys.stderr)
        print(HELP, file=sys.stderr)
        with _history(home() / "chat_history"):
            Conversation(engine, sampling, args.system).run(ask)
    return 0


class Conversation:
    def __init__(self, engine: EngineThread, sampling: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._messages: Messages = []
        self._begin(system)

    def run(self, ask: Callable[[str], str]) -> None:
        """Read lines until /quit or the end of input."""
        while True:
            try:
                line = ask("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # throws the half-typed line away
                print()
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _begin(self, system: str | None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def _system(self) -> str | None:
        return self._messages[0]["content"] if self._messages and self._messages[0]["role"] == "system" else None

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/new":
            self._begin(self._system())
        elif name == "/system":
            self._begin(rest.strip() or None)
        else:
            print(HELP if name == "/help" else f"unknown command {name}\n{HELP}", file=sys.stderr)

    def _answer(self, line: str) -> None:
        """On an error the line is taken back, so that the next one meets the conversation as it was."""
        self._messages.append({"role": "user", "content": line})
        try:
            text = self._stream()
        except ContextLengthExceeded as error:
            self._messages.pop()
            print(f"{error.message}\n/new starts over", file=sys.stderr)
        except (InvalidRequest, StepFailed) as error:
            self._messages.pop()
            print(error.message, file=sys.stderr)
        else:
            self._messages.append({"role": "assistant", "content": text})

    def _stream(self) -> str:
        text = ""
        last: RequestOutput | None = None
        began_s = time.perf_counter()
        with contextlib.closing(self._engine.chat(self._messages, self._sampling)) as outputs:
            try:
                for last in outputs:
                    longer = last.outputs[0].text  # read once: the engine's thread goes on appending
                    print(longer[len(text) :], end="", flush=True)
                    text = longer
            except KeyboardInterrupt:
                print(" [stopped]", end="")
        print()
        if last is not None:
            print(_figures(last, time.perf_counter() - began_s), file=sys.stderr)
        return text


def _figures(output: RequestOutput, took_s: float) -> str:
    choice = output.outputs[0]
    tokens = len(choice.token_ids)
    ttft_s = output.ttft_s if output.ttft_s is not None else took_s
    rate = (tokens - 1) / (took_s - ttft_s) if tokens > 1 and took_s > ttft_s else 0.0
    prompt = f"{len(output.prompt_token_ids)} prompt tokens ({output.num_cached_tokens} cached)"
    return f"[{prompt} · first token {ttft_s:.2f} s · {tokens} tokens · {rate:.1f} tokens/s]"


@contextlib.contextmanager
def _history(path: Path) -> Iterator[None]:
    """Line editing with a history that outlives the process, where the interpreter has readline and a person types."""
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
