"""Optimizers: torch's own (but for Muon's step), parameters in groups by what decays and how fast a layer learns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.errors import UsageError
from vitral.training.muon import Muon

if TYPE_CHECKING:
    from vitral.training.run import Run

Groups = list[dict[str, Any]]
_TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent")


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Stop training what the patterns name: a parameter, a module (all below it), or a shell-style pattern.

    Raises `UsageError` for a pattern that names nothing, and when nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        hit = [n for n in names if n == pattern or n.startswith(f"{pattern}.") or fnmatchcase(n, pattern)]
        if not hit:
            raise UsageError(f"--freeze {pattern} names no parameter", why=f"there are {', '.join(_roots(names))}")
        for name in hit:
            model.get_parameter(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("--freeze leaves nothing to train", hint="leave out head")


def _roots(names: list[str]) -> list[str]:
    return sorted({re.sub(r"^((?:blocks|stages)\.\d+|[^.]+).*", r"\1", name) for name in names})


def parameter_groups(model: nn.Module, run: Run) -> Groups:
    """Trainable parameters in groups of one decay and one learning-rate factor; each parameter is in exactly one.

    Matrices decay; biases, norms, LayerScale and tokens do not (big_vision decays kernels only). With `layer_decay` the
    factor falls from 1 at the head by one power for each block on the way to the patches (BEiT, MAE). A ResNet's blocks
    are counted through its stages; the ResNet of a hybrid is one with the patches.
    """
    blocks = {m[0]: None for name, _ in model.named_parameters() if (m := _BLOCK.match(name))}
    layers = {block: number for number, block in enumerate(blocks, 1)}
    groups: dict[tuple[bool, bool, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.ndim > 1 and name not in _TOKENS
        hidden = matrix and _HIDDEN.match(name) is not None
        factor = 1.0 if not run.layer_decay else run.layer_decay ** (len(layers) + 1 - _layer(name, layers))
        decay = run.weight_decay if matrix else 0.0
        key = (hidden, matrix, factor)
        group = groups.setdefault(
            key, {"params": [], "names": [], "weight_decay": decay, "factor": factor, "hidden": hidden}
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


_HIDDEN = re.compile(r"blocks\.|patch_embed\.backbone\.layers\.[1-9]")
"""Layers between layers: of a convolutional stem all but the first, which sees pixels."""
_BLOCK = re.compile(r"(stages\.\d+\.)?blocks\.\d+\.")
_FRONT = ("patch_embed", "stem", "cls_token", "dist_token", "reg_token", "pos_embed")


def _layer(name: str, layers: dict[str, int]) -> int:
    """0 for patches, root and tokens, then 1 … for blocks in the order of data, and one more for what follows them."""
    if match := _BLOCK.match(name):
        return layers[match[0]]
    return 0 if name.startswith(_FRONT) else len(layers) + 1


def _fused(groups: Groups) -> bool:
    """torch has fused kernels for parameters on CPU, CUDA and MPS, all of one kind."""
    return all(p.device.type in ("cpu", "cuda", "mps") for g in groups for p in g["params"])


def adamw(groups: Groups, run: Run) -> list[Optimizer]:
    """Decoupled weight decay (arXiv 1711.05101)."""
    return [torch.optim.AdamW(groups, lr=run.peak_lr, betas=(run.momentum, run.beta2), fused=_fused(groups))]


def adam(groups: Groups, run: Run) -> list[Optimizer]:
    """Adam; weight decay, where set, is L2 in the gradient."""
    return [torch.optim.Adam(groups, lr=run.peak_lr, betas=(run.momentum, run.beta2), fused=_fused(groups))]


def sgd(groups: Groups, run: Run) -> list[Optimizer]:
    """SGD with momentum, as the paper fine-tunes (Table 4)."""
    return [torch.optim.SGD(groups, lr=run.peak_lr, momentum=run.momentum, fused=_fused(groups))]


def muon(groups: Groups, run: Run) -> list[Optimizer]:
    """Muon for what is hidden, the blocks and a convolutional stem, AdamW for the rest. Steps of a matrix have AdamW's
    size (arXiv 2502.16982), so that both take the same learning rate and decay.
    """
    hidden = [g for g in groups if g["hidden"]]
    rest = [g for g in groups if not g["hidden"]]
    optimizers: list[Optimizer] = []
    if hidden:
        optimizers.append(Muon(hidden, lr=run.peak_lr, momentum=0.95))
    return optimizers + (adamw(rest, run) if rest else [])


OPTIMIZERS: dict[str, Callable[[Groups, Run], list[Optimizer]]] = {
    "adamw": adamw,
    "adam": adam,
    "sgd": sgd,
    "muon": muon,
}


class OptimizerSet:
    """The optimizers of a run as one: step, learning rate, and a state of plain tensors by parameter name.

    To Muon a kernel (C', C, p, q) is a matrix (C', C·p·q) of the same numbers.
    """

    def __init__(self, model: nn.Module, run: Run):
        groups = parameter_groups(model, run)
        self.parameters = [p for g in groups for p in g["params"]]
        self._kernels: list[tuple[Tensor, Tensor]] = []
        if run.optimizer == "muon":
            for group in groups:
                if group["hidden"]:
                    group["params"] = [self._as_matrix(p) for p in group["params"]]
        self.optimizers = OPTIMIZERS[run.optimizer](groups, run)
        kernels = {id(matrix): kernel for matrix, kernel in self._kernels}
        held = {id(kernels.get(id(p), p)) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        assert held == {id(p) for p in model.parameters() if p.requires_grad}

    def _as_matrix(self, parameter: Tensor) -> Tensor:
        if parameter.ndim == 2:
            return parameter
        matrix = parameter.detach().view(len(parameter), -1)
        self._kernels.append((matrix, parameter))
        return matrix

    def set_lr(self, lr: float) -> None:
        """Set the learning rate, times each group's factor."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * group["factor"])
                else:
                    group["lr"] = lr * group["factor"]

    def keep_rates_on_device(self) -> None:
        """Make learning rates numbers on the device, in fp32, which a recorded step reads anew each time."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor):  # another recorded step may read this one
                    group["lr"] = torch.zeros((), device=group["params"][0].device)
                if "capturable" in group:
                    group["capturable"] = True

    def step(self) -> None:
        """Update the parameters, then drop their gradients."""
        for matrix, kernel in self._kernels:
            matrix.grad = None if kernel.grad is None else kernel.grad.view_as(matrix)
        for optimizer in self.optimizers:
            optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget them; the next step's are new tensors."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for _, kernel in self._kernels:
            kernel.grad = None

    def state(self) -> dict[str, Tensor]:
        """The state as tensors, `PARAMETER:ENTRY`, e.g. `head.weight:exp_avg`."""
        found = {}
        for optimizer in self.optimizers:
            for name, parameter in _named(optimizer):
                for entry, value in optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        found[f"{name}:{entry}"] = torch.as_tensor(value)
        return found

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        entries: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, entry = key.rpartition(":")
            entries.setdefault(name, {})[entry] = value
        for optimizer in self.optimizers:
            for name, parameter in _named(optimizer):
                if name in entries:
                    optimizer.state[parameter] = {k: v.to(parameter.device) for k, v in entries[name].items()}


def _named(optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)
