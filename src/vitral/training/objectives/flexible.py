"""FlexiViT: one network for several patch sizes (arXiv 2212.08013), by any task's objective.

Each step draws a patch size. The patch kernel is resized to it by the pseudo-inverse, and learned positions to its
grid, exactly as weights are loaded with that patch size (`vitral.weights.transform.adapt`). Gradients flow back through
both to the weights of the network's own patch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitral.data.loader import Batch
from vitral.distributed.strategies import through
from vitral.kernels import reference_ops
from vitral.model import ViT, ViTConfig
from vitral.training.objectives.objective import TwoPartObjective
from vitral.weights.transform.resize import resize_patches, resize_positions

SCHEME = "bilinear-corners"
"""Scheme of the positions: that of vitral's own weights."""


class FlexibleViT:
    """A ViT at any of its patch sizes, with the tensors of one network."""

    def __init__(self, config: ViTConfig, sizes: Sequence[int], *, plain: bool = False):
        self.config, self.sizes = config, tuple(sizes)
        with torch.device("meta"):
            self.networks = {size: ViT(dataclasses.replace(config, patch_size=size)) for size in self.sizes}
        for network in self.networks.values():
            if plain:
                reference_ops(network)

    def logits(self, model: nn.Module, images: Tensor, size: int) -> Tensor:
        """Logits (B, K) of `model` with patches of `size` pixels, for images of the network's size."""
        network = self.networks[size].train(model.training)
        logits: Tensor = functional_call(network, self.tensors(model, size), (images,))
        return logits

    def tensors(self, model: nn.Module, size: int) -> dict[str, Tensor]:
        """The parameters of `model` with the patch kernel and the positions resized for patches of `size` pixels."""
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        graph = torch.is_grad_enabled()
        kernel, target = parameters["patch_embed.proj.weight"], self.networks[size].config
        parameters["patch_embed.proj.weight"] = resize_patches(kernel, target.patch, graph=graph)
        if (table := parameters.get("pos_embed")) is not None:
            old, new, prefix = self.config.grid, target.grid, self.config.placed
            parameters["pos_embed"] = resize_positions(table, old, new, prefix=prefix, scheme=SCHEME, graph=graph)
        return parameters


@dataclasses.dataclass(frozen=True, eq=False)
class Flexible(TwoPartObjective):
    """The loss of `objective` on the logits of a patch size that is drawn for each batch."""

    objective: TwoPartObjective
    network: FlexibleViT

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.objective.prepare(batch)

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics for the result of `prepare`."""
        sizes = self.network.sizes
        size = sizes[int(torch.randint(len(sizes), ()))]

        def logits(images: Tensor) -> Tensor:
            return through(model, lambda network: self.network.logits(network, images, size))

        return self.objective.loss(logits, images, labels, teacher_logits)  # type: ignore[arg-type]  # it only calls it
