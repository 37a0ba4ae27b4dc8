"""Predictor = network + preprocessing + class names: pictures in, named probabilities out."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitral import openvino
from vitral.compiler import Compiled, lacking
from vitral.data.dataset import natural
from vitral.data.files import is_picture
from vitral.data.intake import read_image
from vitral.data.kernels import expect
from vitral.data.loader import Batches
from vitral.data.transforms import Preprocessing
from vitral.device import Machine, choose, cores, without_autocast
from vitral.errors import DataError, ImageError, UsageError, empty, unknown
from vitral.graphs import Graphed
from vitral.model import Network, ViT, avx512
from vitral.model.merging import merged
from vitral.model.packed import packable, packed, pays
from vitral.model.quantized import Ranges, quantized, quick, refusal
from vitral.model.views import Views, averaged
from vitral.weights.account import Account
from vitral.weights.load import locate, read
from vitral.weights.ranges import Measured, ranges_file, read_ranges
from vitral.weights.references import is_run

Picture = str | os.PathLike[str] | bytes | Image.Image | np.ndarray
"""A path, an encoded file, a PIL picture, or uint8 pixels (H, W) or (H, W, C)."""


Engine = Literal["auto", "plain", "packed", "compiled", "openvino"]
"""What computes a prediction: `plain` the network itself, `auto` what of ours is fastest on this machine and equals it
up to rounding, `openvino` the network as OpenVINO compiles it (`vitral[openvino]`).
"""


@dataclass(frozen=True)
class Prediction:
    """What the network says of one picture."""

    name: str
    classes: tuple[str, ...]
    probabilities: np.ndarray
    """(K,), summing to 1."""

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.classes[int(self.probabilities.argmax())]

    @property
    def confidence(self) -> float:
        """Its probability."""
        return float(self.probabilities.max())

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The most probable classes with their probabilities, best first."""
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(self.classes[i], float(self.probabilities[i])) for i in order]

    def to_json(self, count: int = 5) -> dict[str, Any]:
        """Plain data, with the `count` most probable classes."""
        top = [{"class": name, "probability": p} for name, p in self.top(count)]
        return {"image": self.name, "label": self.label, "confidence": self.confidence, "top": top}

    def __repr__(self) -> str:
        return f"Prediction({self.label!r}, {self.confidence:.1%}, {self.name!r})"


