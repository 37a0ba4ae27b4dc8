"""Table of layers in execution order, with shapes, parameters, FLOPs and memory.

Nothing is computed: a copy of the network on the meta device runs once. So the largest models need no memory, and the
model that was passed stays as it is. A network of another library may not run there: its copy computes one image.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitral.console import Described, stdout, table
from vitral.errors import UsageError
from vitral.kinds import checked
from vitral.model import registry, variants
from vitral.model.decoder import EncoderDecoder
from vitral.model.foreign import Foreign
from vitral.model.registry import ModelConfig
from vitral.model.vit import ViT
from vitral.model.watched import pooled_queries

PARAMETER = "Parameter"
"""Type of the row of a bare parameter, such as `cls_token`: one that a module with submodules holds itself."""


@dataclass(frozen=True)
class Layer:
    """One row. Parameters and FLOPs exclude nested layers."""

    name: str  # as in the state dict: "blocks.0.attn.qkv"
    type: str
    output_shape: tuple[int, ...]  # batch first; empty if the layer never runs; for a bare parameter its shape
    parameters: int
    trainable: int  # how many of the parameters are trained
    flops: int


@dataclass(frozen=True, repr=False)
class Summary(Described):
    """Layers and totals of one network for one input.

    FLOPs count one multiply-add as two, in matrix products, convolutions and attention, without elementwise operations.
    Memory is in bytes; `activation_bytes` is the sum over the distinct output tensors of the layers.

    Example:
        summary = vitral.summarize("B/16", 224)
        print(summary.parameters, summary.activation_bytes)
    """

    model: str
    input_shape: tuple[int, ...]
    layers: tuple[Layer, ...]
    parameter_bytes: int
    activation_bytes: int
    input_bytes: int
    computed_flops: int
    """FLOPs of a forward pass as it runs: the last block computes only the tokens that the head reads."""

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def trainable(self) -> int:
        return sum(layer.trainable for layer in self.layers)

    @property
    def frozen(self) -> int:
        return self.parameters - self.trainable

    @property
    def counted(self) -> int:
        """Parameters without bare ones, as some tools count: 86,415,592 in reproduction 000, 7,562 in 001."""
        return sum(layer.parameters for layer in self.layers if layer.type != PARAMETER)

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass for the whole batch, with all tokens in every block, as other tools count."""
        return sum(layer.flops for layer in self.layers)

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        return {
            "model": self.model,
            "input": "×".join(map(str, self.input_shape)),
            "layers": f"{len(self.layers):,} layers",
            "parameters": f"{self.parameters:,} parameters",
            "FLOPs": f"{self.flops:,} FLOPs",
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data; memory in bytes."""
        return {
            "model": self.model,
            "input_shape": list(self.input_shape),
            "parameters": self.parameters,
            "trainable": self.trainable,
            "frozen": self.frozen,
            "counted": self.counted,
            "flops": self.flops,
            "computed_flops": self.computed_flops,
            "memory": {
                "parameters": self.parameter_bytes,
                "activations": self.activation_bytes,
                "input": self.input_bytes,
            },
            "layers": [asdict(layer) | {"output_shape": list(layer.output_shape)} for layer in self.layers],
        }

    def print_table(self, console: Console | None = None, *, full: bool = False) -> None:
        """Print the table; identical blocks are folded into one, unless `full`."""
        console = console or stdout()
        console.print(f"[bold]{escape(self.model)}[/]  {self.parameters:,} parameters", highlight=False)
        console.print(_table(self, full=full))
        if any(repeats for _, repeats in _units(self.layers, full=full)):
            note = "A row with × is the sum of alike blocks; the rows inside it are one of them."
            console.print(f"[dim]{note}[/]", highlight=False, soft_wrap=True)
        for label, text in _totals(self):
            console.print(f"{label:<12}{text}", highlight=False, soft_wrap=True)


@checked
def summarize(
    model: nn.Module | ModelConfig | str,
    image_size: int | tuple[int, int] | None = None,
    batch: int = 1,
    *,
    name: str | None = None,
) -> Summary:
    """Summarize a network, a configuration or a named model such as "B/16", without allocating its weights.

    Args:
        model: The network, its configuration, or its name.
        image_size: Size in pixels: a side of a square, or (height, width) (default: the size of the model). A network
            with learned positions accepts only its own.
        batch: Images per batch, for the memory of activations.
        name: The title (default: the name or the class of the model).

    Returns:
        Parameters, FLOPs and memory, with a row per layer.

    Raises:
        UsageError: The name is not known, or the network does not take images of this size.

    Example:
        print(vitral.summarize("B/16", 224))
    """
    if isinstance(model, nn.Module):
        network: nn.Module = copy.deepcopy(model).cpu() if isinstance(model, Foreign) else _to_meta(model)
        title = name or type(model).__name__
    else:
        config = variants.config(model) if isinstance(model, str) else model
        config = config if image_size is None else registry.with_image_size(config, image_size)
        with torch.device("meta"):
            network = registry.network(config)
        title = name or (model if isinstance(model, str) else type(network).__name__)
    images = _images(network.eval(), image_size, batch)
    try:
        pruned = _PrunedBlock.of(network)
        layers, activations = _run(network, images)
        saved = pruned.saved_flops() if pruned else 0
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        why = "one of its tensors has more values than torch can count"
        raise UsageError(
            f"{title} is too large to summarize", why=why, hint="use a smaller image size or batch"
        ) from None
    return Summary(
        model=title,
        input_shape=tuple(images.shape),
        layers=layers,
        parameter_bytes=sum(p.nbytes for p in network.parameters()),
        activation_bytes=activations,
        input_bytes=images.nbytes,
        computed_flops=sum(layer.flops for layer in layers) - saved,
    )


@dataclass
class _PrunedBlock:
    """The last block of a ViT that computes only the tokens that the head reads, and what it was given."""

    block: nn.Module
    queries: int
    given: tuple[Any, ...] = ()

    @classmethod
    def of(cls, network: nn.Module) -> _PrunedBlock | None:
        """Let this block compute all tokens for the table; None if it does in any case."""
        if not isinstance(network, ViT) or (queries := pooled_queries(network)) is None:
            return None
        found = cls(network.blocks[-1], queries)
        network.prune_last_block = False
        found.block.register_forward_pre_hook(found.keep)
        return found

    def keep(self, _: nn.Module, inputs: tuple[object, ...]) -> None:
        self.given = inputs

    def saved_flops(self) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        x, keys, rotation, _ = self.given
        counts = []
        for queries in (None, self.queries):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                self.block(x, keys, rotation, queries)
            counts.append(counter.get_total_flops())
        return counts[0] - counts[1]


def _to_meta(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device. The memo maps its tensors to meta tensors, so deepcopy copies no values."""
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b.to("meta") for b in model.buffers()}
    network = copy.deepcopy(model, memo)
    for module in network.modules():  # hooks of the original must not see this run
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return network


