"""Flags of the commands.

Owns: the argument parser's manners (one-line errors that name near matches), the flags made from the config tree.
Does not know: what a command does.
Invariants: a flag left out is absent from the namespace, so that lower layers (variables, file) show through.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from aengine.cli import settings
from aengine.config import AengineConfig
from aengine.errors import ConfigError


class UsageError(ConfigError):
    """The command line cannot be understood."""


class _HelpAll(argparse.Action):
    """Shows the help of the rarely used settings too."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        for action, text in parser.rare:
            action.help = text
        parser.print_help()
        raise SystemExit(0)


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing a page of usage and exiting."""

    def __init__(self, command: str, text: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"aengine {command}".rstrip(),
            description=text,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.rare: list[tuple[argparse.Action, str]] = []  # settings left out of the help, and what they would say

    def format_help(self) -> str:
        """The options are listed below; a usage that names them all again takes twenty lines."""
        places = [
            f"[{name}]" if action.nargs == "?" else name
            for action in self._get_positional_actions()
            for name in [action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest)]
        ]
        self.usage = " ".join(("%(prog)s [options]", *map(str, places)))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def read(self, argv: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = settings.near(unknown[0].split("=")[0], flags)
            if not unknown[0].startswith("-") and "--model" in flags:
                hint = "; a text is one argument, in quotes, and --model names the model"
            self.error(f"unknown argument {unknown[0]}{hint}")
        return args


def add_settings(parser: Parser, *, server: bool, model_flag: bool = False) -> None:
    """MODEL (or --model), --config, --print-config and a flag for each setting; the server's only if `server`."""
    general = parser.add_argument_group("configuration")
    general.add_argument("--config", metavar="FILE", help="YAML file with settings (names as below)")
    general.add_argument("--print-config", action="store_true", help="print the whole configuration as YAML and exit")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings.settings():
        if setting.name == "model":
            text = f"{setting.help} (default: {setting.default})"
            if model_flag:
                general.add_argument("--model", default=argparse.SUPPRESS, help=text)
            else:
                parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=text)
        elif server or setting.section != "server":
            if setting.section not in groups:
                groups[setting.section] = parser.add_argument_group(setting.section)
            added, text = _add(groups[setting.section], setting)
            if setting.rare:
                added.help = argparse.SUPPRESS
                parser.rare.append((added, text))
    if parser.rare:
        general.add_argument("--help-all", action=_HelpAll, nargs=0, help="also show the settings that few will need")


def _add(group: argparse._ArgumentGroup, setting: settings.Setting) -> tuple[argparse.Action, str]:
    """-> (the flag, its help)."""
    text = setting.help.replace("%", "%%")
    if setting.kind is bool:
        text += f" (default: {'on' if setting.default else 'off'})"
        added = group.add_argument(
            setting.flag,
            dest=setting.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
        return added, text
    if setting.default not in (None, ()):
        text += f" (default: {setting.default})"
    metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else _metavar(setting)
    added = group.add_argument(setting.flag, dest=setting.name, metavar=metavar, default=argparse.SUPPRESS, help=text)
    return added, text


def _metavar(setting: settings.Setting) -> str:
    if setting.is_list:
        return "A,B"
    if setting.is_size:
        return "SIZE"
    return {int: "N", float: "X"}.get(setting.kind, "TEXT")


def add_sampling(parser: Parser, max_tokens: int | None, temperature: float = 0.0) -> None:
    group = parser.add_argument_group("sampling")
    shown = "up to the context" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most tokens to generate (default: {shown})"
    )
    told = f"0 is greedy (default: {temperature:g})"
    group.add_argument("--temperature", type=float, default=temperature, metavar="X", help=told)
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="nucleus sampling (default: 1)")
    group.add_argument("--seed", type=int, default=None, metavar="N", help="makes sampling repeatable")


def config_of(args: argparse.Namespace) -> AengineConfig:
    """The configuration from flags, AENGINE_* variables and --config. Raises ConfigError."""
    file = settings.read_file(args.config) if args.config else {}
    return settings.build(file, settings.read_environment(), _flags(args))


def _flags(args: argparse.Namespace) -> settings.Layer:
    given = vars(args)
    layer: dict[str, tuple[object, str]] = {}
    for setting in settings.settings():
        if setting.name in given:
            where = "MODEL" if setting.name == "model" else setting.flag
            layer[setting.name] = (settings.parse(setting, given[setting.name], where), where)
    return layer


def print_config(config: AengineConfig) -> int:
    print(settings.to_yaml(config), end="")
    return 0
