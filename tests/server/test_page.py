"""The chat page as files: served, safe by construction, whole. (How it behaves needs a browser: tests/e2e.)"""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser

import pytest

from aengine.server.page import POLICY, STATIC, read_files

FILES = read_files()
PAGES = {"/": "index.html", "/trace": "trace.html"}
OWN = {name: file.body.decode() for name, file in FILES.items() if not name.startswith("vendor/")}
SCRIPTS = {name: text for name, text in OWN.items() if name.endswith(".js")}
SINKS = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def elements():
    parser = Elements()
    for name in PAGES.values():
        parser.feed(FILES[name].body.decode())
    return parser.found


async def test_every_file_is_served_without_a_key(serve):
    client, _ = await serve(api_key="secret")
    assert (await client.get("/v1/models")).status == 401
    for name, file in FILES.items():
        response = await client.get("/" if name == "index.html" else f"/static/{name}")
        assert (response.status, response.headers["Content-Type"]) == (200, file.type)
        assert await response.read() == file.body
        assert response.headers["Content-Security-Policy"] == POLICY
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    for path, name in PAGES.items():
        page = await client.get(path)
        assert (page.status, await page.read()) == (200, FILES[name].body)
        assert (await client.head(path)).status == 200


async def test_a_known_file_is_not_sent_again(serve):
    client, _ = await serve()
    etag = (await client.get("/static/main.js")).headers["ETag"]
    again = await client.get("/static/main.js", headers={"If-None-Match": etag})
    assert (again.status, await again.read()) == (304, b"")


@pytest.mark.parametrize("path", ["nothing.js", "%2e%2e%2fpage.py", "vendor/", "vendor"])
async def test_nothing_else_is_there(serve, envelope, path):
    client, _ = await serve()
    await envelope(await client.get(f"/static/{path}"), 404)


def test_the_policy_allows_no_inline_code_and_no_other_host():
    policy = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in POLICY


@pytest.mark.parametrize("name", SCRIPTS)
def test_markup_comes_from_the_sanitiser_alone(name):
    assert [sink for sink in SINKS if sink in SCRIPTS[name]] == []


def test_nothing_comes_from_elsewhere(elements):
    for tag, attrs in elements:
        assert tag not in ("iframe", "object", "embed", "base", "style")
        for place in ("src", "href"):
            assert attrs.get(place, "static/").startswith(("static/", "#"))
        assert not [name for name in attrs if name.startswith("on") or name == "style"]
    for name in PAGES.values():
        assert not re.search(r"<script[^>]*>[^<]", FILES[name].body.decode())
    for name, text in OWN.items():
        assert not re.search(r"url\(|@import", text), name
        assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}, name


def test_what_is_asked_for_exists(elements):
    ids = {attrs.get("id") for _, attrs in elements}
    for _, attrs in elements:
        for place in ("src", "href"):
            path = attrs.get(place, "")
            assert not path.startswith("static/") or path.removeprefix("static/") in FILES
    for name, text in SCRIPTS.items():
        assert set(re.findall(r"\$\(\"([\w-]+)\"\)", text)) <= ids, name
        imports = re.findall(r"(?:from|import) \"([^\"]+)\"", text)
        assert {path.removeprefix("./") for path in imports} <= set(FILES), name
        drawings = re.findall(r"icon(?:Button)?\(\"(\w+)\"", text)
        assert {f"i-{drawing}" for drawing in drawings} <= ids, name


def test_every_field_and_button_has_a_name(elements):
    labelled = {attrs["for"] for tag, attrs in elements if tag == "label"}
    for tag, attrs in elements:
        if tag in ("input", "textarea", "select"):
            assert attrs["id"] in labelled
        if tag == "button" and "icon" in attrs.get("class", "").split():
            assert attrs["aria-label"]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_the_edges_of_fields_stand_out(scheme):
    """As WCAG 2 asks at level AA: 4.5 for text, 3 for what shows where a field is or how a server does."""
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", OWN["base.css"])
    colours = {name: pair[scheme] for name, *pair in pairs}
    grounds = ("paper", "side", "raised", "mine", "code")
    text = [("ink", ground) for ground in grounds] + [("soft", ground) for ground in grounds]
    text += [("accent", "paper"), ("on-accent", "accent"), ("bad", "paper"), ("bad", "bad-paper")]
    parts = [("edge", "paper"), ("edge", "raised"), ("edge", "side")]
    parts += [("good", "paper"), ("wait", "paper"), ("accent", "raised")]
    for least, tried in ((4.5, text), (3, parts)):
        for front, ground in tried:
            assert contrast(colours[front], colours[ground]) >= least, (front, ground)
    assert "::placeholder { color: var(--soft); opacity: 1; }" in OWN["base.css"]


def test_files_are_small_enough_to_read():
    for name, text in OWN.items():
        assert text.count("\n") < 400, name


def test_vendored_files_are_the_ones_named_and_have_licences():
    vendor = STATIC / "vendor"
    rows = re.findall(
        r"^\| (\S+\.js) \| \S+ \| (\S+) \| .*\((\S+)\) \| (\w{64}) \|$", (vendor / "README.md").read_text(), re.M
    )
    assert {name for name, *_ in rows} == {path.name for path in vendor.glob("*.js")}
    for name, version, licence, digest in rows:
        body = (vendor / name).read_bytes()
        assert hashlib.sha256(body).hexdigest() == digest
        assert version.encode() in body[:400]
        assert (vendor / licence).exists()
