"""`aengine chat` on a fake engine and a scripted person."""

import io
import threading

import pytest

from aengine.cli import chat
from aengine.cli.options import UsageError
from aengine.cli.session import EngineThread
from aengine.config import EngineConfig
from aengine.errors import InvalidRequest, ModelNotFound
from aengine.types import SamplingParams
from tests.cli.fakes import FakeEngine, FakeText


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
    assert out == "cba\nf\n"
    assert "3 messages, 1 fit\n/undo takes the last question and its answer back, /new starts over" in err
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
    out, err = capsys.readouterr()
    assert "[stopped · 3 prompt tokens" in err
    assert "stopped" not in out
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
    converse(
        engine,
        ["/set top_k 40", r"/set stop \n\n", *wrong, "a", "/set top_k", r"/set stop é\t日", r"/set stop \x", "b"],
    )
    first, second = (entry[2] for entry in engine.log if entry[0] == "chat")
    assert (first.top_k, first.stop, first.top_p, first.temperature) == (40, ("\n\n",), 1.0, 0.7)
    assert (second.top_k, second.stop) == (0, ("é\t日",))
    err = capsys.readouterr().err
    assert "top_p is 7.0, not in (0.0, 1.0]" in err
    assert "top_k: 'many' is not a whole number" in err
    assert "there is no setting 'frob'" in err
    assert r"stop: '\\x' is not a text with escapes" in err


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


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "Expecting value: line 1"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[3]", "it has no messages and sampling"),
        (b'{"messages": 3, "sampling": {}}', "its messages are no list"),
        (b'{"messages": [3], "sampling": {}}', "message 0 has no role and text"),
        (b'{"messages": [{"role": "user", "content": null}], "sampling": {}}', "message 0 has no role and text"),
        (b'{"messages": [{"role": "user", "content": "a\\ud83d"}], "sampling": {}}', "half a character at 1"),
        (b'{"messages": [{"role": "tool", "content": ""}], "sampling": {}}', "message 0 is of 'tool', not of 'user'"),
        (b'{"messages": [{"role": "user", "content": ""}], "sampling": {}}', "message 0, a question, has no answer"),
        (b'{"messages": [], "sampling": {"temperature": "hot"}}', "temperature is 'hot'"),
        (b'{"messages": [], "sampling": {"stop": [1]}}', "stop is '[1]'"),
        (b'{"messages": [], "sampling": {"temperature": NaN}}', "temperature is nan"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_before_anything_is_loaded(data, told, tmp_path, capsys):
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "odd.json").write_bytes(data)
    engine = FakeEngine()
    with pytest.raises(InvalidRequest) as caught:
        converse(engine, [], "--resume", "odd")
    assert "odd.json is not a saved conversation: " in caught.value.message
    assert told in caught.value.message
    assert engine.log == []
    converse(engine, ["abc", "/load odd", "de"])
    assert conversations(engine)[1] == ["user: abc", "assistant: cba", "user: de"]
    assert told in capsys.readouterr().err


def test_several_lines_and_totals(capsys):
    engine = FakeEngine()
    converse(engine, ["/stats", '"""one', "two", 'three"""', "b", "/stats", "/model", "/model other"])
    assert conversations(engine)[0] == ["user: one\ntwo\nthree"]
    err = capsys.readouterr().err
    assert "no answers yet" in err
    assert "2 answers · 6 prompt tokens (0 cached) · 14 tokens" in err
    assert "start `aengine chat other`" in err


def test_what_is_given_wins_over_what_was_saved():
    converse(FakeEngine(), ["/set seed 5", "/set top_k 9", "abc"], "--system", "be brief")
    engine = FakeEngine()
    converse(engine, ["f"], "--resume", "--system", "rhyme", "--temperature", "0.1", "--seed", "6")
    assert conversations(engine) == [["system: rhyme", "user: abc", "assistant: cba", "user: f"]]
    sampling = next(entry[2] for entry in engine.log if entry[0] == "chat")
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.1, 6, 9)


def test_another_conversation_is_not_written_over(tmp_path, capsys):
    converse(FakeEngine(), ["abc", "/save trip", "de", "/save trip", "/new", "f", "/save trip"])
    assert "there is a conversation 'trip' already" in capsys.readouterr().err
    converse(FakeEngine(), ["gh", "/save trip"], "--resume", "trip")
    saved = (tmp_path / "chats" / "trip.json").read_text()
    assert [word in saved for word in ("abc", "de", "gh", '"f"')] == [True, True, True, False]
    assert not list((tmp_path / "chats").glob("*.part"))
    assert (tmp_path / "chats" / "trip.json").stat().st_mode & 0o077 == 0


