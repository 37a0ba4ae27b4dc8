"""What a network is made of: its layers in the order in which they run, with shapes, parameters, FLOPs and memory.

Nothing is computed: a copy of the network without numbers (meta tensors) runs once, so the largest models cost no
memory and the model that was passed in is not touched.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitral.console import stdout, table
from vitral.errors import UsageError
from vitral.model.kinds import ModelConfig
from vitral.model.kinds import network as network_of
from vitral.model.variants import config as config_of
from vitral.model.vit import ViT

PARAMETER = "Parameter"
"""The type of a row that is a bare parameter, such as `cls_token`: one that a module holds beside its parts."""


@dataclass(frozen=True)
class Layer:
    """One row. Parameters and FLOPs are the layer's own, without those of the layers inside it."""

    name: str  # as in the state dict: "blocks.0.attn.qkv"
    type: str
    output_shape: tuple[int, ...]  # batch first; empty if the layer never runs; a bare parameter's own shape
    parameters: int
    trainable: int  # how many of the parameters are trained
    flops: int


@dataclass(frozen=True)
class Summary:
    """Layers and totals of one network for one input.

    FLOPs: one multiply-add is two; matrix products, convolutions and attention are counted, elementwise work is not.
    Memory in bytes: `activation_bytes` adds up the tensors that the layers of the table hand on, each once.
    """

    model: str
    input_shape: tuple[int, ...]
    layers: tuple[Layer, ...]
    parameter_bytes: int
    activation_bytes: int
    input_bytes: int

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
        """What a tool prints that skips bare parameters: write-up 000's 86,415,592, write-up 001's 7,562."""
        return sum(layer.parameters for layer in self.layers if layer.type != PARAMETER)

    @property
    def flops(self) -> int:
        """Of the forward pass, for the whole batch."""
        return sum(layer.flops for layer in self.layers)

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
            "memory": {
                "parameters": self.parameter_bytes,
                "activations": self.activation_bytes,
                "input": self.input_bytes,
            },
            "layers": [asdict(layer) | {"output_shape": list(layer.output_shape)} for layer in self.layers],
        }

    def print_table(self, console: Console | None = None, *, full: bool = False) -> None:
        """Print the table for people; blocks that are alike become one, unless `full`."""
        console = console or stdout()
        console.print(f"[bold]{escape(self.model)}[/]  {self.parameters:,} parameters", highlight=False)
        console.print(_table(self, full=full))
        if any(repeats for _, repeats in _units(self.layers, full=full)):
            note = "A row with × is the sum of alike blocks; the rows inside it are one of them."
            console.print(f"[dim]{note}[/]", highlight=False, soft_wrap=True)
        for label, text in _totals(self):
            console.print(f"{label:<12}{text}", highlight=False, soft_wrap=True)


def summarize(
    model: nn.Module | ModelConfig | str,
    image_size: int | tuple[int, int] | None = None,
    batch: int = 1,
    *,
    name: str | None = None,
) -> Summary:
    """Summarise a network, a configuration or a name ("B/16"), which are not built in memory.

    `image_size` is the model's own unless given; a network with learned positions takes no other (`UsageError`), while
    a name or a configuration is changed to it. `name` is the title, by default what was passed.
    """
    if isinstance(model, nn.Module):
        network: nn.Module = _without_numbers(model)
        title = name or type(model).__name__
    else:
        config = config_of(model) if isinstance(model, str) else model
        config = config if image_size is None else replace(config, image_size=image_size)
        with torch.device("meta"):
            network = network_of(config)
        title = name or (model if isinstance(model, str) else type(network).__name__)
    if isinstance(network, ViT):
        network.lean = False  # the table shows the whole network
    images = _images(network, image_size, batch)
    layers, activations = _run(network.eval(), images)
    return Summary(
        model=title,
        input_shape=tuple(images.shape),
        layers=layers,
        parameter_bytes=sum(p.nbytes for p in network.parameters()),
        activation_bytes=activations,
        input_bytes=images.nbytes,
    )


