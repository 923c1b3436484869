"""`/openapi.json` tells the truth about the routes, and no body makes an endpoint fail."""

from __future__ import annotations

import copy
import json
import random

import msgspec
import pytest
from server_fakes import FakeEngine

from aengine.server import openapi
from aengine.server.routes import ROUTES

HI = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "1"}],
    "tools": [TOOL],
    "tool_choice": "auto",
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_object"},
}
# What the bodies of each path begin as, before something in them is changed.
SEEDS = {
    "/v1/chat/completions": [{"messages": HI}, {"messages": PARTS}, CHAT],
    "/v1/chat/completions/render": [{"messages": HI}, CHAT],
    "/v1/completions": [{"prompt": "a"}, {"prompt": [[97], [98]], "echo": True, "logprobs": 1}],
    "/v1/responses": [
        {"input": "hi"},
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ],
    "/v1/messages": [
        {"messages": HI, "max_tokens": 5},
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]},
            ],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled"},
        },
    ],
    "/v1/messages/count_tokens": [{"messages": HI, "system": "s"}],
    "/tokenize": [{"prompt": "a"}, {"messages": HI, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [1, 2]}],
}
VALUES = [None, True, 0, 1, -1, 2**63, 2**70, 0.5, 1e300, "", "auto", "text", "é😀", "x" * 300, [], {}, [[]], [None]]
VALUES += [[1], ["a"], {"type": "function"}, {"type": []}, [{"type": {}}], {"a": {"b": [1]}}, {"": ""}]


@pytest.fixture(scope="module")
def document():
    return openapi.document(ROUTES, key=True)


async def test_every_route_is_in_it(serve):
    client, _ = await serve()
    served = await (await client.get("/openapi.json")).json()
    assert served["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in served["paths"].items() for method in methods}
    routed = {
        (route.method, route.resource.canonical)
        for route in client.server.app.router.routes()
        if route.method != "HEAD" and route.resource.canonical.startswith(("/v1", "/health", "/metrics", "/version"))
    }
    assert routed <= described
    assert described == {(route.method, route.path) for route in ROUTES} | {("GET", "/openapi.json")}
    assert {route.resource.canonical for route in client.server.app.router.routes()} >= {path for _, path in described}


def test_references_resolve_and_names_are_unique(document):
    schemas = document["components"]["schemas"]
    used = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert used <= set(schemas)
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body], ids=lambda route: route.path)
def test_bodies_are_the_structs(document, route):
    body = document["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    assert set(schema["properties"]) == {field.encode_name for field in msgspec.structs.fields(route.body)}
    content = document["paths"][route.path]["post"]["responses"]["200"]["content"]
    assert ("text/event-stream" in content) == route.streams


def test_errors_are_envelopes(document):
    for path, methods in document["paths"].items():
        kind = "TypedErrorEnvelope" if path.startswith("/v1/messages") else "ErrorEnvelope"
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if status != "200":
                    schema = response["content"]["application/json"]["schema"]
                    assert schema == {"$ref": f"#/components/schemas/{kind}"}
                    assert ("Retry-After" in response["headers"]) == (status in ("429", "503"))


async def test_keys_are_asked_for_where_the_document_says_so(serve):
    client, _ = await serve(api_key="k")
    for key in ("k", None):
        if key is None:
            client, _ = await serve()
        headers = {} if key is None else {"x-api-key": key}
        told = await (await client.get("/openapi.json", headers=headers)).json()
        assert told["security"] == ([{}] if key is None else [{"bearer": []}, {"x-api-key": []}])
        for path, methods in told["paths"].items():
            for method, operation in methods.items():
                response = await client.request(method, path)
                assert str(response.status) in operation["responses"]
                assert (response.status == 401) == (key is not None and operation.get("security") != [])


async def test_answers_without_a_body_are_the_structs(serve):
    client, _ = await serve()
    seen = set()
    for route in ROUTES:
        if route.body is None and isinstance(route.answer, type):
            response = await client.request(route.method, route.path.replace("{id}", "fake-alias"))
            assert response.status == 200
            assert msgspec.json.decode(await response.read(), type=route.answer)
            seen.add(route.path)
    assert {"/v1/models", "/v1/models/{id}", "/tokenizer_info", "/health", "/debug/trace", "/version"} <= seen


async def test_examples_are_answered(serve, document):
    client, _ = await serve()
    for route in ROUTES:
        if route.body is not None:
            content = document["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]
            response = await client.post(route.path, json=content["example"])
            assert response.status == 200, await response.text()
            assert "x-aengine-ignored" not in response.headers


def bounds(schema):
    """Values just outside of what a number may be."""
    step = 1 if schema["type"] == "integer" else 0.25
    for keyword, sign in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
        if keyword in schema:
            yield schema[keyword] + sign * step


@pytest.mark.parametrize("path", [path for path in SEEDS if path.startswith("/v1")])
async def test_told_ranges_are_kept(serve, document, path):
    client, _ = await serve()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties = document["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]
    refused = 0
    for name, schema in properties.items():
        number = next((kind for kind in schema.get("anyOf", [schema]) if kind.get("type") in ("integer", "number")), {})
        for wrong in bounds(number) if number else ():
            needed = {"logprobs": True} if name == "top_logprobs" and path.startswith("/v1/chat") else {}
            response = await client.post(path, json={**SEEDS[path][0], **needed, name: wrong})
            error = (await response.json()).get("error") or {}
            assert (response.status, error.get("param")) == (400, name), (wrong, error)
            refused += 1
    assert refused > 20


def changed(rng, body, names):
    """`body` with up to three of its parts replaced, removed or added."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        spots = list(places(body))
        holder, key = rng.choice(spots) if spots else (body, "x")
        deed = rng.random()
        if deed < 0.45:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif deed < 0.6 and spots:
            del holder[key]
        else:
            body[rng.choice(names)] = copy.deepcopy(rng.choice(VALUES))
    return body


def places(node):
    """Every (container, key) in a JSON value."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(items):
        yield node, key
        if isinstance(value, dict | list):
            yield from places(value)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body], ids=lambda route: route.path)
async def test_no_body_makes_it_fail(serve, document, route):
    """Random changes of good bodies: a 200 or a small envelope with a documented status, never a 5xx."""
    rng = random.Random(route.path)
    client, engine = await serve(FakeEngine())
    names = [field.encode_name for field in msgspec.structs.fields(route.body)]
    documented = {int(status) for status in document["paths"][route.path]["post"]["responses"]}
    seen = set()
    for _ in range(200):
        body = changed(rng, rng.choice(SEEDS[route.path]), names)
        response = await client.post(route.path, json=body)
        raw = await response.read()
        seen.add(response.status)
        assert response.status in documented, body
        assert response.status < 500, (body, raw)
        if response.status == 200 and response.content_type == "application/json":
            msgspec.json.decode(raw, type=route.answer)
        if response.status != 200:
            assert len(raw) < 2_500
            assert set(json.loads(raw)["error"]) == {"message", "type", "param", "code"}
    assert {200, 400} <= seen
    assert not engine.open
