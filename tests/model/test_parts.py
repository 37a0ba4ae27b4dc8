"""Single modules, each compared with an alternative implementation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import SHAPE, network, random_images
from torch import nn

from vitral.model import ViT, ViTConfig
from vitral.model.dropout import drop_path
from vitral.model.position import POSITIONS
from vitral.model.vit import MLP, Attention, Block, PatchEmbed

CONFIG = ViTConfig(**SHAPE)


def randomized(part: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.3)
    return part.double().eval()


def tokens(count: int = 7) -> torch.Tensor:
    return torch.randn(2, count, CONFIG.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("image", "patch", "channels"), [((12, 12), (4, 4), 3), ((8, 12), (4, 2), 1), (12, 6, 4)])
def test_patches_are_unfold_then_dense_in_the_order_channel_row_column(image, patch, channels):
    shape = ViTConfig(**SHAPE | {"image_size": image, "patch_size": patch}, channels=channels)
    embed, images = randomized(PatchEmbed(shape)), random_images(shape)
    p, q = shape.patch
    cut = images.unfold(2, p, p).unfold(3, q, q).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    torch.testing.assert_close(embed(images), F.linear(cut, embed.proj.weight.flatten(1), embed.proj.bias))


def test_fused_attention_is_softmax():
    attention = Attention(CONFIG)
    q, k, v = torch.randn(3, 2, 2, 9, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, 9) > 0.4
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(attention.attend(q, k, v, mask), scores.softmax(-1) @ v)


@pytest.mark.parametrize("length", [9, 1100])
def test_attention_in_bfloat16_is_softmax_up_to_rounding(length):
    """A CPU may use another kernel in bfloat16, and for long sequences."""
    q, k, v = torch.randn(3, 1, 2, length, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(length) % 3 != 0
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~mask, -math.inf)
    low = Attention(CONFIG).eval().attend(*(x.bfloat16() for x in (q, k, v)), mask.expand(1, 1, 1, length))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), scores.softmax(-1) @ v, atol=0.03, rtol=0.03)


def test_tensordot_attention_of_write_up_002():
    """Kernels (width, heads, head width) for q, k, v and (heads, head width, width) for out are the same arithmetic."""
    attention, x = randomized(Attention(CONFIG)), tokens()
    D, heads = CONFIG.dim, CONFIG.heads
    kernels = attention.qkv.weight.T.reshape(D, 3, heads, D // heads).unbind(1)
    biases = attention.qkv.bias.reshape(3, heads, D // heads)
    q, k, v = (torch.tensordot(x, w, dims=([2], [0])) + b for w, b in zip(kernels, biases, strict=True))
    q, k, v = (part.permute(0, 2, 1, 3) for part in (q, k, v))
    seen = ((q @ k.mT) / math.sqrt(D // heads)).softmax(-1) @ v
    out = attention.proj.weight.T.reshape(heads, D // heads, D)
    wanted = torch.tensordot(seen.permute(0, 2, 1, 3), out, dims=([2, 3], [0, 1])) + attention.proj.bias
    torch.testing.assert_close(attention(x), wanted)


def test_einsum_attention_of_write_up_000():
    """Its fused projection has rows in the order (head, channel, q/k/v); a masked logit gets the smallest float."""
    attention, x = randomized(Attention(ViTConfig(**SHAPE, attention_scale="model"))), tokens()
    D, heads = CONFIG.dim, CONFIG.heads
    rows = torch.arange(3 * D).view(3, heads, D // heads).permute(1, 2, 0).flatten()
    fused = F.linear(x, attention.qkv.weight[rows], attention.qkv.bias[rows])
    q, k, v = fused.view(2, 7, heads, D // heads, 3).permute(4, 0, 2, 1, 3)
    mask = torch.arange(7) != 3
    energy = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(~mask, torch.finfo(torch.float32).min)
    seen = torch.einsum("bhqk,bhkd->bqhd", (energy / math.sqrt(D)).softmax(-1), v).flatten(2)
    wanted = F.linear(seen, attention.proj.weight, attention.proj.bias)
    torch.testing.assert_close(attention(x, mask.expand(2, 1, 1, 7)), wanted)


def test_minus_ten_billion_of_write_up_003_is_a_mask():
    q, k, v = torch.randn(3, 2, 2, 9, 8)
    mask = torch.rand(2, 1, 1, 9) > 0.4
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~mask, -1e10)
    torch.testing.assert_close(Attention(CONFIG).attend(q, k, v, mask), scores.softmax(-1) @ v)


def test_convolutions_of_write_up_003_are_the_mlp():
    mlp, x = randomized(MLP(ViTConfig(**SHAPE, activation="gelu"))), tokens()
    first, second = nn.Conv1d(CONFIG.dim, CONFIG.mlp_dim, 1), nn.Conv1d(CONFIG.mlp_dim, CONFIG.dim, 1)
    for conv, dense in ((first, mlp.fc1), (second, mlp.fc2)):
        conv.weight, conv.bias = nn.Parameter(dense.weight[:, :, None]), dense.bias
    torch.testing.assert_close(mlp(x), second(F.gelu(first(x.mT))).mT)


def test_every_part_works_alone():
    x = tokens(5).float()
    for part in (Attention(CONFIG), MLP(CONFIG), Block(CONFIG)):
        assert part(x).shape == x.shape
    assert PatchEmbed(CONFIG)(torch.zeros(2, 3, 12, 12)).shape == (2, 9, CONFIG.dim)


def test_a_block_without_branches_is_the_identity():
    block, x = randomized(Block(CONFIG)), tokens()
    for dense in (block.attn.proj, block.mlp.fc2):
        nn.init.zeros_(dense.weight)
        nn.init.zeros_(dense.bias)
    torch.testing.assert_close(block(x), x)


def test_stochastic_depth_keeps_the_mean_and_drops_whole_images():
    torch.manual_seed(0)
    x = drop_path(torch.ones(20_000, 2, 3), 0.3, training=True)
    assert x.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert torch.equal(x, x[:, :1, :1].expand_as(x)), "an image is dropped as a whole"
    assert x.mean().item() == pytest.approx(1, abs=0.02)  # four standard errors
    assert torch.equal(drop_path(x, 0.3, training=False), x)


def test_stochastic_depth_grows_from_zero():
    model = ViT(ViTConfig(**SHAPE | {"depth": 5}, drop_path=0.4))
    assert [block.drop_path for block in model.blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_rotary_attention_depends_on_distance_alone():
    """Moving both tokens by one patch does not change q · k, the defining property of the scheme."""
    cos, sin = POSITIONS["rotary"].rotation((4, 4), 8, prefix=0)
    q, k = torch.randn(2, 8)

    def turned(x: torch.Tensor, place: int) -> torch.Tensor:
        first, second = x.chunk(2)
        return x * cos[place] + torch.cat([-second, first]) * sin[place]

    near, moved = turned(q, 0) @ turned(k, 1), turned(q, 5) @ turned(k, 6)
    torch.testing.assert_close(near, moved)
    assert not torch.isclose(near, turned(q, 0) @ turned(k, 2))


def test_order_of_parts_is_the_order_of_data():
    seen: list[str] = []
    model = network(CONFIG)
    for name, module in model.named_modules():
        if name and not any(module.children()):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(random_images(CONFIG))
    parts = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    assert seen == ["patch_embed.proj", *(f"blocks.{i}.{part}" for i in range(2) for part in parts), "norm", "head"]


def test_printing_shows_what_is_there():
    assert "attn_pool" not in repr(ViT(CONFIG))
    assert "q_norm" in repr(ViT(ViTConfig(**SHAPE, qk_norm=True)))


@pytest.mark.parametrize("position", ["sincos", "rotary"])
def test_gradients_after_inference(position):
    """Tables cached by a first call in inference mode also work for later calls with gradients."""
    model = ViT(ViTConfig(**SHAPE, position=position))
    images = random_images(model.config).float()
    with torch.inference_mode():
        before = model(images)
    answer = model(images)
    answer.sum().backward()
    assert torch.equal(answer, before)
    assert model.patch_embed.proj.weight.grad is not None
