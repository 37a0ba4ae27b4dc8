"""Predictor = network + preprocessing + class names: images in, named probabilities out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, overload

import numpy as np
import torch
from torch import Tensor, nn

from vitral.console import Described
from vitral.data.images.preprocessing import Preprocessing
from vitral.device import Machine, choose, cpu_by_default, without_autocast
from vitral.errors import ImageError, UsageError, unknown, warn
from vitral.inference.engines import openvino
from vitral.inference.engines.built import Built, Held, Snapshot, stepped_aside, structure_of
from vitral.inference.engines.casting import cast_copy, dtype_of, is_of_dtype
from vitral.inference.engines.compiled import Compiled, unavailable_reason
from vitral.inference.engines.int8 import Ranges, has_fused_blocks, quantized, unsupported_reason
from vitral.inference.engines.packed import is_faster, packable, packed
from vitral.inference.features import head_features, inner_tokens, patch_tokens
from vitral.inference.generation import only_generates
from vitral.inference.inputs import ImageInput, Images, expand, is_single, pixels_of
from vitral.inference.outputs import Output, holding, output_of
from vitral.inference.outputs.output import require_classes
from vitral.inference.own_sizes import network_logits, only_plain
from vitral.inference.predictions import Prediction, Predictions
from vitral.inference.stream import stream
from vitral.inference.tta import Averaged, Views, averaged
from vitral.kernels import cpu, cpu_library
from vitral.kernels.cuda_graphs import Graphed
from vitral.kinds import checked
from vitral.model import Foreign, Network, ViT
from vitral.model.settings import replaced_head
from vitral.model.variants import name_of
from vitral.weights.fitted import check_ranges
from vitral.weights.in_memory import unwrapped
from vitral.weights.load import read
from vitral.weights.native import assumed_output
from vitral.weights.report import LoadReport

T = TypeVar("T")

Engine = Literal["auto", "plain", "packed", "compiled", "openvino"]
"""Implementations of the forward pass; `load` lists them. `auto` is the fastest of vitral's own on this machine; its
results equal those of `plain` up to rounding.
"""
_COMPILES = "compiled by torch: the first call takes up to a minute, and once more with another batch size"


class Predictor(Described):
    """A trained network, ready to use. `predictor.model` is the module in fp32, in evaluation mode, on every machine.

    Engines in bf16 or int8, or with packed weights, compute with a copy of the weights, which the first call makes.
    After you have read `model`, each call compares all weights with the copy, and renews it if they have changed. In
    bf16, the copy of the engine `plain` needs half the memory of `model`. The copy of `packed` needs as much as
    `model`, because it keeps the original weights beside the packed ones.

    Example:
        predictor = vitral.load("runs/photos")
        print(predictor("cat.jpg").label)
        features = predictor.embed(["cat.jpg"])
    """

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] | None = None,
        *,
        machine: Machine | None = None,
        source: str = "",
        engine: Engine = "auto",
        ranges: Ranges | None = None,
        tta: Views = "none",
        output: Output | None = None,
    ):
        """Wrap a network in memory.

        `model` is one of vitral's networks, which is moved to the device and to fp32 in place, or one of timm,
        torchvision or transformers, which is read and left unchanged (`vitral.weights.load.read`). By default,
        preprocessing and classes are read from the network, or assumed if it does not define them, and `output` is a
        classifier's. The numbers of `output` must have been fitted to this network and single views; those that are not
        valid for `tta` or in int8 are left out. `ranges` (`int8.observe`) quantize the dense layers. `load` describes
        `engine` and `tta`.

        Raises `UsageError` for an engine that does not support this network or device, also for `ranges` of a ResNet
        or on a GPU; `MissingExtraError` for an engine that is not installed.
        """
        self.account: LoadReport | None = None
        """The load report: the status of each tensor of the weights that the network was loaded from."""
        network = unwrapped(model)
        ours = isinstance(network, Network)
        if not ours or preprocessing is None or classes is None:
            loaded = read(network)
            weights, self.account, source = loaded.weights, loaded.account, source or loaded.reference
            preprocessing = weights.preprocessing if preprocessing is None else preprocessing
            classes = weights.classes if classes is None else classes
            network = network if ours else loaded.build()
        assert isinstance(network, Network)
        self.machine = machine or choose("cpu" if engine == "openvino" else "auto", dim=network.config.dim)
        self.held = Held(network.to(self.machine.device, torch.float32).eval())
        self.preprocessing, self.classes, self.source = preprocessing, tuple(classes), source
        self._as_fitted = output or output_of(self.classes, assumed_output(network.config))
        self.tta, self.ranges = tta, ranges
        """Views of each image whose predictions are averaged, and ranges of int8."""
        self.output: Output
        """The way from logits to predictions, for the task of the network."""
        self.output, self.left_out = holding(self._as_fitted, self.changes)
        """… and notes on the numbers of `output` that do not hold here."""
        if engine not in get_args(Engine):
            raise unknown("engine", engine, get_args(Engine))
        self._requested = engine
        self._built: Built | None = None
        self._seen: Snapshot | None = None
        self._choose_engine()
        if tta != "none":
            require_classes(self.output, "averaging views", "--tta none")
        if tta != "none" or self.engine == "openvino":
            self._network()  # raises now for unsupported options, not at the first call

    @property
    def model(self) -> Network:
        """The module. You may change it: after its first use here, each call looks for changes (docs/predict.md)."""
        if self._seen is None:
            self._seen = Snapshot(self.held.network)
        self.held.lent = True
        return self.held.network

    @model.setter
    def model(self, network: Network) -> None:
        if self._seen is None:
            self._seen = Snapshot(self.held.network)
        self.held, self._built = Held(network), None
        self._choose_engine()

    @property
    def network(self) -> Network:
        """The module, for reading only: do not change it. Unlike `model`, reading it makes no later call slower."""
        return self.held.network

    def _choose_engine(self) -> None:
        """Choose the engine in use for the network as it is now."""
        own = only_plain(self.preprocessing, self._requested, bool(self.ranges), self.tta)
        changed = "" if own else stepped_aside(self.network, self._requested, bool(self.ranges))
        self.engine = "plain" if own or changed else self._engine(self._requested, self.ranges)
        """The engine in use: `plain` (`model`, in bf16 a copy), `compiled` (by torch.compile), `graphed` (CUDA graphs),
        `packed` (weights in the layout of oneDNN), `int8` (quantized dense layers) or `openvino`. With a hook, or after
        another change of what it computes, `model` itself computes.
        """
        by_kernels = self.engine == "int8" or (self.engine == "packed" and self.dtype == torch.bfloat16)
        built = cpu_library.compile_note() if by_kernels and cpu.ready() else changed
        self.note = _COMPILES if self.engine == "compiled" else built
        """A note on the engine: what was compiled first, or a drawback. Empty if there is none."""
        self._structure = structure_of(self.network)

    def _engine(self, engine: Engine, ranges: Ranges | None) -> str:
        """Return the engine in use for the requested one."""
        if only_generates(self.network, engine, bool(ranges) or self.tta != "none"):
            return "plain"
        if engine == "openvino":
            return "openvino"
        if ranges:
            if engine in ("plain", "compiled"):
                raise UsageError(f"engine {engine} does not compute in int8", hint="--engine auto, or no int8")
            return int8_engine(self.network, torch_alone=engine == "packed")
        if engine == "compiled":
            if missing := unavailable_reason(self.machine.device):
                raise UsageError(missing, hint="--engine auto")
            return "compiled"
        wanted = engine != "plain" and packable(self.network, self.dtype)
        if wanted and (engine == "packed" or is_faster(self.network, self.dtype)):  # type: ignore[arg-type]  # it is a ViT
            return "packed"
        captured = self.machine.device.type == "cuda" and not isinstance(self.network, Foreign)
        if engine == "auto" and captured:
            return "graphed"
        if engine == "packed":
            why = "packing needs a ViT on a CPU with torch's oneDNN"
            raise UsageError("nothing can be packed here", why=why, hint="--engine plain")
        return "plain"

    @property
    def changes(self) -> list[str]:
        """Differences from the settings with which the calibration was fitted (`vitral.weights.fitted.CHANGES`)."""
        own = {"views": self.tta != "none", "int8": bool(self.ranges)}
        return [*(self.account.changes if self.account else ()), *(name for name, on in own.items() if on)]

    def plainly(self) -> Predictor:
        """Return a predictor of the same network on the same machine, without averaging."""
        twin = Predictor(
            self.network,
            self.preprocessing,
            self.classes,
            machine=self.machine,
            source=self.source,
            engine="packed" if self.engine == "int8" else self._requested,
            ranges=self.ranges,
            output=self.output if self.tta == "none" else self._as_fitted,
        )
        twin.held, twin._seen = self.held, self._seen
        return twin

    def cast(self) -> Predictor:
        """Cast `model` to the precision of the engine, for heat maps and figures in that precision; return `self`."""
        self.held, self._built = Held(cast_copy(self.network, self.dtype), self.held.lent), None
        self._seen = None
        return self

    @overload
    def __call__(self, images: ImageInput) -> Prediction: ...  # type: ignore[overload-overlap]  # str is iterable
    @overload
    def __call__(self, images: Iterable[Any]) -> Predictions: ...
    def __call__(self, images: Images) -> Prediction | Predictions:
        """Predict one image, or all images of an iterable, a batch, a folder, a list or an archive.

        `vitral.inference.inputs.ACCEPTED` lists what an image may be. Raises `ImageError`, which names the image that
        cannot be read, and `DataError` for a folder, list or archive without any.
        """
        if is_single(images):
            (item,) = expand(images)
            row = self.rows(self.prepare(item.image, item.name)[None])[0]
            return self.output.prediction(item.name, row)
        return Predictions(_or_raise(result) for result in self.stream(images))

    def probabilities(self, images: Images) -> np.ndarray:
        """Return probabilities (n, K) float32 of any number of images, computed as one batch."""
        prepared = [self.prepare(item.image, item.name) for item in expand(images)]
        if not prepared:
            return np.zeros((0, len(self.classes)), np.float32)
        logits = self.logits(torch.stack(prepared))
        return self.output.values(logits).cpu().numpy()

    def prepare(self, image: ImageInput, name: str = "image") -> Tensor:
        """Decode, resize and crop an image: uint8 (C, height, width), not yet standardized."""
        recipe = self.preprocessing
        pixels = pixels_of(image, name=name, channels=recipe.channels, levels=recipe.levels)
        return recipe.geometry(pixels)

    @partial(checked, but=("images",))  # which `expand` checks
    def stream(self, images: Images, batch_size: int = 32) -> Iterator[Prediction | ImageError]:
        """Predict any number of images in order, decoding the next batch during the computation of this one.

        `images` are as for a call. An unreadable image yields its error, and the stream continues. Memory does not
        grow: an iterable is read at most two batches ahead.
        """
        for name, row in stream(images, self.prepare, self.rows, batch_size):
            yield row if isinstance(row, ImageError) else self.output.prediction(name, row)

    @partial(checked, but=("images",))  # which `expand` checks
    def embed(
        self, images: Images, *, tokens: bool = False, layer: int | None = None, batch_size: int = 32
    ) -> np.ndarray:
        """Return the input of the head for each image, (B, D) float32; with `tokens` a vector per patch, (B, N, D).

        With `layer`, the vectors are the output of this block of a ViT, and (B, D) is their mean over the patches; −1
        is the last block. The module itself computes them, with any engine. `images` are as for a call. Raises
        `ImageError` for an unreadable image, and `UsageError` if the predictor averages views.
        """
        results = self.stream_features(images, tokens=tokens, layer=layer, batch_size=batch_size)
        rows = [_or_raise(row) for _, row in results]
        config = self.network.config
        empty = (0, 0, config.dim) if tokens else (0, config.features if layer is None else config.dim)
        return np.stack(rows) if rows else np.zeros(empty, np.float32)

    @partial(checked, but=("images",))  # which `expand` checks
    def stream_features(
        self, images: Images, *, tokens: bool = False, layer: int | None = None, batch_size: int = 32
    ) -> Iterator[tuple[str, np.ndarray | ImageError]]:
        """Yield the name of each image with its features or its error, as `stream` does."""
        if self.tta != "none":
            why = "this predictor averages views"
            raise UsageError("features come from the module itself", why=why, hint="predictor.plainly().embed(…)")
        yield from stream(images, self.prepare, lambda batch: self.features(batch, tokens, layer).numpy(), batch_size)

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        height, width = self.preprocessing.image_size
        some = ", ".join([*map(repr, self.classes[:3]), *(["…"] if len(self.classes) > 3 else [])])
        return {
            "model": name_of(self.network.config),
            **({"source": repr(self.source)} if self.source else {}),
            "classes": f"{len(self.classes):,} classes" + (f": {some}" if some else ""),
            "image size": f"{height}×{width}",
            "device": f"{self.machine.device} {self.machine.precision}",
            "engine": self.engine,
        }

    def rows(self, images: Tensor) -> np.ndarray:
        """Return one row of outputs for each prepared image. `output.prediction` turns a row into a `Prediction`."""
        logits = self.logits(images)
        values = self.output.values(logits)
        if detector := getattr(self.output, "unknown", None):
            values = detector.appended(values, logits, lambda: self.features(images))
        return values.cpu().numpy()

    def features(self, images: Tensor, tokens: bool = False, layer: int | None = None) -> Tensor:
        """Return `embed` of prepared images, (B, D) or (B, N, D) fp32 on the CPU."""
        features, images = patch_tokens if tokens else head_features, images.to(self.machine.device)
        with cpu_by_default():
            if layer is not None:
                found = inner_tokens(self.network, images, self.preprocessing, self.machine, layer)
                return found if tokens else found.mean(1)
            return features(self.network, images, self.preprocessing, self.machine)

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:
        """Return logits (B, K) fp32 of prepared images (B, C, H, W) uint8."""
        # Packed weights have a fixed dtype, and their operators do not support autocast.
        context: AbstractContextManager[None] = nullcontext()
        if self.engine in ("packed", "int8"):
            context = without_autocast(self.machine.device)
        elif isinstance(self.network, Foreign):
            context = self.machine.autocast()
        with context, cpu_by_default():
            network = self._network()
            logits = network_logits(network, self.preprocessing, images.to(self.machine.device), self.dtype)
        if self.classes and not self.output.sequence and logits.shape[1] != len(self.classes):
            raise replaced_head(logits.shape[1], len(self.classes))
        return logits

    def _network(self) -> nn.Module:
        """Return the engine's module, rebuilt if `model` has changed since the last call."""
        network, lent = self.held.network, self.held.lent
        if lent and self._structure != structure_of(network):
            self._choose_engine()
            self._built = None
        snapshot = Snapshot(network) if lent else None
        if snapshot:
            self._check_fitted(snapshot)
        itself = self.engine == "plain" and self.tta == "none" and self.dtype == dtype_of(network)
        if itself and (not lent or self._requested == "plain" or is_of_dtype(network, self.dtype)):
            return network
        if self._built is None or (snapshot and not self._built.snapshot.is_same(snapshot)):
            with cpu_by_default():
                self._built = Built(snapshot or Snapshot(network), averaged(self._build(), self.tta))
        if isinstance(self._built.network, Averaged):
            self._built.network.temperature = getattr(self.output, "temperature", 1.0)
        return self._built.network

    def _check_fitted(self, snapshot: Snapshot) -> None:
        """Leave out the numbers of the output, with a warning, if weights were changed since the last call."""
        if self._seen is not None and not snapshot.has_values_of(self._seen):
            if self.ranges:
                check_ranges(["weights"], self.source)
            self.output, notes = holding(self.output, ["weights"])
            self.left_out += notes
            for note in notes:
                warn(note)
        self._seen = snapshot

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the engine's module, which belongs to this process: a copy builds its own."""
        return {**self.__dict__, "_built": None, "_seen": None}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the engine computes in.

        vitral casts its own networks once, because autocast would cast the weights in every call. A network of another
        library keeps its dtype and uses autocast, because some of its parts may have to stay in fp32, such as the
        statistics of batch normalization.
        """
        own = dtype_of(self.network)
        if isinstance(self.network, Foreign):
            return own
        if self.machine.precision == "bf16":
            return torch.bfloat16
        return own if self._requested == "plain" or own == torch.bfloat16 else torch.float32

    def _build(self) -> nn.Module:
        network: Any = self.network if self.engine == "openvino" else cast_copy(self.network, self.dtype)
        if self.engine == "openvino":
            compiled = openvino.compiled(network, self.machine, self.ranges)
            self.note = compiled.note
            return compiled
        if self.engine == "int8":
            network = quantized(network, self.ranges or {})
        elif self.engine == "packed":
            network = packed(network)
        elif self.engine in ("compiled", "graphed"):
            return (Compiled if self.engine == "compiled" else Graphed)(network)
        return network


def int8_engine(
    network: Network,
    *,
    torch_alone: bool = False,
    where: str | Path | None = None,
    hint: str = "--precision auto",
) -> Literal["openvino", "int8"]:
    """Choose the int8 implementation: vitral's kernels if they support the network, else OpenVINO if it is installed,
    else torch (the first and the last are the engine "int8").

    In int8 OpenVINO is as fast as torch for one image and a fifth faster in batches (docs/log/inference-speed.md). In
    bf16 it is faster only in batches, and never chosen. Raises `UsageError` if no implementation supports the network.
    """
    torch_alone = torch_alone or (isinstance(network, ViT) and has_fused_blocks(network))
    if not torch_alone and openvino.installed() and not openvino.unsupported_reason(network):
        return "openvino"
    if why := unsupported_reason(network):
        raise UsageError("int8 cannot be computed here", where=where, why=why, hint=hint)
    return "int8"


def _or_raise(result: T | ImageError) -> T:
    if isinstance(result, ImageError):
        raise result
    return result
