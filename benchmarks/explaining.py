"""Attribution maps: their cost, and hits on a patch that is known to decide the class.

`time`: ViT-S/16 at 224 pixels, 8 images, one class each, random weights; every method with its defaults, as a multiple
of a plain forward pass of the same batch, in the same rounds. "Explicit" is the same formula as usually implemented:
the attention matrix (N, N) of every layer is materialized and kept, in the graph if its gradients are needed; its maps
are first checked against vitral's. captum gets the same classes.

`passes`: the same for methods of many passes, some seconds or minutes each. captum gets as many steps.

`memory`: ViT-L/16 at 384 pixels, 8 images, each in a separate process. The peak is that of the process, including
weights and libraries; "above" is relative to the memory before the first pass. On a GPU both are the allocator's.

`planted`: the generated set `planted` (a color and a shape, together in one cell, are the class), a network trained on
it by its recipe or given as a run folder, correctly predicted test images, maps of the true class. A hit has its
maximum on the planted patch; mass is the share of positive relevance on the patch. The last line is a random map.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import vitral
from benchmarks.machine import ROOT
from benchmarks.results import Options, Row, Table
from vitral.bench.harness import alternate, ratio
from vitral.bench.memory import peak
from vitral.data import load as load_data
from vitral.data.sources import planted
from vitral.explanation.capture import override
from vitral.explanation.methods import METHODS
from vitral.explanation.methods.method import on_grid, quiet
from vitral.inference.predictor import Predictor
from vitral.model import ViT, ViTConfig

Program = Callable[[], object]
PARTS = ("time", "passes", "memory", "planted")
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIMITS = {"rollout": 1.3, "generic": 3.5, "legrad": 3.5}
"""Upper bound of a method's cost, as a multiple of a forward pass."""
MEMORY_LIMIT = 1.5
LONG = ("integrated-gradients", "smoothgrad", "occlusion", "rise", "integrated gradients, captum")
"""Methods of many passes."""
ONLY_BF16 = ("occlusion", "rise")
"""Those without a competing implementation, in which only the time of forward passes differs by dtype."""
ROUNDS = {"time": 15, "passes": 3}
STEPS = 32
"""Steps of integrated gradients, vitral's and captum's."""
CHEAP = {"rise": {"masks": 8}, "integrated-gradients": {"steps": 2}, "smoothgrad": {"samples": 2}}
QUICK = ViTConfig(image_size=16, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=32, classes=6)
IMAGES = 300
"""Images of the planted set, for each seed."""


def run(options: Options) -> list[Table]:
    """Make a table for each part; words other than the parts' names are run folders for the last."""
    parts = [name for name in options.names if name in PARTS]
    runs = [name for name in options.names if name not in PARTS]
    programs: dict[str, Callable[[], Table]] = {
        "time": lambda: times(options, "time"),
        "passes": lambda: times(options, "passes"),
        "memory": lambda: peaks(options),
        "planted": lambda: truth(options, runs),
    }
    return [programs[name]() for name in parts or (("planted",) if runs else PARTS)]


# ---------------------------------------------------------------- time


def times(options: Options, part: str) -> Table:
    """Measure milliseconds of each method, and its cost in forward passes."""
    rows: list[Row] = []
    config = QUICK if options.quick else vitral.create("S/16").config
    for kind, dtype in TYPES.items():
        case = Case.of(config, 2 if options.quick else 8, dtype, options)
        if kind == "fp32":
            case.check()
        left_out = ONLY_BF16 if kind == "fp32" else ()
        ways = {
            name: way
            for name, way in case.ways().items()
            if name == "forward" or ((name in LONG) == (part == "passes") and name not in left_out)
        }
        rounds, warm_up = (1, 0) if options.quick else (ROUNDS[part], int(part == "time"))
        with quiet(case.model):
            found = alternate(ways, rounds=rounds, warm_up=warm_up, device=options.device)
        rows += [
            {
                "kind": kind, "way": name, **sample.columns(1000), "ratio": ratio(sample, found["forward"]),
                "limit": LIMITS.get(name),
            }
            for name, sample in found.items()
        ]  # fmt: skip
    columns = {
        "kind": "type", "way": "way", "n": "n|d", "median": "ms|.1f", "least": "least|.1f",
        "greatest": "greatest|.1f", "ratio": "time : forward|.2f", "limit": "at most|.1f",
    }  # fmt: skip
    network = "a tiny network" if options.quick else "ViT-S/16"
    what = "Methods of many passes" if part == "passes" else "Maps"
    caption = f"{what}, {case.size} of one class each, {network}"
    return Table(caption, columns, rows, name=f"cuda-{part}" if options.device == "cuda" else part)


