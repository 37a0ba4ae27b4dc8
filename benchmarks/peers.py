"""ViT-S/16 at 224 pixels, 1000 classes, the same random pictures for all, everything in turn.

A training step is forward, cross-entropy, backward and AdamW. Ours goes through the library's own parts: precision
from `vitral.device.choose`, the objective on uint8 pictures, its parameter groups and optimizer. The others get
standardised floats, fused AdamW, their fused attention where they have a switch for it, and `torch.autocast` for bf16.
On a CPU the process keeps freed memory, as our trainer has it; the others gain from that too. vit-pytorch's network has
no bias in attention and computes attention explicitly, in the same few products as ours.

Inference of ours is `Predictor` from uint8 pictures to probabilities; the others compute logits from standardised
pictures, in bf16 both by casting the module and by autocast, of which the faster counts. "Defaults" is fp32 for the
others, which is what they compute in when nothing is said, and what the machine can do best for ours. The share is
that of the machine's own matrix-product rate at the same precision, measured in the same rounds, with the operations
of the network counted once (a multiply-add is two; a training step is three forward passes).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import vitral
from benchmarks.results import Options, Table
from vitral.bench.timing import Sample, alternate, best, matrix_product, ratio, repeated
from vitral.data.loader import Batch
from vitral.data.transforms import Augmentation, Preprocessing
from vitral.device import choose, keep_freed_memory
from vitral.model import ViTConfig
from vitral.predict import Predictor
from vitral.training.objective import classification
from vitral.training.optimizers import OptimizerSet
from vitral.training.run import Run

Program = Callable[[], object]
CLASSES = 1000
_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """The network that all build, and how much of it is measured."""

    config: ViTConfig
    train_batch: int
    infer_batches: tuple[int, ...]
    rounds: int
    matrix: int  # side of the matrices that the machine's own rate is measured with

    @property
    def size(self) -> int:
        return self.config.image[0]

    @property
    def flops(self) -> int:
        """Operations of one picture, forward."""
        return vitral.summarize(self.config).flops


def _shape(options: Options) -> Shape:
    if options.quick:
        tiny = ViTConfig(image_size=32, patch_size=16, dim=64, depth=1, heads=1, mlp_dim=128, classes=CLASSES)
        return Shape(tiny, 2, (2,), rounds=1, matrix=64)
    config = vitral.create("S/16", classes=CLASSES).config
    if options.device == "cuda":
        return Shape(config, 256, (256, 1), rounds=9, matrix=8192)
    return Shape(config, 32, (32, 1), rounds=5, matrix=2048)


# ---------------------------------------------------------------- the peers


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _timm(config: ViTConfig) -> nn.Module:
    timm = _module("timm")
    return timm.models.vision_transformer.VisionTransformer(
        img_size=config.image[0], patch_size=config.patch[0], num_classes=CLASSES, embed_dim=config.dim,
        depth=config.depth, num_heads=config.heads, mlp_ratio=config.mlp_dim / config.dim,
    )  # fmt: skip


class _Logits(nn.Module):
    """transformers' networks answer with an object."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def _transformers(config: ViTConfig) -> nn.Module:
    package = _module("transformers")
    their = package.ViTConfig(
        hidden_size=config.dim, num_hidden_layers=config.depth, num_attention_heads=config.heads,
        intermediate_size=config.mlp_dim, image_size=config.image[0], patch_size=config.patch[0], num_labels=CLASSES,
        attn_implementation="sdpa",
    )  # fmt: skip
    return _Logits(package.ViTForImageClassification(their))


def _torchvision(config: ViTConfig) -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=config.image[0], patch_size=config.patch[0], num_layers=config.depth, num_heads=config.heads,
        hidden_dim=config.dim, mlp_dim=config.mlp_dim, num_classes=CLASSES,
    )  # fmt: skip


