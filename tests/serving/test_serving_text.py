"""A network that reads text behind the server: texts with confidences, shared batches, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io

import numpy as np
import pytest
from starlette.testclient import TestClient

import vitral
from textlines import draw, write_reader
from vitral.errors import WeightsError
from vitral.explanation.texts import explain_texts
from vitral.inference.inputs import Item
from vitral.serving import app
from vitral.serving.decoding import Decoder
from vitral.serving.limits import Limits
from vitral.serving.metrics import Metrics
from vitral.serving.models import TextModel, load_checked

LINES = ("a", "b", "ab", "ba", "aab", "bbb")
PNG = {"Content-Type": "image/png"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return str(write_reader(tmp_path_factory.mktemp("weights") / "reader.safetensors"))


@pytest.fixture(scope="module")
def client(reader):
    with TestClient(app(reader, precision="fp32", device="cpu"), base_url="http://localhost") as client:
        yield client


def png(line: str) -> bytes:
    file = io.BytesIO()
    draw(line).save(file, "PNG")
    return file.getvalue()


def test_answers_are_the_texts_of_python(client, reader):
    predictor = vitral.load(reader, precision="fp32", device="cpu")
    images = [{"name": f"{line}.png", "data": base64.b64encode(png(line)).decode()} for line in LINES]
    answer = client.post("/v1/predict", json={"images": images})
    assert answer.status_code == 200, answer.text
    found = answer.json()["predictions"]
    wanted = predictor([png(line) for line in LINES])
    assert [one["text"] for one in found] == [one.text for one in wanted]
    assert len({one.text for one in wanted}) > 1
    for one, line, text in zip(found, LINES, wanted, strict=True):
        assert one["image"] == f"{line}.png"
        assert one["confidence"] == pytest.approx(text.confidence, rel=1e-4)
        assert "".join(part["character"] for part in one["characters"]) == text.text


def test_lines_of_several_requests_share_a_batch(reader):
    predictor = load_checked(reader, {"precision": "fp32", "device": "cpu"})
    sizes, rows = [], predictor.rows
    predictor.rows = lambda images: sizes.append(len(images)) or rows(images)

    async def ask() -> list[str]:
        model = TextModel("reader", predictor, Limits(batch_size=4, batch_wait=0.5), Metrics())
        decode = Decoder(1, model.limits, model.metrics)
        model.start()
        with model.places.taken(len(LINES)):
            each = await asyncio.gather(*(model.predict(decode, [Item(line, png(line))]) for line in LINES))
        await model.stop()
        decode.close()
        return [predictor.output.prediction("", one.answer.result()).text for (one,) in each]

    assert asyncio.run(ask()) == [predictor(draw(line)).text for line in LINES]
    assert sizes[:2] == [4, 2]


def test_explanations_are_those_of_python(client, reader):
    predictor = vitral.load(reader, precision="fp32", device="cpu")
    for query in ("explain=default", "explain=cross-attention&overlay=true"):
        answer = client.post(f"/v1/predict?{query}", content=png("bbb"), headers=PNG)
        assert answer.status_code == 200, answer.text
        (found,) = answer.json()["predictions"]
        (wanted,) = explain_texts(predictor, png("bbb"))
        explained = found["explanation"]
        assert explained["method"] == "cross-attention"
        assert [one["character"] for one in explained["characters"]] == list(found["text"])
        for one, own in zip(explained["characters"], wanted.maps, strict=True):
            np.testing.assert_allclose(one["values"], own.values, atol=1e-5)
            assert one.get("overlay", "").startswith("data:image/png") == ("overlay" in query)


@pytest.mark.parametrize("query", ["explain=rollout", "explain=lime", "explain=default&target=a"])
def test_other_methods_and_targets_are_refused(client, query):
    answer = client.post(f"/v1/predict?{query}", content=png("ab"), headers=PNG)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert answer.json()["type"] == "/docs#no-explanation"


def test_a_classifier_has_no_cross_attention(drawings):
    with TestClient(app("demo", precision="fp32", device="cpu"), base_url="http://localhost") as client:
        answer = client.post("/v1/predict?explain=cross-attention", content=drawings["cat.png"], headers=PNG)
    assert answer.status_code == 422


def test_features_are_refused(client):
    answer = client.post("/v1/embed", content=png("ab"), headers=PNG)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert answer.json()["type"] == "/docs#no-embedding"


def test_the_model_states_its_task_and_method(client):
    (model,) = client.get("/v1/models").json()["models"]
    assert (model["task"], [one["name"] for one in model["methods"]]) == ("text", ["cross-attention"])
    assert model["classes"][3:] == ["a", "b", "c"]
    written = client.get("/openapi.json").json()["components"]["schemas"]["Predictions"]
    kinds = written["properties"]["predictions"]["items"]["anyOf"]
    assert any(set(kind["required"]) == {"image", "text", "confidence"} for kind in kinds)


def test_a_broken_reader_does_not_pass_its_self_test(reader):
    predictor = vitral.load(reader, precision="fp32", device="cpu")
    predictor.model.decoder.head.bias.data[3] = float("nan")
    with pytest.raises(WeightsError, match="self-test"):
        load_checked(predictor, {})