_LARGEST_BATCH = 1_000_000


def _images(network: nn.Module, image_size: int | tuple[int, int] | None, batch: int) -> Tensor:
    if batch < 1:
        raise UsageError(f"a batch of {batch} has no images", hint="--batch 1")
    if batch > _LARGEST_BATCH:
        raise UsageError(f"a batch must be at most {_LARGEST_BATCH:,}, not {batch}", hint="--batch 1")
    config = getattr(network, "config", None)
    size = image_size or getattr(config, "image_size", None)
    channels = getattr(config, "channels", 3)
    if size is None:
        raise UsageError("the model does not say its image size", hint="summarize(model, image_size=224)")
    height, width = (size, size) if isinstance(size, int) else size
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    device = "cpu" if isinstance(network, Foreign) else "meta"
    return torch.zeros(batch, channels, height, width, dtype=dtype, device=device)


def _run(network: nn.Module, images: Tensor) -> tuple[tuple[Layer, ...], int]:
    """Run once. Return the rows in execution order, and the bytes of the layers' outputs."""
    names = {module: name for name, module in network.named_modules()}
    bare = {
        parameter: f"{name}.{own}" if name else own
        for module, name in names.items()
        if any(module.children())
        for own, parameter in module.named_parameters(recurse=False)
    }
    order: dict[str, nn.Module | nn.Parameter] = {}
    outputs: dict[str, Tensor] = {}

    def begin(module: nn.Module, _: object) -> None:
        order.setdefault(names[module], module)

    def end(module: nn.Module, _: object, output: object) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if isinstance(output, Tensor):
            outputs[names[module]] = output

    def use(value: object) -> None:
        if isinstance(value, nn.Parameter) and value in bare:
            order.setdefault(bare[value], value)

    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, which prediction does not need

    for module in names:
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
    counter = FlopCounterMode(display=False)
    inputs = [images]
    if isinstance(network, EncoderDecoder):  # the longest text for each image
        inputs += [torch.zeros(len(images), network.config.decoder.length, dtype=torch.long, device=images.device)]
    with torch.no_grad(), counter, _ArgumentTracer(use):
        network(*inputs)
    rest = {name: module for module, name in names.items() if not any(module.children())}
    for name, item in [*rest.items(), *((name, parameter) for parameter, name in bare.items())]:
        if any(True for _ in _own(item)):
            order.setdefault(name, item)  # never used, but part of the model

    root = type(network).__name__
    counts = counter.get_flop_counts()
    flops = _own_flops({name: sum(counts.get(f"{root}.{name}" if name else root, {}).values()) for name in order})
    rows = [_row(name, item, outputs.get(name), flops[name]) for name, item in order.items()]
    storages = {output.untyped_storage()._cdata: output.untyped_storage().nbytes() for output in outputs.values()}
    storages.pop(images.untyped_storage()._cdata, None)
    return tuple(row for row in rows if row.name or row.parameters or row.flops), sum(storages.values())


