"""Every contender of every library runs on a tiny network, and rows record its settings. No time is asserted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from images import MakeImages
from running import sampled
from vitral.bench import files, measure
from vitral.bench.measure import WHAT, Case, Contender
from vitral.bench.models import of_config
from vitral.bench.peers import PEERS, Peer, chosen
from vitral.bench.report import VITRAL
from vitral.data import Split
from vitral.data import load as load_data
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError
from vitral.model import ViTConfig, summarize

TINY = ViTConfig(image_size=32, patch_size=16, dim=16, depth=1, heads=2, mlp_dim=32, classes=5)
SUBJECT = of_config("tiny", TINY)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the machine's matrix-product rate and the repetitions, which these tests do not need."""
    monkeypatch.setattr(measure, "SMALL_MATRIX", 16)
    monkeypatch.setattr(measure, "_MAX_REPEATS", 1)


def case(what: str, *peers: str, **changes) -> Case:
    found = {name: PEERS[name] for name in peers}
    return dataclasses.replace(Case(SUBJECT, what, 2, "cpu", ("fp32",), found), **changes)


@pytest.fixture
def dataset(make_images: MakeImages):
    return load_data(make_images({"cat": 5, "dog": 6}, size=(40, 50), extension=".jpg"))


# ---------------------------------------------------------------- every contender


@pytest.mark.slow
@pytest.mark.parametrize("what", sampled(["training", "inference"], 2))
def test_everyone_takes_part(what: str) -> None:
    installed, _ = chosen(["all"], TINY)
    rows, notes = measure.measure(case(what, *installed, precisions=("bf16", "fp32")), rounds=2)
    assert notes == []
    assert {(row.who, row.precision) for row in rows} == {
        (who, precision) for who in (VITRAL, *installed) for precision in ("bf16", "fp32")
    }
    passes = WHAT[what][1]
    for row in rows:
        assert (row.what, row.batch, row.images, row.sample.n) == (what, 2, 2, 2)
        assert row.flops == passes * 2 * SUBJECT.flops
        assert row.first is None
        assert (row.via in ("cast", "autocast")) == (
            what == "inference" and row.who != VITRAL and row.precision == "bf16"
        )
        assert (row.times == 1.0) == (row.who == VITRAL) or row.sample.median == row.reference
    assert len({row.matrix_rate for row in rows}) == 2, "one for each precision"


@pytest.mark.slow
def test_training_from_files(dataset) -> None:
    rows, _ = measure.measure(case("jpeg", "torchvision", dataset=dataset), rounds=1)
    assert [row.who for row in rows] == [VITRAL, f"{VITRAL}, kept", f"{VITRAL}, synthetic", "torchvision"]
    assert {row.images for row in rows} == {8}, "four steps of two"
    assert all(row.first is not None and row.first > 0 for row in rows)
    assert {row.memory for row in rows} == {None}, "the workers' memory is not this process's"


