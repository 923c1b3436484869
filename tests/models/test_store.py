"""The model store: packaged models through the real pip on a local folder of wheels, local paths, the hub cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aengine.errors import ModelLoadError, ModelNotFound
from aengine.models import hub, packaged
from aengine.models.packaged import PACKAGED, PackagedModel, PackagedWheel, fetch_packaged
from aengine.models.store import resolve

PARTS = (b"GGUF" + b"a" * 3_000_000, b"b" * 1_000_000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, number: int, data: bytes) -> Path:
    path = folder / f"tiny_model_part{number}-1.0-py3-none-any.whl"
    info = f"tiny_model_part{number}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny_model_part{number}/part", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model-part{number}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> list[Path]:
    """Two wheels in a folder that pip takes for its only source."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return [make_wheel(folder, number, data) for number, data in enumerate(PARTS)]


@pytest.fixture
def model(wheels) -> PackagedModel:
    return PackagedModel(
        name="tiny",
        file="tiny.gguf",
        wheels=tuple(
            PackagedWheel(
                requirement=f"tiny-model-part{number}==1.0",
                sha256=sha256(path.read_bytes()),
                member=f"tiny_model_part{number}/part",
                n_bytes=path.stat().st_size,
            )
            for number, path in enumerate(wheels)
        ),
        sha256=sha256(b"".join(PARTS)),
        n_bytes=sum(map(len, PARTS)),
    )


def change(model: PackagedModel, **values) -> PackagedModel:
    return PackagedModel(**{name: getattr(model, name) for name in PackagedModel.__slots__} | values)


def leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("*") if path.is_file() and path.name != ".lock")


def test_parts_are_fetched_verified_and_joined(model, tmp_path):
    calls = []
    path = fetch_packaged(model, tmp_path / "home", lambda *args: calls.append(args))
    assert path == tmp_path / "home/models/tiny/tiny.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert leftovers(tmp_path / "home") == ["tiny.gguf"]
    whats = list(dict.fromkeys(what for what, _, _ in calls))
    assert whats == ["download tiny-model-part0==1.0", "download tiny-model-part1==1.0", "extract tiny.gguf"]
    assert all(0 <= done <= total for _, done, total in calls)
    assert calls[-1] == ("extract tiny.gguf", model.n_bytes, model.n_bytes)


def test_a_second_start_fetches_nothing(model, tmp_path, monkeypatch):
    fetch_packaged(model, tmp_path)
    monkeypatch.setattr(packaged, "_pip_download", lambda *args: pytest.fail("downloaded again"))
    assert fetch_packaged(model, tmp_path).stat().st_size == model.n_bytes


def test_wrong_wheel_hash_leaves_nothing(model, tmp_path):
    bad = PackagedWheel(model.wheels[1].requirement, "0" * 64, model.wheels[1].member, 1)
    with pytest.raises(ModelLoadError, match=f"{model.wheels[1].sha256}, pinned is {'0' * 64}"):
        fetch_packaged(change(model, wheels=(model.wheels[0], bad)), tmp_path)
    assert not (tmp_path / "models/tiny/tiny.gguf").exists()
    assert leftovers(tmp_path / "models") == []


def test_wrong_model_hash_leaves_nothing(model, tmp_path):
    with pytest.raises(ModelLoadError, match=f"{model.sha256}, pinned is {'1' * 64}"):
        fetch_packaged(change(model, sha256="1" * 64), tmp_path)
    assert leftovers(tmp_path / "models") == []


def test_missing_member_is_named(model, tmp_path):
    wheel = model.wheels[0]
    bad = PackagedWheel(wheel.requirement, wheel.sha256, "nowhere", wheel.n_bytes)
    with pytest.raises(ModelLoadError, match="nowhere cannot be read"):
        fetch_packaged(change(model, wheels=(bad,)), tmp_path)


