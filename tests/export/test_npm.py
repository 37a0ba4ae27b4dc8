"""Packages of npm: pinned bytes or nothing, from the registry of the environment, a file, or the cache."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from npmpackages import packed
from vitral.errors import MissingExtraError, UsageError
from vitral.export import export_model, npm
from vitral.folders import cache_folder

PACKAGE, DATA = packed("thing", {"package/dist/a.js": b"one", "package/b.js": b"two"})


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def registry(monkeypatch):
    """A registry with `PACKAGE`; `sent` is what it sends, `asked` the paths that were asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        sent = DATA
        asked: ClassVar[list[str]] = []
        address = ""

        def do_GET(self) -> None:
            self.asked.append(self.path)
            self.send_response(200 if self.sent else 404)
            self.end_headers()
            self.wfile.write(self.sent)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Handler.address = f"http://127.0.0.1:{server.server_port}/npm/"
    monkeypatch.setenv("npm_config_registry", Handler.address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield Handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_archive_is_fetched_once(registry):
    first = npm.archive(PACKAGE)
    assert first.read_bytes() == DATA
    assert npm.archive(PACKAGE) == first == cache_folder("npm") / "thing-1.2.3.tgz"
    assert registry.asked == ["/npm/thing/-/thing-1.2.3.tgz"]
    assert npm.members(first, ["package/dist/a.js"]) == {"package/dist/a.js": b"one"}


def test_a_damaged_archive_in_the_cache_is_fetched_again(registry):
    npm.archive(PACKAGE).write_bytes(DATA[:-1] + b"x")
    assert npm.archive(PACKAGE).read_bytes() == DATA


@pytest.mark.parametrize("sent", [DATA[:-1], DATA + b"x", DATA[:-1] + b"x", b""], ids=["short", "long", "other", "404"])
def test_other_bytes_are_refused(registry, sent):
    registry.sent = sent
    with pytest.raises(MissingExtraError, match=r"(?s)thing-1.2.3.tgz cannot be fetched.*--runtime thing-1.2.3.tgz"):
        npm.archive(PACKAGE)
    assert not list(cache_folder("npm").iterdir())


def test_an_endless_answer_is_cut_off(registry):
    registry.sent = b"x" * (8 << 20)
    with pytest.raises(MissingExtraError, match="another hash"):
        npm.archive(PACKAGE)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/", "file:///etc/"])
def test_a_registry_that_cannot_be_reached_is_named(address, monkeypatch):
    monkeypatch.setenv("npm_config_registry", address)
    with pytest.raises(MissingExtraError, match="cannot be fetched") as caught:
        npm.archive(PACKAGE)
    assert address.rstrip("/") in str(caught.value)


@pytest.fixture
def no_environment(monkeypatch):
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        monkeypatch.delenv(name, raising=False)


def test_the_default_registry_is_that_of_npm(registry, monkeypatch, tmp_path):
    monkeypatch.delenv("npm_config_registry")
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$*" = "config get registry" ] && echo {registry.address}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert npm.archive(PACKAGE).read_bytes() == DATA
    assert registry.asked == ["/npm/thing/-/thing-1.2.3.tgz"]


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(("program", "why"), [(None, "npm is not installed"), ("exit 3", "does not name its registry")])
def test_without_a_registry_the_way_out_is_named(monkeypatch, tmp_path, program, why):
    if program:
        (tmp_path / "npm").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match=f"(?s){why}.*--runtime thing-1.2.3.tgz"):
        npm.archive(PACKAGE)
    assert not list(tmp_path.glob("cache/**/*.tgz"))


def test_a_file_takes_the_place_of_the_registry(tmp_path):
    (tmp_path / "mine.tgz").write_bytes(DATA)
    assert npm.archive(PACKAGE, tmp_path / "mine.tgz") == tmp_path / "mine.tgz"
    (tmp_path / "mine.tgz").write_bytes(b"other")
    for name, why in (("mine.tgz", "its bytes are not those of thing 1.2.3"), ("none.tgz", "no such file")):
        with pytest.raises(UsageError, match=why):
            npm.archive(PACKAGE, tmp_path / name)


def test_a_missing_member_is_named(tmp_path):
    Path(tmp_path / "it.tgz").write_bytes(DATA)
    with pytest.raises(MissingExtraError, match=r"it has no package/c\.js"):
        npm.members(tmp_path / "it.tgz", ["package/b.js", "package/c.js"])


def test_an_export_says_what_it_cannot_fetch(tmp_path, monkeypatch):
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    with pytest.raises(MissingExtraError, match=r"onnxruntime-web-\d.*cannot be fetched"):
        export_model("demo", "web", out=tmp_path / "site")
    assert not (tmp_path / "site").exists()
