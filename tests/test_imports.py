"""Who may import whom: the walls between the rooms, read from the source, and what importing a room costs.

The table is the design's; a new edge is a decision to be made here, not an accident to be found later.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "aengine"
BASE = {"types", "errors", "config"}
ROOMS = {
    "errors": set(),
    "types": {"errors"},
    "config": {"errors"},
    "metrics": {"types", "errors"},
    "timeline": set(),
    "memory": BASE,
    "prefix_cache": BASE | {"memory"},
    "scheduler": BASE | {"memory", "prefix_cache"},
    "kernels": BASE,
    "models": BASE | {"kernels"},
    "runner": BASE | {"kernels", "models", "memory"},
    "engine": BASE | {"metrics", "timeline", "memory", "prefix_cache", "scheduler", "models", "runner", "kernels"},
    "server": BASE,
    "frontends": BASE | {"metrics", "timeline", "models", "engine", "server"},
    "client": BASE,
    "cli": BASE | {"server", "frontends", "__init__"},
    "__init__": BASE | {"engine", "client"},
}
EXTRA_EDGES = {"memory/arena.py": {"kernels"}}  # the one file of its room that holds tensors
HEAVY = {"torch", "transformers", "aiohttp", "asyncio", "tokenizers"}
FORBIDDEN = {
    "errors": HEAVY,
    "types": HEAVY,
    "config": HEAVY,
    "metrics": HEAVY,
    "timeline": HEAVY,
    "memory": HEAVY,
    "prefix_cache": HEAVY,
    "scheduler": HEAVY | {"time", "random", "threading"},  # no clock, no chance: same calls, same plans
    "kernels": {"aiohttp", "asyncio", "transformers", "tokenizers"},
    "models": {"aiohttp", "asyncio"},
    "runner": {"aiohttp", "transformers", "tokenizers"},
    "engine": {"aiohttp"},
    "server": {"torch", "transformers", "tokenizers"},
    "frontends": {"torch", "transformers", "tokenizers", "aiohttp"},
    "cli": {"torch", "transformers", "tokenizers"},
    "client": {"torch", "transformers", "tokenizers"},
    "__init__": HEAVY,
}
ALLOWED_HEAVY = {"memory/arena.py": {"torch"}}
PURE = ("types", "errors", "config", "memory", "prefix_cache", "scheduler")
# Engine files that put the parts together; the others know the runner's protocol and the tokenizer alone.
ASSEMBLY = {
    "engine/build.py",
    "engine/build_cpu.py",
    "engine/build_cuda.py",
    "engine/build_sim.py",
    "engine/page_groups.py",
    "engine/weights.py",
}
ENGINE_KNOWS = {"runner": {"aengine.runner.protocol"}, "kernels": set()}

FILES = sorted(PACKAGE.rglob("*.py"))
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONSTARTUP"}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    return relative(path).split("/")[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, anywhere in it. Relative imports are not in use."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} is a relative import"
            if node.module == "aengine":
                yield from (f"aengine.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def target_room(name: str) -> str | None:
    """The room a module name lies in; a public name of the package itself is in `__init__`."""
    parts = name.split(".")
    if parts[0] != "aengine":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "__init__"


def crossings(path: Path) -> set[str]:
    return {target for name in imported(path) if (target := target_room(name)) not in (None, room(path))}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_imports_only_rooms_its_own_may_know(path):
    assert room(path) in ROOMS, f"{relative(path)} is in a room that the table does not know"
    assert crossings(path) <= ROOMS[room(path)] | EXTRA_EDGES.get(relative(path), set())


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_imports_no_library_its_room_must_not_know(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & (FORBIDDEN[room(path)] - ALLOWED_HEAVY.get(relative(path), set()))


def test_the_table_has_no_cycle():
    reached: dict[str, set[str]] = {}

    def walk(name: str, above: tuple[str, ...]) -> set[str]:
        assert name not in above, " → ".join((*above, name))
        if name not in reached:
            reached[name] = set().union(*({other} | walk(other, (*above, name)) for other in ROOMS[name]))
        return reached[name]

    for name in ROOMS:
        walk(name, ())


def test_only_the_assembly_knows_concrete_devices():
    for path in FILES:
        if room(path) == "engine" and relative(path) not in ASSEMBLY:
            for name in imported(path):
                allowed = ENGINE_KNOWS.get(target_room(name) or "")
                assert allowed is None or name in allowed, f"{relative(path)} imports {name}"


def test_only_config_reads_the_environment():
    """Handing all of it on to a child process is not reading it."""
    for path in FILES:
        if relative(path) == "config.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        handed_on = {
            id(value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is None
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
                assert id(node) in handed_on, f"{relative(path)}:{node.lineno} reads the environment"


def test_every_module_says_what_it_owns():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        doc = ast.get_docstring(ast.parse(text)) or ""
        if text.strip():
            missing = [part for part in ("Owns:", "Does not know:", "Invariants:") if part not in doc]
            assert not missing, f"{relative(path)} does not say {missing}"


# ---- what it costs


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=ENVIRONMENT, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", [*PURE, "metrics", "timeline"])
def test_a_pure_room_loads_neither_torch_nor_asyncio_nor_aiohttp(name):
    loaded = f"import sys, aengine.{name}; print(*[name for name in {sorted(HEAVY)} if name in sys.modules])"
    assert python(loaded) == ""


def test_the_assembly_does_not_load_triton_kernels():
    """An installation for CPUs has no Triton; one with it pays for it only when there is a CUDA device."""
    assert python("import sys, aengine.engine.build; print('aengine.kernels.triton' in sys.modules)") == "False"


def test_a_front_end_loads_no_torch():
    """It would cost each of them 150 MB and seconds."""
    assert python("import sys, aengine.frontends.remote, aengine.server; print('torch' in sys.modules)") == "False"


def test_the_package_itself_loads_nothing_heavy():
    assert python(f"import sys, aengine; print(*[name for name in {sorted(HEAVY)} if name in sys.modules])") == ""


def test_the_pure_rooms_import_in_under_100_ms(monkeypatch, tmp_path):
    """All six together, in processor time of a fresh interpreter: about 40 ms. A busy machine gets eight tries.

    numpy and msgspec come first and are not counted: numpy alone takes 70 to 130 ms, and nothing here can change that.
    """
    rooms = ", ".join(f"aengine.{name}" for name in PURE)
    # A machine that is told to write no byte code would compile the rooms each time: that is not what is measured.
    monkeypatch.setitem(ENVIRONMENT, "PYTHONDONTWRITEBYTECODE", "")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPYCACHEPREFIX", str(tmp_path))
    code = f"import numpy, msgspec, time; t = time.process_time(); import {rooms}; print(time.process_time() - t)"
    assert any(float(python(code)) < 0.1 for _ in range(8))
