"""LeGrad: for each layer by itself, which attention would raise the class if the network ended there (Bousselham et
al., ICCV 2025, arXiv 2404.03214).

The head is put behind every layer, s_l = head(pool(Z_l)) of the tokens Z_l after block l. E_l is the mean over heads
and queries of relu(∂s_l/∂A_l), and the map is the mean of E_l over the layers, without prefix tokens. Values are raw:
the paper's last step, minimum to maximum, is a matter of drawing.

`pool` is this network's own: final norm and reading as after the last layer. The paper's formula for CLIP takes the
mean over all tokens, but a head that was trained on the class token (or on the patches) means nothing on others, and
with the class token the row of A_l that it gathers by is what counts. For a MAP head, as the paper does for SigLIP,
A_l is that head's attention over Z_l.

No layer waits for a later one's gradient: each graph is half a block and a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, capture, plain
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import ViT


@torch.enable_grad()
def legrad(model: ViT, images: Tensor, targets: Tensor, *, layers: Sequence[int] | None = None) -> Maps:
    """Maps (B, T, rows, columns), not negative: the mean over `layers` (default all; -1 is the last)."""
    network = plain(model)
    read, per_layer = network.config.read, []
    with capture(network, layers, tokens=True, graph=True) as seen, block_inputs(network, apart=True):
        network(images)
        for layer in seen.layers:
            logits = network.classify(network.pool(seen.tokens[layer]))
            which = POOL if network.config.pool == "map" else layer
            mixed = seen.mixed[which]
            per_token = []
            for (gradient,) in gradients_of(logits, targets, [mixed]):
                # Queries that the head does not read have no gradient: they count in the mean only.
                raising = seen.attention_gradient(which, gradient[:, :, :read]).relu_().mean(1)
                per_token.append(raising.sum(1) / mixed.shape[2])
            per_layer.append(torch.stack(per_token, dim=1))
    return Maps(patches_of(torch.stack(per_layer).mean(0), network, images).float().cpu())


LEGRAD = Method("legrad", legrad, "LeGrad", "Bousselham et al., arXiv 2404.03214, section 3")
