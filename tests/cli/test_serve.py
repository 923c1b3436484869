"""`aengine serve`: the lines and the table of a start."""

import logging
import re

import pytest

from aengine.cli import serve
from aengine.cli.startup import MAX_LINES, Startup, binary_size, table
from aengine.config import AengineConfig, EngineConfig, ServerConfig
from aengine.errors import ModelNotFound
from tests.cli.fakes import FakeReport


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "aengine")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "aengine.startup"]


def test_a_start_is_told_phase_by_phase(lines, capsys):
    startup = Startup("a-model", "1.2.3")
    startup.listening("http://127.0.0.1:8000")
    startup.phase("weights", 1.234)
    startup.ready(FakeReport())
    assert lines() == ["aengine 1.2.3 listens on http://127.0.0.1:8000 and loads a-model", "weights: 1.23 s"]
    shown = capsys.readouterr().out
    assert re.search(r"^weights +1\.25$", shown, re.MULTILINE)
    assert re.search(r"^weights +256\.0 MiB$", shown, re.MULTILINE)
    assert re.search(r"^KV pages +3\.0 GiB$", shown, re.MULTILINE)
    assert re.search(r"^total +3\.2 GiB$", shown, re.MULTILINE)
    assert "a note" in shown
    assert "chat page http://127.0.0.1:8000/ " in shown


def test_many_phases_do_not_flood_the_log(lines):
    startup = Startup("a-model", "1.2.3")
    startup.listening("http://127.0.0.1:8000")
    for i in range(100):
        startup.phase(f"phase {i}", 0.0)
    assert len(lines()) == MAX_LINES == 15


def test_the_table_sums_to_the_whole_start():
    rows = dict(re.findall(r"^(\S.*?) +(\d+\.\d\d)$", table(FakeReport(), 2.0), re.MULTILINE))
    assert rows == {"find model": "0.50", "weights": "1.25", "other": "0.25", "total": "2.00"}


def test_a_table_without_ledger_and_notes_has_no_empty_parts():
    shown = table(FakeReport(ledger=(), lines=()), 2.0)
    assert "memory" not in shown
    assert not shown.endswith("\n")


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (256 * 2**20, "256.0 MiB"), (2**31, "2.0 GiB")],
)
def test_binary_sizes(n_bytes, shown):
    assert binary_size(n_bytes) == shown


def arguments(*argv):
    return serve.parser().read(list(argv))


def test_the_server_gets_the_whole_config():
    seen = []

    async def fake(config, startup):
        seen.append(config)

    assert serve.run(arguments("my-model", "--port", "9", "--log-level", "error"), fake) == 0
    (config,) = seen
    assert isinstance(config, AengineConfig)
    assert config.engine.model.model == "my-model"
    assert config.server.port == 9
    assert logging.getLogger("aengine").level == logging.ERROR


def test_what_the_start_raises_comes_out():
    async def fake(config, startup):
        raise ModelNotFound("nowhere")

    with pytest.raises(ModelNotFound, match="nowhere"):
        serve.run(arguments(), fake)


async def test_engine_and_server_are_put_together(monkeypatch, capsys):
    """The real wiring with an engine that loads nothing: phases are told as they end, the table when it is ready."""
    import aengine
    import aengine.server

    class Engine:
        report = FakeReport()

        def __init__(self, config, *, on_phase, on_progress=None, own_process=False):
            assert config == EngineConfig()
            assert own_process
            self.on_phase = on_phase

        async def start(self):
            self.on_phase("weights", 1.25)

    async def run_server(engine, config, *, on_listening):
        on_listening("http://h:1")
        await engine.start()

    monkeypatch.setattr(aengine, "AsyncEngine", Engine, raising=False)
    monkeypatch.setattr(aengine.server, "run_server", run_server)
    told = []

    class Told(Startup):
        def _log(self, text, *values):
            told.append(text % values)

    await serve.serve_engine(AengineConfig(server=ServerConfig(frontends=0)), Told("a-model", "1"))
    assert told[0] == "HTTP and text: in the engine process"
    assert told[1:] == ["aengine 1 listens on http://h:1 and loads a-model", "weights: 1.25 s"]
    assert "chat page http://h:1/" in capsys.readouterr().out
