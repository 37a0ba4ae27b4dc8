"""LeGrad: gradients of attention in each layer, with the head applied after that layer.

Source: Bousselham et al., ICCV 2025, arXiv 2404.03214.

The head is applied after every layer: s_l = head(pool(Z_l)) of the tokens Z_l after block l. E_l is the mean over heads
and queries of relu(∂s_l/∂A_l), and the map is the mean of E_l over the layers, without prefix tokens. Values are not
normalized: the paper's last step, scaling to minimum and maximum, is left to the drawing.

`pool` is that of the network: final norm and reading as after the last layer. The paper's formula for CLIP takes the
mean over all tokens, but a head trained on the class token (or on patches) is meaningless on others; with the class
token, its row of A_l counts. For a MAP head, as in the paper for SigLIP, A_l is that head's attention over Z_l.

Layers are independent: each graph is half a block and a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, capture, require_vit
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import ViT


@torch.enable_grad()
def legrad(model: ViT, images: Tensor, targets: Tensor, *, layers: Sequence[int] | None = None) -> Maps:
    """Non-negative maps (B, T, rows, columns): the mean over `layers` (default all; -1 is the last)."""
    network = require_vit(model)
    num_queries, per_layer = network.config.num_queries, []
    with capture(network, layers, tokens=True, graph=True) as captured, block_inputs(network, apart=True):
        network(images)
        for layer in captured.layers:
            logits = network.classify(network.pool(captured.tokens[layer]))
            which = POOL if network.config.pool == "map" else layer
            mixed = captured.mixed[which]
            per_token = []
            for (gradient,) in gradients_of(logits, targets, [mixed]):
                # Queries that the head does not read have zero gradient, and count in the mean only.
                positive = captured.attention_gradient(which, gradient[:, :, :num_queries]).relu_().mean(1)
                per_token.append(positive.sum(1) / mixed.shape[2])
            per_layer.append(torch.stack(per_token, dim=1))
    return Maps(patches_of(torch.stack(per_layer).mean(0), network, images).float().cpu())


LEGRAD = Method("legrad", legrad, "LeGrad", "Bousselham et al., arXiv 2404.03214, section 3")
