"""The `llm` command: a prompt streamed and not, a schema, a conversation that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import BASE, MODEL, check, run_checks

HOME = Path(tempfile.mkdtemp(prefix="llm-"))
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: here\n  model_name: {MODEL}\n  api_base: {BASE}\n  supports_schema: true\n  supports_tools: true\n"
    f"- model_id: plain\n  model_name: {MODEL}\n  api_base: {BASE}\n  completion: true\n"
)


def llm(*arguments):
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(HOME), "OPENAI_API_KEY": "any"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, timeout=150
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


LIMITS = ("-o", "temperature", "0", "-o", "max_tokens", "24")


@check
def prompt_streamed_and_whole_agree():
    streamed = llm("-m", "here", *LIMITS, "-s", "Be brief.", "Name three fruits.")
    whole = llm("-m", "here", *LIMITS, "--no-stream", "-s", "Be brief.", "Name three fruits.")
    assert streamed == whole
    assert len(streamed) > 10


@check
def schema():
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
        "required": ["kind", "old"],
    }
    for mode in ((), ("--no-stream",)):
        pet = json.loads(llm("-m", "here", *mode, "--schema", json.dumps(schema), "A pet."))
        assert pet["kind"] in ("cat", "dog")
        assert pet["old"] in (True, False)


@check
def conversation_goes_on():
    llm("-m", "here", *LIMITS, "My name is Ada.")
    llm("-c", *LIMITS, "What is my name?")
    logged = json.loads(llm("logs", "-n", "2", "--json"))
    assert logged[0]["conversation_id"] == logged[1]["conversation_id"]
    assert all(entry["output_tokens"] for entry in logged), logged


@check
def completion_model():
    assert "Paris" in llm("-m", "plain", "-o", "temperature", "0", "-o", "max_tokens", "8", "The capital of France is")


run_checks()
