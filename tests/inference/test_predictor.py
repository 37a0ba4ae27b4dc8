"""Predictor: images of every kind in, named probabilities out."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import noise
from running import same_bits, weights_of
from vitral.cli.main import main
from vitral.data.loader import Batches
from vitral.errors import DataError, ImageError, RunError, UsageError, WeightsError
from vitral.inference.engines import int8, packed
from vitral.inference.engines.compiled import unavailable_reason
from vitral.inference.logits import logits_of
from vitral.inference.outputs.labels import LabelsPrediction
from vitral.inference.outputs.numbers import NumbersPrediction
from vitral.inference.outputs.text import ReadText
from vitral.inference.predictor import Predictor
from vitral.inference.sources import find_images
from vitral.training.run_folder import RunFolder
from vitral.weights.load import locate
from vitral.workflows.evaluate import evaluate


@pytest.fixture(scope="module")
def predictor(trained: vitral.TrainedRun) -> Predictor:
    return vitral.load(trained.folder, device="cpu", precision="fp32")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Images of several sizes and modes."""
    paths = []
    for number, (size, mode) in enumerate([((8, 10), "L"), ((40, 25), "RGB"), ((9, 31), "RGBA"), ((8, 12), "P")]):
        path = tmp_path / f"{number}.png"
        Image.fromarray(noise(number, size)).convert(mode).save(path)
        paths.append(path)
    return paths


def test_every_kind_of_image(predictor, files):
    pixels = noise(3, (8, 10), 1)
    path = files[0].with_name("gray.png")
    Image.fromarray(pixels).save(path)
    kinds = [str(path), path, path.read_bytes(), Image.fromarray(pixels), pixels, pixels[..., None]]
    found = [predictor(kind) for kind in kinds]
    assert all(np.array_equal(one.probabilities, found[0].probabilities) for one in found)
    assert (found[0].name, found[1].name, found[3].name) == (str(path), str(path), "image 0")
    assert found[0].probabilities.shape == (2,)
    assert found[0].probabilities.sum() == pytest.approx(1, abs=1e-6)


def test_probabilities_are_those_of_the_module(predictor, files):
    pixels = predictor.prepare(files[1])[None]
    with torch.no_grad():
        wanted = predictor.model(predictor.preprocessing.standardize(pixels)).softmax(1)[0]
    assert np.allclose(predictor(files[1]).probabilities, wanted.numpy(), atol=1e-6)


def test_a_batch_equals_its_images_one_by_one(predictor, files):
    batch = predictor(files)
    assert [one.name for one in batch] == list(map(str, files))
    for one, path in zip(batch, files, strict=True):
        assert np.allclose(one.probabilities, predictor(path).probabilities, atol=1e-6)
    assert predictor([]) == []
    assert predictor.probabilities([]).shape == (0, 2)


def test_stream_equals_the_batch_and_gives_errors_in_their_place(predictor, files):
    bad = files[0].with_name("bad.png")
    bad.write_bytes(b"no image")
    paths = [files[0], bad, *files[1:]]
    for batch_size in (1, 2, 32):
        found = list(predictor.stream(paths, batch_size))
        assert isinstance(found[1], ImageError)
        assert found[1].name == str(bad)
        good = [one for one in found if not isinstance(one, ImageError)]
        assert [one.name for one in good] == list(map(str, files))
        assert np.allclose([one.probabilities for one in good], predictor.probabilities(files), atol=1e-6)
    assert [type(one) for one in predictor.stream([bad, bad], 1)] == [ImageError, ImageError]
    assert list(predictor.stream([])) == []


def test_top_is_sorted_and_bounded(predictor, files):
    one = dataclasses.replace(
        predictor(files[0]), classes=("a", "b", "c"), probabilities=np.array([0.2, 0.5, 0.3], np.float32)
    )
    assert [name for name, _ in one.top(2)] == ["b", "c"]
    assert [name for name, _ in one.top(99)] == ["b", "c", "a"]
    assert (one.label, one.confidence) == ("b", 0.5)
    plain = one.to_json(2)
    assert set(plain) == {"image", "label", "confidence", "top"}
    assert [entry["class"] for entry in plain["top"]] == ["b", "c"]
    assert "'b', 50.0%" in repr(one)


