"""A small server on this machine that huggingface_hub takes for the hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest
from huggingface_hub import constants

FIRST, SECOND = "1" * 40, "2" * 40


class Hub:
    """State of the server: repository → its commits, newest last, each with its files; and the requests received."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refuse: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []
        self.body = b"{}"

    def answer(self, url: str) -> tuple[int, dict[str, str], bytes]:
        path = urlparse(url).path.strip("/").split("/")
        if path == ["api", "models"]:
            author = parse_qs(urlparse(url).query)["author"][0]
            return 200, {}, json.dumps([{"id": name} for name in self.commits if name.startswith(author)]).encode()
        api = path[:2] == ["api", "models"]
        name = "/".join(path[2:4] if api else path[:2])
        rest = path[4:] if api else path[2:]
        if name in self.refuse:
            return self.refuse[name][0], {"X-Error-Code": self.refuse[name][1]}, self.body
        if name not in self.commits:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commits = self.commits[name]
        wanted = rest[1] if len(rest) > 1 else "main"
        sha = list(commits)[-1] if wanted == "main" else wanted
        if sha not in commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        return self.of_commit(name, sha, rest, api)

    def of_commit(self, name: str, sha: str, rest: list[str], api: bool) -> tuple[int, dict[str, str], bytes]:
        files = self.commits[name][sha]
        if api and rest[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            return 200, {}, json.dumps(listed).encode()
        if api:
            siblings = [{"rfilename": file} for file in files]
            return 200, {}, json.dumps({"id": name, "sha": sha, "siblings": siblings}).encode()
        data = files[rest[2]]
        return 200, {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data


@contextlib.contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without models, at the place where huggingface_hub looks for the real one."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path)
            if status == 200 and (part := re.fullmatch(r"bytes=0-(\d+)", self.headers.get("Range", ""))):
                headers = {**headers, "Content-Range": f"bytes 0-{min(int(part[1]), len(body) - 1)}/{len(body)}"}
                status, body = 206, body[: int(part[1]) + 1]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the standard library looks for this name

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    point_at(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Set the endpoint as HF_ENDPOINT does, which is read when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
