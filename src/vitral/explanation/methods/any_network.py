"""Wrap any module from images (B, C, H, W) to logits (B, K), for methods that need no attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import UsageError, VitralError, type_of, unknown

CELLS = 14
"""Approximate number of cells along the short side of a map, as for a ViT with patches of 16 at 224."""
MAX_PREFIX = 16
"""Largest inferred number of tokens before the patches."""


class AnyNetwork(nn.Module):
    """A network of another library, with its own layer names. Maps that are of no layer have a grid over the image."""

    def __init__(self, module: nn.Module, grid: tuple[int, int] | None = None, why: str = ""):
        """`grid` is rows and columns of the maps, by default about `CELLS` on the short side.

        `why` is the reason why methods that need attention are not available.
        """
        super().__init__()
        self.inner, self.given_grid = module, grid
        self.title = type(module).__name__
        self.why = why or f"{self.title} is used as it is, by the names of its layers"

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); `UsageError` if the network fails on these images, or has another output."""
        try:
            logits = _logits(self.inner(images))
        except (VitralError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            what = f"{self.title} cannot compute images of the shape {tuple(images.shape)}"
            raise UsageError(what, why=f"{type(error).__name__}: {str(error)[:200]}") from error
        if logits is None or logits.ndim != 2:
            shape = type(logits).__name__ if logits is None else tuple(logits.shape)
            raise UsageError(f"{self.title} is no classifier", why=f"it returns {shape}, not logits (images, classes)")
        return logits

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of the maps for images (B, C, H, W)."""
        size = images.shape[2], images.shape[3]
        if self.given_grid is None:
            return _default_grid(*size)
        if not all(1 <= n <= side for n, side in zip(self.given_grid, size, strict=True)):
            rows, columns = self.given_grid
            raise UsageError(f"no grid of {rows} × {columns} cells", why=f"images have {size} pixels")
        return self.given_grid

    @contextmanager
    def begin_at(self, layer: str) -> Iterator[list[Tensor]]:
        """Start the autograd graph at the output of a layer. Yields a list, filled with one output for each call."""
        layers = {name: part for name, part in self.inner.named_modules() if name}
        if layer not in layers:
            raise unknown("layer", layer, layers)
        if isinstance(layers[layer], torch.jit.ScriptModule):
            raise UsageError("a scripted network has no accessible layers", hint="pass the module before scripting")
        outputs: list[Tensor] = []

        def keep(_: nn.Module, __: object, output: Any) -> object:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if not isinstance(first, Tensor) or not first.is_floating_point():
                raise UsageError(f"layer '{layer}' has no tensor output", why=f"it returns {type_of(output)}")
            outputs.append(first.detach().requires_grad_())
            passed = outputs[-1].clone()  # the next layer may modify it, as `nn.ReLU(inplace=True)` does
            return passed if first is output else type(output)([passed, *output[1:]])

        with ExitStack() as undo:
            undo.callback(layers[layer].register_forward_hook(keep).remove)
            yield outputs

    @torch.no_grad()
    def layers_with_maps(self, images: Tensor) -> list[str]:
        """Outermost layers whose output has a grid over the image, in order of completion."""
        grids: dict[str, tuple[int, int]] = {}

        def record(name: str, output: object) -> None:
            if isinstance(output, Tensor) and output.ndim in (3, 4):
                try:
                    grids[name] = to_grid(output, images)[1]
                except UsageError:
                    return

        with ExitStack() as undo:
            for name, part in self.inner.named_modules():
                if name and not isinstance(part, torch.jit.ScriptModule):
                    hook = part.register_forward_hook(lambda _, __, output, name=name: record(name, output))
                    undo.callback(hook.remove)
            self(images[:1])
        inner = {name for name in grids if name.rpartition(".")[0] in grids}
        return [name for name, grid in grids.items() if name not in inner and min(grid) > 1]


def to_grid(features: Tensor, images: Tensor, prefix: int | None = None) -> tuple[Tensor, tuple[int, int]]:
    """Features of the cells of a grid, (B, rows × columns, D), and the grid.

    `features` are maps (B, D, rows, columns) or (B, rows, columns, D), or tokens (B, N, D), of which the first `prefix`
    are no patches. By default `prefix` is the smallest number that leaves a grid of the image's shape. `UsageError` for
    other features.
    """
    size = images.shape[2], images.shape[3]
    if features.ndim == 4:
        first, last = tuple(features.shape[2:]), tuple(features.shape[1:3])
        if not _fits(first, size) and _fits(last, size):
            return features.flatten(1, 2), (last[0], last[1])
        return features.flatten(2).mT, (first[0], first[1])
    if features.ndim == 3:
        before, grid = _grid_of_tokens(features.shape[1], size, range(MAX_PREFIX + 1) if prefix is None else (prefix,))
        if grid is not None:
            return features[:, before:], grid
        why = f"{features.shape[1]} tokens make no grid over an image of {size[0]} × {size[1]} pixels"
        raise UsageError("the tokens of this layer do not form a grid over the image", why=why, hint="prefix=1")
    why = f"its output is {tuple(features.shape)}, not (B, C, rows, columns) or (B, N, D)"
    raise UsageError("this layer has no grid over the image", why=why)


def _grid_of_tokens(tokens: int, size: tuple[int, int], prefixes: Iterable[int]) -> tuple[int, tuple[int, int] | None]:
    """Number of tokens before the grid, and the grid: of square cells if possible, otherwise of nearly square ones."""
    candidates: list[tuple[bool, int, tuple[int, int]]] = []
    for before in prefixes:
        rows = round(math.sqrt(max(tokens - before, 0) * size[0] / size[1]))
        grid = rows, (tokens - before) // max(rows, 1)
        if rows and rows * grid[1] == tokens - before and _fits(grid, size):
            candidates.append((grid[0] * size[1] != grid[1] * size[0], before, grid))
    return min(candidates)[1:] if candidates else (0, None)


def _fits(grid: tuple[int, ...], size: tuple[int, int]) -> bool:
    """True if cells of this grid over the image are nearly square."""
    height, width = (side / n for side, n in zip(size, grid, strict=True))
    return min(height, width) >= 1 and max(height, width) < 1.5 * min(height, width)


def _default_grid(height: int, width: int) -> tuple[int, int]:
    """Grid of square cells that divide the image, if their size is within a factor of 2 of the usual one."""
    usual = max(1.0, min(height, width) / CELLS)
    common = math.gcd(height, width)
    cell = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(math.log(n / usual)))
    if max(cell / usual, usual / cell) > 2:
        return max(1, round(height / usual)), max(1, round(width / usual))
    return height // cell, width // cell


def _logits(output: object) -> Tensor | None:
    """Logits in an output: a tensor, the first of a tuple, or `logits` of a dictionary or of transformers."""
    if isinstance(output, dict):
        output = output.get("logits")
    output = getattr(output, "logits", output)
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None
