"""`aengine chat`: a conversation in the terminal, with a model in this process or a server elsewhere.

Owns: the slash commands, what is printed, line editing and its history, the files conversations are saved in.
Does not know: chat templates, how tokens come about.
Invariants: Ctrl-C stops the answer and keeps what was said; at the prompt, Ctrl-D (or /quit) leaves. After every answer
the conversation is saved as `last`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aengine.cli.dialogue import Dialogue, Totals
from aengine.cli.options import Parser, add_sampling, add_settings, config_of, print_config
from aengine.cli.remote import Remote
from aengine.cli.session import Answer, Chatter, EngineThread, Factory, real_engine
from aengine.config import home
from aengine.errors import AengineError, ContextLengthExceeded, EngineDead, InvalidRequest

HELP = """\
/new, /clear        start over, with the same system message
/system [TEXT]      set the system message (without TEXT: none) and start over
/set [NAME [VALUE]] show how answers are sampled, or set one of it; without VALUE back to the default
/regen              another answer to the last question
/undo               take the last question and its answer back
/save [NAME]        save the conversation; /load [NAME] goes on with one, /sessions lists them
/model [NAME]       show the models, or go on with another one
/stats              tokens and times so far
/quit               leave
\"""                 begins and ends a message of several lines; Ctrl-C stops an answer"""
HINT = "/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves"
HISTORY_LINES = 1000
LAST = "last"
_NAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,63}")
Ask = Callable[[str], str]


def parser() -> Parser:
    made = Parser(
        "chat", "Chat in the terminal with a model in this process, or with a server.", epilog=f"commands:\n{HELP}"
    )
    made.add_argument("--url", metavar="URL", help="chat with the server there; MODEL is then one that it serves")
    made.add_argument("--api-key", metavar="TEXT", default=argparse.SUPPRESS, help="the key that the server asks for")
    made.add_argument("--system", metavar="TEXT", help="system message to begin with")
    made.add_argument("--resume", nargs="?", const=LAST, metavar="NAME", help=f"go on with a saved one ({LAST})")
    add_sampling(made, max_tokens=None)
    made.set_defaults(temperature=0.7)
    add_settings(made, server=False)
    return made


def run(args: argparse.Namespace, factory: Factory = real_engine, ask: Ask = input) -> int:
    config = config_of(args)
    if args.print_config:
        return print_config(config)
    names = ("temperature", "top_p", "seed", "max_tokens")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    dialogue = Dialogue(given)
    dialogue.params()  # a value out of range is said before anything is loaded
    if args.url is not None:
        remote = Remote(args.url, config.server.api_key, getattr(args, "model", None))
        print(f"{remote.model} at {args.url}", file=sys.stderr)
        return _converse(remote, dialogue, args, ask)
    print(f"loading {config.engine.model.model} …", file=sys.stderr)
    with EngineThread(config.engine, factory) as engine:
        for line in engine.engine.report.lines:
            print(line, file=sys.stderr)
        return _converse(engine, dialogue, args, ask)


def _converse(chatter: Chatter, dialogue: Dialogue, args: argparse.Namespace, ask: Ask) -> int:
    conversation = Conversation(chatter, dialogue, home() / "chats")
    if args.resume is not None:
        conversation.load(args.resume)
    if args.system is not None:
        dialogue.begin(args.system)
    print(HINT, file=sys.stderr)
    with _history(home() / "chat_history", conversation.commands):
        conversation.run(ask)
    return 0


