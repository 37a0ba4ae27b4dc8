"""The contract of a format of weights (`vitral.formats`): the same weights in, the same logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.weights import native
from vitral.weights.formats import FORMATS
from vitral.weights.formats.format import Format
from vitral.weights.load import read

Size = tuple[int, int]
WORST = 1e-5
"""Largest difference of logits, as a share of the largest one."""


@dataclass(frozen=True)
class Case:
    """A source's network with random weights."""

    write: Callable[[Path], Path]
    """Write its file or folder into this folder; return the path to load."""
    logits: Callable[[Tensor], Tensor]
    """Logits of the source for standardized images (B, C, H, W), of any size in `sizes`."""
    sizes: tuple[Size, ...]
    """The network's own image size first, then others that the source can compute too."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `vitral.load` for facts that the file does not state, as `heads`."""
    channels: int = 3
    text: Tensor | None = None
    """Tokens (2, T), for a network that reads text: its logits are those of the tokens after them."""


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter at random, none at its initial zero or one, and in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 if parameter.ndim == 1 else 0.2))
    return model.eval()


def check_parity(case: Case, format: str, folder: Path) -> tuple[float, int]:
    """Check that a network computes the same here, at all sizes of its case, and that every tensor is accounted for.

    Returns the largest difference of logits, as a share of the largest one, and the number of tensors.
    """
    source, worst = case.write(folder), 0.0
    for size in case.sizes:
        changes: dict[str, Any] = {} if size == case.sizes[0] else {"image_size": size}
        loaded = read(source, **case.options, **changes)
        assert loaded.format == format, f"detected as {loaded.format}"
        assert loaded.weights.config.image == size
        images = torch.randn(2, case.channels, *size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            text = () if case.text is None else (case.text,)
            ours, theirs = native.build(loaded.weights)(images, *text), case.logits(images)
        assert ours.isfinite().all()
        worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
        assert worst <= WORST, f"{format} at {size}: {worst:.1e}"
    reported = {line.source: line for line in loaded.account.lines}
    assert len(reported) == len(loaded.account.lines), "a tensor is reported twice"
    ours_named = {line.ours for line in reported.values() if line.ours} | set(loaded.account.fresh)
    assert ours_named == set(loaded.weights.state), "parameters without a line in the load report"
    return worst, len(reported)


class FormatContract:
    """Inherit, and set `format` and `case`."""

    format: Format

    def case(self) -> Case:
        """Return a network of the format's own program, with random weights."""
        raise NotImplementedError("a case of this format")

    def test_logits_are_those_of_the_source(self, tmp_path: Path) -> None:
        check_parity(self.case(), self.format.name, tmp_path)

    def test_vitral_finds_it(self) -> None:
        """The package is installed, and the name is not one of vitral's own formats."""
        assert FORMATS[self.format.name] == self.format