class Predictor:
    """A trained network, ready to use. `predictor.model` is the module, in evaluation mode."""

    def __init__(
        self,
        model: Network,
        preprocessing: Preprocessing,
        classes: Sequence[str],
        *,
        machine: Machine | None = None,
        source: str = "",
        engine: Engine = "auto",
        ranges: Ranges | None = None,
        merge: int = 0,
        tta: Views = "none",
    ):
        """`ranges` (`vitral.model.quantized.observe`) make the dense layers integers: `UsageError` where that cannot
        be, for a ResNet and on a GPU. `merge` is how many tokens become one with another in each block
        (`vitral.model.merging`), `tta` which views of a picture are averaged (`vitral.model.views`).
        `MissingExtraError` for an engine that is not installed.
        """
        self.machine = machine or choose("cpu" if engine == "openvino" else "auto", dim=model.config.dim)
        dtype = torch.bfloat16 if self.machine.precision == "bf16" else torch.float32
        # Weights are cast once: autocast would cast them again at every call.
        self.model = model.to(self.machine.device, dtype).eval()
        self.preprocessing, self.classes, self.source = preprocessing, tuple(classes), source
        self.account: Account | None = None
        """What became of the tensors of the file that the network came from."""
        if engine not in get_args(Engine):
            raise unknown("engine", engine, get_args(Engine))
        self.engine = self._engine(engine, ranges, merge)
        """What computes: `plain` is `model`, `compiled` what torch's compiler makes of it; `graphed`, its kernels
        recorded on a GPU, `packed`, its weights laid out for this processor, `int8`, its dense layers in integers, and
        `openvino` call no hooks.
        """
        self.merge = merge
        """Tokens that are merged in each block."""
        self.tta = tta
        """Views that are averaged."""
        compiles = "compiled by torch: the first call takes up to a minute, and once more with another batch size"
        by_kernels = self.engine == "int8" or (self.engine == "packed" and dtype == torch.bfloat16)
        ours = by_kernels and avx512.ready()
        self.note = compiles if self.engine == "compiled" else avx512.told() if ours else ""
        """What was done before the engine could compute, or speaks against it, where it is worth a word."""
        self._asked, self._ranges = engine, ranges
        self._made: _Made | None = None
        if merge or tta != "none" or self.engine == "openvino":
            self._network()  # what cannot be is said now

    def _engine(self, engine: Engine, ranges: Ranges | None, merge: int) -> str:
        """What computes where this was asked for."""
        if engine == "openvino":
            return "openvino"
        if ranges:
            if engine in ("plain", "compiled"):
                raise UsageError("the module itself does not compute in int8", hint="--engine auto, or no int8")
            return integers_by(self.model, torch_alone=engine == "packed" or merge > 0)
        if engine == "compiled":
            if merge:  # it would be compiled in pieces
                raise UsageError("what is compiled merges no tokens", hint="--merge without --engine compiled")
            if missing := lacking(self.machine.device):
                raise UsageError(missing, hint="--engine auto")
            return "compiled"
        if engine != "plain" and packable(self.model) and (engine == "packed" or pays(self.model)):  # type: ignore[arg-type]  # it is a ViT
            return "packed"
        if engine == "auto" and self.machine.device.type == "cuda" and not merge:
            return "graphed"
        if engine == "packed":
            why = "it is for a ViT on a CPU with torch's oneDNN"
            raise UsageError("nothing can be packed here", why=why, hint="--engine plain")
        return "plain"

    def plainly(self) -> Predictor:
        """The same network on the same machine with all its tokens and one view of each picture."""
        return Predictor(
            self.model, self.preprocessing, self.classes, machine=self.machine, source=self.source,
            engine="packed" if self.engine == "int8" else self._asked, ranges=self._ranges,
        )  # fmt: skip

    @overload
    def __call__(self, pictures: Picture) -> Prediction: ...  # type: ignore[overload-overlap]  # str is a Sequence
    @overload
    def __call__(self, pictures: Sequence[Picture]) -> list[Prediction]: ...
    def __call__(self, pictures: Picture | Sequence[Picture]) -> Prediction | list[Prediction]:
        """Predict one picture, or a sequence of them as one batch. `ImageError` names one that cannot be read."""
        if isinstance(pictures, Sequence) and not isinstance(pictures, (str, bytes)):
            names = [_name(picture, i) for i, picture in enumerate(pictures)]
            probabilities = self.probabilities(list(pictures))
            return [Prediction(n, self.classes, p) for n, p in zip(names, probabilities, strict=True)]
        return self([pictures])[0]

    def probabilities(self, pictures: Sequence[Picture]) -> np.ndarray:
        """(n, K) float32."""
        if not pictures:
            return np.zeros((0, len(self.classes)), np.float32)
        return self._forward(torch.stack([self.prepare(p, _name(p, i)) for i, p in enumerate(pictures)]))

    def prepare(self, picture: Picture, name: str = "image") -> Tensor:
        """uint8 (C, height, width), as the network reads it but for scaling."""
        pixels = read_image(picture, name=name, channels=self.preprocessing.channels)
        return self.preprocessing.geometry(pixels)

    def stream(self, paths: Iterable[Path], batch_size: int = 32) -> Iterator[Prediction | ImageError]:
        """Predict many files, decoding the next batch while this one is computed. A file that cannot be read gives its
        error instead; the order is that of `paths`.
        """

        def prepare(path: Path) -> Tensor | ImageError:
            try:
                return self.prepare(path, str(path))
            except ImageError as error:
                return error

        paths = list(paths)
        expect(len(paths))
        parts = [paths[i : i + batch_size] for i in range(0, len(paths), batch_size)]
        with ThreadPoolExecutor(cores()) as pool:
            ahead = [pool.submit(prepare, path) for path in parts[0]] if parts else []
            for number, part in enumerate(parts):
                ready = [future.result() for future in ahead]
                ahead = [pool.submit(prepare, p) for p in parts[number + 1]] if number + 1 < len(parts) else []
                yield from self._predict_prepared(part, ready)

    def _predict_prepared(
        self, paths: Sequence[Path], ready: Sequence[Tensor | ImageError]
    ) -> Iterator[Prediction | ImageError]:
        images = [image for image in ready if isinstance(image, Tensor)]
        rows = iter(self._forward(torch.stack(images)) if images else ())
        for path, image in zip(paths, ready, strict=True):
            yield image if isinstance(image, ImageError) else Prediction(str(path), self.classes, next(rows))

    def _forward(self, images: Tensor) -> np.ndarray:
        return self.logits(images).softmax(1).cpu().numpy()

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:
        """Logits (B, K) fp32 of prepared pictures (B, C, H, W) uint8."""
        images = self.preprocessing.standardise(images.to(self.machine.device))
        # What is packed has a precision of its own, and its operators know no autocast.
        apart = self.engine in ("packed", "int8")
        with without_autocast(self.machine.device) if apart else nullcontext():
            logits = self._network()(images.to(next(self.model.parameters()).dtype))
        return logits.float()

    def _network(self) -> nn.Module:
        """What computes, anew where `model` was changed since the last time."""
        if self.engine == "plain" and not self.merge and self.tta == "none":
            return self.model
        tensors = _tensors(self.model)
        if self._made is None or not self._made.is_of(tensors):
            self._made = _Made(tensors, averaged(self._make(), self.tta))
        return self._made.network

    def __getstate__(self) -> dict[str, Any]:
        """Without what computes, which is laid out for this process: a copy makes its own."""
        return {**self.__dict__, "_made": None}

    def _make(self) -> nn.Module:
        network: Any = self.model
        if self.engine == "openvino":
            if self.merge:
                hint = "--merge without --engine openvino"
                raise UsageError("OpenVINO computes whole networks: it merges no tokens", hint=hint)
            compiled = openvino.compiled(network, self.machine, self._ranges)
            self.note = compiled.note
            return compiled
        if self.engine == "int8":
            network = quantized(network, self._ranges or {})
        elif self.engine == "packed":
            network = packed(network)
        elif self.engine in ("compiled", "graphed"):
            return (Compiled if self.engine == "compiled" else Graphed)(network)
        return merged(network, self.merge) if self.merge else network


