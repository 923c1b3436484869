"""Flags, YAML files and AENGINE_* variables, all derived from the one config tree.

Owns: the flat view of the tree (one `Setting` per leaf), parsing of values, precedence, the printed YAML.
Does not know: what any setting means; limits are checked by `aengine.config` itself.
Invariants: precedence is flag > variable > file > default; an unknown name is an error that names near matches; what
`to_yaml` prints gives the same config when read back (an API key excepted: it is never printed).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from aengine.config import ENV_PREFIX, AengineConfig, environment
from aengine.errors import ConfigError

Layer = Mapping[str, tuple[object, str]]  # setting name -> (parsed value, where it was given)

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}{b}": 1000 ** (i + 1) for i, p in enumerate("kmgt") for b in ("", "b")}
_UNITS |= {f"{p}i{b}": 1024 ** (i + 1) for i, p in enumerate("kmgt") for b in ("", "b")}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the config tree. `path`: attribute names from the root; `kind`: its type without `None`."""

    path: tuple[str, ...]
    kind: Any
    optional: bool
    default: object
    help: str
    rare: bool = False

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def section(self) -> str:
        """The branch the leaf hangs on: engine, model, scheduler, cache, device or server."""
        return self.path[-2]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def is_size(self) -> bool:
        return self.kind is int and self.name.endswith("_bytes")

    @property
    def is_fitted(self) -> bool:
        """A number that may be left unset."""
        return self.optional and self.kind in (int, float)


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Every leaf of the tree, in its order."""
    return tuple(_leaves(AengineConfig, ()))


def _leaves(node: type, path: tuple[str, ...]) -> Iterable[Setting]:
    hints = get_type_hints(node)
    for field in dataclasses.fields(node):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _leaves(hint, (*path, field.name))
            continue
        arms = [arm for arm in get_args(hint) if arm is not NoneType] if get_origin(hint) is UnionType else [hint]
        optional = get_origin(hint) is UnionType
        yield Setting(
            (*path, field.name),
            arms[0],
            optional,
            field.default,
            field.metadata.get("help", ""),
            field.metadata.get("rare", False),
        )


def parse(setting: Setting, raw: object, where: str) -> object:
    """`raw` (text of a flag or variable, or a YAML value) as the setting's type; `auto` leaves a number unset
    that may be, and `off` (which YAML reads as false) is 0 there. Raises ConfigError naming `where`."""
    if setting.is_fitted and (raw == "off" or raw is False):
        raw = 0
    if raw is None or (setting.is_fitted and raw == "auto") or (raw == "" and setting.optional):
        if setting.optional:
            return None
        raise ConfigError(f"{where}: {setting.name} has no value", param=setting.name)
    try:
        return _convert(setting, raw)
    except (TypeError, ValueError):
        shown = f"a value of type {type(raw).__name__}" if setting.name == "api_key" else repr(raw)
        message = f"{where}: {setting.name} is {shown}, not {_expected(setting)}"
        raise ConfigError(message, param=setting.name) from None


def _convert(setting: Setting, raw: object) -> object:
    if setting.is_list:
        return _texts(raw)
    if setting.kind is bool:
        return _boolean(raw)
    if setting.is_size:
        return _size(raw)
    if setting.kind in (int, float):
        return _number(setting.kind, raw)
    if not isinstance(raw, str) or (setting.choices and raw not in setting.choices):
        raise ValueError(raw)
    return raw


def _texts(raw: object) -> tuple[str, ...]:
    """A list, or text with commas between the items."""
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise TypeError(raw)
    return tuple(stripped for item in items if (stripped := item.strip()))


def _boolean(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = raw.lower() if isinstance(raw, str) else ""
    if text not in _TRUE | _FALSE:
        raise ValueError(raw)
    return text in _TRUE


def _number(kind: type, raw: object) -> int | float:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise TypeError(raw)
    if kind is int and isinstance(raw, float):
        raise TypeError(raw)
    return int(raw) if kind is int else float(raw)


def _size(raw: object) -> int:
    """Bytes: a whole number, or text with a unit. KiB, MiB, GiB, TiB are powers of 1024; K, kB, M, MB … of 1000."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    match = _SIZE.fullmatch(raw.strip().lower()) if isinstance(raw, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(raw)
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def _expected(setting: Setting) -> str:
    if setting.choices:
        return "one of " + ", ".join(setting.choices)
    if setting.is_list:
        return "a list of texts"
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    kind = "a size such as 512MiB, 2GiB or 1073741824" if setting.is_size else kinds.get(setting.kind, "text")
    if not setting.is_fitted:
        return kind
    return f"auto, off or {kind}" if _may_be_off(setting) else f"auto or {kind}"


