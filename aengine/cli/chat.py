"""`aengine chat`: a conversation in the terminal, with a model in this process or a server elsewhere.

Owns: the slash commands, what is said beside answers, exit codes.
Does not know: chat templates, how tokens come about, what a terminal is.
Invariants: Ctrl-C stops the answer and keeps what was said; at the prompt, Ctrl-D (or /quit) leaves. A conversation
changes only by whole questions with their answers, and is saved as `last` after each. Where nobody types, Ctrl-C leaves
too, and the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aengine.cli import settings
from aengine.cli.dialogue import Dialogue, Totals
from aengine.cli.options import Parser, UsageError, add_sampling, add_settings, config_of, print_config
from aengine.cli.remote import Remote
from aengine.cli.saved import Chats, SavingFailed
from aengine.cli.session import Answer, Chatter, EngineThread, Factory, Messages, real_engine
from aengine.cli.signals import ends_at_once, uninterrupted
from aengine.cli.terminal import Ask, OutputFailed, Terminal, note, say
from aengine.config import home
from aengine.errors import AengineError, ContextLengthExceeded, EngineDead, InvalidRequest

HELP = """\
/new, /clear        start over, with the same system message
/system [TEXT]      set the system message (without TEXT: none) and start over
/set [NAME [VALUE]] show how answers are sampled, or set one of it; without VALUE back to the default
/regen              another answer to the last question, or to the one that got none
/undo               take the last question and its answer back
/save [NAME]        save the conversation; /load [NAME] goes on with one, /sessions lists them
/model [NAME]       show the models, or go on with another one
/stats              tokens and times so far
/quit               leave
\"""                 begins and ends a message of several lines; Ctrl-C stops an answer"""
HINT = "/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves"
LAST = "last"
TEMPERATURE = 0.7
SAMPLING = ("temperature", "top_p", "seed", "max_tokens")
SHOWN = 200  # characters of a question that is taken back


def parser() -> Parser:
    made = Parser(
        "chat", "Chat in the terminal with a model in this process, or with a server.", epilog=f"commands:\n{HELP}"
    )
    made.add_argument("--url", metavar="URL", help="chat with the server there; MODEL is then one that it serves")
    made.add_argument("--api-key", metavar="TEXT", default=argparse.SUPPRESS, help="the key that the server asks for")
    made.add_argument("--system", metavar="TEXT", help="system message to begin with")
    made.add_argument("--resume", nargs="?", const=LAST, metavar="NAME", help=f"go on with a saved one ({LAST})")
    add_sampling(made, max_tokens=None, temperature=TEMPERATURE)
    made.set_defaults(**dict.fromkeys(SAMPLING))  # what is given wins over what was saved, defaults do not
    add_settings(made, server=False)
    return made


def run(args: argparse.Namespace, factory: Factory = real_engine, ask: Ask | None = None) -> int:
    config = config_of(args)
    if args.print_config:
        return print_config(config)
    _check_url_flags(args)
    chats = Chats(home() / "chats")
    dialogue = _dialogue(args, chats)  # what is wrong with it is said before anything is loaded
    terminal = Terminal(ask)
    if args.url is not None:
        remote = Remote(args.url, config.server.api_key, getattr(args, "model", None))
        note(f"{remote.model} at {remote.where}")
        return _converse(Conversation(remote, dialogue, chats, terminal, args.resume), terminal)
    model = config.engine.model.model
    note(f"loading {model} …")
    with contextlib.ExitStack() as stack:
        with ends_at_once(f"aengine chat: ended by {{}} while {model} was loading"):
            engine = stack.enter_context(EngineThread(config.engine, factory))
        for line in engine.engine.report.lines:
            note(line)
        return _converse(Conversation(engine, dialogue, chats, terminal, args.resume), terminal)


def _check_url_flags(args: argparse.Namespace) -> None:
    """Raises UsageError for flags that would change nothing."""
    given = [setting for setting in settings.settings() if setting.name in vars(args) and setting.name != "model"]
    if args.url is None and any(setting.name == "api_key" for setting in given):
        raise UsageError("--api-key is for a server: it needs --url")
    idle = [setting.flag for setting in given if setting.section != "server"]
    if args.url is not None and idle:
        raise UsageError(f"{', '.join(idle)}: not with --url, the server there has its own settings")


def _dialogue(args: argparse.Namespace, chats: Chats) -> Dialogue:
    given: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    made = Dialogue({"temperature": TEMPERATURE}) if args.resume is None else chats.load(args.resume)
    made.sampling |= given
    try:
        made.params()
        (args.system or "").encode()
    except InvalidRequest as error:
        raise UsageError(error.message) from None
    except UnicodeEncodeError as error:
        raise UsageError(f"--system is not UTF-8 after {error.start} characters") from None
    if args.system is not None:
        made.instruct(args.system)
    return made