def integers_by(
    network: Network,
    *,
    torch_alone: bool = False,
    where: str | Path | None = None,
    hint: str = "--precision auto",
) -> Literal["openvino", "int8"]:
    """What computes a network in integers here: our kernels where they are for it, else OpenVINO where it is installed,
    which is as fast as torch for one picture and a fifth faster in batches (docs/log.md; in bf16 it is faster in
    batches alone, and not taken), else torch.

    `UsageError` where neither can.
    """
    torch_alone = torch_alone or (isinstance(network, ViT) and quick(network))
    if not torch_alone and openvino.installed() and not openvino.refusal(network):
        return "openvino"
    if why := refusal(network):
        raise UsageError("int8 cannot be computed here", where=where, why=why, hint=hint)
    return "int8"


class _Made:
    """What computes in the place of a network, and the tensors that it was made from, in the state that they had."""

    def __init__(self, tensors: list[Tensor], network: nn.Module):
        self.tensors, self.versions, self.network = tensors, _versions(tensors), network

    def is_of(self, tensors: list[Tensor]) -> bool:
        """Whether these are the same tensors, unchanged."""
        same = len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))
        return same and _versions(tensors) == self.versions


def _versions(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]


def _tensors(network: nn.Module) -> list[Tensor]:
    """Parameters and buffers as they are now: any of them, and any module, may have been replaced. At every call, so
    without torch's own iterators, which take nearly twice as long.
    """
    found, modules = list[Tensor](), [network]
    while modules:
        module = modules.pop()
        found += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        modules += [m for m in module._modules.values() if m is not None]
    return found


