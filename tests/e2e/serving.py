"""`aengine serve` as a process of its own, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

READY = re.compile(r"chat page (http://\S+)/ ")


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str, output: list[str]) -> None:
        self.process = process
        self.url = url
        self.output = output

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=120) as response:
            return str(response.read().decode())

    def post(self, path: str, body: object) -> dict[str, object]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return dict(json.load(response))

    def metric(self, name: str) -> float:
        """The sum over the labels of one metric's samples."""
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.M)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def wait_idle(self, seconds: float = 120) -> None:
        """Until no request runs or waits and no page is in use; fails after `seconds`."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        deadline = time.monotonic() + seconds
        while any(self.metric(name) for name in names):
            state = {name: self.metric(name) for name in names}
            assert time.monotonic() < deadline, f"not idle after {seconds} s: {state}"
            time.sleep(0.05)


@contextlib.contextmanager
def serve(*arguments: str) -> Iterator[Server]:
    """A server on a free port of 127.0.0.1, ready; ended with SIGTERM."""
    command = [sys.executable, "-m", "aengine.cli", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output: list[str] = []
    found = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if READY.search(line):
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(300), "the server was not ready after 300 s:\n" + "".join(output)
        match = READY.search("".join(output))
        assert match, "the server ended:\n" + "".join(output)
        yield Server(process, match[1], output)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