class _ArgumentTracer(TorchFunctionMode):
    """Call `visit` with every argument of every torch function, which is how uses of bare parameters are found."""

    def __init__(self, visit: Callable[[object], None]):
        super().__init__()
        self.visit = visit

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        for argument in args:
            for value in argument if isinstance(argument, list | tuple) else (argument,):
                self.visit(value)
        return func(*args, **(kwargs or {}))


def _own(item: nn.Module | nn.Parameter) -> Iterator[nn.Parameter]:
    """Parameters of one row. A module with submodules has none, since its bare parameters have their own rows."""
    if isinstance(item, nn.Parameter):
        yield item
    elif not any(item.children()):
        yield from item.parameters(recurse=False)


def _own_flops(totals: dict[str, int]) -> dict[str, int]:
    """Subtract the FLOPs of nested layers from each layer."""
    own = dict(totals)
    for name in totals:
        if name:
            parent = _parent(name, totals)
            if parent in own:
                own[parent] -= totals[name]
    return own


def _parent(name: str, names: Collection[str]) -> str:
    """Nearest enclosing layer with a row; lists of layers have none."""
    while name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return ""


def _row(name: str, item: nn.Module | nn.Parameter, output: Tensor | None, flops: int) -> Layer:
    if isinstance(item, nn.Parameter):
        output, kind = item, PARAMETER
    else:
        kind = type(item).__name__
    own = list(_own(item))
    return Layer(
        name=name,
        type=kind,
        output_shape=() if output is None else tuple(output.shape),
        parameters=sum(p.numel() for p in own),
        trainable=sum(p.numel() for p in own if p.requires_grad),
        flops=flops,
    )


