"""The console script: speed, help, exit codes, one-line errors."""

import os
import re
import signal
import subprocess
import sys
from importlib import import_module

import pytest

from aengine.cli import main as cli
from aengine.errors import ModelNotFound


def run(*argv, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "aengine.cli", *argv], capture_output=True, text=True, timeout=200, **kwargs
    )


def test_help_loads_nothing_heavy():
    """Counted in modules: what they take is bench/startup.py's to measure."""
    code = (
        "import sys; from aengine.cli.main import main; code = main(['--help']);"
        "heavy = [name for name in ('numpy', 'msgspec', 'asyncio') if name in sys.modules];"
        "print('loaded:', len(sys.modules), *heavy);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert all(command in done.stdout for command in cli.COMMANDS)
    modules, *heavy = done.stdout.rpartition("loaded: ")[2].split()
    assert heavy == []
    assert int(modules) < 250
    assert "usage: aengine" in run("--help").stdout


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_a_command_reads_its_flags_without_torch_or_aiohttp(command):
    code = (
        "import sys; from aengine.cli.main import main; code = main([sys.argv[1], '--help']);"
        "print('loaded:', *[name for name in ('torch', 'transformers', 'aiohttp') if name in sys.modules]);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"usage: aengine {command}" in done.stdout
    assert done.stdout.endswith("loaded:\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_server_listens_is_told(number, code):
    program = (
        "import os, sys, time; from aengine.cli import main as cli;"
        "cli.import_module = lambda _: (os.kill(os.getpid(), int(sys.argv[1])), time.sleep(30));"
        "cli.main(['serve'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(number))], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == code
    assert done.stderr == f"aengine serve: ended by {number.name} before it listened\n"


@pytest.mark.parametrize("model", ["no-such.gguf", "/no/such/folder", "smollm2-136m"])
def test_an_unknown_model_is_told_before_torch_is_imported(model, tmp_path):
    code = (
        "import sys; from aengine.cli.main import main; code = main(['serve', sys.argv[1], '--port', '0']);"
        "print('loaded:', *[name for name in ('torch', 'transformers') if name in sys.modules]);"
        "sys.exit(code)"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, timeout=200, env=offline)
    assert done.returncode == 1
    assert f"model '{model}' was not found" in done.stderr
    assert done.stdout.endswith("loaded:\n")


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_the_help_shows_fewer_than_40_flags(command):
    parser = import_module(f"aengine.cli.{command}").parser()
    shown = set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", parser.format_help(), re.MULTILINE))
    assert 0 < len(shown) < 40
    flags = {name for name in parser._option_string_actions if re.match("--(?!no-)", name)}
    with pytest.raises(SystemExit):
        parser.parse_args(["--help-all"] if parser.rare else ["--help"])
    everything = set(re.findall(r"(--[a-z0-9-]+)", parser.format_help()))
    assert flags <= everything


def test_version():
    done = run("--version")
    assert re.fullmatch(r"aengine \d+\.\d+\.\d+\n", done.stdout)


def test_nothing_asked_for_shows_the_help(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: aengine COMMAND")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["srve"], "aengine: unknown command 'srve'; did you mean serve? (see aengine --help)"),
        (["serve", "--prot", "1"], "unknown argument --prot; did you mean --port"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "--port", "70000"], "aengine serve: --port: port is 70000, not in [0, 65535]"),
        (["serve", "--kv-bytes", "much"], "kv_bytes is 'much', not auto or a size such as"),
        (["serve", "one", "two"], "unknown argument two"),
        (["generate", "a-model", "a text"], "unknown argument a text; a text is one argument, in quotes, and --model"),
        (["generate", "--max-tokens", "x"], "argument --max-tokens: invalid int value: 'x'"),
        (["bench"], "the following arguments are required: what"),
        (["bench", "engine"], "invalid choice: 'engine'"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(argv, message, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trace", "http://127.0.0.1:1"], "no server listens on http://127.0.0.1:1; aengine serve starts one"),
        (["chat", "--url", "http://127.0.0.1:1"], "no server listens on http://127.0.0.1:1; aengine serve starts one"),
        (["bench", "serve", "http://127.0.0.1:1"], "no server answers on 127.0.0.1:1; aengine serve starts one"),
    ],
)
def test_where_no_server_is_the_way_to_one_is_named(argv, message, capsys):
    assert cli.main(argv) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ModelNotFound("no model 'x'; looked in: a, b"), 1, "aengine doctor: no model 'x'; looked in: a, b\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_an_error_ends_the_process(monkeypatch, capsys, error, code, shown):
    def fail(_):
        raise error

    monkeypatch.setattr("aengine.cli.doctor.run", fail)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == shown


def test_an_unexpected_fault_keeps_its_traceback(monkeypatch):
    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr("aengine.cli.doctor.run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "doctor"])
def test_print_config_can_be_fed_back(command, tmp_path):
    env = os.environ | {"AENGINE_MAX_N": "7"}
    first = run(command, "--depth", "0", "--print-config", env=env)
    assert first.returncode == 0, first.stderr
    assert re.search(r"^depth: 0 .*#", first.stdout, re.MULTILINE)
    assert re.search(r"^max_n: 7 ", first.stdout, re.MULTILINE)
    path = tmp_path / "printed.yaml"
    path.write_text(first.stdout, encoding="utf-8")
    assert run(command, "--config", str(path), "--print-config").stdout == first.stdout


def test_a_reader_that_has_gone_is_no_traceback():
    command = f"{sys.executable} -m aengine.cli serve --print-config | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=200)
    assert "Traceback" not in done.stderr
