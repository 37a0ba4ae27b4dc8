"""`vitral export` and `export_model`: files, refusals, and a proof that detects differences."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from rich.console import Console

import vitral
from images import noise
from npmpackages import pretend_runtime
from running import as_json, in_child, printed, sampled
from vitral import web
from vitral.cli.main import main
from vitral.digest import check
from vitral.errors import ExportError, MissingExtraError, RunError, UsageError, WriteError
from vitral.export import TARGETS, export_model
from vitral.export import web as export_web
from vitral.export.exporting import files_in
from vitral.export.target import Runtime
from vitral.export.web import RUNTIME, publishing
from vitral.weights import native

FILES = {
    "onnx": {"model.onnx"},
    "torch": {"model.pt2"},
    "openvino": {"model.xml", "model.bin"},
    "web": {
        "index.html",
        "model.json",
        "model.onnx",
        *web.BROWSER,
        "runtime/LICENSE.txt",
        *(f"runtime/{name.replace('.mjs', '.js')}" for name in RUNTIME),
    },
}
BESIDE = {"preprocessing.json", "export.json"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runtime(monkeypatch, tmp_path_factory.mktemp("cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_every_target_has_its_files_here():
    assert FILES.keys() == TARGETS.keys()


class TestEveryTarget:
    @pytest.mark.parametrize("to", [pytest.param(to, marks=[pytest.mark.slow] * (to == "web")) for to in TARGETS])
    def test_the_command_writes_and_proves(self, to, trained, tmp_path, capsys):
        out, err = printed(capsys, "export", str(trained.folder), "--to", to, "--out", "there")
        assert set(files_in(Path("there"))) == FILES[to] | BESIDE
        assert "100.00% agreement" in out
        assert "Export   there" in err
        record = json.loads(Path("there/export.json").read_text("utf-8"))
        assert check(Path("there/export.json").read_bytes())
        proof = record["proof"]
        assert proof["images"] >= 64
        assert proof["passed"]
        assert proof["failure"] == ""
        assert proof["agreement"] == 1
        assert proof["difference"] <= 1e-4
        assert proof["accuracy"] == proof["accuracy_export"]
        assert proof["speed"] > 0
        assert proof["speed_export"] > 0
        assert proof["size"] == sum(Path("there", name).stat().st_size for name in FILES[to])
        assert record["classes"] == ["day", "night"]
        state = vitral.load(trained.folder, device="cpu", precision="fp32").model.state_dict()
        assert record["weights"] == f"sha256:{native.digest(state)}"

    @pytest.mark.slow
    @pytest.mark.parametrize("to", sampled([to for to in TARGETS if to != "web"], 2))  # it takes seconds to trace
    def test_an_export_is_replaced_only_with_overwrite(self, to):
        first = export_model("demo", to, out="there")
        before = Path("there/export.json").read_bytes()
        with pytest.raises(RunError, match="exists already") as caught:
            export_model("demo", to, out="there")
        assert "--overwrite" in str(caught.value)
        assert Path("there/export.json").read_bytes() == before
        again = export_model("demo", to, out="there", overwrite=True)
        assert again.record["proof"]["on"] == first.record["proof"]["on"] == "64 drawings of vitral demo"
        assert [path.name for path in Path().iterdir()] == ["there"], "nothing is left of the folder before"

    @pytest.mark.slow
    @pytest.mark.parametrize("to", sampled(TARGETS, 2))
    def test_a_result_that_differs_is_not_kept(self, to, monkeypatch, capsys):
        target = TARGETS[to]
        load = type(target).load

        def wrong(self: Any, folder: Path) -> Runtime:
            right = load(self, folder)

            def run(images: np.ndarray) -> np.ndarray:
                logits = right.run(images).copy()
                logits[-1] += np.linspace(0, 9, logits.shape[1], dtype=np.float32)
                return logits

            return dataclasses.replace(right, run=run)

        monkeypatch.setattr(type(target), "load", wrong)
        out, err = printed(capsys, "export", "demo", "--to", to, code=1)
        assert "does not match its network" in err
        assert "first drawing of airplane, part 0: airplane by the network, truck by the export" in err
        assert "% agreement" in out
        assert len(err.strip().splitlines()) <= 5
        assert not Path("export/demo", to).exists()

    @pytest.mark.real
    @pytest.mark.slow
    @pytest.mark.parametrize("to", sampled(TARGETS, 2))
    def test_a_full_disk_is_reported_and_leaves_no_files(self, to):
        def work() -> int:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            try:
                export_model("demo", to, out="there")
            except WriteError:
                return 3 if os.listdir() == [] else 4
            return 5

        TARGETS[to].check_installed()
        assert in_child(work) == 3

    @pytest.mark.parametrize("to", TARGETS)
    def test_a_folder_that_cannot_be_written(self, to):
        Path("file").write_text("no folder")
        with pytest.raises(WriteError, match="cannot write"):
            export_model("demo", to, out="file/there")


class TestRefusals:
    def test_other_folders_are_never_replaced(self):
        Path("there").mkdir()
        Path("there/letter.txt").write_text("mine")
        with pytest.raises(RunError, match="exists already"):
            export_model("demo", "torch", out="there")
        with pytest.raises(RunError, match="did not write all"):
            export_model("demo", "torch", out="there", overwrite=True)
        assert Path("there/letter.txt").read_text() == "mine"

    @pytest.mark.slow
    def test_an_export_with_other_files_is_not_replaced(self):
        export_model("demo", "torch", out="there")
        Path("there/letter.txt").write_text("mine")
        with pytest.raises(RunError, match="did not write all"):
            export_model("demo", "torch", out="there", overwrite=True)

    @pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
    def test_missing_onnx_is_reported(self, package, monkeypatch):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match="ONNX is not installed") as caught:
            export_model("demo", "onnx")
        assert "vitral[onnx]" in str(caught.value)

    def test_missing_openvino_is_reported(self, monkeypatch):
        for name in ("openvino", "openvino_telemetry"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=r"(?s)OpenVINO is not installed.*vitral\[openvino\]"):
            export_model("demo", "openvino")

    def test_a_page_is_opened_on_a_phone_and_published(self, tmp_path, monkeypatch):
        lines = publishing(tmp_path / "my site")
        assert lines[0].startswith("Then open http://localhost:8000")
        assert "camera needs https" in lines[1]
        commands = [shlex.split(line) for line in lines[2:]]
        assert [words[:2] for words in commands] == [["npx", "surge"], ["npx", "netlify-cli"], ["npx", "vercel"]]
        assert all(words[-1] == str(tmp_path / "my site") for words in commands)
        monkeypatch.setattr(export_web, "_own_address", lambda: "10.1.2.3")
        assert "http://10.1.2.3:8000 on a phone in the same network" in publishing(tmp_path)[0]
        monkeypatch.setattr(export_web, "_own_address", lambda: None)
        assert publishing(tmp_path)[0] == "Then open http://localhost:8000."

    def test_unknown_names(self):
        with pytest.raises(UsageError, match="nearest: onnx"):
            export_model("demo", "onx")
        with pytest.raises(UsageError, match="nearest: fp16"):
            export_model("demo", "onnx", precision="fp6")  # type: ignore[arg-type]

    @pytest.mark.parametrize("words", [{"to": "web"}, {"to": "onnx", "with_preprocessing": True}])
    def test_images_of_16_bits_are_refused_where_bytes_are_read(self, words, tmp_path):
        deep = vitral.load("demo", device="cpu", precision="fp32", levels=(0, 4095))
        with pytest.raises(UsageError, match="cannot be exported") as caught:
            export_model(deep, **words, out=tmp_path / "deep")
        assert "16 bits by --levels" in caught.value.why

    def test_too_few_images_are_refused(self):
        with pytest.raises(UsageError, match="at least 64"):
            export_model("demo", "torch", images=63)

    def test_accept_is_refused_for_fp32(self):
        with pytest.raises(UsageError, match="--accept is for fp16 and int8"):
            export_model("demo", "torch", accept=True)

    def test_unsupported_precisions(self):
        with pytest.raises(UsageError, match="--to onnx --precision int8"):
            export_model("demo", "torch", precision="int8")

    def test_a_runtime_is_for_the_web(self):
        with pytest.raises(UsageError, match="--runtime is for --to web"):
            export_model("demo", "onnx", runtime="file.tgz")
        with pytest.raises(UsageError, match="--example is for --to web"):
            export_model("demo", "onnx", example="cat.jpg")

    def test_a_network_without_a_head(self):
        features = vitral.create("mu/4", classes=0, image_size=8)
        with pytest.raises(UsageError, match="without a head"):
            export_model(features, "torch")


@pytest.fixture(scope="module")
def demo_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model("demo", "onnx", out=tmp_path_factory.mktemp("onnx") / "demo").folder


class TestONNX:
    def test_metadata_and_shapes(self, demo_onnx):
        proto = onnx.load(demo_onnx / "model.onnx")
        onnx.checker.check_model(proto)
        metadata = {one.key: one.value for one in proto.metadata_props}
        predictor = vitral.load("demo")
        assert json.loads(metadata["vitral.classes"]) == list(predictor.classes)
        assert vitral.Preprocessing.from_json(json.loads(metadata["vitral.preprocessing"])) == predictor.preprocessing
        assert metadata["vitral.version"] == vitral.__version__
        assert metadata["vitral.weights"].startswith("sha256:")
        shapes = [
            [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim]
            for one in (*proto.graph.input, *proto.graph.output)
        ]
        assert shapes == [["batch", 3, 32, 32], ["batch", 10]]
        assert {one.domain for one in proto.opset_import} == {""}, "only standard operators"

    @pytest.mark.slow
    def test_no_path_of_this_machine_is_in_it(self, demo_onnx):
        assert str(Path(vitral.__file__).parent).encode() not in (demo_onnx / "model.onnx").read_bytes()

    def test_any_batch_prepared_by_preprocessing_json(self, demo_onnx):
        session = onnxruntime.InferenceSession(str(demo_onnx / "model.onnx"))
        described = json.loads((demo_onnx / "preprocessing.json").read_text("utf-8"))
        preprocessing = vitral.Preprocessing.from_json(described["preprocessing"])
        images = [noise(number, (40 + number, 50), 3) for number in range(7)]
        batch = preprocessing.standardize(torch.stack([preprocessing.geometry(one) for one in images])).numpy()
        predictor = vitral.load("demo", device="cpu", precision="fp32")
        wanted = predictor.probabilities(images)
        for count in (1, 2, 7):
            logits = session.run([described["output"]["name"]], {described["input"]["name"]: batch[:count]})[0]
            assert np.abs(torch.from_numpy(logits).softmax(1).numpy() - wanted[:count]).max() < 1e-4


class TestTorch:
    @pytest.mark.slow
    def test_it_loads_without_vitral(self, tmp_path):
        folder = export_model("demo", "torch", out="there").folder
        images = torch.randn(5, 3, 32, 32)
        torch.save(images, "images.pt")
        code = (
            "import sys; sys.modules['vitral'] = None\n"
            "import torch\n"
            "metadata = {'vitral.classes': ''}\n"
            "program = torch.export.load(sys.argv[1], extra_files=metadata).module()\n"
            "torch.save((program(torch.load('images.pt')), metadata), 'found.pt')\n"
        )
        subprocess.run([sys.executable, "-c", code, str(folder / "model.pt2")], check=True, timeout=120)
        logits, metadata = torch.load("found.pt")
        model = vitral.load("demo", device="cpu", precision="fp32").model
        with torch.inference_mode():
            torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-4)
        assert json.loads(metadata["vitral.classes"])[0] == "airplane"

    @pytest.mark.slow
    def test_no_path_of_this_machine_is_in_it(self):
        folder = export_model("demo", "torch", out="there").folder
        assert str(Path(vitral.__file__).parent).encode() not in (folder / "model.pt2").read_bytes()


class TestOpenVINO:
    @pytest.mark.slow
    def test_metadata_and_shapes(self):
        from vitral.inference.engines.openvino import package, shared_core

        package()
        folder = export_model("demo", "openvino", out="there").folder
        model = shared_core().read_model(str(folder / "model.xml"))
        assert str(model.input("images").partial_shape) == "[?,3,32,32]"
        assert model.output("logits")
        classes = model.get_rt_info(["vitral", "classes"]).astype(str)
        assert json.loads(classes)[-1] == "truck"


class TestImages:
    def test_a_run_is_proven_on_its_held_out_images_first(self, trained):
        found = export_model(trained.folder, "torch", out="there").proof
        assert found.on.startswith("12 test images of ")
        assert "8 val images" in found.on
        assert "24 train images" in found.on
        assert "20 drawings" in found.on
        assert found.images == 64
        assert found.held_out
        assert found.labeled == 20, "neither training images nor drawings"
        wanted = [vitral.evaluate(trained.folder, split=name) for name in ("test", "val")]
        assert found.accuracy == pytest.approx(sum(one.accuracy * one.images for one in wanted) / 20)

    def test_the_table_names_the_rows_and_the_images_of_the_accuracy(self, trained, capsys):
        out, _ = printed(capsys, "export", str(trained.folder), "--to", "torch", "--out", "there")
        assert "accuracy on 20 held-out images" in out
        assert [line.split(":")[0] for line in out.splitlines() if "fp32  " in line] == ["network", "export"]
        out, _ = printed(capsys, "export", "demo", "--to", "torch", "--out", "demo")
        assert "accuracy on 64 labeled images" in out

    def test_the_size_of_a_small_file_is_not_zero(self, trained):
        proof = export_model(trained.folder, "torch", out="there").proof
        screen = Console(file=io.StringIO(), width=200)
        dataclasses.replace(proof, size=30_000).print_table(screen)
        assert ", 29.3 KiB; limits" in screen.file.getvalue()

    @pytest.mark.slow
    def test_unreadable_images_are_named_or_left_out(self, make_images, capsys):
        root = make_images({f"{name}/{label}": 2 for name in ("train", "test") for label in ("cat", "dog")})
        (root / "test/cat/0.png").write_bytes(b"no image")
        _, err = printed(capsys, "export", "demo", str(root), "--to", "torch", code=2)
        assert "0.png" in err
        found = as_json(capsys, "export", "demo", str(root), "--to", "torch", "--bad-images", "skip")
        assert found["proof"]["on"].startswith("3 test images of ")

    @pytest.mark.slow
    def test_printed_json_equals_the_file(self, capsys):
        found = as_json(capsys, "export", "demo", "--to", "torch")
        on_disk = json.loads(Path("export/demo/torch/export.json").read_text("utf-8"))
        on_disk.pop("vitral_digest")
        assert found == on_disk

    @pytest.mark.slow
    def test_a_failing_proof_is_in_the_error(self, monkeypatch):
        monkeypatch.setattr(
            type(TARGETS["torch"]), "load", lambda self, folder: Runtime("none", lambda x: x[:, 0, :10, 0])
        )
        with pytest.raises(ExportError) as caught:
            export_model("demo", "torch")
        assert caught.value.exit_code == 1
        assert caught.value.proof.failure  # type: ignore[attr-defined]
        assert main(["export", "demo", "--to", "torch", "--format", "json"]) == 1