def _converse(conversation: Conversation, terminal: Terminal) -> int:
    conversation.recall()
    if terminal.person:
        note(HINT)
    with terminal.editing(home() / "chat_history", conversation.commands):
        conversation.run()
    return int(conversation.failed and not terminal.person)


@dataclass(frozen=True, slots=True)
class Command:
    run: Callable[[str], None]
    takes: bool = False  # text behind its name


class Conversation:
    """`name`: under which it was saved. `failed`: whether anything that was typed could not be done."""

    def __init__(
        self, chatter: Chatter, dialogue: Dialogue, chats: Chats, terminal: Terminal, name: str | None = None
    ) -> None:
        self._chatter = chatter
        self._dialogue = dialogue
        self._chats = chats
        self._terminal = terminal
        self._totals = Totals()
        self._unanswered: tuple[str, Messages] | None = None  # a question, and what was said before it
        self._own: set[str | None] = {name}  # under these it may be saved again
        self._saves = True
        self.failed = False
        self.commands: dict[str, Command] = {
            "/new": Command(self._new),
            "/clear": Command(self._new),
            "/system": Command(self._system, takes=True),
            "/set": Command(self._set, takes=True),
            "/regen": Command(self._regen),
            "/undo": Command(self._undo),
            "/save": Command(self._save, takes=True),
            "/load": Command(self._load, takes=True),
            "/sessions": Command(self._sessions),
            "/model": Command(self._model, takes=True),
            "/stats": Command(lambda _: note(self._totals.line())),
            "/help": Command(lambda _: note(HELP)),
            "/quit": Command(_leave),
            "/exit": Command(_leave),
        }

    def run(self) -> None:
        """Read messages until /quit or the end of input."""
        interrupts = 0
        while True:
            try:
                self._turn()
                interrupts = 0
            except EOFError:
                if self._terminal.person:
                    note("")
                return
            except KeyboardInterrupt:  # throws the half-typed line away
                if not self._terminal.person:
                    raise
                interrupts += 1
                note("" if interrupts == 1 else "\nCtrl-D or /quit leaves")

    def recall(self) -> None:
        """Show what was said."""
        for message in self._dialogue.messages:
            note(f"{'> ' if message['role'] == 'user' else ''}{message['content']}")

    def _turn(self) -> None:
        try:
            message = self._terminal.read()
            if message.command:
                self._command(message.text)
            elif message.text:
                self._answer(message.text, self._dialogue.messages)
        except (EngineDead, OutputFailed):
            raise  # nothing more can be asked, or shown
        except AengineError as error:
            self._fail(error.message)

    def _fail(self, text: str) -> None:
        self.failed = True
        note(text)

    def _command(self, line: str) -> None:
        name, *more = line.split(maxsplit=1)
        command = self.commands.get(name)
        if command is None:
            hint = settings.near(name, self.commands) or " (/help lists them)"
            raise InvalidRequest(f'unknown command {name[:40]}{hint}; a message that begins with / goes between """')
        if more and not command.takes:
            raise InvalidRequest(f"{name} takes nothing behind it, and there is {more[0][:40]!r}")
        command.run(more[0].strip() if more else "")

    def _new(self, _: str) -> None:
        self._begin(self._dialogue.system)

    def _system(self, rest: str) -> None:
        self._begin(rest or None)

    def _begin(self, system: str | None) -> None:
        self._dialogue.begin(system)
        self._unanswered = None
        self._own = set()

    def _set(self, rest: str) -> None:
        name, *value = rest.split(maxsplit=1) or [""]
        if name:
            self._dialogue.set(name, value[0] if value else "")
        note(" · ".join(f"{key} {value!r}" for key, value in self._dialogue.sampling.items()) or "all defaults")

    def _regen(self, _: str) -> None:
        if self._unanswered is None:
            before = Dialogue({}, list(self._dialogue.messages))
            question = before.take_back()
            if question is None:
                raise InvalidRequest("there is no question yet")
            self._unanswered = question, before.messages
        self._answer(*self._unanswered)

    def _undo(self, _: str) -> None:
        question = self._dialogue.take_back()
        if question is None:
            raise InvalidRequest("there is nothing to take back")
        self._unanswered = None
        note(f"taken back: {question[:SHOWN]}{'…' if len(question) > SHOWN else ''}")

    def _save(self, rest: str) -> None:
        name = rest or time.strftime("%Y-%m-%d-%H%M%S")
        if name not in self._own and self._chats.has(name):
            raise InvalidRequest(f"there is a conversation {name!r} already: /load it, or take another name")
        self._chats.save(name, self._dialogue)
        self._own.add(name)
        note(f"saved as {name}")

    def _load(self, rest: str) -> None:
        name = rest or LAST
        loaded = self._chats.load(name)
        self._begin(None)
        self._dialogue.messages, self._dialogue.sampling = loaded.messages, loaded.sampling
        self._own.add(name)
        self.recall()

    def _sessions(self, _: str) -> None:
        note("\n".join(self._chats.names()) or "nothing is saved yet")

    def _model(self, rest: str) -> None:
        if rest:
            self._chatter.use(rest)
        note("\n".join(f"{'*' if name == self._chatter.model else ' '} {name}" for name in self._chatter.models()))

    def _answer(self, question: str, before: Messages) -> None:
        """Without an answer the next question meets the conversation as it was. Raises EngineDead, OutputFailed."""
        self._unanswered = question, before
        asked = [*before, {"role": "user", "content": question}]
        again = "; /regen asks again" if self._terminal.person else ""
        try:
            last, stopped, took_s = self._stream(asked)
        except (EngineDead, OutputFailed):
            raise
        except ContextLengthExceeded as error:
            undo = any(message["role"] == "user" for message in before)
            way = "/undo takes the last question and its answer back, /new starts over"
            self._fail(f"{error.message}\n{way if undo else 'a shorter message may fit'}")
            return
        except AengineError as error:
            self._fail(f"{error.message}{again}")
            return
        with uninterrupted():  # there is nothing left to stop
            self._end(asked, last, stopped=stopped, took_s=took_s, again=again)
        if stopped and not self._terminal.person:
            raise KeyboardInterrupt

    def _end(self, asked: Messages, last: Answer, *, stopped: bool, took_s: float, again: str) -> None:
        _end_line(last, stopped=stopped)
        if stopped and not last.text:
            self._fail(f"nothing was said yet{again}")
            return
        self._dialogue.messages = [*asked, {"role": "assistant", "content": last.text}]
        self._unanswered = None
        self._totals.add(last, took_s)
        note(_figures(last, took_s, stopped=stopped, max_tokens=self._dialogue.params().max_tokens))
        self._keep()

    def _keep(self) -> None:
        """A full disk is no reason to stop talking."""
        try:
            self._chats.save(LAST, self._dialogue)
        except SavingFailed as error:
            if self._saves:  # once is enough
                note(f"the conversation is not saved: {error.message}")
            self._saves = False

    def _stream(self, messages: Messages) -> tuple[Answer, bool, float]:
        """The answer, whether it was stopped, and the seconds it took."""
        last = Answer("", 0, 0, 0)
        stopped = False
        began_s = time.perf_counter()
        try:
            with contextlib.closing(self._chatter.answers(messages, self._dialogue.params())) as answers:
                for answer in answers:
                    before, last = last, answer  # what is seen is kept, wherever Ctrl-C falls
                    _show(before, answer)
        except KeyboardInterrupt:
            stopped = True
        except AengineError:
            if last.text or last.reasoning:
                _end_line(last, stopped=True)
            raise
        return last, stopped, time.perf_counter() - began_s