def _vit_pytorch(config: ViTConfig) -> nn.Module:
    return _module("vit_pytorch").ViT(
        image_size=config.image[0], patch_size=config.patch[0], num_classes=CLASSES, dim=config.dim,
        depth=config.depth, heads=config.heads, dim_head=config.dim // config.heads, mlp_dim=config.mlp_dim,
    )  # fmt: skip


def _vit_pytorch_flash(config: ViTConfig) -> nn.Module:
    return _module("vit_pytorch.simple_flash_attn_vit").SimpleViT(
        image_size=config.image[0], patch_size=config.patch[0], num_classes=CLASSES, dim=config.dim,
        depth=config.depth, heads=config.heads, dim_head=config.dim // config.heads, mlp_dim=config.mlp_dim,
        use_flash=True,
    )  # fmt: skip


PEERS: dict[str, tuple[str, Callable[[ViTConfig], nn.Module]]] = {
    "timm": ("timm", _timm),
    "transformers": ("transformers", _transformers),
    "torchvision": ("torchvision", _torchvision),
    "vit-pytorch": ("vit_pytorch", _vit_pytorch),
    "vit-pytorch, simple flash": ("vit_pytorch", _vit_pytorch_flash),
}
"""Name → the package that must be installed, and the network. vit-pytorch's have no bias on q, k and v; the last has no
class token either: a little less work than the others' and ours."""


def _installed(options: Options) -> dict[str, Callable[[ViTConfig], nn.Module]]:
    found = {}
    for name, (package, build) in PEERS.items():
        if options.names and not any(name.startswith(asked) for asked in options.names):
            continue
        if importlib.util.find_spec(package):
            found[name] = build
        else:
            print(f"left out: {name} is not installed; make bench installs it")
    return found


# ---------------------------------------------------------------- what is measured


