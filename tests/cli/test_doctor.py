"""`aengine doctor`: facts, problems with hints, the exit code."""

import importlib
import json
import socket
import threading

import pytest

from aengine.cli import doctor
from aengine.cli.options import config_of
from aengine.config import AengineConfig, DeviceConfig, EngineConfig, ServerConfig

build = importlib.import_module("aengine.kernels.native.build")  # its name is also a function's
FREE = AengineConfig(server=ServerConfig(port=0))


def facts(findings):
    return {name: text for _, name, text in findings.facts}


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("AENGINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_sound_machine_has_no_problems(store, capsys):
    assert doctor.run(doctor.parser().read(["--port", "0"])) == 0
    out = capsys.readouterr().out
    assert "no problems found" in out
    for name in ("Python", "torch", "cores", "features", "RAM", "C compiler", "AENGINE_HOME", "disk"):
        assert name in out


def test_the_store_lists_model_files(store):
    assert "none yet" in facts(doctor.examine(FREE))["files"]
    (store / "models").mkdir(parents=True)
    (store / "models" / "a.gguf").write_bytes(b"x" * 2048)
    assert facts(doctor.examine(FREE))["2.0 KiB"] == "models/a.gguf"


def test_a_home_that_is_a_file_is_a_problem(store):
    store.write_text("not a folder")
    assert any(str(store) in what for what, _ in doctor.examine(FREE).problems)


def test_a_taken_port_is_a_problem_with_a_hint(store):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (problem,) = doctor.examine(AengineConfig(server=ServerConfig(port=port))).problems
    assert f"127.0.0.1:{port} cannot be listened on" in problem[0]
    assert "--port" in problem[1]


def test_an_aengine_on_the_port_is_a_note_and_no_problem(store):
    def answer(taken: socket.socket) -> None:
        with taken.accept()[0] as one:
            one.recv(1000)
            one.sendall(b"HTTP/1.1 503 Busy\r\nServer: aengine\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        threading.Thread(target=answer, args=(taken,), daemon=True).start()
        port = taken.getsockname()[1]
        found = doctor.examine(AengineConfig(server=ServerConfig(port=port)))
    assert found.problems == []
    assert (f"an aengine serves on 127.0.0.1:{port}", "another one needs another --port") in found.notes


def test_problems_set_the_exit_code_and_are_shown_with_hints(store, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "LIBRARIES", ("no-such-library",))
    assert doctor.run(doctor.parser().read(["--port", "0"])) == 1
    assert "problem: no-such-library is not installed\n  → run make serve" in capsys.readouterr().out


def test_no_compiler_is_a_note_not_a_problem(store, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    findings = doctor.examine(FREE)
    assert findings.problems == []
    assert any("no C compiler" in what for what, _ in findings.notes)


def test_processor_features_are_named_by_what_kernels_ask_for(store, monkeypatch):
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"avx2", "avx512f", "avx_vnni", "amx_tile"})
    assert facts(doctor.examine(FREE))["features"] == "avx2 avx512 avx512_vnni amx"


def test_the_instruction_set_of_the_kernels_is_told(store):
    assert facts(doctor.examine(FREE))["kernels"] == f"native, {build.best_isa()}"
    portable = AengineConfig(engine=EngineConfig(device=DeviceConfig(cpu_isa="portable")), server=FREE.server)
    assert facts(doctor.examine(portable))["kernels"].startswith("native, portable (cpu_isa; the best here is")


def test_an_instruction_set_that_the_processor_lacks_is_a_problem(store, monkeypatch):
    monkeypatch.setattr(build, "_machine_flags", lambda: {"avx2", "fma", "f16c", "avx512f"})
    forced = AengineConfig(engine=EngineConfig(device=DeviceConfig(cpu_isa="avx512")), server=FREE.server)
    (problem,) = doctor.examine(forced).problems
    assert "lacks avx512bw avx512dq avx512vl of the instruction set avx512; it has avx2, portable" in problem[0]


def test_an_old_processor_is_a_problem(store, monkeypatch):
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"sse4_2"})
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert any("AVX2" in what for what, _ in doctor.examine(FREE).problems)


def test_little_memory_is_a_problem(store, monkeypatch):
    monkeypatch.setattr(doctor, "_meminfo", lambda: iter([("MemTotal", 2**31), ("MemAvailable", 2**28)]))
    assert any("256.0 MiB of memory" in what for what, _ in doctor.examine(FREE).problems)


def test_a_machine_without_proc_is_unknown_not_an_error(store, monkeypatch):
    monkeypatch.setattr(doctor, "_meminfo", lambda: iter([]))
    monkeypatch.setattr(doctor, "_cpu_flags", set)
    shown = facts(doctor.examine(FREE))
    assert shown["RAM"] == "unknown"
    assert shown["features"] == "unknown"


def test_settings_that_differ_are_listed_and_a_key_is_not_shown(store):
    args = doctor.parser().read(["--port", "0", "--depth", "0", "--api-key", "hidden-key"])
    shown = doctor.as_text(doctor.examine(config_of(args)))
    assert "hidden-key" not in shown
    assert [line.split() for line in shown.splitlines() if line.strip().startswith("depth")] == [["depth", "0"]]
    assert json.dumps(shown)


def test_a_wrong_setting_is_a_finding_not_an_end(monkeypatch, capsys):
    monkeypatch.setenv("AENGINE_MAX_NUM_SEKS", "3")
    args = doctor.parser().parse_args([])
    assert doctor.run(args) == 1
    out = capsys.readouterr().out
    assert "max_num_sek" in out.lower()
    assert "Python" in out


def test_the_page_table_of_a_model_on_this_machine_is_shown(store, monkeypatch):
    lines = ("9 large pages of 1 MiB", "group   lifetime", "window  window(512)")
    monkeypatch.setattr(doctor.aengine, "describe_pages", lambda config: lines, raising=False)
    text = doctor.as_text(doctor.examine(FREE))
    assert "KV pages of smollm2-135m\n  9 large pages of 1 MiB\n" in text
    assert "  window  window(512)" in text


def test_a_model_that_is_not_here_is_a_note_and_a_broken_one_a_problem(store, tmp_path):
    assert any("is not here yet" in what for what, _ in doctor.examine(FREE).notes)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    args = doctor.parser().read([str(tmp_path / "broken"), "--port", "0"])
    (problem,) = doctor.examine(config_of(args)).problems
    assert "unsupported architecture" in problem[0]
