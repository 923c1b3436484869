"""`aengine chat` on a fake engine and a scripted person."""

import threading

import pytest

from aengine.cli import chat
from aengine.cli.session import EngineThread
from aengine.config import EngineConfig
from aengine.errors import ModelNotFound
from aengine.types import SamplingParams
from tests.cli.fakes import FakeEngine


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Saved conversations of tests stay with them."""
    monkeypatch.setenv("AENGINE_HOME", str(tmp_path))


def converse(engine, script, *argv):
    """Play `script`: lines to type, or exceptions that `input` raises."""
    left = iter([*script, EOFError()])

    def ask(_):
        item = next(left)
        if isinstance(item, str):
            return item
        raise item

    return chat.run(chat.parser().read(list(argv)), lambda config: engine, ask)


def conversations(engine):
    """The messages of each request, as role: content."""
    return [
        [f"{message['role']}: {message['content']}" for message in entry[1]]
        for entry in engine.log
        if entry[0] == "chat"
    ]


def test_a_conversation_grows(capsys):
    engine = FakeEngine()
    assert converse(engine, ["abc", "de", "/quit", "never"]) == 0
    assert capsys.readouterr().out == "cba\ned\n"
    assert conversations(engine) == [["user: abc"], ["user: abc", "assistant: cba", "user: de"]]
    assert engine.log[-1] == "close"


def test_end_of_input_leaves():
    engine = FakeEngine()
    assert converse(engine, []) == 0
    assert engine.log == ["start", "close"]


def test_new_forgets_and_keeps_the_system_message():
    engine = FakeEngine()
    converse(engine, ["abc", "/new", "de"], "--system", "be brief")
    assert conversations(engine) == [
        ["system: be brief", "user: abc"],
        ["system: be brief", "user: de"],
    ]


def test_system_sets_and_unsets_the_system_message():
    engine = FakeEngine()
    converse(engine, ["/system  rhyme ", "a", "/system", "b"])
    assert conversations(engine) == [["system: rhyme", "user: a"], ["user: b"]]


def test_unknown_commands_and_empty_lines_reach_no_model(capsys):
    engine = FakeEngine()
    converse(engine, ["/frob", "/help", "", "   "])
    assert conversations(engine) == []
    assert "unknown command /frob" in capsys.readouterr().err


def test_a_conversation_that_got_too_long_can_go_on_after_new(capsys):
    engine = FakeEngine(limit=1)
    converse(engine, ["abc", "de", "/new", "f"])
    out, err = capsys.readouterr()
    assert out == "cba\nf\n\n"
    assert "3 messages, 1 fit\n/new starts over" in err
    assert conversations(engine)[-1] == ["user: f"]


def test_an_interrupt_at_the_prompt_throws_the_line_away():
    engine = FakeEngine()
    converse(engine, [KeyboardInterrupt(), "a"])
    assert conversations(engine) == [["user: a"]]


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(monkeypatch, capsys):
    engine = FakeEngine(delay_s=0.001)
    real = EngineThread.chat

    def interrupted(self, messages, sampling):
        outputs = real(self, messages, sampling)
        try:
            for output in outputs:
                yield output
                if len(output.outputs[0].text) >= 3 and len(messages) == 1:
                    raise KeyboardInterrupt
        finally:
            outputs.close()

    monkeypatch.setattr(EngineThread, "chat", interrupted)
    converse(engine, ["x" * 10_000, "b"])
    assert " [stopped]" in capsys.readouterr().out
    assert "cancelled" in engine.log
    said = conversations(engine)[1][1].removeprefix("assistant: ")
    assert 3 <= len(said) < 10_000
    assert set(said) == {"x"}


def test_figures_follow_an_answer(capsys):
    converse(FakeEngine(), ["abc"])
    assert "3 prompt tokens (0 cached) · first token 0.25 s · 3 tokens]" in capsys.readouterr().err


def test_a_failed_start_is_raised_and_leaves_no_thread():
    before = threading.active_count()
    engine = FakeEngine(start_error=ModelNotFound("nowhere"))
    with pytest.raises(ModelNotFound, match="nowhere"):
        converse(engine, [])
    assert threading.active_count() == before


def test_leaving_an_answer_early_aborts_it_and_the_next_is_whole():
    engine = FakeEngine(delay_s=0.001)
    with EngineThread(EngineConfig(), lambda config: engine) as thread:
        ask = [{"role": "user", "content": "y" * 1000}]
        outputs = thread.chat(ask, SamplingParams(max_tokens=None))
        next(outputs)
        outputs.close()
        assert "cancelled" in engine.log
        last = list(thread.chat(ask[:1], SamplingParams(max_tokens=5)))[-1]
    assert last.outputs[0].text == "yyyyy"
    assert engine.log[-1] == "close"


def test_an_error_inside_the_engine_reaches_the_main_thread():
    engine = FakeEngine(limit=0)
    with (
        EngineThread(EngineConfig(), lambda config: engine) as thread,
        pytest.raises(Exception, match="1 messages, 0 fit"),
    ):
        list(thread.chat([{"role": "user", "content": "a"}], SamplingParams()))


def test_another_answer_and_taking_back(capsys):
    engine = FakeEngine()
    converse(engine, ["/regen", "/undo", "abc", "/regen", "de", "/undo", "f"])
    assert conversations(engine) == [
        ["user: abc"],
        ["user: abc"],
        ["user: abc", "assistant: cba", "user: de"],
        ["user: abc", "assistant: cba", "user: f"],
    ]
    err = capsys.readouterr().err
    assert "there is no question yet" in err
    assert "taken back: de" in err


def test_settings_reach_the_sampling_and_wrong_ones_do_not(capsys):
    engine = FakeEngine()
    wrong = ["/set top_p 7", "/set top_k many", "/set frob 1"]
    converse(engine, ["/set top_k 40", r"/set stop \n\n", *wrong, "a", "/set top_k", "b"])
    first, second = (entry[2] for entry in engine.log if entry[0] == "chat")
    assert (first.top_k, first.stop, first.top_p, first.temperature) == (40, ("\n\n",), 1.0, 0.7)
    assert second.top_k == 0
    err = capsys.readouterr().err
    assert "top_p is 7.0, not in (0.0, 1.0]" in err
    assert "top_k: 'many' is not a number" in err
    assert "there is no setting 'frob'" in err


def test_saved_conversations_go_on(capsys):
    converse(FakeEngine(), ["/set seed 5", "abc", "/save first", "/save ../out", "de"], "--system", "be brief")
    engine = FakeEngine()
    converse(engine, ["/sessions", "/load first", "f", "/load none"], "--resume")
    assert conversations(engine) == [["system: be brief", "user: abc", "assistant: cba", "user: f"]]
    assert next(entry[2].seed for entry in engine.log if entry[0] == "chat") == 5
    err = capsys.readouterr().err
    assert "'../out' is no name" in err
    assert "last\nfirst\n" in err
    assert "there is no saved conversation 'none'" in err


def test_a_file_that_is_no_conversation_is_refused(tmp_path, capsys):
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "odd.json").write_text('{"messages": 3}')
    converse(FakeEngine(), ["/load odd"])
    assert "not a saved conversation" in capsys.readouterr().err


def test_several_lines_and_totals(capsys):
    engine = FakeEngine()
    converse(engine, ["/stats", '"""one', "two", 'three"""', "b", "/stats", "/model", "/model other"])
    assert conversations(engine)[0] == ["user: one\ntwo\nthree"]
    err = capsys.readouterr().err
    assert "no answers yet" in err
    assert "2 answers · 6 prompt tokens (0 cached) · 14 tokens" in err
    assert "start `aengine chat other`" in err