def run(options: Options) -> list[Table]:
    """A table for the training step, and one for each batch size of inference."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # vit-pytorch's way of asking for flash attention
    if options.device != "cuda":
        keep_freed_memory()  # as our trainer does; it holds for the whole process
    shape, peers = _shape(options), _installed(options)
    tables = [_table("Training step", 3, shape.train_batch, _training(shape, peers, options.device), shape, options)]
    for batch in shape.infer_batches:
        programs = _inference(shape, peers, batch, options.device)
        tables.append(_table("Inference", 1, batch, programs, shape, options))
    return tables


Key = tuple[str, str]  # implementation, precision; a way of reaching that precision may follow after a slash


def _training(shape: Shape, peers: dict[str, Callable[[ViTConfig], nn.Module]], device: str) -> dict[Key, Program]:
    pixels, labels = _pictures(shape.train_batch, shape.size, device)
    floats = Preprocessing((shape.size, shape.size)).standardise(pixels)
    programs: dict[Key, Program] = {}
    for precision in ("bf16", "fp32"):
        programs["vitral", precision] = _our_step(shape, pixels, labels, precision, device)
        for name, build in peers.items():
            programs[name, precision] = _their_step(build(shape.config).to(device), floats, labels, precision)
    return programs


def _our_step(shape: Shape, pixels: Tensor, labels: Tensor, precision: str, device: str) -> Program:
    run = Run(optimizer="adamw", lr=1e-4)
    machine = choose(device, precision)
    model = vitral.ViT(shape.config).to(machine.device).train()
    optimizer = OptimizerSet(model, run)
    objective = classification(Preprocessing((shape.size, shape.size)), Augmentation(), CLASSES)
    batch = Batch(pixels, labels, labels.cpu().numpy())

    def step() -> None:
        with machine.autocast():
            loss, _ = objective(model, batch)
        loss.backward()
        optimizer.step()

    return step


def _their_step(model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Program:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)

    def step() -> None:
        with _autocast(images.device.type, precision):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _inference(
    shape: Shape, peers: dict[str, Callable[[ViTConfig], nn.Module]], batch: int, device: str
) -> dict[Key, Program]:
    pixels, _ = _pictures(batch, shape.size, device)
    preprocessing = Preprocessing((shape.size, shape.size))
    floats = preprocessing.standardise(pixels)
    names = [str(k) for k in range(CLASSES)]
    programs: dict[Key, Program] = {}
    for precision in ("bf16", "fp32"):
        predictor = Predictor(vitral.ViT(shape.config), preprocessing, names, machine=choose(device, precision))
        programs["vitral", precision] = partial(predictor._forward, pixels)
        for name, build in peers.items():
            model = build(shape.config).to(device).eval()
            if precision == "fp32":
                programs[name, precision] = _logits(model, floats, "fp32")
            else:
                programs[name, "bf16/autocast"] = _logits(model, floats, "bf16")
                cast = build(shape.config).to(device, torch.bfloat16).eval()
                programs[name, "bf16/cast"] = _logits(cast, floats.bfloat16(), "fp32")
    return programs


def _logits(model: nn.Module, images: Tensor, precision: str) -> Program:
    def infer() -> Tensor:
        with torch.inference_mode(), _autocast(images.device.type, precision):
            return model(images)

    return infer


def _autocast(device: str, precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def _pictures(batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (batch, 3, size, size), generator=generator, dtype=torch.uint8)
    return pixels.to(device), torch.randint(CLASSES, (batch,), generator=generator).to(device)


# ---------------------------------------------------------------- tables


def _table(what: str, passes: int, batch: int, programs: dict[Key, Program], shape: Shape, options: Options) -> Table:
    """Measure everything in turn and put it into rows. What is short is repeated until a clock can read it."""
    times = 1 if options.quick or batch * passes > 8 else 10
    keyed = {" ".join(key): repeated(program, times) for key, program in programs.items()}
    for precision, dtype in _TYPES.items():
        keyed[f"machine {precision}"] = repeated(matrix_product(shape.matrix, dtype, options.device), times)
    measured = alternate(keyed, rounds=shape.rounds, warm_up=1 if options.quick else 2, device=options.device)
    found = {key: Sample(tuple(s / times for s in measured[" ".join(key)].seconds)) for key in programs}
    rates = {p: 2 * shape.matrix**3 * times / min(measured[f"machine {p}"].seconds) for p in _TYPES}
    flops = passes * shape.flops * batch
    ours = {p: found["vitral", p] for p in _TYPES}
    default = ours[choose(options.device).precision]
    rows: list[dict[str, object]] = []
    for name, precision, sample, note in _best_ways(found):
        rows.append({
            "name": name, "precision": precision + note, **sample.columns(1000), "rate": batch / sample.median,
            "share": flops / sample.median / rates[precision],
            "same": ratio(sample, ours[precision]), "default": ratio(sample, default),
        })  # fmt: skip
    columns = {
        "name": "", "precision": "precision", "n": "n|d", "median": "ms|.1f", "least": "least|.1f",
        "greatest": "greatest|.1f", "rate": "pictures/s|.1f", "share": "of the matrix rate|.0%",
        "same": "time : ours, same precision|.2f", "default": "time : ours, by default|.2f",
    }  # fmt: skip
    rate = ", ".join(f"{p} {rate / 1e9:,.0f} GFLOP/s" for p, rate in rates.items())
    name = "cuda" if options.device == "cuda" else ""
    return Table(f"{what}, batch {batch} (matrix products of {shape.matrix}: {rate})", columns, rows, name=name)


def _best_ways(found: dict[Key, Sample]) -> list[tuple[str, str, Sample, str]]:
    """Of the ways to a precision, each implementation's fastest."""
    rows = []
    for precision in _TYPES:
        for name in dict.fromkeys(name for name, _ in found):
            ways = {key[1]: s for key, s in found.items() if key[0] == name and key[1].partition("/")[0] == precision}
            way = next(way for way, sample in ways.items() if sample is best(list(ways.values())))
            note = way.partition("/")[2]
            rows.append((name, precision, ways[way], f" ({note})" if note else ""))
    return rows