def find_pictures(paths: Sequence[str | Path], command: str = "predict") -> list[Path]:
    """The picture files that files and folders stand for: folders in natural order, all levels, hidden files left out.

    Raises `DataError` for a path that is not there, and where there is no picture at all; `UsageError` for an empty
    path.
    """
    if "" in paths:
        raise empty("IMAGE", f"vitral {command} RUN IMAGE_OR_FOLDER …")
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file() and is_picture(p.name))
            visible = (p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts))
            found += sorted(visible, key=lambda p: natural(str(p)))
        elif path.exists():
            found.append(path)
        else:
            raise DataError("no such picture or folder", where=path, hint=f"vitral {command} RUN IMAGE_OR_FOLDER …")
    if not found:
        hint = f"vitral {command} RUN IMAGE_OR_FOLDER …"
        why = None if paths else "what stands first is taken for the run or weights, and nothing follows it"
        if any(map(is_run, map(Path, paths))):
            why = "it is a run, which stands first"
        raise DataError(f"no pictures to {command}", where=", ".join(map(str, paths)) or None, why=why, hint=hint)
    return found


def _name(picture: Picture, index: int) -> str:
    return str(picture) if isinstance(picture, (str, os.PathLike)) else f"image {index}"


@torch.inference_mode()
def logits_of(model: nn.Module, batches: Batches, machine: Machine) -> Tensor:
    """Logits (n, K), fp32 on the CPU, of a split in its own order. The module's mode is left as it was."""
    training = model.training
    model.eval()
    try:
        with machine.autocast():
            parts = [model(batches.preprocessing.standardise(batch.images)).float() for batch in batches.epoch()]
    finally:
        model.train(training)
    return torch.cat(parts).cpu()


def load(
    source: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    engine: Engine = "auto",
    merge: int = 0,
    tta: Views = "none",
    **options: Any,
) -> Predictor:
    """A predictor from a run folder, a weights file of any known format, or a hub: `timm:NAME`, `hf:ORG/NAME`; or from
    the package itself: `demo`.

    `options` make the weights fit: `image_size`, `patch_size`, `channels`, `classes` with `new_head`, and say what a
    file does not tell: `format`, `heads`, `scheme` (see `vitral.weights.load.read`). What became of each tensor is in
    the predictor's `account`. With `engine="plain"` predictions are those of the module itself, bit for bit; with
    `engine="openvino"` OpenVINO computes, with `engine="packed"` torch's oneDNN from weights that are laid out once,
    with `engine="compiled"` what torch.compile makes of the module, which takes up to a minute first;
    with `precision="int8"` dense layers are integers, for weights that `vitral quantize` has measured; `merge` tokens
    become one with another in each block; `tta` ("mirror", "shifts", "both") averages over views of a picture. Raises
    `RunError` for a folder that is no run, `WeightsError` for what is damaged or of another kind.
    """
    loaded = read(source, **options)
    weights = loaded.weights
    network, measured = loaded.build(), Measured({})
    if device == "auto" and (precision == "int8" or engine == "openvino"):
        device = "cpu"
    if precision == "int8":
        precision = "auto"
        if device == "cpu" and engine in ("auto", "packed"):
            integers_by(network, torch_alone=engine == "packed", where=source)  # before anyone is sent to measure
        measured = read_ranges(ranges_file(locate(source)[0]), network, source)
    predictor = Predictor(
        network, weights.preprocessing, weights.classes, machine=choose(device, precision, dim=weights.config.dim),
        source=str(source), engine=engine, ranges=measured.ranges or None, merge=merge, tta=tta,
    )  # fmt: skip
    predictor.note = "; ".join(filter(None, (predictor.note, measured.warning, predictor.machine.caution)))
    predictor.account = loaded.account
    return predictor
