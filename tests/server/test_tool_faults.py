"""What is said of tools whose grammar is refused: which tool, where in its schema, and why, in the client's words."""

from __future__ import annotations

import pytest
from test_checklist import CHAT, on_sim, sim  # noqa: F401 - fixtures

GOOD = {"type": "object", "properties": {"city": {"type": "string"}}}
LOOK_AHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
HI = [{"role": "user", "content": "x"}]


@pytest.fixture
async def client(on_sim, sim):  # noqa: F811
    sim.context = 400_000  # characters; models without a template for tools get them as text
    sim.tokenizer.token_bytes = lambda token: bytes([token])  # a vocabulary that can spell JSON
    made, _ = await on_sim()
    return made


def of(**properties):
    return {"type": "object", "properties": properties}


def tool(name, schema, **fields):
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


async def refusal(client, url, **body):
    response = await client.post(url, json=body)
    assert response.status == 400, await response.text()
    return (await response.json())["error"]


FAULTS = [
    (LOOK_AHEAD, "$.properties.a", "look-around", "invalid_grammar"),
    (of(a={"type": "strin"}), "$.properties.a", "Invalid type: strin", "invalid_grammar"),
    (of(a=of(b={"items": {"$ref": "#/no"}})), "$.properties.a.properties.b.items", "'/no'", "invalid_grammar"),
    (of(a={"type": "integer", "maximum": 1e30}), "$.properties.a.maximum is 1e+30", "64 bits", "invalid_grammar"),
    (of(**{f"p{i}": {} for i in range(1300)}), "$ has 1,300 optional", "at most 1,200", "grammar_too_complex"),
    ({**of(a=False), "required": ["a"]}, "$", "required property 'a' is unsatisfiable", "invalid_grammar"),
]


async def test_the_tool_the_place_and_the_reason(client):
    for schema, place, reason, code in FAULTS:
        tools = [tool("f", GOOD), tool("g", schema), tool("h", GOOD)]
        error = await refusal(client, CHAT, messages=HI, tools=tools, tool_choice="required")
        path = "tools[1].function.parameters"
        assert (error["param"], error["code"]) == (path, code)
        told = error["message"].removeprefix(f"{path}: ").removeprefix("the grammar is too complex: ")
        assert told.startswith(place)
        assert reason in told[len(place) :]


async def test_a_keyword_that_cannot_be_kept_is_refused_where_strict_asks_for_it(client):
    unique = of(a={"type": "array", "uniqueItems": True})
    body = {"messages": HI, "tool_choice": "required", "max_tokens": 2}
    assert (await client.post(CHAT, json={**body, "tools": [tool("f", unique)]})).status == 200
    error = await refusal(client, CHAT, **body, tools=[tool("f", unique, strict=True)])
    assert error["message"] == 'tools[0].function.parameters: $.properties.a: Unimplemented keys: ["uniqueItems"]'


async def test_of_two_tools_with_one_name_the_second_is_named(client):
    tools = [tool("other", LOOK_AHEAD), tool("f", GOOD), tool("f", LOOK_AHEAD)]
    named = {"type": "function", "function": {"name": "f"}}
    error = await refusal(client, CHAT, messages=HI, tools=tools, tool_choice=named)
    assert error["param"] == "tools[2].function.parameters"


async def test_tools_that_are_too_much_together(client):
    tools = [tool(name, of(a={"enum": [name * 140_000]})) for name in "fg"]
    error = await refusal(client, CHAT, messages=HI, tools=tools, tool_choice="required")
    assert (error["param"], error["code"]) == ("tools", "grammar_too_complex")
    assert error["message"].startswith("tools cannot be enforced: the grammar has 280,")
    assert error["message"].endswith("at most 262,144 are accepted")


async def test_responses_and_messages_hear_of_what_they_sent(client):
    hosted, good = {"type": "web_search"}, {"type": "function", "name": "f", "parameters": GOOD}
    bad = {"type": "function", "name": "g", "parameters": LOOK_AHEAD}
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    nested = tool("g", LOOK_AHEAD)
    for choice, wrong, path in (
        ("required", bad, "tools[2].parameters"),
        (only, bad, "tools[2].parameters"),
        ("required", nested, "tools[2].function.parameters"),
    ):
        tools = [hosted, good, wrong]
        error = await refusal(client, "/v1/responses", input="x", tools=tools, tool_choice=choice)
        assert error["param"] == path
        assert error["message"].startswith(f"{path}: $.properties.a: regex parse error")
    tools = [{"type": "bash_20250124", "name": "bash"}, {"name": "f", "input_schema": GOOD}]
    tools.append({"name": "g", "input_schema": LOOK_AHEAD})
    error = await refusal(
        client, "/v1/messages", messages=HI, max_tokens=5, tools=tools, tool_choice={"type": "tool", "name": "g"}
    )
    assert error["param"] == "tools[2].input_schema"
    assert error["message"].startswith("tools[2].input_schema: $.properties.a: regex parse error")
