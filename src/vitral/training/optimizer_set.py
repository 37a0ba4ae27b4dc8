"""The optimizers of a run as one, with parameter groups for weight decay and layer-wise rates; what is frozen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.distributed.tensors import like
from vitral.errors import UsageError
from vitral.training.optimizers import rule_of
from vitral.training.optimizers.rule import Groups, OptimizerOptions

_TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent", "mask_token")
_OUTER = re.compile(r"^(encoder|decoder)\.")
"""Parts of a network of pretraining, whose parameters have the names of a ViT's after it."""


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze parameters by patterns: a parameter, a module (with all submodules), or a shell-style pattern.

    Raises `UsageError` for a pattern that matches nothing, and if no trainable parameter remains.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        hit = [n for n in names if n == pattern or n.startswith(f"{pattern}.") or fnmatchcase(n, pattern)]
        if not hit:
            there = sorted({re.sub(r"^((?:blocks|stages)\.\d+|[^.]+).*", r"\1", name) for name in names})
            raise UsageError(f"--freeze {pattern} matches no parameter", why=f"there are {', '.join(there)}")
        for name in hit:
            model.get_parameter(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("--freeze leaves nothing to train", hint="leave out head")


def train_mode(model: nn.Module) -> None:
    """Set a network to train mode, but modules whose parameters are all frozen to evaluation mode: batch norms keep
    their running statistics and use them, and nothing is dropped.
    """
    model.train()
    if all(p.requires_grad for p in model.parameters()):
        return
    for module in model.modules():
        trainable = [p.requires_grad for p in module.parameters()]
        if trainable and not any(trainable):
            module.eval()


def parameter_groups(model: nn.Module, run: OptimizerOptions) -> Groups:
    """Group trainable parameters by weight decay and learning-rate factor; each parameter is in exactly one group.

    Matrices decay; biases, norms, LayerScale and tokens do not (big_vision decays kernels only). With `layer_decay` the
    factor is 1 at the head and decreases by one power per block towards the patches (BEiT, MAE). A ResNet's blocks are
    counted across its stages; the ResNet of a hybrid belongs to the patch embedding.
    """
    blocks = {m[0]: None for name, _ in model.named_parameters() if (m := _BLOCK.match(name))}
    layers = {block: number for number, block in enumerate(blocks, 1)}
    own = getattr(model, "no_decay", ())
    groups: dict[tuple[bool, bool, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        inner = _OUTER.sub("", name, count=1)
        matrix = parameter.ndim > 1 and inner not in _TOKENS and name not in own
        hidden = matrix and _HIDDEN.match(inner) is not None
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
"""Hidden layers; of a convolutional stem all but the first, whose input are pixels."""
_BLOCK = re.compile(r"(stages\.\d+\.)?blocks\.\d+\.")
_FRONT = ("patch_embed", "stem", "cls_token", "dist_token", "reg_token", "pos_embed")


def _layer(name: str, layers: dict[str, int]) -> int:
    """Depth of a parameter: 0 for patches, root and tokens, 1 … for blocks in forward order, one more after them."""
    if match := _BLOCK.match(name):
        return layers[match[0]]
    return 0 if name.startswith(_FRONT) else len(layers) + 1


class OptimizerSet:
    """All optimizers of a run as one: step, learning rate, and a state of plain tensors by parameter name.

    A rule of `hidden_matrices` gets a kernel (C', C, p, q) as a matrix view (C', C·p·q).
    """

    def __init__(self, model: nn.Module, run: OptimizerOptions):
        groups = parameter_groups(model, run)
        self.parameters = [p for g in groups for p in g["params"]]
        self._kernels: list[tuple[Tensor, Tensor]] = []
        rule = rule_of(run.optimizer)
        if rule.hidden_matrices:
            for group in groups:
                if group["hidden"]:
                    group["params"] = [self._as_matrix(p) for p in group["params"]]
        self.optimizers = rule.build(groups, run)
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
        """Keep learning rates as fp32 tensors on the device, which a captured step reads at each replay."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor):  # another captured step may use this tensor
                    group["lr"] = torch.zeros((), device=group["params"][0].device)
                if "capturable" in group:
                    group["capturable"] = True

    def step(self) -> None:
        """Update the parameters, then free their gradients."""
        for matrix, kernel in self._kernels:
            matrix.grad = None if kernel.grad is None else kernel.grad.view_as(matrix)
        for optimizer in self.optimizers:
            optimizer.step()
        self.drop_gradients()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers: `params`, `names`, `lr`, `factor` and the optimizer's own options."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients, as torch's optimizers do; `step` has done so already."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Set all gradients to None; the next step allocates new tensors."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for _, kernel in self._kernels:
            kernel.grad = None

    def state(self) -> dict[str, Tensor]:
        """The state as tensors, `PARAMETER:ENTRY`, e.g. `head.weight:exp_avg`."""
        tensors = {}
        for optimizer in self.optimizers:
            for name, parameter in _named(optimizer):
                for entry, value in optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        tensors[f"{name}:{entry}"] = torch.as_tensor(value)
        return tensors

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state`."""
        entries: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, entry = key.rpartition(":")
            entries.setdefault(name, {})[entry] = value
        for optimizer in self.optimizers:
            for name, parameter in _named(optimizer):
                if name in entries:
                    optimizer.state[parameter] = {k: like(v, parameter) for k, v in entries[name].items()}


def _named(optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)