def test_an_interrupted_fetch_goes_on_where_it_stopped(model, wheels, tmp_path):
    kept = wheels[1].rename(wheels[1].with_suffix(".hidden"))
    with pytest.raises(ModelLoadError, match=r"(?s)part1==1\.0 ended with code 1.*No matching distr"):
        fetch_packaged(model, tmp_path)
    kept.rename(wheels[1])
    wheels[0].unlink()  # the first part is not fetched again
    assert fetch_packaged(model, tmp_path).read_bytes() == b"".join(PARTS)


def test_a_fetch_that_is_stopped_leaves_nothing(model, tmp_path):
    """By Ctrl-C or by who is told its progress: while the second part is fetched, and while the parts are joined."""
    for moment, stop in (("download tiny-model-part1==1.0", KeyboardInterrupt), ("extract tiny.gguf", RuntimeError)):

        def report(what, done, total, moment=moment, stop=stop):
            if what == moment:
                raise stop

        with pytest.raises(stop):
            fetch_packaged(model, tmp_path / "home", report)
        assert leftovers(tmp_path / "home") == []


def test_a_truncated_model_file_is_fetched_again(model, tmp_path):
    path = fetch_packaged(model, tmp_path)
    path.write_bytes(b"GGUF")
    assert fetch_packaged(model, tmp_path).stat().st_size == model.n_bytes


