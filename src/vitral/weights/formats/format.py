"""Describe a format of published weights by data and short functions: names, arithmetic, preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ModelConfig
from vitral.weights.native import Weights
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import ConfigFields, KeyMap, Rule, fits

HEADS: Mapping[tuple[int, int], int] = {
    (192, 768): 3,
    (384, 1536): 6,
    (768, 3072): 12,
    (1024, 4096): 16,
    (1280, 5120): 16,
}
"""Width and MLP width → heads of the paper's and DeiT's sizes, used by most families."""
DINOV2_HEADS = {**HEADS, (1536, 4096): 24}
DINOV3_HEADS = {**HEADS, (1280, 5120): 20, (4096, 8192): 32}
SIGLIP_HEADS = {(768, 3072): 12, (1024, 4096): 16, (1152, 4304): 16, (1536, 6144): 16}


@dataclass(frozen=True)
class Format:
    """A layout of weights in a file.

    Its declared names are those of `rules` and `ignored`; a file has this format if every tensor has a declared name
    and each of `required` is present.
    """

    name: str
    rules: tuple[Rule, ...]
    required: tuple[str, ...]
    """Names (`{i}` a number, `*` anything) that distinguish this format from the others; empty if nothing does, and the
    format must be given by `--from`."""
    scheme: str
    """Scheme to resize positions to another grid: a name in `vitral.weights.transform.resize.SCHEMES`."""
    preprocessing: Callable[[Source, Any], tuple[Preprocessing, str]]
    """Preprocessing that the weights expect, and the source of that knowledge."""
    facts: Callable[[Source], ConfigFields] = lambda source: {}
    """Fields of the configuration stated by the file or its companions; the shapes determine the rest."""
    assumed: Callable[[Source], Sequence[str]] = lambda source: ()
    """Notes for the report on assumptions about a file that does not state something."""
    stated: Callable[[Source], bool] = lambda source: False
    """True if a file beside the tensors states what shapes cannot determine."""
    heads: Mapping[tuple[int, int], int] = field(default_factory=lambda: HEADS)
    """Width and MLP width → heads of the family's published networks, for files that do not state them."""
    undecided: str = ""
    """Reason why published networks of this format differ in their arithmetic, so that a file alone is refused."""
    architectures: bool = False
    """True if the names are timm's, so that a file without a config is looked up among timm's architectures."""
    any_of: tuple[str, ...] = ()
    """Names of which a file of this format has at least one; empty if `required` is enough."""
    config: Callable[[Mapping[str, Tensor], ConfigFields, object], ModelConfig] | None = None
    """Build the configuration from tensors under our names, stated fields, and the path for errors; None for a ViT."""
    classes: Callable[[Source, int], tuple[str, ...] | None] = lambda source, count: None
    """Class names, if the file has them."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Names of omitted tensors → reason."""
    canonical: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
    """Convert older or packed spellings of names to those of the rules."""
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Fields of the configuration → values that the format's own program can compute; others cannot be written."""
    write: Callable[[Weights, Path], Sequence[Path]] | None = None
    """Write a file or folder for the format's own program; returns the written files."""

    @cached_property
    def keymap(self) -> KeyMap:
        """The rules, indexed for fast lookup."""
        return KeyMap(self.rules)

    def unexpected(self, names: Iterable[str]) -> list[str]:
        """List tensors unknown to this format."""
        return [n for n in names if not self.keymap.knows(n) and fits(self.ignored, n) is None]

    def missing(self, names: Sequence[str]) -> list[str]:
        """List required tensors that are not in `names`."""
        if self.any_of and not any(fits(self.any_of, name) for name in names):
            return list(self.any_of)
        return [want for want in self.required if not any(fits((want,), name) for name in names)]


ELSEWHERE: Mapping[str, Sequence[Any]] = {
    "norm": ("pre", "post"),
    "activation": ("gelu", "gelu-tanh", "swiglu"),
    "norm_pre": (False,),
    "patch_bias": (True,),
    "attn_norm": (False,),
    "mlp_norm": (False,),
    "mlp_bias": (True,),
    "register_position": (False,),
    "rope": (None,),
    "pool_heads": (None,),
    "pool_prefix": (True,),
}
"""Values that every format can write, unless its `fixed` lists other values for the field."""


_TRAINED_SO = {
    "activation": "a network trained with --activation {}",
    "position": "a network trained with --position {}",
    "pool": "a network trained with --pool {}",
    "qk_norm": "a network trained without --qk-norm",
    "layer_scale": "a network trained without --layer-scale",
    "registers": "a network trained without --registers",
    "pre_logits": "a network trained without --pre-logits",
    "channels": "a network trained with --channels {}",
    "cls_token": "a network trained with --cls-token",
    "stem": "a network without a convolutional stem: --model S/16",
}
"""Field of the configuration → the words to type for a network that can be written."""


def check_square(config: object, program: str) -> None:
    """Raise `WeightsError` if image or patches are not square, for programs that support squares only."""
    for name in ("image", "patch"):
        height, width = getattr(config, name, (0, 0))
        if height != width:
            why = f"its {name} size is {height}×{width}; {program} supports squares only"
            hint = f"--image-size {height} resizes the positions, or --to timm" if name == "image" else "--to timm"
            raise WeightsError(f"this network cannot be written for {program}", why=why, hint=hint)


def translated(kind: Format, weights: Weights) -> dict[str, Tensor]:
    """Translate weights to the names and layout of `kind`.

    Raises `WeightsError`, with the reason, for a network that the format's own program cannot compute.
    """
    config = weights.config
    for name, values in {**ELSEWHERE, **kind.fixed}.items():
        value = getattr(config, name, values[0])
        if value not in values:
            why = f"{name.replace('_', ' ')} is {value}; {kind.name} supports {' or '.join(map(str, values))}"
            hint = _TRAINED_SO[name].format(values[0]) if name in _TRAINED_SO else None
            raise WeightsError(f"this network cannot be written for {kind.name}", why=why, hint=hint)
    found: dict[str, Tensor] = {}
    for parameter, tensor in weights.state.items():
        match = kind.keymap.writing(parameter, config)
        if match is None:
            why = f"the format has no tensor for '{parameter}'"
            raise WeightsError(f"this network cannot be written for {kind.name}", why=why)
        try:
            parts = match.form.write(tensor, getattr(config, "heads", 1))
        except ValueError as error:
            why = f"'{parameter}': {error}"
            raise WeightsError(f"this network cannot be written for {kind.name}", why=why) from None
        found |= {name: part for name, part in zip(match.tensors, parts, strict=True) if part is not None}
    return found