@pytest.mark.slow
@pytest.mark.parametrize("what", sampled(["training", "inference"], 2))
def test_compiled_ways_stand_beside_the_others(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = torch.compile

    def without_a_compiler(function: Callable, **options) -> Callable:
        assert options == {"dynamic": False}
        owner = getattr(function, "__self__", None)  # of a method
        compiled.append(function.__name__ if owner is None else type(owner).__name__)
        return original(function, backend=backend)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        frozen.append(inductor.freezing)
        return graph

    from torch._inductor import config as inductor

    frozen: list[bool] = []
    monkeypatch.setattr(torch, "compile", without_a_compiler)
    rows, _ = measure.measure(case(what, "torchvision", compile=True), rounds=1)
    assert [(row.who, row.compiled) for row in rows] == [
        (VITRAL, False),
        ("torchvision", False),
        (VITRAL, True),
        ("torchvision", True),
    ]
    assert compiled == ["loss" if what == "training" else "ViT", "VisionTransformer"], "of ours the loss as well"
    assert [row.first is not None for row in rows] == [False, False, True, True]
    assert len({row.reference for row in rows}) == 1, "what all are compared with is not compiled"
    assert set(frozen) == {what == "inference"}, "inference with torch's setting for it"
    assert len(frozen) >= 2
    assert not inductor.freezing, "as it was before"


def test_our_way_changes_the_weights_in_training_and_not_in_inference() -> None:
    models: list[torch.nn.Module] = []

    def build() -> torch.nn.Module:
        models.append(SUBJECT.build())
        return models[-1]

    for what, changes in (("inference", False), ("training", True)):
        (contender,) = WHAT[what][0](case(what, subject=dataclasses.replace(SUBJECT, build=build)))
        before = [p.detach().clone() for p in models[-1].parameters()]
        contender.program()
        after = models[-1].parameters()
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == changes


def test_inference_of_ours_is_the_predictors_probabilities() -> None:
    (contender,) = WHAT["inference"][0](case("inference"))
    found = contender.program()
    assert isinstance(found, np.ndarray)
    assert found.shape == (2, 5)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


# ---------------------------------------------------------------- images


@pytest.mark.filterwarnings("default")  # torchvision calls its decoder deprecated
def test_both_read_the_same_images(tmp_path: Path) -> None:
    """Images of one color each: any crop gives that color, standardized."""
    levels = [30, 90, 150, 210]
    for number, level in enumerate(levels):
        path = tmp_path / "plain" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (level,) * 3).save(path)
    split = load_data(tmp_path / "plain")["train"]
    about = (split, Preprocessing((16, 16)), 2, torch.device("cpu"), 1)
    theirs = list(files.TorchvisionLoader(*about))
    assert [batch.images.shape for batch in theirs] == [(2, 3, 16, 16)] * 2
    pairs = [pair for batch in theirs for pair in zip(batch.images, batch.labels, strict=True)]
    found = {round(127.5 * float(image.mean()) + 127.5): int(label) for image, label in pairs}
    assert found == {level: number % 2 for number, level in enumerate(levels)}
    for residency in ("stream", "memory"):
        ours = list(files.VitralLoader(*about, kept=residency))
        assert {int(image.float().mean().round()) for batch in ours for image in batch.images} == set(levels)
        assert all(batch.images.dtype == torch.uint8 for batch in ours)


def test_what_torchvision_cannot_read_is_read_as_ours_is() -> None:
    pixels = np.full((6, 8), 77, np.uint8)
    split = Split(["a"], np.zeros(1, np.int64), lambda index: pixels)
    found = files._Files(split, Preprocessing((4, 4)))._pixels(0)
    assert (found.shape, found.unique().tolist()) == ((3, 6, 8), [77])


def test_a_pass_is_whole_batches_spread_over_the_set(dataset) -> None:
    some = files.some_images(dataset, SUBJECT, 3, "cpu")
    assert len(some) == 9
    assert set(some.labels) == {0, 1}
    assert len(files.some_images(dataset, SUBJECT, 2, "cpu")) == 2 * files.FEW


def test_data_that_do_not_fit_are_refused(dataset) -> None:
    with pytest.raises(UsageError, match=r"only 11 training images(.|\n)*a batch is 12"):
        files.some_images(dataset, SUBJECT, 12, "cpu")
    with pytest.raises(UsageError, match=r"2 classes(.|\n)*has 1"):
        files.some_images(dataset, of_config("one", dataclasses.replace(TINY, classes=1)), 2, "cpu")


# ---------------------------------------------------------------- who fails


