"""Compiling: the decision, numerical equality, reports, and the cache of compiled code."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import vitral
from images import MakeImages
from running import TINY, same_bits, weights_of
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.device import Machine, seed_everything
from vitral.errors import TrainingError, UsageError
from vitral.model import network
from vitral.model.variants import config
from vitral.training import compiling
from vitral.training.compiling import (
    COMPILE_SECONDS,
    SAVED_PER_FLOP,
    CompiledObjective,
    Stopwatch,
    keep_code,
    seconds_saved,
    should_compile,
)
from vitral.training.distillation import Teacher
from vitral.training.loop import State
from vitral.training.objectives.classification import Classification
from vitral.training.options import Run
from vitral.training.run_folder import RunFolder
from vitral.weights.native import Weights
from vitral.workflows.planning import compute as plan_compute
from vitral.workflows.planning.plan import plan_run

S16 = config("S/16", image_size=224)
GPU = Machine(torch.device("cuda"), "bf16", "for a test")


@pytest.fixture
def compiler_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "unavailable_reason", lambda device: None)


def test_saved_seconds_grow_with_the_operations():
    assert seconds_saved(2e18, "bf16", 384) == pytest.approx(2 * seconds_saved(1e18, "bf16", 384))
    assert seconds_saved(1e18, "bf16", 768) < seconds_saved(1e18, "bf16", 384) < seconds_saved(1e18, "fp32", 384)


@pytest.mark.usefixtures("compiler_available")
def test_on_a_gpu_long_runs_are_compiled():
    """S/16 takes 9.2 GFLOP forward, three times that with backward."""
    break_even = COMPILE_SECONDS / SAVED_PER_FLOP["bf16"][0] / (3 * 9.2e9)
    assert should_compile(GPU, S16, round(1.1 * break_even))[0]
    on, why = should_compile(GPU, S16, round(0.9 * break_even))
    assert not on
    assert f"takes about {COMPILE_SECONDS:.0f} s" in why
    assert "saves an estimated 54 s" in why
    assert should_compile(dataclasses.replace(GPU, precision="fp32"), S16, round(0.9 * break_even))[0], (
        "its steps are longer"
    )


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_other_devices_do_not_compile(kind):
    assert not should_compile(Machine(torch.device(kind), "fp32", ""), S16, 10**12)[0]


def test_a_missing_compiler_is_reported_in_the_plan(monkeypatch):
    monkeypatch.setattr(
        compiling, "unavailable_reason", lambda device: "torch.compile needs a C++ compiler, and there is none"
    )
    assert should_compile(GPU, S16, 10**12) == (False, "torch.compile needs a C++ compiler, and there is none")


def test_a_missing_compiler_is_detected():
    from torch._inductor import config as inductor
    from torch._inductor import cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "needs a C++ compiler" in (compiling.unavailable_reason(torch.device("cpu")) or "")
    cpp_builder.cpp_compiler_search.cache_clear()


def planned(options: dict) -> tuple[Run, tuple[str, str] | None]:
    plan = plan_run({"data": "digits", "device": "cpu", **options}).plan
    choices = [choice for choice in plan.choices if choice.name == "compile"]
    return plan.run, (choices[0].value, choices[0].reason) if choices else None


def test_the_plan_reports_the_decision(monkeypatch):
    run, line = planned({})
    assert run.compile is False
    assert line is not None
    assert line[0] == "off"
    assert "only on NVIDIA GPUs" in line[1]
    monkeypatch.setattr(plan_compute, "should_compile", lambda *about: (True, "it saves hours"))
    assert planned({})[0].compile is True
    assert planned({})[1] == ("on", "it saves hours")
    assert planned({"compile": False}) == (run, ("off", "requested"))
    monkeypatch.setattr(plan_compute, "unavailable_reason", lambda device: "there is no compiler")
    with pytest.raises(UsageError, match="there is no compiler"):
        planned({"compile": True})


def test_older_runs_are_read(tmp_path: Path):
    for value in (True, False):
        record = {"run": Run().to_json() | {"compile": value}, "plan": []}
        (tmp_path / "config.json").write_text(json.dumps(record))
        assert RunFolder(tmp_path).read_plan().run.compile is value


def test_compile_time_is_reported_and_not_part_of_throughput():
    """By a fake clock, the first step compiles for 100 s."""
    from test_loop import run_of, trained

    clock = iter([0.0, 100.0, 100.0, 100.0])
    state: State = trained(run_of(epochs=2), compiling=lambda: next(clock))
    first, second = state.history
    assert first["compile_seconds"] == 100.0
    assert "compile_seconds" not in second
    assert state.compile_seconds == 100.0
    assert first["images_per_second"] > 1e9, "no time is left for training"


def a_batch(shape) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, *shape.image), generator=generator, dtype=torch.uint8)
    return Batch(images, torch.arange(4) % 3, np.arange(4))


TINY_SHAPE = config("mu/4", image_size=8, classes=3, dim=8, depth=1, heads=2, mlp_dim=8)
OBJECTIVE = Classification(Preprocessing((8, 8)), Augmentation(), 3)


def test_the_module_itself_is_not_compiled(monkeypatch):
    model = network(TINY_SHAPE)
    seen = []
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **how: seen.append(how) or original(module, backend="eager"))
    objective = CompiledObjective(OBJECTIVE, model)
    loss, metrics = objective(model, a_batch(TINY_SHAPE))
    expected, _ = OBJECTIVE(model, a_batch(TINY_SHAPE))
    assert torch.equal(loss, expected)
    assert set(metrics) == {"train_accuracy"}
    assert seen == [{"dynamic": False}]
    assert getattr(model, "_compiled_call_impl", None) is None
    assert all("_orig_mod" not in name for name in model.state_dict())


def a_teacher() -> Teacher:
    weights = Weights(TINY_SHAPE, network(TINY_SHAPE).state_dict(), Preprocessing((8, 8)), ("a", "b", "c"), {})
    about = (weights, Preprocessing((8, 8)), ("a", "b", "c"), torch.device("cpu"))
    return Teacher.of(*about, weight=0.5, temperature=2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "objective"),
    [
        (TINY_SHAPE, OBJECTIVE),
        (TINY_SHAPE, Classification(Preprocessing((8, 8)), Augmentation(), 3, 0.1, torch.tensor([1.0, 2.0, 0.5]))),
        (TINY_SHAPE, Classification(Preprocessing((8, 8)), Augmentation(flip=True, mixup=1.0), 3)),
        (TINY_SHAPE, Classification(Preprocessing((8, 8)), Augmentation(), 3, teacher=a_teacher())),
        (config("mu/4", image_size=8, classes=3, depth=1, dropout=0.1, drop_path=0.1), OBJECTIVE),
        (config("mu/2", image_size=8, classes=3, depth=1, patch_dropout=0.5), OBJECTIVE),
        (config("C+Femto/4", image_size=8, classes=3, depth=1), OBJECTIVE),
    ],
    ids=["plain", "smoothing and weights", "mixed labels", "teacher", "dropout", "patch dropout", "stem"],
)
def test_network_loss_and_metrics_are_one_graph(monkeypatch, model, objective):
    """Random numbers are those drawn without compiling."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **how: original(module, backend=keep, **how))
    net = network(model).train()
    results = []
    torch.compiler.reset()  # forget earlier graphs
    for each in (objective, CompiledObjective(objective, net)):
        seed_everything(3)
        loss, metrics = each(net, a_batch(TINY_SHAPE))
        results.append({"loss": loss.detach(), **metrics})
    assert len(graphs) == 1
    assert "cross_entropy" in graphs[0].code
    assert "argmax" in graphs[0].code
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_many_networks_in_a_process_are_all_compiled(monkeypatch):
    """torch's default limit is eight recompilations of a function."""
    graphs = []
    original = torch.compile
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda module, **how: original(module, backend=backend, **how))
    for width in range(1, 11):
        net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, width), nn.Linear(width, 3))
        with compiling.compiler_timed():
            CompiledObjective(OBJECTIVE, net)(net, a_batch(TINY_SHAPE))
    assert len(graphs) == 10