def _leave(_: str) -> None:
    raise EOFError


def _show(before: Answer, answer: Answer) -> None:
    """What has come since."""
    if len(answer.reasoning) > len(before.reasoning):
        note(answer.reasoning[len(before.reasoning) :], end="")
    if len(answer.text) > len(before.text):
        if answer.reasoning and not before.text:
            note("\n")
        say(answer.text[len(before.text) :], end="")


def _end_line(answer: Answer, *, stopped: bool) -> None:
    """A line on stdout for each answer that ended by itself, be it empty."""
    if answer.text or not stopped:
        say("")
    if not answer.text and (answer.reasoning or stopped):
        note("")


FEWEST = 8  # tokens that say something about speed: those of one step come together


def _figures(answer: Answer, took_s: float, *, stopped: bool, max_tokens: int | None) -> str:
    ttft_s = answer.ttft_s if answer.ttft_s is not None else took_s
    writing_s = took_s - ttft_s
    told = ["stopped"] if stopped else []
    if answer.prompt_tokens:
        told.append(f"{answer.prompt_tokens} prompt tokens ({answer.cached_tokens} cached)")
    told.append(f"first token {ttft_s:.2f} s")
    if answer.tokens:
        told.append(f"{answer.tokens} tokens")
    if answer.tokens >= FEWEST and writing_s > 0:
        told.append(f"{(answer.tokens - 1) / writing_s:.1f} tokens/s")
    if answer.cut_off:
        asked_for = max_tokens is not None and answer.tokens in (0, max_tokens)
        told.append(
            f"cut off at max_tokens {max_tokens}" if asked_for else "cut off: no more tokens fit or are allowed"
        )
    return f"[{' · '.join(told)}]"