def test_predictions_are_equal_by_their_values(predictor, files):
    first, second, again = (predictor(file) for file in (files[0], files[1], files[0]))
    assert first == again
    assert hash(first) == hash(again)
    assert first != second
    assert first != dataclasses.replace(first, probabilities=first.probabilities[::-1])
    assert first != dataclasses.replace(first, threshold=0.5)
    assert first != first.label
    assert [second, first].index(again) == 1
    assert again in {first, second}
    assert len({first, second, again}) == 2
    shared = {"name": "a", "classes": ("x", "y")}
    for kind, more in {
        LabelsPrediction: {"probabilities": np.array([0.5, 0.25]), "thresholds": (0.5, 0.5)},
        NumbersPrediction: {"values": np.array([3.0, 4.0])},
    }.items():
        assert kind(**shared, **more) == kind(**shared, **copy.deepcopy(more))
        assert len({kind(**shared, **more), kind(**{**shared, "name": "b"}, **more)}) == 2
    texts = [ReadText("a", text, 0.5, (("x", 0.5),), np.zeros(2)) for text in ("x", "x", "y")]
    assert texts[0] == texts[1] != texts[2]
    assert hash(texts[0]) == hash(texts[1])


def test_a_negative_count_of_classes_is_an_error(predictor, files):
    labels = LabelsPrediction("a", ("x", "y"), np.array([0.5, 0.25]), (0.5, 0.5))
    for one in (predictor(files[0]), labels, ReadText("a", "x", 0.5, (), np.zeros(2))):
        assert one.top(0) == []
        with pytest.raises(UsageError, match="-1 most probable"):
            one.top(-1)


def test_a_bad_image_is_named(predictor, files):
    bad = files[0].with_name("bad.png")
    bad.write_bytes(files[0].read_bytes()[:-30])
    with pytest.raises(ImageError, match=r"bad\.png"):
        predictor([files[0], bad])
    with pytest.raises(ImageError, match="image 1"):
        predictor([noise(0), b"nothing"])
    with pytest.raises(ImageError, match=r"gone\.png"):
        predictor("gone.png")


def test_bf16_is_near(trained, predictor, files):
    half = vitral.load(trained.folder, device="cpu", precision="bf16")
    assert half.dtype == torch.bfloat16
    assert half.model.head.weight.dtype == torch.float32, "the module is the network as published"
    assert np.allclose(half.probabilities(files), predictor.probabilities(files), atol=0.03)


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_the_module_is_the_network_as_published_on_every_machine(trained, files, engine):
    """In bf16, too, it takes images in fp32, its weights are those of the file, and heat maps are those of fp32."""
    half, exact = (
        vitral.load(trained.folder, device="cpu", precision=precision, engine=engine) for precision in ("bf16", "fp32")
    )
    before = half.probabilities(files)
    assert same_bits(half.model.state_dict(), weights_of(trained.folder))
    assert half.model(torch.randn(1, 1, *half.preprocessing.image_size)).dtype == torch.float32
    for method in ("occlusion", "input-gradient"):
        maps = [vitral.explain(one, files[0], method=method)[0] for one in (half, exact)]
        assert (maps[0].values == maps[1].values).all()
        assert maps[0].probability == maps[1].probability
    assert (half.probabilities(files) == before).all()


def test_a_change_of_the_module_reaches_the_engine_in_bf16(trained, files):
    predictor = vitral.load(trained.folder, device="cpu", precision="bf16")
    before = predictor.probabilities(files)
    with torch.no_grad():
        predictor.model.head.weight.neg_()
    assert np.abs(predictor.probabilities(files) - before).max() > 0.01


