"""The layer table: complete, ordered, without allocation, and without a trace on the model."""

from __future__ import annotations

import io
import json
import time

import pytest
import torch
from rich.console import Console
from tiny import VARIANTS
from torch import nn

from vitral.errors import UsageError
from vitral.model import ViT, create, summarize


def printed(summary, width: int = 80, **options) -> str:
    console = Console(file=io.StringIO(), width=width)
    summary.print_table(console, **options)
    return console.file.getvalue()


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_add_up_to_the_model(name):
    model = ViT(VARIANTS[name])
    summary = summarize(model)
    assert summary.parameters == sum(p.numel() for p in model.parameters()) == summary.trainable
    assert summary.parameter_bytes == 4 * summary.parameters
    bare = {row.name for row in summary.layers if row.type == "Parameter"}
    direct = {"cls_token", "dist_token", "pos_embed", "reg_token", "attn_pool.latent", "rope_freqs"}
    assert bare == direct & dict(model.named_parameters()).keys()
    assert summary.parameters - summary.counted == sum(model.get_parameter(key).numel() for key in bare)
    assert all(row.output_shape for row in summary.layers)


def test_rows_are_in_the_order_of_execution():
    names = [row.name for row in summarize(create("mu/16", registers=2)).layers]
    block = ["", ".norm1", ".attn", ".attn.qkv", ".attn.proj", ".norm2", ".mlp", ".mlp.fc1", ".mlp.fc2"]
    front = ["patch_embed", "patch_embed.proj", "pos_embed", "cls_token", "reg_token"]
    assert names == [*front, *(f"blocks.0{part}" for part in block), "norm", "head"]


def test_shapes_and_numbers_of_b16():
    summary = summarize("B/16", batch=2)
    rows = {row.name: row for row in summary.layers}
    assert summary.input_shape == (2, 3, 224, 224)
    assert rows["patch_embed.proj"].output_shape == (2, 768, 14, 14)
    assert rows["blocks.11"].output_shape == (2, 197, 768)
    assert rows["blocks.0.attn.qkv"].parameters == 1_771_776
    assert rows["head"].output_shape == (2, 1000)


@pytest.mark.parametrize("name", ["B/16", "Ti/16", "einops-b16", "mnist-7562", "timm-small-128"])
def test_flops_are_those_of_the_formulas(name):
    model = summarize(name)
    rows = {row.name: row for row in model.layers}
    with torch.device("meta"):
        c = create(name).config
    N, patches = c.grid[0] * c.grid[1] + 1, c.grid[0] * c.grid[1]
    attention = 2 * N * N * c.dim
    dense = N * (4 * c.dim * c.dim + 2 * c.dim * c.mlp_dim)
    stem = patches * c.dim * c.channels * c.patch[0] * c.patch[1]
    assert rows["blocks.0.attn"].flops == 2 * attention, "fused attention is counted"
    assert model.flops == 2 * (stem + c.depth * (dense + attention) + c.dim * c.classes)
    assert summarize(name, batch=3).flops == 3 * model.flops


def test_activations_count_each_tensor_once():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.dense, self.same = nn.Flatten(), nn.Linear(12, 5), nn.Identity()

        def forward(self, x):
            return self.same(self.dense(self.flat(x)))

    summary = summarize(Plain(), image_size=2, batch=7)
    assert summary.input_bytes == 4 * 7 * 12
    assert summary.activation_bytes == 4 * 7 * 5, "a view of the input and an identity add nothing"


def test_frozen_parameters():
    model = create("mu/16", depth=4)
    model.blocks[:2].requires_grad_(False)
    model.pos_embed.requires_grad_(False)
    summary = summarize(model)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert (summary.frozen, summary.trainable) == (frozen, summary.parameters - frozen)
    text = printed(summary)
    assert "blocks.0 … 1  ×2" in text
    assert "blocks.2 … 3  ×2" in text, "frozen and trained blocks are not alike"


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = create("mu/16", position="sincos", image_size=32).train(training)
    seen: list[object] = []
    hooks = [module.register_forward_hook(lambda *_: seen.append(1)) for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    cached = dict(model._tables.cache)
    summarize(model)
    assert not seen, "hooks of others must not see the run"
    assert [len(module._forward_hooks) for module in model.modules()] == [1] * len(hooks)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(module.training is training for module in model.modules())
    assert model._tables.cache == cached
    assert all(
        value.device.type == "cpu" and torch.equal(value, before[key]) for key, value in model.state_dict().items()
    )


def test_the_largest_need_no_memory_or_time():
    summarize("mu/16")  # the first use of meta tensors imports their formulas
    start = time.process_time()
    assert summarize("G/14").parameters == 1_844_440_680
    assert time.process_time() - start < 2


def test_unused_layers_have_a_row():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Conv2d(3, 2, 1), nn.Linear(4, 4)
            self.forgotten = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return self.used(x)

    summary = summarize(Forgetful(), image_size=8)
    assert summary.parameters == 8 + 20 + 6
    assert [row.name for row in summary.layers] == ["used", "unused", "forgotten"]
    assert "not used" in printed(summary)


def test_image_size():
    assert summarize("B/16", image_size=384).parameters == 86_859_496
    assert summarize(create("mu/16", position="rotary"), image_size=(32, 64)).input_shape == (1, 3, 32, 64)
    with pytest.raises(UsageError, match="learned positions"):
        summarize(create("mu/16"), image_size=32)
    with pytest.raises(UsageError, match="does not say its image size"):
        summarize(nn.Linear(3, 3))


def test_half_precision_halves_the_memory():
    whole, half = summarize(create("mu/16")), summarize(create("mu/16").to(torch.bfloat16))
    for field in ("parameter_bytes", "activation_bytes", "input_bytes"):
        assert getattr(half, field) * 2 == getattr(whole, field)


def test_json_is_plain_and_complete():
    summary = summarize("mnist-7562")
    data = json.loads(json.dumps(summary.to_json()))
    assert data["counted"] == 7_562
    assert data["parameters"] == 7_850 == sum(row["parameters"] for row in data["layers"])
    assert data["flops"] == sum(row["flops"] for row in data["layers"])
    assert data["layers"][0].keys() == {"name", "type", "output_shape", "parameters", "trainable", "flops"}
    assert data["memory"]["input"] == 4 * 28 * 28


def test_the_table_fits_a_terminal_and_folds_alike_blocks():
    summary = summarize("B/16")
    text = printed(summary)
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 30
    for part in ("B/16", "blocks.0 … 11  ×12", "85,054,464", "86,415,592", "35.1 GFLOPs", "(1, 3, 224, 224)", "Conv2d"):
        assert part in text
    assert "…" not in text.replace("blocks.0 … 11", ""), "nothing is cut off"
    full = printed(summary, full=True)
    assert full.count("qkv") == 12
    assert "×" not in full


def test_a_title_with_brackets_is_printed_as_it_is():
    assert "[bold]x" in printed(summarize("mu/16", name="[bold]x"))
