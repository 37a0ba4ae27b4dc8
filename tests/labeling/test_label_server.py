"""The server of labeling: who is answered, what is answered, and that nothing of a request becomes a path."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from images import MakeImages
from vitral import web
from vitral.labeling.application import build
from vitral.labeling.service import Labeling
from vitral.labeling.session import Session
from vitral.labeling.state import Action

TOKEN = "a-token-of-24-characters"
HOST = "http://127.0.0.1:8001"


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    return make_images({".": 6}, size=(300, 400))


@pytest.fixture
def session(photos: Path) -> Iterator[Session]:
    with Session([str(photos)], photos / "labels.csv", ["rose", "tulip"]) as session:
        yield session


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(build(Labeling(session, TOKEN)), base_url=HOST, headers=headers) as client:
        yield client


def test_the_page_and_its_files_need_no_token(client: TestClient):
    for path in web.LABEL:
        answer = client.get(path, headers={"Authorization": ""})
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "require-trusted-types-for 'script'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert client.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
        assert len(answer.text.splitlines()) < 300


ASKED = ["/v1/state", "/v1/changes?since=0", "/v1/images/0/small", "/v1/images/0/large", "/v1/actions", "/v1/finish"]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer another-token-of-some-length"}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:8001"}, 421),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_who_is_refused(client: TestClient, session: Session, path: str, headers: dict[str, str], status: int):
    method = "POST" if path in ("/v1/actions", "/v1/finish") else "GET"
    answer = client.request(method, path, headers=headers)
    assert answer.status_code == status
    assert session.version == 0


def test_the_state_has_names_for_people_and_numbers_for_requests(client: TestClient):
    found = client.get("/v1/state").json()
    assert found["names"] == [f"{n}.png" for n in range(6)]
    assert found["classes"] == ["rose", "tulip"]
    assert found["labels"] == [-1] * 6


def test_an_action_answers_with_what_changed(client: TestClient, session: Session):
    first = client.post("/v1/actions", json={"do": "label", "images": [1, 2], "label": "tulip", "version": 0}).json()
    assert (first["version"], first["numbers"], first["labels"]) == (1, [1, 2], [1, 1])
    assert first["undo"] == "label 2 images tulip"
    second = client.post("/v1/actions", json={"do": "undo", "version": 1}).json()
    assert (second["numbers"], second["labels"], second["redo"]) == ([1, 2], [-1, -1], "label 2 images tulip")
    assert session.state.marks[1].label == ""


def test_another_tab_hears_of_a_change(client: TestClient, session: Session):
    heard: list[dict[str, object]] = []
    listener = threading.Thread(target=lambda: heard.append(client.get("/v1/changes?since=0").json()))
    listener.start()
    time.sleep(0.2)
    assert not heard
    session.act(Action("label", (3,), "rose"))
    listener.join(10)
    assert heard[0]["numbers"] == [3]
    assert client.get("/v1/changes?since=99").json()["numbers"] == list(range(6)), "of a server before this one"


def test_images_come_by_number_and_are_made_once(client: TestClient, photos: Path):
    small, large = (client.get(f"/v1/images/2/{size}") for size in ("small", "large"))
    for answer, longest in ((small, 256), (large, 400)):
        assert answer.headers["content-type"] == "image/jpeg"
        with Image.open(io.BytesIO(answer.content)) as image:
            assert max(image.size) == longest
    Image.new("RGB", (300, 300), "red").save(photos / "2.png")
    assert client.get("/v1/images/2/small").content != small.content, "the file has changed since"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/images/6/small",
        "/v1/images/99999999999999999999/small",
        "/v1/images/-1/small",
        "/v1/images/0/original",
        "/v1/images/..%2f..%2fetc%2fpasswd/small",
        "/v1/images/../../../etc/passwd",
        "/v1/images/0.png/small",
        "/..%2f..%2fetc%2fpasswd",
        "/label/page.html",
        "/labels.csv",
    ],
)
def test_no_path_of_a_request_becomes_a_path_on_the_disk(client: TestClient, path: str):
    answer = client.get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text


@pytest.mark.skipif(os.name == "nt", reason="pipes and links")
def test_images_that_cannot_be_shown(client: TestClient, photos: Path):
    """Decided when they are asked for, whatever they were when they were listed."""
    for number in range(5):
        (photos / f"{number}.png").unlink()
    os.mkfifo(photos / "0.png")
    (photos / "1.png").symlink_to("/etc/passwd")
    (photos / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    Image.new("1", (20_000, 10_000)).save(photos / "3.png")
    for number, why in enumerate(["not a file", "a text file", "", "20000 × 10000 pixels", "No such file"]):
        for size in ("small", "large"):
            answer = client.get(f"/v1/images/{number}/{size}")
            assert answer.status_code == 422
            assert why in answer.json()["detail"]
            assert "root:" not in answer.text
            assert str(photos) not in answer.text, "no path of this machine"
    assert client.get("/v1/images/5/small").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'{"do": "label", "images": [0], "label": "oak"}', 400, "there is no class 'oak'"),
        (b'{"do": "label", "images": [7], "label": "rose"}', 400, "does not exist"),
        (b'{"do": "add class", "label": "a\\nb"}', 400, "name of a class"),
        (b'{"do": "add class", "label": "\\ud800"}', 400, "JSON"),
        (b'{"do": "label", "version": "0"}', 400, "whole number"),
        (b'{"do": "hold", "path": "/etc/passwd"}', 400, "an action has"),
        (b" " * (5 << 20), 413, "bytes"),
    ],
)
def test_refused_actions(client: TestClient, session: Session, body: bytes, status: int, said: str):
    answer = client.post("/v1/actions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert said in answer.text
    assert session.version == 0


def test_a_form_of_another_page_is_no_action(client: TestClient):
    answer = client.post("/v1/actions", content=b'{"do": "undo"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_markup_in_a_name_is_text(client: TestClient):
    name = "<img src=x onerror=alert(1)>"
    answer = client.post("/v1/actions", json={"do": "add class", "label": name})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["classes"][-1] == name


def test_twenty_thousand_images(make_images: MakeImages, tmp_path: Path):
    """An action on all of them is answered at once: the table is written beside it."""
    photos = make_images({".": 1})
    for number in range(1, 20_000):
        os.link(photos / "0.png", photos / f"{number}.png")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        Session([str(photos)], tmp_path / "labels.csv", ["rose"]) as session,
        TestClient(build(Labeling(session, TOKEN)), base_url=HOST, headers=headers) as client,
    ):
        assert len(client.get("/v1/state").json()["names"]) == 20_000
        took = []
        for number in range(20):
            began = time.perf_counter()
            action = {"do": "label", "images": [number], "label": "rose", "version": number}
            assert client.post("/v1/actions", json=action).json()["numbers"] == [number]
            took.append(time.perf_counter() - began)
        everything = {"do": "label", "images": list(range(20_000)), "label": "rose", "version": 20}
        assert len(client.post("/v1/actions", json=everything).json()["numbers"]) == 19_980
    assert sorted(took)[10] < 0.1, "seconds of a median action"
    assert (tmp_path / "labels.csv").read_text().count(",rose,") == 20_000
