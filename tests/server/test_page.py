"""The chat page as a file: safe by construction, whole, reachable controls. (How it behaves needs a browser.)"""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from aengine.server.page import PAGE, content_security_policy

HTML = PAGE.read_text(encoding="utf-8")
SCRIPT = re.search(r"<script>(.*?)</script>", HTML, re.DOTALL).group(1)


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def elements():
    parser = Elements()
    parser.feed(HTML)
    return parser.found


@pytest.mark.parametrize(
    "id", ["prompt", "send", "stop", "messages", "stats", "status", "new-chat", "system", "temperature", "max-tokens"]
)
def test_control_is_there_once(elements, id):
    assert [attrs.get("id") for _, attrs in elements].count(id) == 1


def test_model_text_never_becomes_markup():
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert sink not in SCRIPT


def test_nothing_comes_from_elsewhere(elements):
    for tag, attrs in elements:
        assert tag not in ("iframe", "object", "embed", "base")
        assert "src" not in attrs
        assert attrs.get("href", "data:").startswith("data:")
        assert not [name for name in attrs if name.startswith("on") or name == "style"]
    assert not re.findall(r"fetch\(\"(?:https?:)?//", SCRIPT)
    assert "@import" not in HTML
    assert "url(" not in HTML.split("</style>")[0].split("<style>")[1]


def test_every_field_has_a_label(elements):
    labelled = {attrs["for"] for tag, attrs in elements if tag == "label"}
    for tag, attrs in elements:
        if tag in ("input", "textarea", "select"):
            assert attrs["id"] in labelled


def test_policy_allows_exactly_this_script_and_style():
    policy = dict(part.split(" ", 1) for part in content_security_policy(HTML).split("; "))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert policy["style-src"].startswith("'sha256-")
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    changed = content_security_policy(HTML.replace("use strict", "use  strict"))
    assert digest not in changed


def test_ids_the_script_asks_for_exist(elements):
    ids = {attrs.get("id") for _, attrs in elements}
    asked = set(re.findall(r"\$\(\"([a-z-]+)\"\)", SCRIPT))
    assert len(asked) > 10
    assert asked <= ids
