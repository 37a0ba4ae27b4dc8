"""The pruned last block, which computes only pooled tokens: same logits and gradients."""

import pytest
import torch

from vitral.model import create

VARIANTS = [
    {},
    {"position": "rotary", "registers": 2, "qk_norm": True, "layer_scale": 0.3},
    {"norm": "post", "qkv_bias": False},
    {"dist_token": True},
    {"position": "sincos", "activation": "swiglu", "pre_logits": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_logits_and_gradients_are_those_of_the_whole_block(variant, masked):
    torch.manual_seed(0)
    model = create("mu/8", depth=2, image_size=32, classes=5, **variant).double()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    mask = torch.rand(3, 16) > 0.3 if masked else None
    found = {}
    for pruned in (True, False):
        model.prune_last_block = pruned
        model.zero_grad()
        logits = model(images, mask)
        logits.logsumexp(1).sum().backward()
        found[pruned] = [logits.detach(), *(p.grad.clone() for p in model.parameters())]
    for short, whole in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(short, whole, rtol=1e-9, atol=1e-9)


def test_encode_returns_every_token_by_default():
    model = create("mu/8", image_size=32, classes=5)
    images = torch.randn(2, 3, 32, 32)
    assert model.encode(images).shape == (2, 17, 32)
    assert model.encode(images, num_queries=1).shape == (2, 1, 32)


def test_mean_pooling_reads_every_token():
    model = create("mu/8", image_size=32, classes=5, pool="mean")
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 32, 32)
    whole = model.classify(model.pool(model.encode(images)))
    assert torch.equal(model(images), whole)


def test_qkv_may_be_replaced_by_another_layer():
    """A layer that cannot compute a part of its outputs is called as a whole."""
    model = create("mu/8", image_size=32, classes=5).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 32, 32)
    wanted = model(images)
    for block in model.blocks:
        block.attn.qkv = torch.nn.Sequential(block.attn.qkv)
    torch.testing.assert_close(model(images), wanted)
