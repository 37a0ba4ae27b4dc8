"""Requests from the API's description, by schemathesis, and with random damage: no 5xx but 503.

VITRAL_SOAK=1 sends 100,000 damaged requests.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from running import soak
from serving.serverprocess import ServerProcess, eventually, serving

TOKEN = "a-token-of-24-characters"
HERE = Path(__file__).parent
STATUSES = ["400", "401", "403", "404", "405", "406", "413", "415", "422"]
"""Right answers to a request that the schema excludes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokens = tmp_path_factory.mktemp("fuzz") / "tokens"
    tokens.write_text(TOKEN)
    with serving("demo", "--precision", "fp32", "--token-file", str(tokens)) as running:
        running.client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield running


@pytest.mark.slow
def test_the_server_is_as_its_description_says(server, tmp_path):
    """All checks of schemathesis: statuses, headers, schemas, what must be refused and accepted, and the token.

    Requests that the schema excludes come from its phase "coverage" alone: "fuzzing" sends one file in place of a list
    of files, which is the same multipart body, and expects a refusal.
    """
    pytest.importorskip("schemathesis", reason="needs schemathesis")
    listed = ", ".join(f'"{one}"' for one in STATUSES)
    (tmp_path / "all.toml").write_text(
        f"[checks.negative_data_rejection]\nexpected-statuses = [{listed}]\n"
        '[phases.fuzzing]\ngeneration = { mode = "positive" }\n'
    )
    words = ["--config-file", "all.toml", "run", f"{server.url}/openapi.json", "--checks", "all", "--seed", "1"]
    words += ["--max-examples", "20", "--continue-on-failure", "--no-color", "-H", f"Authorization: Bearer {TOKEN}"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *words],
        cwd=tmp_path,
        env=environment,
        text=True,
        timeout=220,
        capture_output=True,
    )
    assert done.returncode == 0, "\n".join(line[:300] for line in (done.stdout + done.stderr).splitlines())


def requests(image: bytes) -> list[bytes]:
    """Requests that are right, to be damaged."""
    head = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"

    def post(path: str, kind: str, body: bytes) -> bytes:
        length = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return f"POST {path} HTTP/1.1\r\n{head}{length}".encode() + body

    part = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + image + b"\r\n--x--\r\n"
    chunked = f"POST /v1/predict HTTP/1.1\r\n{head}Content-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [
        post("/v1/predict?top=3&explain=default", "image/png", image),
        post("/v1/predict", "multipart/form-data; boundary=x", part),
        post("/v1/embed?timeout=20", "application/json", json.dumps({"images": ["iVBORw0KGgo="]}).encode()),
        chunked.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(image), image),
        *(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode() for path in ("/", "/v1/models", "/metrics", "/docs")),
    ]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Data with some bytes changed, repeated, moved or cut, mostly in the header."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        end = len(changed) if chance.random() < 0.3 else min(len(changed), 300)
        at = chance.randrange(max(1, end))
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[at : at + chance.randrange(1, 20)]
            case 2:
                changed[at:at] = changed[at : at + chance.randrange(1, 40)] * chance.choice((1, 3))
            case 3:
                changed[at:at] = chance.choice((b"\r\n", b"\0", b"%00", b"\xff", b"../", b"9" * 30, b"-1", b"&a=" * 9))
            case 4:
                del changed[at:]
    return bytes(changed)


def status(server: ServerProcess, data: bytes) -> int | None:
    """The status of the answer; None if the server closes without one, or waits for the rest."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(0.5)
            answer = connection.recv(1 << 16)
        except (ConnectionError, TimeoutError):
            return None
    return int(answer[9:12]) if answer else None


@pytest.mark.slow
def test_damaged_requests(server, drawings):
    count = soak(100_000, 500)
    chance = random.Random(count)
    whole = requests(drawings["ship.png"])
    sent = [damaged(chance.choice(whole), chance) for _ in range(count)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda data: status(server, data), sent))
    assert not [one for one in found if one is not None and one >= 500 and one != 503], server.log[-3000:]
    assert {200, 400, 401} <= set(found)
    assert "Traceback" not in server.log
    assert eventually(lambda: server.metric("vitral_requests_in_flight") == 1)
    answer = server.client.post("/v1/predict", content=drawings["ship.png"], headers={"Content-Type": "image/png"})
    assert answer.status_code == 200