def test_a_compiler_failure_is_reported(monkeypatch):
    def fails(graph, inputs):
        raise ValueError("no Python.h")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **how: original(module, backend=fails))
    model = network(TINY_SHAPE)
    torch.compiler.reset()  # forget earlier graphs
    with pytest.raises(TrainingError, match=r"torch\.compile failed") as caught:
        CompiledObjective(OBJECTIVE, model)(model, a_batch(TINY_SHAPE))
    assert "no Python.h" in str(caught.value)
    assert "--no-compile" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_the_stopwatch_runs_while_torch_compiles():
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    with compiling.compiler_timed() as watch:
        double(torch.zeros(1, 2))
        first = watch.seconds()
        double(torch.zeros(1, 2))
        assert 0 < first == watch.seconds()
        double(torch.zeros(2, 2))
        assert watch.seconds() > first, "another shape is compiled, too"
    after = watch.seconds()
    nn.Linear(3, 3).compile(backend="eager")
    assert watch.seconds() == after
    assert Stopwatch().seconds() == 0.0


def test_code_is_kept_in_vitrals_cache_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "vitral/compiled")


@pytest.mark.slow
def test_a_run_reports_its_compile_time(make_images: MakeImages, tmp_path: Path, monkeypatch, capsys):
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **how: original(module, backend="eager", **how))
    monkeypatch.setattr(plan_compute, "unavailable_reason", lambda device: None)
    photos = make_images({"a": 12, "b": 12})
    plain, run = (
        vitral.train(str(photos), **{**TINY, "epochs": 2, "ema": 0.9}, out=str(tmp_path / str(on)), compile=on)
        for on in (False, True)
    )
    assert capsys.readouterr().err.count("compiled in") == 1
    assert "compile_seconds" not in plain.result
    assert 0 < run.result["compile_seconds"] < run.result["seconds"]
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["compile_seconds"] == run.result["compile_seconds"]
    assert "compile_seconds" not in metrics[1]
    assert metrics[0]["images_per_second"] > metrics[0]["images_seen"] / metrics[0]["seconds"]
    assert same_bits(weights_of(plain.folder), weights_of(run.folder)), "the backend changes nothing"