def test_where_nothing_can_be_saved_talking_goes_on_and_it_is_told_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AENGINE_HOME", str(tmp_path / "file"))
    engine = FakeEngine()
    converse(engine, ["abc", "de", "/save x", "/sessions"])
    err = capsys.readouterr().err
    assert err.count("the conversation is not saved: ") == 1
    assert "x.json cannot be written: Not a directory" in err
    assert len(conversations(engine)) == 2


def test_a_question_without_an_answer_is_asked_again_by_regen(capsys):
    engine = FakeEngine(limit=1)
    converse(engine, ["abc", "de", "/undo", "/regen", "f", "g"])
    assert conversations(engine)[2:] == [["user: f"], ["user: f", "assistant: f", "user: g"]]
    engine = FakeEngine(limit=1)
    converse(engine, ["abc", "de", "/regen"])
    assert conversations(engine)[1:] == [["user: abc", "assistant: cba", "user: de"]] * 2


def test_an_answer_stopped_before_its_first_word_is_none(monkeypatch, capsys):
    engine = FakeEngine()
    real = EngineThread.answers
    stops = iter([True, False, True, False])

    def answers(self, messages, sampling):
        if next(stops):
            raise KeyboardInterrupt
        yield from real(self, messages, sampling)

    monkeypatch.setattr(EngineThread, "answers", answers)
    converse(engine, ["abc", "/regen", "/regen", "de"])
    assert conversations(engine) == [["user: abc"], ["user: abc", "assistant: cba", "user: de"]]
    assert capsys.readouterr().err.count("nothing was said yet; /regen asks again") == 2


def test_thoughts_of_a_model_in_this_process_are_no_part_of_the_conversation(capsys):
    engine = FakeEngine(text=FakeText("{{ '</think>' }}"))
    converse(engine, ["<think>hm</think>yes"[::-1], "b"])
    out, err = capsys.readouterr()
    assert out == "yes\nb\n"
    assert "hm\n\n[" in err
    assert conversations(engine)[1][1] == "assistant: yes"


def test_an_answer_that_was_cut_off_says_so(capsys):
    converse(FakeEngine(ends="length"), ["abcdef"], "--max-tokens", "3")
    assert "cut off at max_tokens 3]" in capsys.readouterr().err


def test_commands_take_what_they_take(capsys):
    engine = FakeEngine()
    converse(engine, ["abc", "/new york", "/stat", "/quit now", '"""/etc/x"""', "/exit", "never"])
    assert conversations(engine)[1] == ["user: abc", "assistant: cba", "user: /etc/x"]
    err = capsys.readouterr().err
    assert "/new takes nothing behind it, and there is 'york'" in err
    assert "unknown command /stat; did you mean /stats" in err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--url", "127.0.0.1:9", "--device", "sim", "--max-num-seqs", "2"],
            "--max-num-seqs, --device: not with --url",
        ),
        (["--api-key", "x"], "it needs --url"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--system", "\udcff"], "--system is not UTF-8"),
    ],
)
def test_flags_that_make_no_sense_are_misuse(argv, told):
    with pytest.raises(UsageError, match=told):
        converse(FakeEngine(), [], *argv)


def piped(engine, data, monkeypatch, *argv):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    return chat.run(chat.parser().read(list(argv)), lambda config: engine)


def test_a_pipe_is_answered_line_by_line_and_the_exit_code_tells(monkeypatch, capsys):
    engine = FakeEngine()
    assert piped(engine, b'abc\n\n"""d\ne"""\nf', monkeypatch) == 0
    assert capsys.readouterr().out == "cba\ne\nd\nf\n"
    assert piped(engine, b"", monkeypatch) == 0
    assert piped(engine, b"caf\xe9\nok\n", monkeypatch) == 1
    assert piped(engine, b'"""a\nb', monkeypatch) == 1
    out, err = capsys.readouterr()
    assert out == "ko\n"
    assert "the message is not utf-8 text: byte 0xe9 after 3 characters" in err
    assert "the input ended within a message, after 2 lines" in err
    assert "/help" not in err


def test_an_interrupt_of_a_pipe_ends_the_program_and_keeps_what_was_said(tmp_path, monkeypatch):
    engine = FakeEngine()
    real = EngineThread.answers

    def answers(self, messages, sampling):
        yield next(real(self, messages, sampling))
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineThread, "answers", answers)
    with pytest.raises(KeyboardInterrupt):
        piped(engine, b"abc\nde\n", monkeypatch)
    assert '"role": "assistant"' in (tmp_path / "chats" / "last.json").read_text()
    assert conversations(engine) == [["user: abc"]]