@pytest.mark.parametrize(("precision", "dtype", "within"), [("bf16", torch.bfloat16, 0.02), ("fp32", None, 1e-5)])
def test_engines_agree_and_plain_is_the_module(trained, files, precision, dtype, within):
    fast, plain = (vitral.load(trained.folder, precision=precision, engine=engine) for engine in ("auto", "plain"))
    assert plain.engine == "plain"
    images = torch.stack([plain.prepare(file) for file in files])
    with torch.inference_mode():
        logits = plain.cast().model(plain.preprocessing.standardize(images).to(dtype or torch.float32))
    assert (plain.probabilities(files) == logits.float().softmax(1).numpy()).all()
    assert np.abs(fast.probabilities(files) - plain.probabilities(files)).max() < within


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_does_not_change_packed_predictions(trained, files, precision, dtype):
    if not packed.self_test(dtype):
        pytest.skip(f"{precision} cannot be packed here")
    predictor = vitral.load(trained.folder, precision=precision, engine="packed")
    alone = predictor.probabilities(files)
    with torch.autocast("cpu", torch.bfloat16):
        assert (predictor.probabilities(files) == alone).all()


def test_packing_in_fp32(trained, monkeypatch):
    assert vitral.load(trained.folder, precision="fp32").engine == "plain", "a narrow network"
    monkeypatch.setattr("vitral.inference.predictor.is_faster", lambda *_: True)
    if packed.self_test(torch.float32):
        assert vitral.load(trained.folder, precision="fp32").engine == "packed"
    monkeypatch.setattr("vitral.inference.predictor.packable", lambda *_: False)
    assert vitral.load(trained.folder, precision="fp32").engine == "plain"
    with pytest.raises(UsageError, match="nothing can be packed here"):
        vitral.load(trained.folder, precision="fp32", engine="packed")
    with pytest.raises(UsageError, match="unknown engine 'quick'"):
        vitral.load(trained.folder, engine="quick")


@pytest.fixture
def compiled_by(monkeypatch: pytest.MonkeyPatch):
    """Run torch.compile with another backend: torch's own takes half a minute."""
    original = torch.compile

    def use(backend) -> None:
        torch.compiler.reset()
        monkeypatch.setattr(torch, "compile", lambda module: original(module, backend=backend))
        monkeypatch.setattr("vitral.inference.predictor.unavailable_reason", lambda device: None)

    return use


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tta": "mirror"}])
def test_the_compiled_engine_computes_the_module(trained, files, compiled_by, options):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled_by(backend)
    plain, fast = (
        vitral.load(trained.folder, device="cpu", precision="fp32", engine=engine, **options)
        for engine in ("plain", "compiled")
    )
    assert (fast.engine, fast.plainly().engine) == ("compiled", "compiled")
    for count in (4, 1, 3, 2):
        assert np.allclose(fast.probabilities(files[:count]), plain.probabilities(files[:count]), atol=1e-6)
    if not options:
        assert 1 <= len(graphs) <= 3, "not one for every batch size: one image, the first size, and all others"
    with torch.no_grad():
        for one in (plain, fast):
            one.model.head.weight.mul_(-2)
    assert np.allclose(fast.probabilities(files), plain.probabilities(files), atol=1e-6)


def test_evaluate_by_the_compiled_engine(trained, compiled_by):
    compiled_by("eager")
    assert evaluate(trained.folder, engine="compiled").accuracy == evaluate(trained.folder, engine="plain").accuracy


def test_a_failing_or_missing_compiler_is_reported(trained, files, compiled_by, monkeypatch):
    def fails(graph, inputs):
        raise ValueError("no Python.h")

    compiled_by(fails)
    with pytest.raises(UsageError, match=r"torch\.compile failed") as caught:
        vitral.load(trained.folder, device="cpu", engine="compiled").probabilities(files)
    assert "no Python.h" in str(caught.value)
    assert "--engine auto" in str(caught.value)
    monkeypatch.setattr(
        "vitral.inference.predictor.unavailable_reason", lambda device: "torch.compile needs a C++ compiler"
    )
    with pytest.raises(UsageError, match=r"needs a C\+\+ compiler"):
        vitral.load(trained.folder, device="cpu", engine="compiled")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason(torch.device("cpu")) is not None, reason="needs a C++ compiler")