def _table(summary: Summary, *, full: bool) -> Table:
    rows = table()
    rows.add_column("layer", no_wrap=True)
    rows.add_column("type", style="dim")
    rows.add_column("output shape", style="dim", no_wrap=True)
    for number in ("parameters", "FLOPs") if not summary.frozen else ("parameters", "trainable", "FLOPs"):
        rows.add_column(number, justify="right", no_wrap=True)
    parents = {layer.name: None for layer in summary.layers}
    for unit, repeats in _units(summary.layers, full=full):
        for layer in unit:
            parent = _parent(layer.name, parents)
            above, depth = parent, 0
            while above:
                above, depth = _parent(above, parents), depth + 1
            label = "  " * depth + (layer.name[len(parent) + 1 :] if parent else layer.name)
            numbers = (layer.parameters, layer.trainable, layer.flops)
            folded = repeats is not None and layer is unit[0]
            if repeats and folded:  # the first row is the sum of all blocks, the rows below are one block
                label += f" … {repeats.last}  ×{repeats.times}"
                each = [(one.parameters, one.trainable, one.flops) for one in unit]
                numbers = tuple(repeats.times * sum(of) for of in zip(*each, strict=True))
            cells = [f"{numbers[0]:,}", f"{numbers[1]:,}", _short(numbers[2])]
            cells = [cell if of else "" for cell, of in zip(cells, (numbers[0], numbers[0], numbers[2]), strict=True)]
            if not summary.frozen:
                del cells[1]
            shape = str(layer.output_shape) if layer.output_shape else "not used"
            rows.add_row(escape(label), escape(layer.type), shape, *cells, style="bold" if folded else None)
    return rows


class _Repeats(NamedTuple):
    last: str  # number of the last block
    times: int


def _units(layers: Sequence[Layer], *, full: bool) -> Iterator[tuple[list[Layer], _Repeats | None]]:
    """Group layers by numbered block. Yield the first of consecutive identical blocks, and their number."""
    if full:
        yield list(layers), None
        return
    units = [(unit, list(group)) for unit, group in groupby(layers, key=lambda layer: _unit(layer.name))]
    for _, group in groupby(units, key=lambda pair: (pair[0].rpartition(".")[0], _nameless(*pair))):
        same = list(group)
        repeats = _Repeats(same[-1][0].rpartition(".")[2], len(same))
        yield same[0][1], repeats if len(same) > 1 else None


def _unit(name: str) -> str:
    """Numbered block of a layer: "blocks.3" for "blocks.3.attn.qkv", empty outside numbered blocks."""
    match = re.match(r"(?:.*\.)?\d+(?=\.|$)", name)
    return match[0] if match else ""


def _nameless(unit: str, layers: list[Layer]) -> tuple[Layer, ...]:
    return tuple(replace(layer, name=layer.name[len(unit) :] if unit else layer.name) for layer in layers)


def _totals(summary: Summary) -> Iterator[tuple[str, str]]:
    state = f"{summary.trainable:,} trained, {summary.frozen:,} frozen" if summary.frozen else "all trained"
    yield "parameters", f"{summary.parameters:,}, {state}"
    if summary.counted != summary.parameters:
        yield "", f"{summary.counted:,} for tools that skip bare parameters"
    yield "input", f"{summary.input_shape}"
    yield "FLOPs", f"{_short(summary.flops)}FLOPs forward; one multiply-add is two"
    if summary.computed_flops != summary.flops:
        yield "", f"{_short(summary.computed_flops)}FLOPs run: the last block computes only what the head reads"
    yield (
        "memory",
        f"parameters {binary_size(summary.parameter_bytes)}, activations {binary_size(summary.activation_bytes)}, "
        f"input {binary_size(summary.input_bytes)}",
    )


def _short(number: float) -> str:
    """Format 1,234,567 as "1.23 M", to be followed by the name of a unit."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.0f} {prefix}" if prefix == "" else f"{number:.3g} {prefix}"


def binary_size(number: float) -> str:
    """Format bytes: 1500 → "1.465 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"