def test_two_starts_do_not_collide(model, tmp_path, monkeypatch):
    real, running, most = packaged._pip_download, [], []

    def watched(*args):
        running.append(1)
        most.append(len(running))
        real(*args)
        running.pop()

    monkeypatch.setattr(packaged, "_pip_download", watched)
    results = []
    threads = [threading.Thread(target=lambda: results.append(fetch_packaged(model, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert most == [1, 1]  # one start fetched both parts, the others waited


def test_registry_pins_are_complete():
    assert set(PACKAGED) == {"smollm2-135m", "gemma3-270m"}
    for name, model in PACKAGED.items():
        assert model.name == name
        assert model.file.endswith(".gguf")
        assert len(model.sha256) == 64
        for wheel in model.wheels:
            assert len(wheel.sha256) == 64
            assert "==" in wheel.requirement
    assert [wheel.member[-2:] for wheel in PACKAGED["gemma3-270m"].wheels] == ["00", "01", "02", "03"]


def test_packaged_names_come_first(model, tmp_path, monkeypatch):
    monkeypatch.setattr("aengine.models.store.PACKAGED", {"tiny": model})
    files = resolve("tiny", home=tmp_path)
    assert (files.kind, files.name, files.path.name) == ("gguf", "tiny", "tiny.gguf")


def test_local_paths(tmp_path):
    folder = tmp_path / "My-Model"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json and no \.gguf file"):
        resolve(str(folder), home=tmp_path)
    (folder / "a.gguf").touch()
    files = resolve(str(folder), home=tmp_path)
    assert (files.kind, files.path, files.name) == ("gguf", folder / "a.gguf", "a")
    (folder / "b.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"2 \.gguf files \(a\.gguf, b\.gguf\): name one"):
        resolve(str(folder), home=tmp_path)
    assert resolve(str(folder / "b.gguf"), home=tmp_path).name == "b"
    (folder / "config.json").write_text("{}")
    files = resolve(str(folder), home=tmp_path)
    assert (files.kind, files.path, files.name) == ("hf", folder, "My-Model")
    (folder / "notes.txt").touch()
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve(str(folder / "notes.txt"), home=tmp_path)


@pytest.mark.parametrize("source", ["/no/such/folder", "./model.gguf", "owner/name/extra", "bad name", ""])
def test_what_cannot_be_a_hub_id_is_refused_at_once(source, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "download_snapshot", lambda *args: pytest.fail("asked the hub"))
    if source == "":  # the current folder, which is no model
        with pytest.raises(ModelNotFound):
            resolve(source, home=tmp_path)
        return
    with pytest.raises(ModelNotFound, match=r"(?s)packaged models: smollm2-135m.*a file or folder.*a hub id"):
        resolve(source, home=tmp_path)


SCRIPT = """
import json, sys, time
from pathlib import Path
from aengine.errors import AengineError
from aengine.models.store import resolve
calls, start = [], time.perf_counter()
try:
    files = resolve(sys.argv[1], home=Path(sys.argv[2]), progress=lambda *args: calls.append(args))
    out = {"kind": files.kind, "path": str(files.path), "name": files.name}
except AengineError as error:
    out = {"error": type(error).__name__, "message": error.message}
print(json.dumps(out | {"calls": calls, "seconds": time.perf_counter() - start}))
"""


def in_subprocess(source: str, home: Path, **environment: str) -> dict:
    """The hub library reads its variables when it is imported, so each setting needs a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, source, str(home)],
        env={**os.environ, "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def cached_repo(home: Path, *, shards: int, missing: int = 0) -> Path:
    repo = home / "hub/models--owner--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    names = [f"model-{index}.safetensors" for index in range(shards)]
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: name for name in names}}))
    for name in names[missing:]:
        (snapshot / name).touch()
    return snapshot


def test_a_cached_hub_model_needs_no_network(tmp_path):
    snapshot = cached_repo(tmp_path, shards=2)
    found = in_subprocess("owner/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert (found["kind"], found["path"], found["name"]) == ("hf", str(snapshot), "owner/name")


def test_offline_is_honoured_and_an_incomplete_snapshot_not_used(tmp_path):
    cached_repo(tmp_path, shards=2, missing=1)
    found = in_subprocess("owner/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert found["error"] == "ModelNotFound"
    for place in ("packaged models: smollm2-135m", "a file or folder", "no complete snapshot of owner/name", "OFFLINE"):
        assert place in found["message"]


def test_an_unreachable_hub_is_reported_within_seconds(tmp_path):
    found = in_subprocess("owner/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert found["error"] == "ModelNotFound"
    assert "the hub could not be reached" in found["message"]
    assert found["seconds"] < 10


REPO = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": b"x" * 200_000,
    "README.md": b"no",
    "a.bin": b"no",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a snapshot needs."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        file = re.fullmatch(r"/owner/name/resolve/\w+/(.+)", self.path)
        if file and file[1] in REPO:
            self.send(200, REPO[file[1]], {"ETag": f'"{sha256(REPO[file[1]])}"', "X-Repo-Commit": "b" * 40})
        elif re.match(r"/api/models/owner/name/tree/", self.path):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "c" * 40} for name, data in REPO.items()]
            self.send(200, json.dumps(tree).encode())
        elif re.fullmatch(r"/api/models/owner/name(/revision/\w+)?(\?.*)?", self.path):
            files = [{"rfilename": name} for name in REPO]
            self.send(200, json.dumps({"id": "owner/name", "sha": "b" * 40, "siblings": files}).encode())
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        """Quiet."""


@pytest.fixture
def hub_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_model_is_downloaded_with_progress(tmp_path, hub_url):
    settings = {"HF_ENDPOINT": hub_url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    found = in_subprocess("owner/name", tmp_path, **settings)
    assert found.get("kind") == "hf", found
    assert sorted(path.name for path in Path(found["path"]).iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    whats, done, total = zip(*found["calls"], strict=True)
    assert set(whats) == {"download owner/name"}
    assert done[-1] == total[-1] == 200_004
    again = in_subprocess("owner/name", tmp_path, **settings | {"HF_HUB_OFFLINE": "1"})
    assert again["path"] == found["path"]
    assert again["calls"] == []


def test_an_unknown_hub_model_is_not_found(tmp_path, hub_url):
    found = in_subprocess("owner/other", tmp_path, HF_ENDPOINT=hub_url, HF_HUB_OFFLINE="0")
    assert found["error"] == "ModelNotFound"
    assert "the hub has no such repository" in found["message"]


def test_loading_needs_neither_transformers_nor_the_hub_library():
    script = (
        "import sys, aengine.models.loader; print([m for m in ('transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "[]"