def test_torchs_own_compiler_predicts_what_the_module_does(trained, files):
    torch.compiler.reset()
    plain, fast = (
        vitral.load(trained.folder, device="cpu", precision="fp32", engine=engine) for engine in ("plain", "compiled")
    )
    for count in (4, 1, 3):
        assert np.allclose(fast.probabilities(files[:count]), plain.probabilities(files[:count]), atol=1e-5)
    before = fast.probabilities(files)
    with torch.no_grad():
        for one in (plain, fast):
            one.model.head.weight.mul_(-2)
    after = fast.probabilities(files)
    assert np.allclose(after, plain.probabilities(files), atol=1e-5), "weights are constants in the compiled network"
    assert not np.allclose(after, before, atol=1e-3)


def test_predicting_does_not_draw_random_numbers(trained, files):
    for trial in (packed.self_test, int8._trial):
        trial.cache_clear()
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    vitral.load(trained.folder, precision="bf16").probabilities(files)
    int8.unavailable_reason()
    assert torch.equal(torch.rand(4), wanted)


def test_changed_weights_are_used(trained, files):
    predictor = vitral.load(trained.folder, precision="bf16")
    before = predictor.probabilities(files)
    with torch.no_grad():
        for name, parameter in predictor.model.named_parameters():
            if "blocks.0" in name:
                parameter.mul_(-3)
    after = predictor.probabilities(files)
    with torch.no_grad():
        predictor.model.blocks[1].mlp.fc1.weight.data = torch.randn_like(predictor.model.blocks[1].mlp.fc1.weight)
    last = predictor.probabilities(files)
    assert not np.array_equal(before, after)
    assert not np.array_equal(after, last)


@pytest.mark.parametrize("options", [{}, {"tta": "mirror"}])
def test_replaced_parts_are_used(trained, files, options):
    """Replaced values, parameters, buffers and modules change the predictions."""
    predictor = vitral.load(trained.folder, precision="bf16", **options)
    network = predictor.model
    network.register_buffer("extra", torch.zeros(3))

    def new_head() -> None:
        network.head = torch.nn.Linear(network.head.in_features, network.head.out_features).bfloat16()

    def other_weights() -> None:
        state = {name: torch.randn_like(tensor) for name, tensor in network.state_dict().items()}
        network.load_state_dict(state, assign=True)

    results = [predictor.probabilities(files)]
    for change in (new_head, other_weights):
        with torch.no_grad():
            change()
        new = Predictor(network, predictor.preprocessing, predictor.classes, machine=predictor.machine, **options)
        results.append(predictor.probabilities(files))
        assert np.array_equal(results[-1], new.probabilities(files))
        assert not np.array_equal(results[-1], results[-2])
    built = predictor._built
    predictor.probabilities(files)
    assert predictor._built is built, "an unchanged network is not built again"
    if built:
        network.extra.add_(1)
        predictor.probabilities(files)
        assert predictor._built is not built


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda predictor: pickle.loads(pickle.dumps(predictor))])  # noqa: S301 - pickled here
def test_a_predictor_can_be_copied_and_sent(trained, files, copied):
    predictor = vitral.load(trained.folder, precision="bf16")
    wanted = predictor.probabilities(files)  # the engine is built now
    assert np.array_equal(copied(predictor).probabilities(files), wanted)


def test_views_do_not_change_norms_of_a_stem():
    """Predictions are the same one by one, and no image changes a running mean."""
    for precision in ("fp32", "bf16"):
        predictor = vitral.load("demo", device="cpu", precision=precision, tta="mirror")
        before = copy.deepcopy(predictor.model.state_dict())
        pixels = [noise(number, (32, 32), 3) for number in range(3)]
        together = predictor.probabilities(pixels)
        alone = np.concatenate([predictor.probabilities([one]) for one in pixels])
        assert np.allclose(together, alone, atol=0.02)
        assert all(torch.equal(before[name], tensor) for name, tensor in predictor.model.state_dict().items())


def test_a_weights_file_alone_is_enough(trained, predictor, files, tmp_path):
    copy = tmp_path / "anything.safetensors"
    copy.write_bytes((trained.folder / "model.safetensors").read_bytes())
    other = vitral.load(copy, device="cpu", precision="fp32")
    assert np.array_equal(other.probabilities(files), predictor.probabilities(files))
    assert other.classes == ("day", "night")
    assert not other.model.training


