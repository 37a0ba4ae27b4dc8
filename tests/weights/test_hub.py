"""Fetching from a hub: the real huggingface_hub against a small server on this machine, with and without a network."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_server import FIRST, SECOND, Hub, point_at, serving
from vitral.errors import UsageError, WeightsError
from vitral.weights.read.hub import _TRIAL, is_reference, offered, parse, resolve

MODEL = {
    "config.json": b'{"a": 1}',
    "model.safetensors": b"weights",
    "README.md": b"read",
    "run.py": b"code",
    "pytorch_model.bin": b"pickle",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with google/vit at its second commit."""
    with serving(monkeypatch) as hub:
        hub.commits["google/vit"] = {FIRST: {**MODEL, "model.safetensors": b"old"}, SECOND: MODEL}
        yield hub


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on port 9 of this machine."""
    point_at(monkeypatch, "http://127.0.0.1:9")


@pytest.mark.parametrize("status", [401, 403, 500, 503, 200])
def test_a_copy_is_used_and_said_if_the_hub_refuses(hub, tmp_path, status):
    """A page of a proxy comes with 200, and is no JSON."""
    before = resolve("hf:google/vit", cache_dir=tmp_path)
    assert before.note == ""
    hub.refuse["google/vit"] = (status, "")
    hub.body = b"<html>Log in to the proxy</html>"
    again = resolve("hf:google/vit", cache_dir=tmp_path)
    assert again.path == before.path
    assert f"the hub refused ({status})" in again.note if status != 200 else "could not be asked" in again.note
    with pytest.raises(WeightsError) as caught:
        resolve("hf:google/vit", cache_dir=tmp_path / "other")
    assert "bug" not in str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_commit_is_fetched_and_reported(hub, tmp_path):
    found = resolve("hf:google/vit", cache_dir=tmp_path)
    assert (found.revision, found.reference) == (SECOND, f"hf:google/vit@{SECOND}")
    assert names(found.path) == ["config.json", "model.safetensors"]  # no code, no pickle
    assert (found.path / "model.safetensors").read_bytes() == b"weights"
    assert not any("run.py" in asked or "pytorch_model" in asked for asked in hub.asked)


def test_a_revision_can_be_fetched_again(hub, tmp_path):
    found = resolve(f"hf:google/vit@{FIRST}", cache_dir=tmp_path)
    assert (found.path / "model.safetensors").read_bytes() == b"old"
    hub.asked.clear()
    assert resolve(found.reference, cache_dir=tmp_path) == found
    assert hub.asked == []  # a commit never changes: no question


def test_timm_names_stand_for_its_repositories(hub, tmp_path):
    hub.commits["timm/vit_tiny.augreg"] = {FIRST: MODEL}
    found = resolve("timm:vit_tiny.augreg", cache_dir=tmp_path)
    assert found.reference == f"timm:vit_tiny.augreg@{FIRST}"


@pytest.mark.parametrize(
    ("files", "fetched"),
    [
        (["model.safetensors", "tf_model.h5", "flax_model.npz"], ["model.safetensors"]),
        (
            [
                "model.safetensors.index.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "pytorch_model.bin",
            ],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
        ),
        (["pytorch_model.bin", "training_args.bin", "x.npz"], ["pytorch_model.bin"]),
        (["ViT-B_16.npz"], ["ViT-B_16.npz"]),
    ],
)
def test_safetensors_first(hub, tmp_path, files, fetched):
    shards = {"weight_map": {f"w{i}": file for i, file in enumerate(f for f in files if "-of-" in f)}}
    hub.commits["a/b"] = {
        FIRST: {f: json.dumps(shards).encode() for f in [*files, "preprocessor_config.json", "d/x.bin"]}
    }
    assert names(resolve("hf:a/b", cache_dir=tmp_path).path) == sorted([*fetched, "preprocessor_config.json"])


def test_without_a_network_the_cache_serves(hub, tmp_path, monkeypatch):
    online = resolve("hf:google/vit", cache_dir=tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert resolve("hf:google/vit", cache_dir=tmp_path) == online
    assert hub.asked == []
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert resolve("hf:google/vit", cache_dir=tmp_path) == online
    (online.path / "model.safetensors").unlink()  # as after a download that was broken off
    with pytest.raises(WeightsError, match="there is no complete copy in the cache"):
        resolve("hf:google/vit", cache_dir=tmp_path)


def test_a_cache_without_refs_serves_its_one_copy(hub, tmp_path, monkeypatch):
    online = resolve("hf:google/vit", cache_dir=tmp_path)
    shutil.rmtree(online.path.parents[1] / "refs")
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert resolve("hf:google/vit", cache_dir=tmp_path) == online
    shutil.copytree(online.path, online.path.with_name(FIRST))
    with pytest.raises(WeightsError, match="2 copies of google/vit") as caught:
        resolve("hf:google/vit", cache_dir=tmp_path)
    assert f"hf:google/vit@{FIRST} or hf:google/vit@{SECOND}" in str(caught.value)


def test_a_missing_shard_is_no_copy(hub, tmp_path, monkeypatch):
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}).encode()
    hub.commits["a/b"] = {FIRST: {"model.safetensors.index.json": index, **dict.fromkeys(shards, b"w")}}
    found = resolve("hf:a/b", cache_dir=tmp_path)
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert resolve("hf:a/b", cache_dir=tmp_path) == found
    (found.path / shards[1]).unlink()
    with pytest.raises(WeightsError, match="no complete copy"):
        resolve("hf:a/b", cache_dir=tmp_path)


def lines(caught: pytest.ExceptionInfo[WeightsError]) -> list[str]:
    shown = str(caught.value).splitlines()
    assert len(shown) <= 5
    return shown


def test_a_missing_connection_is_one_error_with_a_hint(no_network, tmp_path):
    with pytest.raises(WeightsError) as caught:
        resolve("hf:google/vit", cache_dir=tmp_path)
    what, where, why, hint = lines(caught)
    assert what == "could not fetch model.safetensors and config.json of google/vit"
    assert where == "  where: hf:google/vit"
    assert "the hub cannot be reached" in why
    assert hint.startswith("  try: download the files into a folder and type its path, or use a built-in model: ")


def test_a_hub_that_is_down_is_like_a_missing_network(hub, tmp_path):
    online = resolve("hf:google/vit", cache_dir=tmp_path / "full")
    hub.refuse = {"google/vit": (500, "")}
    assert resolve("hf:google/vit", cache_dir=tmp_path / "full") == online
    with pytest.raises(WeightsError, match=r"the hub cannot be reached.*500"):
        resolve("hf:google/vit", cache_dir=tmp_path / "empty")


def test_offline_mode_is_reported(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE is set, and there is no complete copy in the cache"):
        resolve("hf:google/vit", cache_dir=tmp_path)
    assert hub.asked == []


def test_an_unknown_model_and_the_nearest(hub, tmp_path):
    hub.commits |= {"timm/vit_tiny_patch16_224.augreg": {FIRST: MODEL}, "timm/resnet50": {FIRST: MODEL}}
    with pytest.raises(WeightsError, match="no such model on the hub") as caught:
        resolve("timm:vit_tiny_patch16_224", cache_dir=tmp_path)
    assert "  why: nearest: timm:vit_tiny_patch16_224.augreg" in lines(caught)
    with pytest.raises(WeightsError, match="it does not exist, or is private"):
        resolve("hf:nobody/nothing", cache_dir=tmp_path)


def test_gated_models_revisions_and_repositories_without_weights(hub, tmp_path):
    hub.refuse = {"meta/gated": (403, "GatedRepo"), "meta/gated2": (401, "GatedRepo"), "meta/no": (403, "")}
    for name in hub.refuse:
        with pytest.raises(WeightsError, match="access to this model is restricted") as caught:
            resolve(f"hf:{name}", cache_dir=tmp_path)
        assert f"https://huggingface.co/{name}" in lines(caught)[-1]
    with pytest.raises(WeightsError, match="no branch, tag or commit 'v9'"):
        resolve("hf:google/vit@v9", cache_dir=tmp_path)
    hub.commits["a/b"] = {FIRST: {"tf_model.h5": b"", "x.npz": b"", "y.npz": b"", ".gitattributes": b""}}
    with pytest.raises(WeightsError, match=r"it has tf_model\.h5, x\.npz, y\.npz; needed is"):
        resolve("hf:a/b", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "reference",
    [
        "hf:../../etc",
        "hf:google",
        "hf:google/",
        "hf:/etc/passwd",
        "hf:a/b/c",
        "timm:a/b",
        "timm:",
        "timm:..",
        "hf:a/..",
        "hf:a/b@",
        "hf:a/b@../main",
        "hf:a/b@x//y",
        "hf:a/b@-x",
        "hf:a b/c",
        "hf:a/b\n",
        "git:a/b",
        "hf:a/b?x=1",
        "hf:a--b/c",
        "hf:a/b@refs/../../x",
        "hf:a/.b",
    ],
)
def test_malformed_references_are_refused_without_a_request(hub, tmp_path, reference):
    with pytest.raises(UsageError, match="not the name of a model on a hub"):
        resolve(reference, cache_dir=tmp_path)
    assert hub.asked == []
    assert names(tmp_path) == []


def test_references():
    assert parse("timm:vit_b.augreg_in21k@main") == ("timm/vit_b.augreg_in21k", "main")
    assert parse("hf:google/vit-base@refs/pr/1") == ("google/vit-base", "refs/pr/1")
    assert parse("hf:google/vit") == ("google/vit", None)
    assert is_reference("timm:x")
    assert not is_reference("runs/photos")


def test_a_hub_is_measured_by_the_first_bytes(hub, monkeypatch):
    hub.commits["google/vit"] = {FIRST: {**MODEL, "model.safetensors": bytes(3 * _TRIAL)}}
    offer = offered("hf:google/vit", 3.0)
    assert offer is not None
    assert offer.size == 3 * _TRIAL
    assert offer.rate > 1e6
    assert offered("hf:google/other", 3.0) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert offered("hf:google/vit", 3.0) is None
    assert hub.asked == []


@pytest.mark.parametrize("status", [401, 403, 500, 200])
def test_pages_of_a_proxy_are_no_offer(hub, status):
    hub.refuse["google/vit"] = (status, "")
    hub.body = b"<html>Log in to the proxy</html>"
    assert offered("hf:google/vit", 3.0) is None


def test_a_slow_hub_makes_no_offer_and_takes_no_longer(hub, monkeypatch):
    answer = hub.answer
    monkeypatch.setattr(hub, "answer", lambda url: (time.sleep(2), answer(url))[1])
    began = time.monotonic()
    assert offered("hf:google/vit", 0.3) is None
    assert time.monotonic() - began < 1
