"""Heat maps in the graph: one run computes the logits of an image, the evidence for a class, and for a network that
detects unknown images by it the distance of the features.

The default method, FullGrad+ with LibraGrad, needs gradients, which no runtime for the web computes. So forward and
backward pass are traced together into one graph of elementary operators, for batches of one image.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from vitral.explanation.capture import explicit_backend, override
from vitral.explanation.libra import libra_backward
from vitral.explanation.methods.fullgrad import FULLGRAD, bias_terms, token_values
from vitral.explanation.methods.gradients import block_inputs
from vitral.explanation.methods.method import Method, patches_of
from vitral.export.target import Job, exportable, recorded_warnings
from vitral.inference.features import head_inputs_of
from vitral.inference.unknown import Statistics
from vitral.model import Network, ViT
from vitral.model.vit import Attention, AttentionPool

PREDICTED = -1
"""Number that stands for the predicted class as the target of a map."""


def method_of(network: Network) -> Method | None:
    """The method whose maps can be in the graph; None for a network without attention."""
    return FULLGRAD if isinstance(network, ViT) else None


class WithMap(nn.Module):
    """Map images (1, C, H, W) and the number of a class, float32 (1,), to logits (1, K) and the heat map (rows,
    columns) of the class. With `statistics` also to the distance (1,) of the features to the nearest class. `PREDICTED`
    is the predicted class.
    """

    def __init__(self, network: ViT, statistics: Statistics):
        super().__init__()
        self.network, self.statistics = network, statistics

    def forward(self, images: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        network = self.network
        with torch.enable_grad(), ExitStack() as undo:
            for part in network.modules():
                if isinstance(part, Attention | AttentionPool):
                    override(undo, part, "backend", explicit_backend)
            undo.enter_context(libra_backward(network))
            inputs = undo.enter_context(block_inputs(network))
            terms = undo.enter_context(bias_terms(network, torch.float32))
            features = undo.enter_context(head_inputs_of(network))
            logits = network(images)
            classes = torch.arange(logits.shape[1], dtype=torch.float32)
            chosen = torch.where(target < 0, logits.detach().argmax(1).float(), target)
            of_chosen = (logits * (classes == chosen).float()).sum()
            gradients = torch.autograd.grad(of_chosen, inputs)
        products = [(x.detach() * one).sum(-1) for x, one in zip(inputs, gradients, strict=True)]
        heatmap = patches_of(token_values(products, terms), network, images)[0]
        distance = [_distance(features[0].detach(), self.statistics)] if self.statistics else []
        return logits.detach(), heatmap, *distance


def _distance(features: Tensor, statistics: Statistics) -> Tensor:
    """`inference.unknown.mahalanobis` of operators that ONNX has."""
    apart = (features @ statistics["whitening"])[:, None] - statistics["means"] @ statistics["whitening"]
    return (apart * apart).sum(-1).amin(1)


def traced_with_map(job: Job) -> ExportedProgram:
    """Trace the network with its map, forward and backward, and the distance of its features if that detects unknown
    images.
    """
    network = exportable(job.network)
    assert isinstance(network, ViT)
    module = WithMap(network, job.unknown.statistics if job.unknown else {}).eval()
    example = torch.zeros(1, job.preprocessing.channels, *job.preprocessing.image_size), torch.tensor([PREDICTED * 1.0])
    with recorded_warnings(job.warnings):
        graph = make_fx(lambda images, target: module(images, target))(*example)
        return torch.export.export(graph, example)