def _may_be_off(setting: Setting) -> bool:
    """Whether 0 is within the setting's limits, which `aengine.config` knows."""
    try:
        build({setting.name: (0, "")})
    except ConfigError:
        return False
    return True


def near(name: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """A hint that names up to three known names close to `name`, or nothing. `spell`: how the reader writes them."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(spell, matches))}?" if matches else ""


def read_file(path: str) -> dict[str, tuple[object, str]]:
    """The settings of a YAML file: flat, names as in the tree (dashes or underscores). Raises ConfigError."""
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}", param="config") from error
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())[:300]
        raise ConfigError(f"config file {path} is not YAML: {message}", param="config") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path} holds a {type(loaded).__name__}, not names with values", param="config")
    return _layer({str(name): raw for name, raw in loaded.items()}, path, spell=str, source=lambda _: path)


def read_environment(variables: Mapping[str, str] | None = None) -> dict[str, tuple[object, str]]:
    """The settings given as AENGINE_* variables (default: this process's, as `config.environment` reads them)."""
    given = environment() if variables is None else variables
    return _layer(given, "environment", spell=_variable, source=_variable)


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _layer(
    given: Mapping[str, object], origin: str, *, spell: Callable[[str], str], source: Callable[[str], str]
) -> dict[str, tuple[object, str]]:
    """`spell`: a name as its writer spells it; `source`: what a message about that name's value begins with."""
    known = {setting.name: setting for setting in settings()}
    layer: dict[str, tuple[object, str]] = {}
    for key, raw in given.items():
        setting = known.get(key.replace("-", "_"))
        if setting is None:
            raise ConfigError(f"{origin}: unknown name {spell(key)}{near(key, known, spell)}", param=key)
        where = source(setting.name)
        layer[setting.name] = (parse(setting, raw, where), where)
    return layer


def build(*layers: Layer) -> AengineConfig:
    """The config of all layers, later ones winning. Raises ConfigError naming where the bad value was given."""
    merged: dict[str, tuple[object, str]] = {}
    for layer in layers:
        merged.update(layer)
    try:
        config: AengineConfig = _node(AengineConfig, {name: value for name, (value, _) in merged.items()})
    except ConfigError as error:
        if error.param not in merged:
            raise
        raise ConfigError(f"{merged[error.param][1]}: {error.message}", param=error.param) from None
    return config


def _node(node: type, values: Mapping[str, object]) -> Any:
    hints = get_type_hints(node)
    given: dict[str, object] = {}
    for field in dataclasses.fields(node):
        if dataclasses.is_dataclass(hints[field.name]):
            given[field.name] = _node(hints[field.name], values)
        elif field.name in values:
            given[field.name] = values[field.name]
    return node(**given)


def value_of(config: AengineConfig, setting: Setting) -> object:
    node: object = config
    for name in setting.path:
        node = getattr(node, name)
    return node


def to_yaml(config: AengineConfig) -> str:
    """The whole config as YAML with the help texts as comments; `--config` reads it back."""
    lines: list[str] = []
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines.append(f"\n# {section}" if lines else f"# {section}")
        lines.append(f"{_yaml_line(setting, value_of(config, setting)):<40}  # {setting.help}")
    return "\n".join(lines) + "\n"


def _yaml_line(setting: Setting, value: object) -> str:
    if setting.name == "api_key" and value is not None:
        return "# api_key: set, and not printed"
    return f"{setting.name}: {_scalar(value)}"


def _scalar(value: object) -> str:
    """One YAML scalar or flow list on one line. JSON texts are YAML; plain names stay unquoted for the reader."""
    import json

    if isinstance(value, tuple):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/~][\w./~-]*", value) and value.lower() not in _RESERVED:
        return value
    return json.dumps(value, ensure_ascii=False)


_RESERVED = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n", "~"})