def failing(error: Exception) -> Peer:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Linear(1, 1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise error

    return Peer("torch", "torch", lambda config: Model(), "")


def test_a_peer_that_fails_is_named_and_left_out() -> None:
    found = case("inference", peers={"odd": failing(ValueError("no such\nshape"))})
    rows, notes = measure.measure(found, rounds=1)
    assert [row.who for row in rows] == [VITRAL]
    assert notes == ["left out: odd, fp32: ValueError: no such shape"]


@pytest.mark.parametrize("what", ["inference", "training"])
def test_a_peer_that_cannot_be_built_is_named_and_left_out(what: str) -> None:
    def build(config: ViTConfig) -> torch.nn.Module:
        raise ImportError("no such module")

    rows, notes = measure.measure(case(what, peers={"old": Peer("torch", "torch", build, "")}), rounds=1)
    assert [row.who for row in rows] == [VITRAL]
    assert notes == ["left out: old, fp32: ImportError: no such module"]


@pytest.mark.parametrize("what", ["inference", "training"])
def test_ours_must_not_fail(what: str) -> None:
    def build() -> torch.nn.Module:
        raise ValueError("ours")

    found = case(what, subject=dataclasses.replace(SUBJECT, build=build))
    with pytest.raises(ValueError, match="ours"):
        measure.measure(found, rounds=1)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_does_not_suffice_is_an_error(error: Exception) -> None:
    with pytest.raises(UsageError, match=r"not enough memory for tiny, training, batch 2\n(.|\n)*try: --batch 1"):
        measure.measure(case("training", peers={"large": failing(error)}), rounds=1)


@pytest.mark.parametrize("what", ["inference", "training"])
def test_what_cannot_fit_is_not_begun(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(case: Case) -> Iterator[Contender]:
        raise AssertionError("begun")

    monkeypatch.setitem(measure.WHAT, what, (begun, WHAT[what][1]))
    with pytest.raises(UsageError, match="not enough memory") as refused:
        measure.measure(case(what, batch=10**12), rounds=1)
    smaller = int(str(refused.value.hint).removeprefix("--batch "))
    with pytest.raises(AssertionError, match="begun"):  # what the hint says is not refused
        measure.measure(case(what, batch=smaller), rounds=1)


def memory_for(asked: Case, peers: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with memory for so many peers in addition to ours, by the module's estimate."""
    found, training = summarize(TINY), asked.what == "training"
    ours, theirs = (held * found.parameter_bytes for held in measure._held(asked, training))
    call = asked.batch * (found.activation_bytes if training else found.input_bytes)
    there = ours + found.parameter_bytes * training + measure._OTHERS * call + peers * theirs
    monkeypatch.setattr(measure, "memory_bytes", lambda: int(there / measure._USABLE) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("what", sampled(["training", "inference"], 2))
def test_peers_that_do_not_fit_beside_ours_are_left_out_and_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights are in memory together, in training with two moments: a process that uses too much is killed."""
    asked = case(what, "timm", "transformers", "torchvision", batch=1)
    for many, left in ((3, []), (2.5, ["torchvision"]), (1, ["transformers", "torchvision"])):
        memory_for(asked, many, monkeypatch)
        rows, notes = measure.measure(asked, rounds=1)
        assert [note.split(",")[0].removeprefix("left out: ") for note in notes] == left
        assert [row.who for row in rows] == [VITRAL, *(name for name in asked.peers if name not in left)]
    assert asked.title in notes[1]
    assert "with vitral, timm it does not fit into 0 GiB; --peers torchvision measures it" in notes[1]
    memory_for(asked, 0.9, monkeypatch)
    rows, notes = measure.measure(asked, rounds=1)
    assert [row.who for row in rows] == [VITRAL]
    assert len(notes) == 3
    assert not any("measures it" in note for note in notes), "alone it would not fit either"


def test_where_ours_alone_does_not_fit_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and moments count, and the suggested batch fits."""
    asked, found = case("training", batch=100), summarize(TINY)
    there = 4 * found.parameter_bytes + 7 * found.activation_bytes + 1
    monkeypatch.setattr(measure, "memory_bytes", lambda: there)
    with pytest.raises(UsageError, match="not enough memory") as refused:
        measure.measure(asked, rounds=1)
    assert refused.value.hint == "--batch 7"
    assert measure._fitting(case("training", batch=7), training=True)[1] == []
    monkeypatch.setattr(measure, "memory_bytes", lambda: 3 * found.parameter_bytes)
    with pytest.raises(UsageError, match="not enough memory") as refused:
        measure.measure(asked, rounds=1)
    assert "a smaller network" in str(refused.value.hint)


def test_weights_that_are_held_are_counted() -> None:
    """In fp32 ours may hold them twice, by `plain` no more; of bf16 the others have one half, and one whole."""
    one = case("inference", "timm", precisions=("fp32",))
    assert measure._held(one, training=False) == (2, 1)
    assert measure._held(dataclasses.replace(one, engines=("plain", "int8")), training=False) == (3, 1)
    both = dataclasses.replace(one, precisions=("bf16", "fp32"))
    assert measure._held(both, training=False) == (3, 2.5)
    assert measure._held(dataclasses.replace(both, compile=True), training=False) == (4.5, 4)
    assert measure._held(dataclasses.replace(both, compile=True), training=True) == (6, 6)


# ---------------------------------------------------------------- which of two contenders


def test_the_faster_of_two_ways_counts() -> None:
    contenders = [Contender("timm", "bf16", False, lambda: None, 1, via) for via in ("cast", "autocast")]
    other = Contender("timm", "fp32", False, lambda: None, 1)
    samples = {
        contenders[0]: measure.Sample((3.0,)),
        contenders[1]: measure.Sample((2.0,)),
        other: measure.Sample((9.0,)),
    }
    assert measure._best_routes(samples) == {contenders[1]: samples[contenders[1]], other: samples[other]}


@pytest.mark.parametrize(("seconds", "times"), [(1.0, 1), (0.004, 5), (1e-9, 50)])
def test_what_is_short_is_repeated(seconds: float, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MAX_REPEATS", 50)
    assert measure._repeats(seconds) == times