@dataclass(frozen=True, eq=False)
class Case:
    """A network with random weights, images, and a class for each."""

    model: ViT
    images: Tensor
    targets: Tensor
    quick: bool

    @classmethod
    def of(cls, config: Any, batch: int, dtype: torch.dtype, options: Options) -> Case:
        """Make a case with the same random values at every call."""
        torch.manual_seed(0)
        model = ViT(config)
        with torch.no_grad():
            model.head.weight.normal_(std=0.1)  # initially zero, which blocks all gradients
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(batch, config.channels, *config.image, generator=generator)
        targets = torch.randint(config.classes, (batch, 1), generator=generator)
        device = options.device
        return cls(model.to(device, dtype).eval(), images.to(device, dtype), targets.to(device), options.quick)

    @property
    def size(self) -> str:
        """Number and size of the images, for the caption."""
        return f"{len(self.images)} images of {'×'.join(map(str, self.images.shape[2:]))}"

    def ways(self) -> dict[str, Program]:
        """Return a forward pass, every method, and competing implementations of some."""
        found: dict[str, Program] = {"forward": self.forward}
        for name in METHODS:
            found[name] = self.method(name)
            if name in EXPLICIT:
                found[f"{name}, explicit"] = lambda name=name: EXPLICIT[name](self.model, self.images, self.targets)
        return found | (self._captum() if importlib.util.find_spec("captum") else {})

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Compute logits only."""
        return self.model(self.images)

    def method(self, name: str) -> Program:
        """Return the library's method with its defaults."""
        cheap = CHEAP.get(name, {}) if self.quick else {}
        return lambda: METHODS[name].run(self.model, self.images, self.targets, **cheap)

    def _captum(self) -> dict[str, Program]:
        from captum.attr import InputXGradient, IntegratedGradients

        single, several = InputXGradient(self.model), IntegratedGradients(self.model)
        target, batch = self.targets[:, 0], len(self.images)
        steps = 2 if self.quick else STEPS
        return {
            "input × gradient, captum": lambda: single.attribute(
                self.images.clone().requires_grad_(), target=target
            ),
            "integrated gradients, captum": lambda: several.attribute(
                self.images, target=target, n_steps=steps, internal_batch_size=batch
            ),
        }  # fmt: skip

    def check(self) -> None:
        """Check that the explicit versions give the same maps."""
        with quiet(self.model):
            for name, way in EXPLICIT.items():
                ours = METHODS[name].run(self.model, self.images, self.targets).values[:, 0].flatten(1)
                theirs = way(self.model, self.images, self.targets).float().cpu()
                if (ours - theirs).abs().max() > 1e-3 * theirs.abs().max():
                    raise AssertionError(f"{name}: the explicit version gives other maps")


# ---------------------------------------------------------------- explicit versions, for networks with a class token


@contextlib.contextmanager
def attention_kept(model: ViT) -> Iterator[list[Tensor]]:
    """Materialize and keep every layer's attention matrix (B, heads, N, N)."""
    kept: list[Tensor] = []
    pruned, model.prune_last_block = model.prune_last_block, False

    def backend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any) -> Tensor:
        kept.append((q @ k.transpose(-2, -1) * scale).softmax(dim=-1))
        return kept[-1] @ v

    try:
        with contextlib.ExitStack() as undo:
            for block in model.blocks:
                override(undo, block.attn, "backend", backend)
            yield kept
    finally:
        model.prune_last_block = pruned


@torch.no_grad()
def explicit_rollout(model: ViT, images: Tensor, targets: Tensor) -> Tensor:
    """(B, patches): R ← rownorm(mean over heads of A + I) R."""
    with attention_kept(model) as kept:
        model(images)
    identity = torch.eye(kept[0].shape[-1], device=images.device, dtype=images.dtype)
    joint = identity.expand(len(images), -1, -1)
    for attention in kept:
        mixed = attention.mean(1) + identity
        joint = (mixed / mixed.sum(-1, keepdim=True)) @ joint
    return joint[:, 0, model.config.prefix :]


