"""`aengine trace`: what it writes, and what it says when there is nothing to write."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from aengine.cli import trace
from aengine.cli.main import main

TRACE = {
    "traceEvents": [{"ph": "M"}],
    "otherData": {"busy_s": 9.92, "idle_s": {"no_work": 3.0, "host": 0.05, "copy": 0.03, "decide": 0.0}},
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == "Bearer key" and self.path == "/debug/trace?seconds=3"
        body = json.dumps(TRACE if known else {"error": {"message": f"refused {self.path}"}}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_writes_the_trace_and_sums_it_up(url, tmp_path, capsys):
    out = tmp_path / "t.json"
    assert main(["trace", url + "/v1", "-o", str(out), "--seconds", "3", "--api-key", "key"]) == 0
    assert json.loads(out.read_text()) == TRACE
    assert "1 events, device busy 99.2 %, bubbles 0.8 % = 0.5 host + 0.3 copy" in capsys.readouterr().out


def test_a_refusal_is_one_line_and_no_file(url, tmp_path, capsys):
    out = tmp_path / "t.json"
    assert main(["trace", url, "-o", str(out)]) == 1
    assert capsys.readouterr().err == "aengine trace: refused /debug/trace?seconds=30\n"
    assert not out.exists()
    assert main(["trace", "http://127.0.0.1:9", "-o", str(out)]) == 1
    assert main(["trace", "localhost"]) == 2


def test_a_device_without_work_is_not_said_to_be_idle():
    assert trace.sentence({"busy_s": 0.0, "idle_s": {"no_work": 5.0}}) == "the device had no work"
