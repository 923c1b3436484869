"""`aengine generate` on a fake engine."""

import io
import json

import pytest

from aengine.cli import generate
from aengine.errors import InvalidRequest, ModelNotFound
from tests.cli.fakes import FakeEngine


def run(engine, *argv):
    return generate.run(generate.parser().read(list(argv)), lambda config: engine)


def test_the_text_goes_to_stdout_and_notes_to_stderr(capsys):
    engine = FakeEngine()
    assert run(engine, "abc") == 0
    out, err = capsys.readouterr()
    assert out == "cba\n"
    assert err == "a note\n"
    assert engine.log[0] == "start"
    assert engine.log[-1] == "close"


def test_a_streamed_text_is_the_same_text(capsys):
    assert run(FakeEngine(), "abc", "--stream") == 0
    assert capsys.readouterr().out == "cba\n"


def test_json(capsys):
    assert run(FakeEngine(), "abc", "--json", "--max-tokens", "2") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["text"] == "cb"
    assert shown["completion_tokens"] == 2
    assert shown["prompt_tokens"] == 3
    assert shown["finish_reason"] == "stop"
    assert shown["e2e_s"] == 0.5


def test_flags_reach_the_request():
    engine = FakeEngine()
    run(engine, "abc", "--temperature", "0.5", "--top-p", "0.9", "--seed", "7", "--max-tokens", "3")
    _, prompt, sampling = engine.log[1]
    assert prompt == "abc"
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 7, 3)


@pytest.mark.parametrize("argv", [(), ("-",)])
def test_without_a_prompt_stdin_is_read(monkeypatch, capsys, argv):
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    run(FakeEngine(), *argv)
    assert capsys.readouterr().out == "nidts morf\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stdin", "argv"), [(Terminal(), ()), (io.StringIO(""), ()), (io.StringIO(""), ("",))])
def test_no_prompt_is_said_before_a_model_is_loaded(monkeypatch, stdin, argv):
    monkeypatch.setattr("sys.stdin", stdin)
    engine = FakeEngine()
    with pytest.raises(generate.UsageError, match="prompt"):
        run(engine, *argv)
    assert engine.log == []


def test_the_table_of_pages_is_not_for_one_prompt(capsys):
    run(FakeEngine(), "abc")
    told = capsys.readouterr().err
    assert "a note" in told
    assert "a table of pages" not in told


def test_the_model_is_a_flag_here():
    seen = []

    def factory(config):
        seen.append(config.model.model)
        return FakeEngine()

    generate.run(generate.parser().read(["abc", "--model", "other"]), factory)
    assert seen == ["other"]


def test_a_wrong_value_is_refused_before_a_model_is_loaded():
    engine = FakeEngine()
    with pytest.raises(InvalidRequest, match="temperature"):
        run(engine, "abc", "--temperature", "nan")
    assert engine.log == []


def test_an_engine_that_does_not_start_is_closed():
    engine = FakeEngine(start_error=ModelNotFound("nowhere"))
    with pytest.raises(ModelNotFound):
        run(engine, "abc")
    assert engine.log == ["start", "close"]


def test_stream_and_json_exclude_each_other():
    with pytest.raises(generate.UsageError, match="--stream and --json"):
        run(FakeEngine(), "abc", "--stream", "--json")
