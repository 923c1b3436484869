"""`vllm bench serve` by its completion and chat backends: all requests succeed, all tokens are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, URL, check, run_checks

HERE = Path(tempfile.mkdtemp(prefix="vllm-bench-"))
(HERE / "prompts.jsonl").write_text(
    "".join(json.dumps({"prompt": f"Tell me {i} facts about Rome.", "output_tokens": 16}) + "\n" for i in range(8))
)


def bench(backend, endpoint):
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", backend]
    command += [
        "--base-url",
        URL,
        "--endpoint",
        endpoint,
        "--model",
        MODEL,
        "--tokenizer",
        os.environ["AENGINE_TOKENIZER"],
    ]
    command += ["--dataset-name", "custom", "--dataset-path", str(HERE / "prompts.jsonl"), "--num-prompts", "8"]
    command += ["--max-concurrency", "4", "--ignore-eos", "--skip-chat-template", "--custom-output-len", "16"]
    command += ["--save-result", "--result-dir", str(HERE), "--result-filename", f"{backend}.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr).strip().splitlines()[-1]
    result = json.loads((HERE / f"{backend}.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0), result
    assert result["total_output_tokens"] == 8 * 16, result
    assert result["median_ttft_ms"] > 1, result
    assert result["median_itl_ms"] > 0, result


@check
def completions():
    bench("openai", "/v1/completions")


@check
def chat():
    bench("openai-chat", "/v1/chat/completions")


run_checks()
