"""Refusals of the server: problems that say what to do, before anything large is read or computed."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import time
import zlib
from contextlib import nullcontext

import pytest
from PIL import Image
from starlette.datastructures import Headers

from serving.serverprocess import serving
from vitral.errors import MissingExtraError, UsageError
from vitral.serving import app, extra
from vitral.serving.auth import Access, check_binding, read_tokens
from vitral.serving.limits import Limits
from vitral.serving.models import named, self_test
from vitral.serving.problems import PROBLEMS, Problem

TOKEN = "a-token-of-24-characters"
OTHER = "0123456789abcdef0123456789abcdef"
PNG = {"Content-Type": "image/png"}


@pytest.fixture(scope="module")
def server(write_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "tokens").write_text(f"# for tests\n{OTHER}\n\n{TOKEN}\n")
    words = (
        "--token-file",
        str(folder / "tokens"),
        "--max-images",
        "3",
        "--max-body",
        "1",
        "--max-pixels",
        "1",
        "--log-format",
        "json",
    )
    with serving(str(write_run(folder / "sky", seed=1)), *words) as running:
        running.client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield running


def refused(answer, name: str) -> dict:
    """The problem, after checks of what every problem has."""
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"/docs#{name}", problem
    assert answer.status_code == problem["status"] == PROBLEMS[name].status
    assert problem["title"] == PROBLEMS[name].title
    assert problem["try"]
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert "Traceback" not in answer.text
    return problem


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is this large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def test_images_that_cannot_be_read(server, drawings):
    whole = drawings["cat.png"]
    large = io.BytesIO()
    Image.new("L", (1100, 1000)).save(large, "PNG")
    for data, why in (
        (whole[: len(whole) // 2], ""),
        (b"GIF89a" + b"\0" * 50, ""),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is an SVG drawing"),
        (b"/etc/passwd", "it is a text"),
        (bomb(100_000, 100_000), "pixels"),
        (large.getvalue(), "1100 × 1000 pixels; the limit is 1,000,000"),
    ):
        problem = refused(server.client.post("/v1/predict", content=data, headers=PNG), "unreadable-image")
        assert why in problem["errors"][0]["why"]
    files = [("image", ("good.png", whole)), ("image", ("bad.png", whole[:200]))]
    problem = refused(server.client.post("/v1/predict", files=files), "unreadable-image")
    assert [(one["index"], one["image"]) for one in problem["errors"]] == [(1, "bad.png")]
    assert server.client.post("/v1/embed", content=whole[:200], headers=PNG).status_code == 422


def test_too_much(server, drawings):
    image = drawings["cat.png"]
    for files in ([("image", image)] * 4, [("image", image)] * 400):
        assert refused(server.client.post("/v1/predict", files=files[:4]), "too-many-images")["limit"] == 3
    many = {"images": [base64.b64encode(image).decode()] * 4}
    refused(server.client.post("/v1/predict", json=many), "too-many-images")
    large = server.client.post("/v1/predict", content=b"\xff\xd8\xff" + bytes(1 << 20), headers=PNG)
    assert refused(large, "body-too-large")["limit"] == 1 << 20
    chunks = (bytes(1 << 16) for _ in range(40))  # no length in the header
    refused(server.client.post("/v1/predict", content=chunks, headers=PNG), "body-too-large")


def test_a_body_is_refused_before_it_is_read(server):
    head = (
        f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: image/png\r\n"
    )
    answer = raw(server, f"{head}Content-Length: 999999999999\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_who_sends_too_much_can_read_why(server, connection):
    """The rest of a body is thrown away, so that the connection is not reset; but not without an end."""
    head = f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\nContent-Type: image/png\r\n"
    for length, token, status in ((20 << 20, TOKEN, b"413"), (20 << 20, "wrong", b"401"), (1 << 40, TOKEN, None)):
        with connect(server) as client:
            client.sendall(f"{head}Authorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n".encode())
            try:
                for _ in range(min(length, 1 << 30) >> 20):
                    client.sendall(bytes(1 << 20))
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 %s " % status)
            except ConnectionError:
                assert status is None
    assert server.client.get("/healthz").status_code == 200


def test_who_asks_first_is_answered_at_once(server):
    head = f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nExpect: 100-continue\r\n"
    began = time.monotonic()
    answer = raw(server, f"{head}Content-Type: image/png\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert time.monotonic() - began < 1


def connect(server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), 20)


def raw(server, data: bytes) -> bytes:
    """Send bytes; return what comes until the server closes."""
    with connect(server) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    return found


def test_headers_that_are_too_large_and_what_is_not_http(server):
    huge = raw(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Fill: " + b"a" * 40_000)
    assert huge.startswith(b"HTTP/1.1 431 ")
    assert json.loads(huge.partition(b"\r\n\r\n")[2])["type"] == "/docs#headers-too-large"
    nonsense = raw(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    assert nonsense.startswith(b"HTTP/1.1 400 ")
    assert json.loads(nonsense.partition(b"\r\n\r\n")[2])["try"]


def test_bodies_that_make_no_sense(server, drawings):
    image = base64.b64encode(drawings["cat.png"]).decode()
    post = server.client.post
    as_json = {"Content-Type": "application/json"}
    multipart = {"Content-Type": "multipart/form-data; boundary=x"}
    for answer, why in (
        (post("/v1/predict", json={"image": "%%%"}), "base64"),
        (post("/v1/predict", json={"image": "data:image/png;base64," + image}), "base64"),
        (post("/v1/predict", json={"image": 3}), "base64"),
        (post("/v1/predict", json={"images": {"a": 1}}), "list"),
        (post("/v1/predict", json={"images": [{"path": "/etc/passwd"}]}), "'name' and 'data'"),
        (post("/v1/predict", json={"images": []}), "no image"),
        (post("/v1/predict", json={"image": image, "images": [image]}), "either"),
        (post("/v1/predict", json=[image]), "object"),
        (post("/v1/predict", content=b"[" * 5_000, headers=as_json), "deep"),
        (post("/v1/predict", content=b'{"image": NaN}', headers=as_json), "JSON"),
        (post("/v1/predict", content=b"\xff\xfe", headers=as_json), "JSON"),
        (post("/v1/predict", content=b"", headers=PNG), "empty"),
        (post("/v1/predict", content=b"nothing", headers=multipart), ""),
        (post("/v1/predict", content=b"x", headers={"Content-Type": "multipart/form-data"}), "boundary"),
        (post("/v1/predict", files={"photo": b"x"}), "'image'"),
        (post("/v1/predict", data={"image": "abc"}, files={"image": b"x"}), "must be a file"),
        (post("/v1/predict", json={"image": image, "top": "many"}), "'top'"),
        (post("/v1/predict", json={"image": image, "top": 0}), "'top'"),
        (post("/v1/predict", json={"image": image, "overlay": "perhaps"}), "'overlay'"),
        (post("/v1/predict", json={"image": image, "overlay": True}), "'overlay' has no effect without 'explain'"),
        (post("/v1/predict?target=cat", json={"image": image}), "'target' has no effect without 'explain'"),
        (post("/v1/predict?timeout=-1", json={"image": image}), "'timeout'"),
        (post("/v1/predict", json={"image": image, "timeout": 1}), "in the query"),
        (post("/v1/predict?top=1&top=2", json={"image": image}), "twice"),
        (post("/v1/predict?top=1", json={"image": image, "top": 1}), "query and in the body"),
    ):
        assert why in refused(answer, "bad-request")["detail"], why
    problem = refused(post("/v1/predict?tpo=3", content=drawings["cat.png"], headers=PNG), "unknown-parameter")
    assert problem["detail"].startswith("unknown parameter 'tpo'; nearest: top; known: explain, model, ")


def test_types_models_methods_and_paths_that_are_not_there(server, drawings):
    image, post = drawings["cat.png"], server.client.post
    refused(post("/v1/predict", content=image, headers={"Content-Type": "text/plain"}), "unsupported-type")
    refused(post("/v1/predict", content=image), "unsupported-type")
    refused(post("/v1/predict", content=image, headers={**PNG, "Content-Encoding": "gzip"}), "unsupported-type")
    assert refused(post("/v1/predict?model=ski", content=image, headers=PNG), "unknown-model")["models"] == ["sky"]
    problem = refused(post("/v1/predict?explain=lime", content=image, headers=PNG), "no-explanation")
    assert "legrad" in problem["methods"]
    refused(post("/v1/predict?explain=rise", content=image, headers=PNG), "no-explanation")
    problem = refused(post("/v1/predict?explain=legrad&target=dya", content=image, headers=PNG), "no-explanation")
    assert "day" in problem["detail"]
    assert problem["try"] == "list the methods and classes with GET /v1/models"
    for path in (
        "/nothing",
        "/v1/predict/",
        "/page.html",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page.css/x",
    ):
        refused(server.client.get(path), "not-found")
    allowed = server.client.get("/v1/predict")
    refused(allowed, "method-not-allowed")
    assert allowed.headers["allow"] == "POST"


def test_tokens(server, drawings):
    with_token = server.client.headers.pop("Authorization")
    try:
        for path in ("/v1/models", "/metrics", "/nothing"):
            answer = server.client.get(path)
            refused(answer, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in (f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer", "Bearer \xff"):
            headers = {"Authorization": wrong.encode("latin-1"), **PNG}
            answer = server.client.post("/v1/predict", content=drawings["cat.png"], headers=headers)
            refused(answer, "unauthorized")
        for path in ("/", "/page.js", "/docs", "/openapi.json", "/healthz", "/readyz"):
            assert server.client.get(path).status_code == 200
        for right in (TOKEN, OTHER):
            answer = server.client.get("/v1/models", headers={"Authorization": f"bearer {right}"})
            assert answer.status_code == 200
    finally:
        server.client.headers["Authorization"] = with_token
    assert TOKEN not in server.log
    assert server.client.get("/openapi.json").json()["components"]["securitySchemes"]


def test_other_sites(server, drawings):
    headers = {**PNG, "Sec-Fetch-Site": "cross-site", "Origin": "https://example.org"}
    refused(server.client.post("/v1/predict", content=drawings["cat.png"], headers=headers), "cross-site")


def test_the_log_is_json_on_demand(server):
    server.client.get("/v1/models", headers={"X-Request-ID": "look-for-me"})
    assert server.logged("look-for-me")
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    found = next(line for line in lines if line.get("request_id") == "look-for-me")
    assert found["message"] == "GET /v1/models 200"
    assert {"time", "level", "ms", "client"} <= found.keys()
    assert server.metric('vitral_requests_total{method="GET",route="/v1/models",status="200"}') >= 1


@pytest.mark.slow
def test_a_slow_body_is_given_up(server):
    head = f"POST /v1/predict?timeout=0.3 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    began = time.monotonic()
    answer = raw(server, f"{head}Content-Length: 1000\r\n\r\nabc".encode())
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 10


def test_without_a_token_only_names_of_this_machine_are_answered():
    for host, answered in (
        ("localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("", False),
        ("127.0.0.1.nip.io", False),
        ("localhost.evil.example:8000", False),
    ):
        with nullcontext() if answered else pytest.raises(Problem, match="host-not-allowed"):
            Access(local=True).check_host(Headers({"host": host}))
        Access().check_host(Headers({"host": host}))
        Access((TOKEN,), local=True).check_host(Headers({"host": host}))


def test_binding():
    check_binding("127.0.0.1", (), no_auth=False)
    check_binding("::1", (), no_auth=False)
    check_binding("localhost", (), no_auth=False)
    check_binding("0.0.0.0", (TOKEN,), no_auth=False)
    check_binding("0.0.0.0", (), no_auth=True)
    for host in ("0.0.0.0", "::", "192.168.1.5", "box.example"):
        with pytest.raises(UsageError, match="needs a token"):
            check_binding(host, (), no_auth=False)
    with pytest.raises(UsageError, match="contradicts"):
        check_binding("127.0.0.1", (TOKEN,), no_auth=True)


def test_token_files(tmp_path):
    file = tmp_path / "tokens"
    assert read_tokens(None, {}) == ()
    assert read_tokens(None, {"VITRAL_TOKEN": TOKEN}) == (TOKEN,)
    assert read_tokens(None, {"VITRAL_TOKEN": f"{TOKEN}\n"}) == (TOKEN,), "as from a file of a secret"
    for text, words in (("short\n", "too short"), ("# none\n", "no token"), ("two words in one line\n", "too short")):
        file.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_tokens(file, {})
    with pytest.raises(UsageError, match="cannot be read"):
        read_tokens(tmp_path / "absent", {})


def test_names_of_models():
    assert named(["runs/photos", "demo", "timm:vit_small_patch16_224.x", "b=runs/photos/"]) == {
        "photos": "runs/photos",
        "demo": "demo",
        "vit_small_patch16_224.x": "timm:vit_small_patch16_224.x",
        "b": "runs/photos/",
    }
    for wrong, words in ((["a/x", "b/x"], "two models"), (["runs/with space"], "cannot be the name"), ([], "no model")):
        with pytest.raises(UsageError, match=words):
            named(wrong)


def test_limits_that_contradict_each_other():
    for wrong in ({"images": 0}, {"images": 9, "queue": 8}, {"pixels": 1 << 40}, {"batch_wait": 5}, {"timeout": -1}):
        with pytest.raises(UsageError):
            Limits(**wrong)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(extra.PACKAGES, "no_such_module", "no-such-package")
    with pytest.raises(MissingExtraError, match=r"no-such-package\n.*vitral\[serve\]"):
        app("demo")


def test_the_command_line_refuses_before_it_loads(capsys, monkeypatch):
    from vitral.cli.main import main

    monkeypatch.delenv("VITRAL_TOKEN", raising=False)
    for words, message in (
        (["serve"], "no model to serve"),
        (["serve", "demo", "--host", "0.0.0.0"], "needs a token"),
        (["serve", "demo", "--batch-size", "0"], "batch_size must be above 0"),
        (["serve", "no-such-run"], "no-such-run"),
        (["serve", "demo", "--port", "99999"], "--port is from 0 to 65535, not 99999"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "demo", "--port", str(taken.getsockname()[1])]) == 2
        assert "cannot listen" in capsys.readouterr().err
    assert main(["serve", "demo", "--host", "no.such.host.invalid", "--no-auth"]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_a_network_that_fails_its_self_test(monkeypatch):
    import vitral
    from vitral.errors import WeightsError

    predictor = vitral.load("demo", precision="fp32", engine="plain")
    predictor.model.head.bias.data[3] = float("nan")
    with pytest.raises(WeightsError, match="not finite"):
        self_test(predictor)