def _without_numbers(model: nn.Module) -> nn.Module:
    """A copy on the meta device. The memo makes deepcopy take these tensors for the model's own: nothing is copied."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b.to("meta") for b in model.buffers()}
    network = copy.deepcopy(model, memo)
    for module in network.modules():  # hooks of whoever watches the model must not see this run
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return network


def _images(network: nn.Module, image_size: int | tuple[int, int] | None, batch: int) -> Tensor:
    if batch < 1:
        raise UsageError(f"a batch of {batch} has no images", hint="--batch 1")
    config = getattr(network, "config", None)
    size = image_size or getattr(config, "image_size", None)
    channels = getattr(config, "channels", 3)
    if size is None:
        raise UsageError("the model does not say its image size", hint="summarize(model, image_size=224)")
    height, width = (size, size) if isinstance(size, int) else size
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return torch.empty(batch, channels, height, width, dtype=dtype, device="meta")


def _run(network: nn.Module, images: Tensor) -> tuple[tuple[Layer, ...], int]:
    """Run once; give the rows in the order in which layers begin, and the bytes of what they hand on."""
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
        if isinstance(output, Tensor):
            outputs[names[module]] = output

    def use(value: object) -> None:
        if isinstance(value, nn.Parameter) and value in bare:
            order.setdefault(bare[value], value)

    from torch.utils.flop_counter import FlopCounterMode  # brings Triton with it, and who predicts counts nothing

    for module in names:
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, _Watch(use):
        network(images)
    rest = {name: module for module, name in names.items() if not any(module.children())}
    for name, item in [*rest.items(), *((name, parameter) for parameter, name in bare.items())]:
        if any(True for _ in _own(item)):
            order.setdefault(name, item)  # never used, but it is part of the model

    root = type(network).__name__
    counts = counter.get_flop_counts()
    flops = _own_flops({name: sum(counts.get(f"{root}.{name}" if name else root, {}).values()) for name in order})
    rows = [_row(name, item, outputs.get(name), flops[name]) for name, item in order.items()]
    storages = {output.untyped_storage()._cdata: output.untyped_storage().nbytes() for output in outputs.values()}
    storages.pop(images.untyped_storage()._cdata, None)
    return tuple(row for row in rows if row.name or row.parameters or row.flops), sum(storages.values())


class _Watch(TorchFunctionMode):
    """Shows every argument of every torch function to `see`: the only trace that a bare parameter leaves."""

    def __init__(self, see: Callable[[object], None]):
        super().__init__()
        self.see = see

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for argument in args:
            for value in argument if isinstance(argument, list | tuple) else (argument,):
                self.see(value)
        return func(*args, **(kwargs or {}))


def _own(item: nn.Module | nn.Parameter) -> Iterator[nn.Parameter]:
    """A row's own parameters: a bare one has its own row, so a module with parts has none."""
    if isinstance(item, nn.Parameter):
        yield item
    elif not any(item.children()):
        yield from item.parameters(recurse=False)


def _own_flops(totals: dict[str, int]) -> dict[str, int]:
    """Take from each layer what the layers inside it account for."""
    own = dict(totals)
    for name in totals:
        if name:
            parent = _parent(name, totals)
            if parent in own:
                own[parent] -= totals[name]
    return own


def _parent(name: str, names: dict[str, Any]) -> str:
    """The nearest layer around this one that has a row; lists of layers have none."""
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
            if repeats and folded:  # its first row speaks for all of them, the rows below for one
                label += f" … {repeats.last}  ×{repeats.times}"
                numbers = tuple(repeats.times * sum(of) for of in zip(*map(_numbers, unit), strict=True))
            cells = [f"{numbers[0]:,}", f"{numbers[1]:,}", _short(numbers[2])]
            shown = [cell if of else "" for cell, of in zip(cells, (numbers[0], numbers[0], numbers[2]), strict=True)]
            if not summary.frozen:
                del shown[1]
            shape = str(layer.output_shape) if layer.output_shape else "not used"
            rows.add_row(escape(label), escape(layer.type), shape, *shown, style="bold" if folded else None)
    return rows


class _Repeats(NamedTuple):
    last: str  # the number of the last one
    times: int


def _units(layers: Sequence[Layer], *, full: bool) -> Iterator[tuple[list[Layer], _Repeats | None]]:
    """Layers by numbered block; of neighbours that are alike the first one only, and how many it stands for."""
    if full:
        yield list(layers), None
        return
    units = [(unit, list(group)) for unit, group in groupby(layers, key=lambda layer: _unit(layer.name))]
    for _, alike in groupby(units, key=lambda pair: (pair[0].rpartition(".")[0], _nameless(*pair))):
        same = list(alike)
        repeats = _Repeats(same[-1][0].rpartition(".")[2], len(same))
        yield same[0][1], repeats if len(same) > 1 else None


def _unit(name: str) -> str:
    """ "blocks.3" for "blocks.3.attn.qkv"; empty outside numbered blocks."""
    found = re.match(r"(?:.*\.)?\d+(?=\.|$)", name)
    return found[0] if found else ""


def _nameless(unit: str, layers: list[Layer]) -> tuple[Layer, ...]:
    return tuple(replace(layer, name=layer.name[len(unit) :] if unit else layer.name) for layer in layers)


def _numbers(layer: Layer) -> tuple[int, int, int]:
    return layer.parameters, layer.trainable, layer.flops


def _totals(summary: Summary) -> Iterator[tuple[str, str]]:
    state = f"{summary.trainable:,} trained, {summary.frozen:,} frozen" if summary.frozen else "all trained"
    yield "parameters", f"{summary.parameters:,}, {state}"
    if summary.counted != summary.parameters:
        yield "", f"{summary.counted:,} for tools that skip bare parameters"
    yield "input", f"{summary.input_shape}"
    yield "FLOPs", f"{_short(summary.flops)}FLOPs forward; one multiply-add is two"
    yield (
        "memory",
        f"parameters {_bytes(summary.parameter_bytes)}, activations {_bytes(summary.activation_bytes)}, "
        f"input {_bytes(summary.input_bytes)}",
    )


def _short(number: float) -> str:
    """1,234,567 is "1.23 M"; the unit's name follows directly."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.0f} {prefix}" if prefix == "" else f"{number:.3g} {prefix}"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"
