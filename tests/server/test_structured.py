"""Fields that ask for structured output: what grammar they make, and what is refused by name."""

import json

import pytest

from aengine.errors import GrammarTooComplex, InvalidGrammar

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA)


def asked(url, chat_body, fields):
    return chat_body(**fields) if url == CHAT else {"prompt": "x", **fields}


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "choice", ["x", "y"]),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/"),
        ({"structured_outputs": {"json": False}}, "json_schema", False),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": TEXT, "guided_decoding_backend": "outlines"}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["x", "y"]}, "choice", ["x", "y"]),
        ({"guided_grammar": "start: /a/"}, "lark", "start: /a/"),
    ],
)
async def test_each_field_makes_its_grammar(serve, chat_body, url, fields, kind, source):
    client, engine = await serve()
    assert (await client.post(url, json=asked(url, chat_body, fields))).status == 200
    grammar = engine.submitted[0]["sampling"].grammar
    assert grammar.kind == kind
    assert (grammar.source if isinstance(source, str) else json.loads(grammar.source)) == source
    if source == SCHEMA:  # the order of properties is the order in which they are written
        assert list(json.loads(grammar.source)["properties"]) == ["b", "a"]


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
    ],
)
async def test_what_is_refused(serve, chat_body, envelope, url, fields, param):
    client, engine = await serve()
    await envelope(await client.post(url, json=asked(url, chat_body, fields)), 400, param=param)
    assert not engine.submitted


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_be_honoured_is_told_by_the_field_that_was_sent(
    serve, chat_body, envelope, url, stream
):
    client, engine = await serve()
    engine.grammar_error = InvalidGrammar("$.properties.a: Unimplemented keys", param="grammar", place="$.properties.a")
    body = asked(url, chat_body, {"guided_json": SCHEMA, "stream": stream})
    error = await envelope(await client.post(url, json=body), 400, param="guided_json")
    assert error["message"] == "guided_json: $.properties.a: Unimplemented keys"
    engine.grammar_error = GrammarTooComplex("too much", param="grammar")
    body = asked(url, chat_body, {"response_format": {"type": "json_object"}, "stream": stream})
    error = await envelope(await client.post(url, json=body), 400, param="response_format")
    assert error["code"] == "grammar_too_complex"
    assert not engine.submitted


async def test_without_any_of_them_there_is_no_grammar(serve, chat_body):
    client, engine = await serve()
    await client.post(CHAT, json=chat_body(response_format={"type": "text"}, structured_outputs={}))
    assert engine.submitted[0]["sampling"].grammar is None


async def test_two_keys_at_once_are_both_named(serve, chat_body):
    client, _ = await serve()
    body = chat_body(structured_outputs={"json": SCHEMA, "regex": "a"})
    response = await client.post(CHAT, json=body)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "structured_outputs")
    assert error["message"].startswith("structured_outputs.json and structured_outputs.regex ")
    assert "one is allowed" in error["message"]
