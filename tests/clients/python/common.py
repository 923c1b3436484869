"""What the Python clients' scripts share: the server's address, a schema and a tool, the list of checks.

Owns: `check` (registers a function), `run_checks` (runs them all, one line each: `ok NAME` or `failed NAME: why`).
Does not know: any client library; it is imported in virtual environments that have nothing of the project's.
Invariants: a failing check does not keep later ones from running; the exit code is 1 if any failed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

URL = os.environ["AENGINE_URL"]
URLS = os.environ["AENGINE_URLS"].split(",")
BASE = URL + "/v1"
MODEL = os.environ["AENGINE_MODEL"]
FRUIT = [{"role": "user", "content": "Name three fruits."}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER},
}
CHECKS: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS.append(function)
    return function


def valid_weather(arguments: Any) -> None:
    """Asserts that a tool call's arguments, JSON text or decoded, are what the schema allows."""
    decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(decoded) == {"city", "unit"}, decoded
    assert isinstance(decoded["city"], str), decoded
    assert len(decoded["city"]) <= 12, decoded
    assert decoded["unit"] in ("celsius", "fahrenheit"), decoded


def get(path: str, url: str = URL) -> str:
    with urllib.request.urlopen(url + path, timeout=30) as response:
        return str(response.read().decode())


def run_checks() -> None:
    failed = 0
    for function in CHECKS:
        name = function.__name__
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
            print("ok", name, flush=True)
        except Exception as error:
            failed += 1
            why = (str(error) or type(error).__name__).splitlines()[0][:300]
            traceback.print_exc()
            print(f"failed {name}: {why}", flush=True)
    sys.exit(1 if failed else 0)
