"""`aengine batch`: files in OpenAI's batch format."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from aengine.cli import batch
from aengine.cli.batch_file import BatchError, answered, read_requests
from aengine.cli.main import main

URL = "/v1/completions"


def line(custom_id, url=URL, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def read(path):
    return {answer["custom_id"]: answer for answer in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def server():
    """Answers {"echo": body}; `script` maps a custom key in the body to a list of (status, headers) to give first."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.give(200, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.asked.append(body)
            script = made.script.get(body.get("key"), [])
            status, headers = script.pop(0) if script else (200, {})
            answer = {"echo": body} if status == 200 else {"error": {"message": "no", "code": "some_code"}}
            self.give(status, answer, headers)

        def give(self, status, answer, headers=None):
            made.paths.append(self.path)
            raw = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(raw)), "x-request-id": "id-1", **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.paths, made.script = [], [], {}
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{made.server_port}"
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def run(source, server, *more):
    return main(["batch", str(source), "--url", server.url, "--no-progress", *more])


def test_every_request_gets_one_answer(tmp_path, server, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line(f"r{i}", prompt=str(i)) for i in range(20)) + "\n")
    assert run(source, server, "--concurrency", "3") == 0
    answers = read(tmp_path / "in.out.jsonl")
    assert {name: answer["response"]["body"]["echo"]["prompt"] for name, answer in answers.items()} == {
        f"r{i}": str(i) for i in range(20)
    }
    assert answers["r3"]["response"]["status_code"] == 200
    assert answers["r3"]["response"]["request_id"] == "id-1"
    assert answers["r3"]["error"] is None
    assert "20 requests: 20 answered, 0 failed" in capsys.readouterr().err


def test_a_failed_request_says_why_and_the_others_go_on(tmp_path, server):
    server.script = {"bad": [(400, {})]}
    source = tmp_path / "in.jsonl"
    source.write_text(line("a", key="bad") + line("b"))
    assert run(source, server) == 1
    answers = read(tmp_path / "in.out.jsonl")
    assert answers["a"]["error"] == {"code": "some_code", "message": "no"}
    assert answers["a"]["response"]["status_code"] == 400
    assert answers["b"]["error"] is None


def test_a_busy_server_is_asked_again(tmp_path, server, monkeypatch):
    monkeypatch.setattr(batch, "RETRY_S", 0.0)
    never = {"broken": [(500, {})] * 99, "full": [(503, {})] * 99}
    server.script = {"busy": [(429, {}), (500, {}), (503, {})], "unknown": [(501, {})], **never}
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line(key, key=key) for key in server.script))
    assert run(source, server) == 1
    answers = read(tmp_path / "in.out.jsonl")
    assert {key: answer["response"]["status_code"] for key, answer in answers.items()} == {
        "busy": 200,
        "unknown": 501,
        "broken": 500,
        "full": 503,
    }
    times = Counter(body["key"] for body in server.asked)
    assert times == {
        "busy": 4,
        "unknown": 1,  # what the server cannot do it cannot do later
        "broken": 1 + batch.FAULT_RETRIES,
        "full": 1 + batch.RETRIES,
    }


def test_answers_to_requests_of_another_file_are_kept_and_not_counted(tmp_path, server, capsys):
    first, second, target = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "answers.jsonl"
    first.write_text(line("a") + line("bad", key="bad"))
    second.write_text(line("a") + line("b") + line("c"))
    server.script = {"bad": [(400, {})]}
    assert run(first, server, "-o", str(target)) == 1
    capsys.readouterr()
    assert run(second, server, "-o", str(target)) == 0
    told = capsys.readouterr().err
    assert "3 requests: 3 answered, 0 failed (1 of them in an earlier run)" in told
    assert "beside 1 to other requests" in told
    assert set(read(target)) == {"a", "bad", "b", "c"}


def test_a_path_before_v1_is_kept(tmp_path, server):
    source = tmp_path / "in.jsonl"
    source.write_text(line("a"))
    server.url += "/behind/a/proxy/v1"
    assert run(source, server) == 0
    assert server.paths == ["/behind/a/proxy/health", "/behind/a/proxy/v1/completions"]


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path, server, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(line(f"r{i}") for i in range(6)))
    assert run(source, server, "-o", str(target)) == 0
    lines = target.read_text().splitlines(keepends=True)
    busy = json.loads(lines[2])
    busy["response"]["status_code"] = 503
    target.write_text("".join(lines[:2]) + json.dumps(busy) + "\n" + lines[3][:30])  # killed while writing
    server.asked.clear()
    assert run(source, server, "-o", str(target)) == 0
    assert len(server.asked) == 4
    assert len(target.read_text().splitlines()) == 6
    assert set(read(target)) == {f"r{i}" for i in range(6)}
    assert "(2 of them in an earlier run)" in capsys.readouterr().err
    server.asked.clear()
    assert run(source, server, "-o", str(target)) == 0
    assert not server.asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken\n", "line 1"),
        (line("a") + "\n" + line("a"), "line 3: custom_id 'a' appears twice"),
        (line("a", url="/v1/secrets"), "url is '/v1/secrets', not one of /v1/chat/completions"),
        (line("a", stream=True), "cannot be streamed"),
        (json.dumps({"custom_id": "a", "method": "GET", "url": URL, "body": {}}), "method is 'GET'"),
        (json.dumps({"custom_id": "a", "method": "POST", "url": URL}), "body"),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(tmp_path, text, message, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(BatchError, match="line"):
        read_requests(source)
    assert main(["batch", str(source), "--url", "http://127.0.0.1:9"]) == 1
    assert message in capsys.readouterr().err


def test_an_output_of_something_else_is_left_alone(tmp_path, server, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    source.write_text(line("a"))
    target.write_text("my notes\n")
    assert run(source, server, "-o", str(target)) == 1
    assert target.read_text() == "my notes\n"
    assert "notes.txt, line 1 is no answer of a batch" in capsys.readouterr().err
    assert run(source, server, "-o", str(source)) == 2
    assert run(source, server, "--concurrency", "0") == 2
    assert main(["batch", str(tmp_path / "absent"), "--url", server.url]) == 1


def test_no_server(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(line("a"))
    assert main(["batch", str(source), "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert answered(tmp_path / "in.out.jsonl") == {}


def test_with_a_model_in_this_process(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        line("text", prompt="Hello", max_tokens=3, ignore_eos=True)
        + line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
        + line("wrong", prompt="Hello", max_tokens=0)
    )
    assert main(["batch", str(source), "--device", "sim", "--no-progress"]) == 1
    answers = read(tmp_path / "in.out.jsonl")
    assert answers["text"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert answers["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert answers["wrong"]["response"]["status_code"] == 400
    assert "max_tokens" in answers["wrong"]["error"]["message"]