@pytest.mark.slow
@pytest.mark.skipif(compiling.unavailable_reason(torch.device("cpu")) is not None, reason="needs a C++ compiler")
def test_code_is_loaded_from_the_cache(monkeypatch, tmp_path: Path):
    """Simulates another process by dropping torch's state in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    found = []
    for _ in range(2):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
        CompiledObjective(OBJECTIVE, model)(model, a_batch(TINY_SHAPE))[0].backward()
        found.append(dict(torch._dynamo.utils.counters["aot_autograd"] | torch._dynamo.utils.counters["inductor"]))
    assert (tmp_path / "vitral/compiled").is_dir()
    assert sum(n for name, n in found[0].items() if name.endswith("cache_miss")) > 0
    assert sum(n for name, n in found[1].items() if name.endswith("cache_miss")) == 0
    assert sum(n for name, n in found[1].items() if name.endswith("cache_hit")) > 0


@pytest.mark.slow
@pytest.mark.skipif(compiling.unavailable_reason(torch.device("cpu")) is not None, reason="needs a C++ compiler")
def test_compiled_code_equals_the_network():
    """With torch's own compiler, forward and backward, in fp32, up to the order of sums."""
    model, batch = network(config("mu/4", image_size=8, classes=3, depth=2)), a_batch(TINY_SHAPE)
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)  # a zero head would hide all layers before it
    found = []
    for objective in (OBJECTIVE, CompiledObjective(OBJECTIVE, model)):
        model.zero_grad()
        loss, metrics = objective(model, batch)
        loss.backward()
        found.append((loss.detach(), metrics["train_accuracy"], [p.grad.clone() for p in model.parameters()]))
    (loss, right, gradients), (compiled_loss, compiled_right, compiled_gradients) = found
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-6)
    assert right == compiled_right
    for ours, theirs in zip(gradients, compiled_gradients, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(gradients, compiled_gradients, strict=True)), "it was compiled"