def test_locating_the_weights_of_a_run(tmp_path, trained):
    assert locate(trained.folder)[0] == trained.folder / "model.safetensors"
    with pytest.raises(RunError, match="not a run folder"):
        locate(tmp_path)
    (tmp_path / "config.json").write_text('{"run": {}}')
    with pytest.raises(RunError, match="no weights yet") as caught:
        locate(tmp_path)
    assert f"vitral train --out {tmp_path} --resume" in str(caught.value)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(RunError, match=r"weights are missing\n(?s:.*)model.safetensors") as caught:
        locate(tmp_path)
    assert "--resume" not in str(caught.value)
    with pytest.raises(UsageError, match="is empty"):
        locate("")
    with pytest.raises(WeightsError, match="no such run or weights"):
        locate(tmp_path / "gone")


def test_find_images(tmp_path, make_images):
    folder = make_images({"b": 2, "a/deep": 1, ".hidden": 1, "b/.cache": 1})
    (folder / "b/10.png").write_bytes(b"x")
    (folder / "b/notes.txt").write_text("x")
    names = [str(path.relative_to(tmp_path)) for path in find_images([folder, folder / "b/notes.txt"])]
    assert names == ["photos/a/deep/0.png", "photos/b/0.png", "photos/b/1.png", "photos/b/10.png", "photos/b/notes.txt"]
    with pytest.raises(DataError, match="no such image or folder"):
        find_images([folder / "gone.png"])
    with pytest.raises(UsageError, match="IMAGE is empty"):
        find_images([str(folder), ""])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images to predict") as caught:
        find_images([tmp_path / "empty"])
    assert str(tmp_path / "empty") in str(caught.value)
    with pytest.raises(DataError, match="no images to predict"):
        find_images(())


@pytest.mark.parametrize("training", [True, False])
def test_logits_of_restores_the_mode(predictor, training):
    from vitral.data import Split
    from vitral.device import choose

    model = predictor.model.train(training)
    try:
        split = Split(["a", "b"], np.zeros(2, np.int64), lambda i: noise(i, (8, 10), 1))
        batches = Batches(split, predictor.preprocessing, batch_size=1, device=torch.device("cpu"))
        assert logits_of(model, batches, choose("cpu", "fp32")).shape == (2, 2)
        assert model.training is training
    finally:
        model.eval()


def test_views_are_averaged_by_predictor_and_evaluate(trained, files):
    plain = vitral.load(trained.folder, precision="fp32")
    both = vitral.load(trained.folder, precision="fp32", tta="mirror")
    images = torch.stack([plain.prepare(file) for file in files])
    wanted = (plain.logits(images).softmax(1) + plain.logits(images.flip(-1)).softmax(1)) / 2
    assert np.abs(both.probabilities(files) - wanted.numpy()).max() < 1e-6
    assert both.plainly().tta == "none"
    measured = evaluate(trained.folder, precision="fp32", tta="mirror")
    assert measured.images > 0
    assert measured.loss != evaluate(trained.folder, precision="fp32").loss
    assert not both.model.training
    with pytest.raises(UsageError, match="unknown --tta 'twice'"):
        vitral.load(trained.folder, tta="twice")


def test_a_run_in_place_of_images(trained):
    with pytest.raises(DataError, match="it is a run, which must be the first argument"):
        find_images([trained.folder])


def test_an_unfinished_run_is_reported(trained, files, tmp_path, capsys):
    run = shutil.copytree(trained.folder, tmp_path / "a run")
    for ended in (True, False):
        for command in (["predict", str(run), str(files[0])], ["evaluate", str(run)]):
            assert main(command) == 0
            err = capsys.readouterr().err
            assert ("the run is not finished" in err) == (not ended)
            assert (f"vitral train --out '{run}' --resume" in err) == (not ended)
        (run / "result.json").unlink(missing_ok=True)
    with RunFolder(run).locked():
        assert main(["predict", str(run), str(files[0])]) == 0
        err = capsys.readouterr().err
    assert "note: the run is still training; these are its best weights so far" in err
    assert "--resume" not in err
