"""Mistakes in the five write-ups, shown by their effects. `docs/write-ups.md` names these tests.

Each mistake is reproduced in a few lines and compared with vitral's network.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from tiny import SHAPE, network, random_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vitral.errors import UsageError
from vitral.model import ViT, ViTConfig, config, create
from vitral.model.vit import MLP, Attention, Block

CONFIG = ViTConfig(**SHAPE)


def tokens(count: int = 9, dim: int = CONFIG.dim) -> Tensor:
    return torch.randn(2, count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def randomized(part: nn.Module, std: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=std)
    return part.double().eval()


def entropy(weights: Tensor) -> float:
    """Mean over queries, in nats; log(keys) when attention is flat."""
    return torch.special.entr(weights).sum(-1).mean().item()


# 000 ------------------------------------------------------------------------------------------------------------------


def test_000_a_mask_whose_result_is_dropped_masks_nothing():
    assert not hasattr(torch.Tensor, "mask_fill"), "the method that the write-up calls does not exist"
    energy, mask = torch.randn(1, 2, 5, 5), torch.arange(5) < 3
    energy.masked_fill(~mask, torch.finfo(torch.float32).min)  # the right method, its result dropped
    assert (energy.softmax(-1)[..., ~mask] > 0).all()

    attention, x = randomized(Attention(CONFIG)), tokens(5)
    other = torch.where(mask[None, :, None], x, 100.0)
    seen = [attention(images, mask.expand(2, 1, 1, 5))[:, mask] for images in (x, other)]
    torch.testing.assert_close(seen[0], seen[1])


def test_000_adding_in_place_destroys_what_the_backward_pass_needs():
    """It works only as long as the branch ends in a dense layer, whose backward does not need its output."""

    def residual(branch: nn.Module, x: Tensor) -> Tensor:
        y = branch(x)
        y += x
        return y

    x = torch.randn(2, 4, requires_grad=True)
    residual(nn.Linear(4, 4), x).sum().backward()
    for last in (nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            residual(nn.Sequential(nn.Linear(4, 4), last), x).sum().backward()

    kept = torch.ones(3)
    residual(nn.Dropout(0.0), kept)
    assert kept.tolist() == [2, 2, 2], "a branch that hands on its input has the caller's own tensor changed"


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_000_scaling_by_the_model_width_flattens_attention(heads):
    """Also 004. Logits of unit queries and keys have deviation √(1 / heads) in place of 1."""
    q, k = torch.randn(2, 200, heads, 64 // heads, generator=torch.Generator().manual_seed(0))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    by_head, by_model = scores / math.sqrt(64 // heads), scores / math.sqrt(64)
    assert by_head.std().item() == pytest.approx(1, rel=0.05)
    assert by_model.std().item() == pytest.approx(math.sqrt(1 / heads), rel=0.05)
    assert entropy(by_model.softmax(-1)) > entropy(by_head.softmax(-1)) + 0.15
    widths = {scale: Attention(ViTConfig(**SHAPE, attention_scale=scale)).scale for scale in ("head", "model")}
    assert widths == {"head": 8**-0.5, "model": 16**-0.5}


# 001 ------------------------------------------------------------------------------------------------------------------


def test_001_tanh_on_the_logits_bounds_the_loss():
    """Ten classes: at best +1 for the right one and -1 for nine others, a loss of log(1 + 9 e⁻²) = 0.797."""
    floor = math.log(1 + 9 * math.exp(-2))
    assert floor == pytest.approx(0.797, abs=5e-4)
    losses = {}
    for tanh in (True, False):
        torch.manual_seed(0)
        model = create("mnist-7562", logits_tanh=tanh)
        images, labels = torch.randn(10, 1, 28, 28), torch.arange(10)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        losses[tanh] = loss.item()
    assert floor <= losses[True] < floor + 0.3, "learnt by heart, and still no lower"
    assert losses[False] < 0.1


def test_001_the_papers_tanh_sits_inside_the_head():
    paper = network(ViTConfig(**SHAPE, pre_logits=True))
    assert paper(10 * random_images(paper.config, count=20)).abs().max() > 1.5, (
        "logits of the pre-training head are free"
    )
    assert create("B/16", depth=1, pre_logits=True).pre_logits.out_features == 768


# 002 ------------------------------------------------------------------------------------------------------------------


def test_002_dropout_of_the_wrong_variable_forgets_the_positions():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.dropout = nn.Parameter(torch.rand(1, 9, CONFIG.dim, dtype=torch.float64)), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            out = x + self.table
            out = self.dropout(x)
            return out  # noqa: RET504 - as it stands there

    positions, blocks, x = Positions().eval(), network(CONFIG).blocks, tokens().requires_grad_()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))

    def encode(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    with torch.no_grad():
        torch.testing.assert_close(encode(positions(x[:, order])), encode(positions(x))[:, order])
        kept = positions.table
        assert not torch.allclose(encode(x[:, order] + kept), encode(x + kept)[:, order])
    positions(x).sum().backward()
    assert positions.table.grad is None, "a table that nothing uses is never trained"


def test_002_an_activation_after_the_last_layer_bounds_the_branch():
    """GELU is nowhere below -0.17, so the branch can add to a channel but hardly take away."""
    mlp, x = randomized(MLP(ViTConfig(**SHAPE, activation="gelu"))), tokens(200)
    free, bounded = mlp(x), F.gelu(mlp(x))
    assert free.min() < -2
    assert bounded.min() > -0.17
    assert bounded.mean() > free.mean() + 0.5


def test_002_unit_normal_kernels_make_attention_a_choice_of_one():
    """Kernels of deviation 1 give queries of deviation √768 = 28; softmax of such logits takes one token."""
    torch.manual_seed(0)
    shape = config("tensordot-b16", depth=1)
    x = torch.randn(1, 20, 768)
    entropies = {}
    for kind in ("written", "preset"):
        attention = ViT(shape).blocks[0].attn
        if kind == "written":
            nn.init.normal_(attention.qkv.weight)
        q, k, _ = attention.qkv(x).view(20, 3, 12, 64).permute(1, 2, 0, 3)
        entropies[kind] = entropy((q @ k.mT * attention.scale).softmax(-1))
    assert entropies["written"] < 0.1
    assert entropies["preset"] > 2


def test_002_misspelt_names_show_when_they_are_used():
    class Misspelt(nn.Module):
        def __init__(self, rate: float = 0.0):
            super().__init__()
            if rate > 0:
                self.dropout = nn.Dropout(rte)  # noqa: F821

        def foward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(NotImplementedError, match="forward"):
        Misspelt()(torch.zeros(1))
    with pytest.raises(NameError):
        Misspelt(0.1)


# 003 ------------------------------------------------------------------------------------------------------------------


def test_003_a_rate_is_no_layer():
    dropout = 0.1
    with pytest.raises(TypeError, match="'float' object is not callable"):
        dropout(torch.zeros(1))


def test_003_a_tensor_that_is_no_buffer_does_not_follow_the_model():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 4)
            self.scale = torch.sqrt(torch.FloatTensor([4]))

        def forward(self, x: Tensor) -> Tensor:
            q = self.dense(x)
            return (q @ q.mT / self.scale).softmax(-1) @ q

    model = Scaled()
    model(torch.zeros(1, 3, 4))
    assert "scale" not in model.state_dict()
    assert model.to("meta").scale.device.type == "cpu"
    with pytest.raises(RuntimeError, match="scalar type"):
        Scaled().to(torch.bfloat16)(torch.zeros(1, 3, 4, dtype=torch.bfloat16))
    assert Attention(CONFIG).to(torch.bfloat16)(torch.zeros(1, 3, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_003_a_star_import_takes_the_name_of_the_module():
    names = {name: getattr(random, name) for name in random.__all__}  # what `from random import *` brings
    with pytest.raises(AttributeError):
        names["random"].seed(0)


def test_003_the_progress_bar_shows_half_the_loss():
    """It divides by len(batch), and a batch is the pair of images and labels."""
    batch = next(iter(DataLoader(TensorDataset(torch.zeros(32, 3), torch.zeros(32)), batch_size=16)))
    assert len(batch) == 2
    assert len(batch[0]) == 16


def test_003_a_view_hides_images_of_the_wrong_layout():
    """`view` into (B, 3, H, W) takes channels-last images without a word and shuffles their pixels."""
    red = torch.zeros(1, 12, 12, 3)
    red[..., 0] = 1
    assert not torch.equal(red.view(1, 3, 12, 12), red.permute(0, 3, 1, 2))
    with pytest.raises(UsageError, match="wrong shape"):
        ViT(CONFIG)(red)


# 004 ------------------------------------------------------------------------------------------------------------------


class OneProjection(nn.Module):
    """q three times over; `heads_moved` says whether heads stand before tokens when attention is taken."""

    def __init__(self, dim: int, heads: int, heads_moved: bool):
        super().__init__()
        self.heads, self.heads_moved = heads, heads_moved
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(x).unflatten(-1, (self.heads, -1))
        q = q.transpose(1, 2) if self.heads_moved else q
        return q @ q.mT / q.shape[-1] ** 0.5, q

    def forward(self, x: Tensor) -> Tensor:
        scores, q = self.scores(x)
        return self.out((scores.softmax(-1) @ q).transpose(1, 2).reshape(x.shape))


def test_004_one_projection_for_all_makes_attention_symmetric():
    """Token i scores j as j scores i: no token can be looked at without looking back. And half the weights are idle."""
    attention, x = randomized(OneProjection(16, 2, heads_moved=True)), tokens()
    scores, _ = attention.scores(x)
    torch.testing.assert_close(scores, scores.mT)
    attention(x).sum().backward()
    assert [name for name, p in attention.named_parameters() if p.grad is None] == ["k.weight", "v.weight"]

    ours = randomized(Attention(ViTConfig(**SHAPE, qkv_bias=False, proj_bias=False)))
    q, k, _ = ours.qkv(x).view(2, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
    assert not torch.allclose(q @ k.mT, (q @ k.mT).mT)
    ours(x).sum().backward()
    assert all(part.any() for part in ours.qkv.weight.grad.split(16))


def test_004_heads_that_are_not_moved_attend_to_heads():
    """The attention of a token is a table of heads by heads, and what it gathers holds nothing of other tokens."""
    attention, x = randomized(OneProjection(16, 2, heads_moved=False)), tokens()
    other = x.clone()
    other[:, 4] += 1
    gathered = []
    for tokens_ in (x, other):
        scores, q = attention.scores(tokens_)
        assert scores.shape == (2, 9, 2, 2)
        gathered.append(scores.softmax(-1) @ q)
    changed = (gathered[0] != gathered[1]).flatten(2).any(-1)
    assert changed.nonzero()[:, 1].tolist() == [4, 4]
    ours = randomized(Attention(CONFIG))
    assert (ours(x) != ours(other)).any(-1).all(), "in true attention every token sees the change"


def test_004_the_class_token_sees_a_third_of_the_image():
    """Only the reshape after such attention mixes tokens, by a fixed deal: row i gets pieces of tokens 4i to 4i + 3.

    After three blocks the class token (row 0) has heard of tokens 0 to 63, whatever the image shows.
    """
    x = tokens(197, dim=8).requires_grad_()
    y = x
    for seed in range(3):
        torch.manual_seed(seed)
        y = y + OneProjection(8, 4, heads_moved=False).double()(y)
    y[:, 0].square().sum().backward()
    assert x.grad.abs().sum((0, 2)).nonzero().flatten().tolist() == list(range(64))

    ours = create("timm-small-128", dim=8, mlp_dim=8).double().eval()
    z = tokens(197, dim=8).requires_grad_()
    ours.blocks[0](z)[:, 0].square().sum().backward()
    assert (z.grad.abs().sum((0, 2)) > 0).all(), "one block is enough for all 197"


def test_004_the_second_residual_loses_the_first():
    """x + MLP(norm(x + attention)) has no path for attention but the MLP; silence that, and attention is gone."""
    block, x = randomized(Block(CONFIG)), tokens()
    nn.init.zeros_(block.mlp.fc2.weight)
    nn.init.zeros_(block.mlp.fc2.bias)

    def mistaken(x: Tensor) -> Tensor:
        h = x + block.attn(block.norm1(x))
        h = block.mlp(block.norm2(h))
        return x + h

    torch.testing.assert_close(mistaken(x), x)
    mistaken(x).sum().backward()
    assert not block.attn.qkv.weight.grad.any()
    torch.testing.assert_close(block(x), x + block.attn(block.norm1(x)))
    block(x).square().sum().backward()
    assert block.attn.qkv.weight.grad.any()


def test_004_of_the_first_sum_only_its_normalized_form_is_left():
    """The variable that held the sum is overwritten by its norm, so the sum's size can never reach the output."""
    block, x = randomized(Block(ViTConfig(**SHAPE, norm_eps=0.0))), tokens()

    def rest(total: Tensor) -> Tensor:
        return x + block.mlp(block.norm2(total))

    total = x + block.attn(block.norm1(x))
    torch.testing.assert_close(rest(total), rest(3 * total))
    right = [kept + block.mlp(block.norm2(kept)) for kept in (total, 3 * total)]
    torch.testing.assert_close(right[1] - right[0], 2 * total)


def test_004_positions_are_made_and_never_added():
    """The table exists in the write-up and its forward pass does not mention it: no gradient, no idea of order."""
    preset = create("timm-small-128", dim=16, mlp_dim=16, image_size=32).train()
    nn.init.normal_(preset.head.weight)
    images = torch.randn(1, 3, 32, 32)
    swapped = images.roll(16, dims=-1)  # the patches of each row change places
    forgetful = ViT(ViTConfig.from_json(preset.config.to_json() | {"position": "none"})).eval()
    forgetful.load_state_dict({key: value for key, value in preset.state_dict().items() if key != "pos_embed"})
    torch.testing.assert_close(forgetful(images), forgetful(swapped))

    preset(images).square().sum().backward()
    assert preset.pos_embed.grad.any()
    nn.init.normal_(preset.pos_embed)
    assert not torch.allclose(preset.eval()(images), preset(swapped))