class Conversation:
    """`folder`: where conversations are saved, one JSON file each."""

    def __init__(self, chatter: Chatter, dialogue: Dialogue, folder: Path) -> None:
        self._chatter = chatter
        self._dialogue = dialogue
        self._folder = folder
        self._totals = Totals()
        self.commands: dict[str, Callable[[str], None]] = {
            "/new": self._new,
            "/clear": self._new,
            "/system": self._system,
            "/set": self._set,
            "/regen": self._regen,
            "/undo": self._undo,
            "/save": self._save,
            "/load": self.load,
            "/sessions": self._sessions,
            "/model": self._model,
            "/stats": lambda rest: _note(self._totals.line()),
            "/help": lambda rest: _note(HELP),
        }

    def run(self, ask: Ask) -> None:
        """Read lines until /quit or the end of input."""
        while True:
            try:
                line = _read(ask)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # throws the half-typed line away
                print()
                continue
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        command = self.commands.get(name)
        if command is None:
            _note(f"unknown command {name}\n{HELP}")
            return
        try:
            command(rest.strip())
        except (AengineError, OSError) as error:
            _note(error.message if isinstance(error, AengineError) else str(error))

    def _new(self, rest: str) -> None:
        self._dialogue.begin(self._dialogue.system)

    def _system(self, rest: str) -> None:
        self._dialogue.begin(rest or None)

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name:
            self._dialogue.set(name, value.strip())
        _note(" · ".join(f"{key} {value!r}" for key, value in self._dialogue.sampling.items()) or "all defaults")

    def _regen(self, rest: str) -> None:
        before = list(self._dialogue.messages)
        question = self._dialogue.take_back()
        if question is None:
            _note("there is no question yet")
        elif not self._answer(question):
            self._dialogue.messages = before

    def _undo(self, rest: str) -> None:
        question = self._dialogue.take_back()
        _note("there is nothing to take back" if question is None else f"taken back: {question}")

    def _save(self, rest: str) -> None:
        path = self._path(rest or time.strftime("%Y-%m-%d-%H%M%S"))
        self._write(path)
        _note(f"saved as {path.stem}")

    def load(self, rest: str) -> None:
        """Goes on with a saved conversation; raises InvalidRequest."""
        path = self._path(rest or LAST)
        if not path.exists():
            raise InvalidRequest(f"there is no saved conversation {path.stem!r}", param="name")
        loaded = Dialogue.from_json(path.read_text(encoding="utf-8"))
        self._dialogue.messages, self._dialogue.sampling = loaded.messages, loaded.sampling
        for message in loaded.messages:
            _note(f"{'> ' if message['role'] == 'user' else ''}{message['content']}")

    def _sessions(self, rest: str) -> None:
        paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        _note("\n".join(path.stem for path in paths) or "nothing is saved yet")

    def _model(self, rest: str) -> None:
        if rest:
            self._chatter.use(rest)
        _note("\n".join(f"{'*' if name == self._chatter.model else ' '} {name}" for name in self._chatter.models()))

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} is no name: letters, digits, - _ and . are, at most 64", param="name")
        return self._folder / f"{name}.json"

    def _write(self, path: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(self._dialogue.to_json(), encoding="utf-8")
        part.replace(path)

    def _answer(self, line: str) -> bool:
        """Whether there is an answer. On an error the line is taken back: the next one meets the conversation as it
        was."""
        messages = self._dialogue.messages
        messages.append({"role": "user", "content": line})
        try:
            text = self._stream()
        except EngineDead:
            raise  # nothing more can be asked
        except AengineError as error:
            messages.pop()
            long = isinstance(error, ContextLengthExceeded)
            _note(f"{error.message}\n/new starts over" if long else error.message)
            return False
        messages.append({"role": "assistant", "content": text})
        with contextlib.suppress(OSError):  # a full disk is no reason to stop talking
            self._write(self._path(LAST))
        return True

    def _stream(self) -> str:
        shown = thought = ""
        last: Answer | None = None
        began_s = time.perf_counter()
        answers = self._chatter.answers(self._dialogue.messages, self._dialogue.params())
        with contextlib.closing(answers):
            try:
                for last in answers:
                    if len(last.reasoning) > len(thought):
                        print(last.reasoning[len(thought) :], end="", flush=True, file=sys.stderr)
                        thought = last.reasoning
                    elif thought and not shown and last.text:
                        _note("\n")
                    print(last.text[len(shown) :], end="", flush=True)
                    shown = last.text
            except KeyboardInterrupt:
                print(" [stopped]", end="")
        print()
        if last is not None:
            took_s = time.perf_counter() - began_s
            self._totals.add(last, took_s)
            _note(_figures(last, took_s))
        return shown


def _note(text: str) -> None:
    """What is not an answer goes to stderr."""
    print(text, file=sys.stderr)


def _read(ask: Ask) -> str:
    """One message: a line, or several between lines that begin and end with three quotes."""
    prompt = "> " if sys.stdin.isatty() else ""
    line = ask(prompt).strip()
    if not line.startswith('"""'):
        return line
    lines = [line.removeprefix('"""')]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(ask("… " if prompt else ""))
    lines[-1] = lines[-1].rstrip().removesuffix('"""')
    return "\n".join(lines).strip()


FEWEST = 8  # tokens that say something about speed: those of one step come together


def _figures(answer: Answer, took_s: float) -> str:
    ttft_s = answer.ttft_s if answer.ttft_s is not None else took_s
    writing_s = took_s - ttft_s
    rate = f" · {(answer.tokens - 1) / writing_s:.1f} tokens/s" if answer.tokens >= FEWEST and writing_s > 0 else ""
    prompt = f"{answer.prompt_tokens} prompt tokens ({answer.cached_tokens} cached)"
    return f"[{prompt} · first token {ttft_s:.2f} s · {answer.tokens} tokens{rate}]"


@contextlib.contextmanager
def _history(path: Path, commands: dict[str, Callable[[str], None]]) -> Iterator[None]:
    """Line editing with a history that outlives the process, where the interpreter has readline and a person types; Tab
    completes commands."""
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    names = [*sorted(commands), "/quit"]
    readline.set_completer(lambda text, state: [*(n for n in names if text and n.startswith(text)), None][state])
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
