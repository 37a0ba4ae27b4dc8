"""`vitral push`: a card that states what result.json has, files that load elsewhere, and an upload over HTTP."""

from __future__ import annotations

import base64
import dataclasses
import http.server
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from transformers import pipeline

import vitral
from running import as_json, printed, train
from vitral.cli.main import main
from vitral.digest import check
from vitral.errors import RunError, UsageError
from vitral.weights.load import read
from vitral.workflows.push import prepare, push

REPOSITORY = "somebody/day-night"


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory) -> Path:
    """A finished run on color images, which Hugging Face's library can compute."""
    source = Path(trained.folder).parent.parent / "sky"
    out = tmp_path_factory.mktemp("push") / "run"
    return train(source, out, channels=3, image_size=8, position="learned", pool="cls", epochs=2).folder


@pytest.fixture(scope="module")
def result(run) -> Any:
    return json.loads((run / "result.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def written(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "there"
    pushed = prepare(run, REPOSITORY, folder, license="mit")
    assert pushed.reason == ""
    return folder


def share(value: float) -> str:
    return f"{100 * value:.2f}%"


def table(card: str, first: str) -> list[list[str]]:
    """The cells of the table whose header begins with `first`."""
    lines = card.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


class TestCard:
    def test_every_figure_is_that_of_the_result(self, written, result):
        card = (written / "README.md").read_text("utf-8")
        assert table(card, "split") == [
            [
                name,
                f"{one['images']:,}",
                share(one["accuracy"]),
                f"{share(one['accuracy_interval'][0])} to {share(one['accuracy_interval'][1])}",
                share(one["balanced_accuracy"]),
                share(one["macro_f1"]),
                share(one["ece"]),
            ]
            for name in ("val", "test")
            for one in [result[name]]
        ]
        assert table(card, "class")[: result["classes"]] == [
            [
                one["name"],
                str(one["images"]),
                share(one["precision"]),
                share(one["recall"]),
                share(one["f1"]),
                f"{one['most_confused_with']}, {one['times']} times" if one["times"] else "",
            ]
            for one in result["test"]["per_class"]
        ]
        wrong = table(card.split("### Confusions")[1], "class") if "| predicted |" in card else []
        confusion = result["test"]["confusion"]
        names = [one["name"] for one in result["test"]["per_class"]]
        pairs = [(i, j) for i in range(len(names)) for j in range(len(names)) if i != j and confusion[i][j]]
        assert set(map(tuple, wrong)) == {(names[i], names[j], str(confusion[i][j])) for i, j in pairs}
        training = dict(table(card, "fact"))
        assert training["train images"] == f"{result['images']['train']:,}"
        assert training["epochs"] == str(result["epochs"])
        assert training["seed"] == str(result["seed"])
        assert f"{result['parameters']:,} parameters and {result['classes']} classes" in card

    def test_the_header_is_what_hubs_read(self, written, result):
        data = ModelCard.load(written / "README.md").data
        assert (data.license, data.library_name, data.pipeline_tag) == ("mit", "transformers", "image-classification")
        assert [(one.dataset_split, one.metric_value) for one in data.eval_results] == [
            (name, result[name]["accuracy"]) for name in ("val", "test")
        ]

    def test_no_path_of_this_machine_is_published(self, written, run, result):
        assert "/" in result["data"]
        for path in written.iterdir():
            assert str(Path(result["data"]).parent).encode() not in path.read_bytes(), path.name
            assert str(run.parent).encode() not in path.read_bytes(), path.name

    def test_names_of_classes_do_not_break_the_table(self, run, result, tmp_path, monkeypatch):
        from vitral.training.run_folder import RunFolder

        odd = json.loads(json.dumps(result))
        odd["test"]["per_class"][0]["name"] = "a|b*<i>\n# c"
        monkeypatch.setattr(RunFolder, "read_result", lambda self: odd)
        prepare(run, REPOSITORY, tmp_path / "there", license="mit")
        card = (tmp_path / "there/README.md").read_text("utf-8")
        assert table(card, "class")[0][0] == r"a\|b\*\<i\>\\n\# c"
        assert len(table(card, "class")[0]) == 6


class TestFiles:
    def test_the_code_on_the_card_runs(self, written, monkeypatch, tmp_path, capsys, run):
        from PIL import Image

        monkeypatch.chdir(tmp_path)
        Image.new("RGB", (10, 8), (200, 210, 220)).save("cat.jpg")
        card = (written / "README.md").read_text("utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
        assert len(blocks) == 3
        known: dict[str, Any] = {}
        for block in blocks:
            assert REPOSITORY in block
            code = block.replace(f"hf:{REPOSITORY}", str(written)).replace(REPOSITORY, str(written))
            exec(compile(code, "card", "exec"), known)  # noqa: S102 - the card's own code
        wanted = vitral.load(run, device="cpu", precision="fp32")("cat.jpg")
        assert known["predictor"]("cat.jpg").label == wanted.label
        first = known["classify"]("cat.jpg")[0]
        assert first["label"] == wanted.label
        assert first["score"] == pytest.approx(wanted.confidence, abs=1e-3)
        pixels = known["predictor"].preprocessing.standardize(known["predictor"].prepare("cat.jpg")[None])
        with torch.inference_mode():
            assert known["model"](pixels).softmax(1).max().item() == pytest.approx(wanted.confidence, abs=1e-3)

    @pytest.mark.parametrize(("model", "size"), [("C+mu/8", 16), ("R+mu/16", 32)])
    def test_a_stem_has_a_modeling_file_and_the_cards_code_runs_it(self, model, size, trained, tmp_path, capsys):
        run = train(Path(trained.folder).parent.parent / "sky", tmp_path / "run", model=model, image_size=size).folder
        words = "push", str(run), REPOSITORY, "--license", "mit", "--dry-run", "--out", str(tmp_path / "there")
        found = as_json(capsys, *words)
        assert found["layout"] == "hf"
        assert "modeling_vitral.py" in found["files"]
        use = (tmp_path / "there/README.md").read_text("utf-8").split("## Use")[1].split("## Training")[0]
        assert "timm" not in use
        (line,) = re.findall(r"^classify = .*$", use, re.MULTILINE)
        assert line == f'classify = pipeline("image-classification", model="{REPOSITORY}", trust_remote_code=True)'
        classify = pipeline("image-classification", model=str(tmp_path / "there"), trust_remote_code=True)
        image = next(Path(trained.folder).parent.parent.glob("sky/test/*/0.png"))
        wanted = vitral.load(run, device="cpu", precision="fp32")(image)
        first = classify(str(image))[0]
        assert first["label"] == wanted.label == vitral.load(tmp_path / "there")(image).label
        assert first["score"] == pytest.approx(wanted.confidence, abs=1e-3)

    def test_a_network_that_no_other_library_knows(self, trained, tmp_path, capsys):
        sky, usual = Path(trained.folder).parent.parent / "sky", {"channels": 3, "device": "cpu", "epochs": 1}
        name, out = "torchvision:shufflenet_v2_x0_5", str(tmp_path / "run")
        run = vitral.train(str(sky), model=name, out=out, image_size=32, batch_size=4, quiet=True, **usual).folder
        words = "push", str(run), REPOSITORY, "--license", "cc-by-4.0", "--dry-run", "--out", str(tmp_path / "there")
        found = as_json(capsys, *words)
        assert (found["layout"], found["files"]) == ("vitral", ["README.md", "model.safetensors"])
        use = (tmp_path / "there/README.md").read_text("utf-8").split("## Use")[1].split("## Training")[0]
        assert "Other libraries cannot read it: its network is torchvision:shufflenet" in use
        assert "transformers" not in use
        assert vitral.load(tmp_path / "there").classes == ("day", "night")


class TestRefusals:
    @pytest.mark.parametrize("name", ["nobody", "a/b/c", "../x/y", "a/b@main"])
    def test_names(self, run, name, tmp_path):
        with pytest.raises(UsageError, match="not the name of a"):
            prepare(run, name, tmp_path / "there", license="mit")

    def test_a_license_is_asked_for(self, run, capsys):
        _, err = printed(capsys, "push", str(run), REPOSITORY, code=2)
        assert "--license" in err

    def test_a_dry_run_has_a_folder(self, run, capsys):
        _, err = printed(capsys, "push", str(run), REPOSITORY, "--license", "mit", "--dry-run", code=2)
        assert "--dry-run and --out go together" in err
        assert "--license mit --dry-run --out FOLDER" in err

    def test_what_is_there_stays(self, run, tmp_path):
        (tmp_path / "mine").write_text("letter")
        with pytest.raises(UsageError, match="exists already"):
            prepare(run, REPOSITORY, tmp_path, license="mit")

    def test_what_is_no_finished_run(self, tmp_path):
        with pytest.raises(RunError, match="not a run folder"):
            prepare("demo", REPOSITORY, tmp_path / "there", license="mit")


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's addresses for an upload of small files in one commit."""

    status = 200
    created: dict[str, Any]
    files: dict[str, bytes]

    def do_GET(self) -> None:
        self._answer({"error": "not found"}, 404)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self._chunks()
        hub = type(self)
        if hub.status != 200:
            self._answer({"error": "no"}, hub.status)
        elif self.path == "/api/repos/create":
            hub.created = json.loads(body)
            self._answer({"url": f"{constants.ENDPOINT}/{REPOSITORY}", "id": REPOSITORY})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(body)["files"]]
            self._answer({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif self.path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            hub.files = {
                one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in lines if one["key"] == "file"
            }
            commit = "1" * 40
            url = f"{constants.ENDPOINT}/{REPOSITORY}/commit/{commit}"
            self._answer({"commitUrl": url, "commitOid": commit, "hookOutput": ""})
        else:
            self._answer({"error": self.path}, 404)

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Hub, "status", 200)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


class TestUpload:
    def test_the_files_of_a_dry_run_are_uploaded(self, hub, run, written):
        pushed = push(run, REPOSITORY, license="mit", private=True)
        assert pushed.url.endswith(REPOSITORY)
        assert hub.created.get("private") or hub.created.get("visibility") == "private"
        assert hub.files == {path.name: path.read_bytes() for path in written.iterdir()}

    @pytest.mark.parametrize(
        ("status", "message"), [(401, "hf auth login"), (403, "hf auth login"), (400, "upload failed")]
    )
    def test_a_refusal_is_explained(self, hub, run, status, message, capsys, monkeypatch):
        monkeypatch.setattr(Hub, "status", status)
        assert main(["push", str(run), REPOSITORY, "--license", "mit"]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err


def test_a_run_stays_as_it_was(run, written):
    assert check((run / "result.json").read_bytes()) in (True, False)
    assert vitral.load(run, device="cpu").classes == ("day", "night")


def test_a_network_without_classes_is_refused(run, tmp_path, monkeypatch):
    whole = read(run)
    without = dataclasses.replace(whole, weights=dataclasses.replace(whole.weights, classes=()))
    monkeypatch.setattr("vitral.workflows.push.read", lambda _: without)
    with pytest.raises(UsageError, match="without classes cannot be published"):
        prepare(run, REPOSITORY, tmp_path / "there", license="mit")
    assert not (tmp_path / "there").exists()
