"""Chat templates: the same text as transformers renders; every failure a typed error."""

from __future__ import annotations

import copy

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from aengine.errors import InvalidRequest
from aengine.models.chat import FALLBACK_TEMPLATE, ChatRenderer

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, n=0) %}
{%- for message in messages %}
    {%- if loop.index0 > 10 %}{% break %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson(indent=2) }}
            {{- '}</tool_call>' }}
            {%- set ns.n = ns.n + 1 %}
        {%- endfor %}
    {%- elif message.reasoning_content is defined and message.reasoning_content %}
        {{- '<think>' + message.reasoning_content.strip('\\n') + '</think>' + content }}
    {%- else %}
        {% generation %}{{- message.role ~ ': ' ~ content ~ '\\n' }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think></think>{%- endif %}
n={{ ns.n }} {{ dict(a=1) | tojson }}
"""
PARTS = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a < b & 'ü'", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, None]}}}
PLAIN = [{"role": "user", "content": "Hi <b>ünï</b> "}, {"role": "assistant", "content": " yes"}]
ODD = [*PLAIN, {"role": "user", "content": "go\n\non"}]
WITH_CALL = [PLAIN[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
THOUGHT = [PLAIN[0], {"role": "assistant", "content": "x", "reasoning": "\nhm\n"}]


def ours(source, messages, tools=None, add=True, go_on=False, **extra):
    return ChatRenderer(VARIABLES).render(
        source, messages, tools=tools, add_generation_prompt=add, continue_final_message=go_on, extra=extra
    )


def theirs(source, messages, tools=None, add=True, go_on=False, **extra):
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered, _ = render_jinja_template(
        [chat], tools=tools, chat_template=source, add_generation_prompt=add, continue_final_message=go_on,
        **VARIABLES, **extra,
    )  # fmt: skip
    return rendered[0]


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    ("source", "messages", "tools", "extra"),
    [
        (CHATML, PLAIN, None, {}),
        (CHATML, ODD, None, {}),
        (LLAMA2, ODD, None, {}),
        (TOOLS, ODD, None, {"enable_thinking": False}),
        (TOOLS, WITH_CALL, [TOOL], {}),
        (TOOLS, THOUGHT, [TOOL, TOOL], {"enable_thinking": True}),
        (PARTS, PLAIN, None, {}),
        (PARTS, [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}], None, {}),
        ("{{ documents }}|{{ tools }}|{{ unknown }}|{{ custom }}", PLAIN, None, {"custom": [1, {"a": True}]}),
        (FALLBACK_TEMPLATE, ODD, None, {}),
    ],
)
def test_renders_as_transformers(source, messages, tools, extra, add):
    assert ours(source, messages, tools, add, **extra) == theirs(source, messages, tools, add, **extra)


@pytest.mark.parametrize("source", [CHATML, LLAMA2, TOOLS, FALLBACK_TEMPLATE])
@pytest.mark.parametrize("text", ["Once upon", "Once upon ", " a\n"])
def test_continues_the_final_message_as_transformers(source, text):
    messages = [PLAIN[0], {"role": "assistant", "content": text}]
    got = ours(source, messages, add=False, go_on=True)
    assert got == theirs(source, messages, add=False, go_on=True)
    assert got.endswith(text.strip()) or got.endswith(text)


def test_messages_of_the_caller_are_left_alone():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *copy.deepcopy(WITH_CALL)]
    before = copy.deepcopy(messages)
    ours(TOOLS, messages, go_on=False)
    ours(PARTS, messages[:1], add=False, go_on=True)
    assert messages == before


def test_text_parts_become_one_string_where_the_template_takes_none():
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in ours(CHATML, [{"role": "user", "content": parts}])
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\] has a part of type 'image_url'.*text only") as caught:
        ours(CHATML, [{"role": "user", "content": image}])
    assert caught.value.param == "messages"


def test_arguments_in_json_text_become_objects():
    as_text = copy.deepcopy(WITH_CALL)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": [2, null]}'
    assert ours(TOOLS, as_text) == ours(TOOLS, WITH_CALL)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 5}], r"content is a int"),
        ([{"role": "user", "content": object()}], "not a JSON value"),
        ([PLAIN[1]], "chat template: roles must alternate"),
        ([{"role": "user"}], "chat template.*has no attribute"),
    ],
)
def test_bad_messages_are_typed_errors(messages, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours(LLAMA2, messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ messages[0].content.foo.bar }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"],
)
def test_failing_and_malicious_templates_are_typed_errors(source):
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        ours(source, PLAIN)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile():
    with pytest.raises(InvalidRequest, match="does not compile") as caught:
        ours("{% for %}", PLAIN)
    assert caught.value.param == "chat_template"


def test_contradicting_flags_and_dropped_text():
    with pytest.raises(InvalidRequest, match="exclude each other"):
        ours(CHATML, PLAIN, add=True, go_on=True)
    with pytest.raises(InvalidRequest, match="drops the last message"):
        ours("nothing", PLAIN, add=False, go_on=True)
    with pytest.raises(InvalidRequest, match="no text to continue"):
        ours(TOOLS, WITH_CALL[:2], add=False, go_on=True)