def explicit_generic(model: ViT, images: Tensor, targets: Tensor) -> Tensor:
    """(B, patches): R ← R + mean over heads of relu(∂y/∂A ⊙ A) R."""
    with torch.enable_grad(), attention_kept(model) as kept:
        logits = model(images.clone().requires_grad_())
        gradients = torch.autograd.grad(logits.gather(1, targets).sum(), kept)
    with torch.no_grad():
        identity = torch.eye(kept[0].shape[-1], device=images.device, dtype=images.dtype)
        joint = identity.expand(len(images), -1, -1)
        for attention, gradient in zip(kept, gradients, strict=True):
            joint = joint + (attention * gradient).clamp(min=0).mean(1) @ joint
    return joint[:, 0, model.config.prefix :]


def explicit_legrad(model: ViT, images: Tensor, targets: Tensor) -> Tensor:
    """(B, patches): mean over layers of the mean over heads and queries of relu(∂ head(pool(Z_l)) / ∂A_l)."""
    tokens: list[Tensor] = []
    with torch.enable_grad(), attention_kept(model) as kept, contextlib.ExitStack() as hooks:
        for block in model.blocks:
            hooks.callback(block.register_forward_hook(lambda _, __, output: tokens.append(output)).remove)
        model(images.clone().requires_grad_())
        gradients = [
            torch.autograd.grad(model.classify(model.pool(z)).gather(1, targets).sum(), attention, retain_graph=True)[0]
            for z, attention in zip(tokens, kept, strict=True)
        ]
    raising = [gradient.clamp(min=0).mean((1, 2)) for gradient in gradients]
    return torch.stack(raising).mean(0)[:, model.config.prefix :]


EXPLICIT: dict[str, Callable[[ViT, Tensor, Tensor], Tensor]] = {
    "rollout": explicit_rollout,
    "generic": explicit_generic,
    "legrad": explicit_legrad,
}


# ---------------------------------------------------------------- memory

WAYS = ("forward", "rollout", "rollout, explicit", "generic", "generic, explicit", "legrad", "legrad, explicit")


def peaks(options: Options) -> Table:
    """Measure peak megabytes of each method, and as a multiple of a forward pass."""
    rows: list[Row] = []
    for kind in TYPES:
        found = {way: measured(way, kind, options) for way in WAYS if way.split(",")[0] in (*METHODS, "forward")}
        plain = found["forward"]
        rows += [
            {
                "kind": kind, "way": way, **one, "ratio": one["peak"] / plain["peak"],
                "above_ratio": one["above"] / plain["above"] if plain["above"] else None,
                "limit": MEMORY_LIMIT if way == "rollout" else None,
            }
            for way, one in found.items()
        ]  # fmt: skip
    columns = {
        "kind": "type", "way": "way", "peak": "peak MB|.0f", "ratio": "peak : forward's|.2f", "limit": "at most|.1f",
        "above": "above MB|.0f", "above_ratio": "above : forward's|.2f",
    }  # fmt: skip
    caption = f"Peak memory, {'a tiny network' if options.quick else 'ViT-L/16 at 384 pixels, 8 images'}"
    return Table(caption, columns, rows, name="cuda-memory" if options.device == "cuda" else "memory")


def measured(way: str, kind: str, options: Options) -> dict[str, float]:
    """Measure `peak` and `above` in MB in a new process; with `quick` in this one, where they mean nothing."""
    if options.quick:
        return inside(way, kind, options.device, quick=True)
    program = "import json, sys; from benchmarks.explaining import inside; print(json.dumps(inside(*sys.argv[1:])))"
    command = [sys.executable, "-c", program, way, kind, options.device]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def inside(way: str, kind: str, device: str, quick: bool = False) -> dict[str, float]:
    """Measure the memory of one pass in this process."""
    options = Options("", quick=quick, device=device)
    config = QUICK if quick else vitral.create("L/16", image_size=384).config
    case = Case.of(config, 2 if quick else 8, TYPES[kind], options)
    name, _, explicit = way.partition(", ")
    if name == "forward":
        program: Program = case.forward
    elif explicit:
        program = partial(EXPLICIT[name], case.model, case.images, case.targets)
    else:
        program = case.method(name)
    with quiet(case.model):
        found = peak(program, device)
    if found is None:
        raise SystemExit("the peak of a process can be measured on Linux only")
    return {"peak": found[1] / 1e6, "above": (found[1] - found[0]) / 1e6}


