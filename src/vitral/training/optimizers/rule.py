"""`UpdateRule`: everything that vitral knows about an optimizer, in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

Groups = list[dict[str, Any]]


class OptimizerOptions(Protocol):
    """The options of a run that an optimizer reads."""

    @property
    def optimizer(self) -> str: ...

    @property
    def peak_lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def momentum(self) -> float: ...

    @property
    def beta2(self) -> float: ...

    @property
    def layer_decay(self) -> float | None: ...


@dataclass(frozen=True)
class Rates:
    """Rates by which a plan moves a recipe's weight decay to another optimizer."""

    decay: float
    """The recipe's weight decay."""
    recipe_lr: float
    lr: float
    """The learning rate of the optimizer that replaces the recipe's."""
    momentum: float


@dataclass(frozen=True)
class DecayRule:
    """Another weight decay than the recipe's, for an optimizer that applies it in another way."""

    suited: Callable[[Rates], float]
    why: str
    """The reason, as the end of a sentence that begins with the optimizer's name."""


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer of `--optimizer`. The defaults hold for AdamW."""

    title: str
    """Name in sentences."""
    build: Callable[[Groups, OptimizerOptions], list[Optimizer]]
    """Groups of parameters and the options → torch's optimizers, which together hold every parameter once."""
    relative_rate: float = 1.0
    """Learning rate that trains like AdamW's at 1 (docs/log/accuracy.md). Plans scale a recipe's rate by it."""
    decay: DecayRule | None = None
    """None: the optimizer uses the recipe's weight decay."""
    moments: int = 2
    """Copies of the weights that its state holds, for the estimate of memory."""
    capturable: bool = False
    """True if its step was tested as a captured CUDA graph."""
    hidden_matrices: bool = False
    """True if it updates the matrices of hidden layers in another way than the rest. Kernels of convolutions come as
    matrix views, and networks without the blocks of a ViT use AdamW unless you name the optimizer.
    """


def fused(groups: Groups) -> bool:
    """True if torch has fused kernels for all parameters: on CPU, CUDA and MPS; for parts of them only Adam's."""
    return all(p.device.type in ("cpu", "cuda", "mps") for g in groups for p in g["params"])
