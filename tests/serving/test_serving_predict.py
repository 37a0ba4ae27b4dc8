"""Every route and every kind of body, and answers equal to Python's."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import vitral
from serving.serverprocess import ServerProcess, running, serving
from vitral.inference.features import head_features
from vitral.inference.unknown import Detector
from vitral.serving import app
from vitral.serving.application import ENDPOINTS
from vitral.serving.server import address, bind
from vitral.workflows.unknown import save

PNG = {"Content-Type": "image/png"}


@pytest.fixture(scope="module")
def sky(write_run, tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "sky", seed=1)


@pytest.fixture(scope="module")
def server(sky):
    with serving("demo", str(sky), "--precision", "fp32") as process:
        yield process


@pytest.fixture(scope="module")
def predictor():
    return vitral.load("demo", precision="fp32")


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def probabilities(prediction: dict) -> np.ndarray:
    by_class = {one["class"]: one["probability"] for one in prediction["top"]}
    return np.array([by_class[name] for name in sorted(by_class)])


def expected(prediction: vitral.Prediction) -> np.ndarray:
    by_class = dict(zip(prediction.classes, prediction.probabilities, strict=True))
    return np.array([by_class[name] for name in sorted(by_class)])


BODIES = {
    "raw": lambda images: {"content": images[0][1], "headers": PNG},
    "octets": lambda images: {"content": images[0][1], "headers": {"Content-Type": "application/octet-stream"}},
    "multipart": lambda images: {"files": [("image", one) for one in images]},
    "multipart, images": lambda images: {"files": [("images", one) for one in images]},
    "json, one": lambda images: {"json": {"image": as_base64(images[0][1])}},
    "json, many": lambda images: {"json": {"images": [as_base64(data) for _, data in images]}},
    "json, named": lambda images: {
        "json": {"images": [{"name": name, "data": as_base64(data)} for name, data in images]}
    },
}


@pytest.mark.parametrize("kind", BODIES)
def test_each_kind_of_body_gives_the_answers_of_python(server, predictor, drawings, kind):
    images = list(drawings.items())[:3]
    answer = server.client.post("/v1/predict?top=10", **BODIES[kind](images))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["model"] == "demo"
    sent = images[:1] if kind in ("raw", "octets", "json, one") else images
    assert len(found["predictions"]) == len(sent)
    for one, wanted in zip(found["predictions"], predictor([data for _, data in sent]), strict=True):
        assert np.allclose(probabilities(one), expected(wanted), rtol=0, atol=1e-6)
        assert one["label"] == wanted.label
        assert [top["class"] for top in one["top"]] == [name for name, _ in wanted.top(10)]
    names = [one["image"] for one in found["predictions"]]
    named = kind.startswith("multipart") or kind == "json, named"
    assert names == ([name for name, _ in sent] if named else [f"image {i}" for i in range(len(sent))])


def test_more_images_than_a_batch_holds(server, predictor, drawings):
    images = [data for _ in range(2) for data in drawings.values()]
    found = server.client.post("/v1/predict?top=10", files=[("image", ("a", data)) for data in images]).json()
    for one, wanted in zip(found["predictions"], predictor(images), strict=True):
        assert np.allclose(probabilities(one), expected(wanted), rtol=0, atol=1e-6)


def test_requests_of_many_clients_share_batches(server, predictor, drawings):
    images, answers = list(drawings.values()) * 3, {}
    before = server.metric('vitral_batch_images_count{model="demo",task="predict"}')

    def ask(number: int) -> None:
        answers[number] = httpx.post(f"{server.url}/v1/predict?top=10", content=images[number], headers=PNG, timeout=60)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(images))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for number, wanted in enumerate(predictor(images)):
        assert np.allclose(probabilities(answers[number].json()["predictions"][0]), expected(wanted), atol=1e-6)
    batches = server.metric('vitral_batch_images_count{model="demo",task="predict"}') - before
    assert 1 <= batches <= len(images)


def test_parameters_in_query_json_and_multipart(server, drawings):
    image = drawings["ship.png"]
    for answer in (
        server.client.post("/v1/predict?top=2&model=demo", content=image, headers=PNG),
        server.client.post("/v1/predict", json={"image": as_base64(image), "top": 2, "model": "demo"}),
        server.client.post("/v1/predict", files={"image": image}, data={"top": "2", "model": "demo"}),
    ):
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["predictions"][0]["top"]) == 2


def test_a_second_model(server, sky, drawings):
    own = vitral.load(sky, precision="fp32")
    found = server.client.post("/v1/predict?model=sky&top=2", content=drawings["bird.png"], headers=PNG).json()
    assert found["model"] == "sky"
    assert np.allclose(probabilities(found["predictions"][0]), expected(own(drawings["bird.png"])), atol=1e-6)


def test_embeddings_are_what_the_head_reads(server, predictor, drawings):
    images = list(drawings.values())[:3]
    found = server.client.post("/v1/embed", files=[("image", ("a", data)) for data in images]).json()
    prepared = torch.stack([predictor.prepare(data) for data in images])
    wanted = head_features(predictor.model, prepared, predictor.preprocessing, predictor.machine)
    assert found["features"] == wanted.shape[1] == 64
    assert np.allclose([one["embedding"] for one in found["embeddings"]], wanted.numpy(), atol=1e-5)


def test_explanations_are_those_of_python(server, predictor, drawings):
    images = [drawings["ship.png"], drawings["dog.png"]]
    for method, target in (("default", None), ("legrad", "cat"), ("occlusion", None)):
        query = {"explain": method, **({"target": target} if target else {})}
        answer = server.client.post("/v1/predict", params=query, json={"images": [as_base64(one) for one in images]})
        assert answer.status_code == 200, answer.text
        wanted = vitral.explain(predictor, images, target, method=None if method == "default" else method)
        for one, heatmap in zip(answer.json()["predictions"], wanted, strict=True):
            explanation = one["explanation"]
            assert np.allclose(explanation["values"], heatmap.values, atol=1e-5)
            assert (explanation["label"], explanation["method"]) == (heatmap.label, heatmap.method)
            assert explanation["probability"] == pytest.approx(heatmap.probability, abs=1e-5)
            assert "overlay" not in explanation


def test_an_overlay_is_the_image_of_the_command_line(server, predictor, drawings):
    query = "/v1/predict?explain=default&overlay=true"
    explanation = server.client.post(query, content=drawings["ship.png"], headers=PNG).json()["predictions"][0][
        "explanation"
    ]
    drawn = Image.open(io.BytesIO(base64.b64decode(explanation["overlay"].partition(",")[2])))
    wanted = vitral.explain(predictor, drawings["ship.png"])[0].overlay()
    assert np.abs(np.asarray(drawn, int) - np.asarray(wanted, int)).max() <= 2
    assert Image.open(io.BytesIO(base64.b64decode(explanation["image"].partition(",")[2]))).size == drawn.size


def test_models(server, predictor):
    demo, sky = server.client.get("/v1/models").json()["models"]
    assert (demo["name"], sky["name"]) == ("demo", "sky")
    assert demo["classes"] == list(predictor.classes)
    assert demo["image_size"] == [32, 32]
    assert demo["parameters"] == sum(one.numel() for one in predictor.model.parameters())
    methods = {one["name"] for one in demo["methods"]}
    assert demo["methods"][0]["name"] == "fullgrad+"
    assert "rise" not in methods, "512 passes an image are over the limit"


def test_health_metrics_and_description(server):
    assert server.client.get("/healthz").json() == {"status": "ok"}
    assert server.client.get("/readyz").json()["models"] == ["demo", "sky"]
    text = server.client.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    assert 'vitral_model_info{engine="' in text.text
    described = server.client.get("/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    assert {path: {*found} for path, found in described["paths"].items()} == {
        path: {method.lower()} for path, (method, _) in ENDPOINTS.items()
    }
    guide = (Path(__file__).parents[2] / "docs/serve.md").read_text("utf-8")
    assert [path for path, (method, _) in ENDPOINTS.items() if f"`{method} {path}`" not in guide] == []
    text = json.dumps(described)
    for name in {part.split('"')[0] for part in text.split("#/components/")[1:]}:
        section, _, key = name.partition("/")
        assert key in described["components"][section], name
    docs = server.client.get("/docs").text
    assert "/v1/predict" in docs
    assert 'id="queue-full"' in docs


def test_request_ids_and_security_headers(server: ServerProcess):
    answer = server.client.get("/healthz", headers={"X-Request-ID": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    bad = server.client.get("/healthz", headers={"X-Request-ID": "a b\x7f<script>"})
    assert bad.headers["x-request-id"] != "a b\x7f<script>"
    for path in ("/", "/healthz", "/v1/models", "/nothing", "/docs"):
        headers = server.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "unsafe" not in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
    assert server.client.options("/v1/predict", headers={"Origin": "https://example.org"}).status_code == 405


def test_a_host_that_only_points_here_is_not_answered(server):
    answer = server.client.get("/v1/models", headers={"Host": "evil.example"})
    assert answer.status_code == 421
    assert answer.json()["type"] == "/docs#host-not-allowed"


def serve_by_uvicorn() -> int:
    """One's own deployment: the application in another server's hands."""
    with bind("127.0.0.1", 0) as bound:
        application = app({"mine": "demo"}, tokens=("0123456789abcdef",), precision="fp32")
        config = uvicorn.Config(application, log_level="error")
        bound.listen()
        print(f"Serving  {address(bound)}", file=sys.stderr, flush=True)
        uvicorn.Server(config).run([bound])
    return 0


def test_the_application_under_a_server_of_ones_own(predictor, drawings):
    with running(serve_by_uvicorn) as server:
        assert server.client.get("/v1/models").status_code == 401
        headers = {**PNG, "Authorization": "Bearer 0123456789abcdef"}
        found = server.client.post("/v1/predict?top=10", content=drawings["ship.png"], headers=headers).json()
        assert found["model"] == "mine"
        wanted = expected(predictor(drawings["ship.png"]))
        assert np.allclose(probabilities(found["predictions"][0]), wanted, atol=1e-6)


def test_an_answer_is_counted_before_it_arrives():
    application = app("demo", precision="fp32", device="cpu")
    counted = 'vitral_requests_total{method="GET",route="/healthz",status="200"} 1.0'
    found = []

    async def receive() -> dict:
        return {"type": "http.request"}

    async def send(message: dict) -> None:
        found.append((message["type"], counted in application.state.service.metrics.text().decode()))

    scope = {"type": "http", "method": "GET", "path": "/healthz", "headers": [(b"host", b"x")], "query_string": b""}
    asyncio.run(application(scope, receive, send))
    assert found == [("http.response.start", False), ("http.response.body", True)]
    assert counted in application.state.service.metrics.text().decode(), "once"


def test_answers_are_sent_without_delay():
    """If the socket does not say that it is TCP, asyncio leaves Nagle's algorithm on: 40 ms an answer."""
    with bind("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_the_log_has_a_line_for_each_request_and_nothing_of_images(server, drawings):
    server.client.post("/v1/predict?top=1", files={"image": ("secret-name.png", drawings["cat.png"])})
    assert server.logged("POST /v1/predict 200")
    assert "secret-name" not in server.log


def test_wrapped_base64_and_a_header_in_one_piece(drawings):
    wrapped = base64.encodebytes(drawings["cat.png"]).decode()
    assert "\n" in wrapped.strip()
    with TestClient(app("demo", precision="fp32", device="cpu"), base_url="http://localhost") as client:
        (found,) = client.post("/v1/predict", json={"image": wrapped}).json()["predictions"]
        assert found["label"] == "cat"
        assert client.get("/v1/models", headers={"X-Much": "a" * (16 << 10)}).status_code == 431


@pytest.mark.parametrize("way", ["mounted", "root path"])
def test_under_a_prefix_open_addresses_stay_open_and_the_others_closed(way):
    token = "0123456789abcdef0123"
    own = app("demo", precision="fp32", device="cpu", tokens=(token,))
    outer = Starlette(routes=[Mount("/m", app=own)], lifespan=lambda _: own.router.lifespan_context(own))
    client = TestClient(outer) if way == "mounted" else TestClient(own, root_path="/m")
    with client:
        for path in ("/", "/page.js", "/docs", "/openapi.json", "/healthz", "/readyz"):
            assert client.get(f"/m{path}").status_code == 200
        assert client.get("/m/v1/models").status_code == 401
        lines = client.get("/m/metrics", headers={"Authorization": f"Bearer {token}"}).text.splitlines()
    assert any('route="/healthz"' in line for line in lines)


def test_without_a_lifespan_it_says_so():
    client = TestClient(app("demo", precision="fp32", device="cpu"), base_url="http://localhost")
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "must run its lifespan" in answer.json()["detail"]


def test_images_of_no_known_class_are_answered_so(write_run, tmp_path):
    run = write_run(tmp_path / "sky", seed=1)
    save(run, Detector("energy", -1e9))
    drawing = io.BytesIO()
    Image.new("L", (8, 8), 90).save(drawing, "PNG")
    with TestClient(app(run, precision="fp32"), base_url="http://localhost") as client:
        (answer,) = client.post("/v1/predict", content=drawing.getvalue(), headers=PNG).json()["predictions"]
    assert (answer["label"], answer["unknown"]) == ("unknown", True)