# ---------------------------------------------------------------- a planted truth


def truth(options: Options, runs: Sequence[str] = ()) -> Table:
    """Tabulate hits and mass of every method, over seeds or the named runs."""
    found: list[dict[str, tuple[float, float]]] = []
    accuracies, count = [], 0
    for predictor in map(vitral.load, runs) if runs else _trained(options):
        scores, accuracy, count = score(predictor, options)
        found.append(scores)
        accuracies.append(accuracy)
    rows = [
        {
            "method": name, "kind": "routing" if name in METHODS and METHODS[name].routing else "of a class",
            "images": count, "n": len(found), "hits": statistics.mean(one[name][0] for one in found),
            "least": min(one[name][0] for one in found), "mass": statistics.mean(one[name][1] for one in found),
        }
        for name in found[0]
    ]  # fmt: skip
    columns = {
        "method": "method", "kind": "what it shows", "images": "images|d", "n": "runs|d", "hits": "hits|.1%",
        "least": "least|.1%", "mass": "mean mass|.1%",
    }  # fmt: skip
    caption = f"The planted patch, found; {statistics.mean(accuracies):.1%} of the test images are answered rightly"
    return Table(caption, columns, rows, name="planted")


def _trained(options: Options) -> Iterator[Predictor]:
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            quick = {"epochs": 1, "train_share": 0.02, "val_share": 0.02} if options.quick else {}
            run = vitral.train(
                "planted", recipe="planted", seed=seed, device=options.device, out=f"{folder}/run",
                quiet=options.quick, **quick,
            )  # fmt: skip
            yield run.predictor


def score(predictor: Predictor, options: Options) -> tuple[dict[str, tuple[float, float]], float, int]:
    """Return method → share of hits and mean mass, the accuracy, and the number of images that counted."""
    split = load_data("planted")["test"]
    split = split.select(range(6 if options.quick else IMAGES))
    mask_of = planted.masks_for(split)
    network: nn.Module = predictor.model.float()
    device = next(network.parameters()).device
    pixels = torch.stack([predictor.prepare(split.image(i)) for i in range(len(split))])
    images = predictor.preprocessing.standardize(pixels.to(device)).float()
    names = [planted.CLASSES[label] for label in split.labels]
    targets = torch.tensor([predictor.classes.index(name) for name in names], device=device)[:, None]
    with torch.no_grad():
        right = network(images).argmax(1) == targets[:, 0]
    accuracy = float(right.float().mean())
    kept = torch.ones_like(right) if options.quick else right
    images, targets = images[kept], targets[kept]
    masks = torch.stack([torch.from_numpy(mask_of(i)) for i in kept.nonzero()[:, 0].tolist()])
    found = {}
    with quiet(network):
        for name, method in METHODS.items():
            cheap = CHEAP.get(name, {}) if options.quick else {}
            parts = zip(images.split(16), targets.split(16), strict=True)
            maps = torch.cat([method.run(network, some, of, **cheap).values[:, 0] for some, of in parts])
            found[name] = hits_and_mass(maps, masks)
    generator = torch.Generator().manual_seed(0)
    found["random"] = hits_and_mass(torch.rand(maps.shape, generator=generator), masks)
    return found, accuracy, len(masks)


def hits_and_mass(maps: Tensor, masks: Tensor) -> tuple[float, float]:
    """Score maps (B, rows, columns) by masks (B, H, W): the share whose maximum lies on a patch of the mask, and the
    mean share of positive values there, 0 for a map without positive values.
    """
    inside = on_grid(masks.float(), maps.shape[-2:]).flatten(1) > 0  # type: ignore[arg-type]
    values = maps.flatten(1)
    hits = inside.gather(1, values.argmax(1, keepdim=True)).float().mean()
    positive = values.clamp_min(0)
    mass = (positive * inside).sum(1) / positive.sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(hits), float(mass.mean())
