"""Self-distillation against loops in NumPy; the teacher, the views, and the signs of collapse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import TrainingError
from vitral.model import ViT, ViTConfig
from vitral.pretraining import dino, views
from vitral.pretraining.dino import SelfDistillation, distillation_loss, koleo, random_masks
from vitral.pretraining.monitor import check_collapse
from vitral.training.options import Run

CONFIG = ViTConfig(image_size=(8, 12), patch_size=4, classes=0, dim=16, depth=2, heads=2, mlp_dim=32)


def small(**options: Any) -> SelfDistillation:
    torch.manual_seed(0)
    model = SelfDistillation(ViT(CONFIG), **{"prototypes": 7, "steps": 10, **options})
    with torch.no_grad():
        for parameter in model.teacher.parameters():  # as after some steps
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.center.normal_(std=0.1)
    return model


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


@torch.no_grad()
def test_the_loss_is_that_of_a_loop_over_pairs():
    model = small()
    large, tiny = torch.randn(2, 3, 3, 8, 12), torch.randn(4, 3, 3, 4, 4)
    center = model.center.double().numpy().copy()
    teacher = [model.teacher_head(model.teacher(crop)).double().numpy() for crop in large]
    student = [model.head(model.encoder(crop)).double().numpy() for crop in (*large, *tiny)]
    loss, metrics = model(large, tiny, None)
    total, pairs = 0.0, 0
    for t in range(2):
        for s in range(6):
            if s == t:
                continue
            for b in range(3):
                wanted = softmax((teacher[t][b] - center) / 0.04)
                got = softmax(student[s][b] / 0.1)
                total -= float((wanted * np.log(got)).sum()) / 3
            pairs += 1
    assert float(loss) == pytest.approx(total / pairs, rel=1e-5)
    assert metrics["dino_loss"] == loss
    wanted = 0.9 * center + 0.1 * np.concatenate(teacher).mean(0)
    assert np.allclose(model.center.numpy(), wanted, atol=1e-6)


@torch.no_grad()
def test_the_loss_of_masked_patches_is_that_of_a_loop():
    model = small(ibot=1.0)
    large = torch.randn(2, 3, 3, 8, 12)
    masks = torch.zeros(2, 3, 6, dtype=torch.bool)
    masks[0, 1, [0, 4]], masks[1, 2, 3], masks[1, 0, :3] = True, True, True
    center = model.patch_center.double().numpy().copy()
    of_crops, counted = 0.0, 0
    for crop, rows in zip(large, masks, strict=True):
        for image, row in zip(crop, rows, strict=True):
            if not row.any():
                continue
            seen = model.teacher_head(tokens(model.teacher, image[None], None, None)).double().numpy()
            guess = model.head(tokens(model.encoder, image[None], row, model.mask_token)).double().numpy()
            each = [
                -(softmax((seen[n] - center) / 0.04) * np.log(softmax(guess[n] / 0.1))).sum()
                for n in row.nonzero()[:, 0].tolist()
            ]
            of_crops, counted = of_crops + float(np.mean(each)), counted + 1
    loss, metrics = model(large, large[:0], masks)
    assert float(metrics["ibot_loss"]) == pytest.approx(of_crops / counted, rel=1e-5)
    assert float(loss) == pytest.approx(float(metrics["dino_loss"] + metrics["ibot_loss"]), rel=1e-6)


def tokens(encoder: ViT, image: Tensor, masked: Tensor | None, token: Tensor | None) -> Tensor:
    patches = encoder.patch_embed(image).clone()
    for n in range(6):
        if masked is not None and masked[n]:
            patches[0, n] = token[0, 0]  # type: ignore[index]
    x = torch.cat([encoder.cls_token, patches], dim=1) + encoder.pos_embed
    for block in encoder.blocks:
        x = block(x)
    return encoder.norm(x)[0, 1:]


def test_sinkhorn_is_that_of_a_loop_and_balances():
    scores = torch.randn(12, 5, dtype=torch.float64)
    q = np.exp(scores.numpy())
    q /= q.sum()
    for _ in range(3):
        q = q / q.sum(0, keepdims=True) / 5
        q = q / q.sum(1, keepdims=True) / 12
    assert np.allclose(dino.sinkhorn(scores).numpy(), q * 12)
    assert torch.allclose(dino.sinkhorn(scores, 200).mean(0), torch.full((5,), 0.2, dtype=torch.float64))
    assert dino.sinkhorn(scores[:0]).shape == (0, 5)


@torch.no_grad()
def test_targets_by_sinkhorn():
    model = small(ibot=1.0, centering="sinkhorn")
    large, masks = torch.randn(2, 3, 3, 8, 12), torch.rand(2, 3, 6) < 0.3
    _, metrics = model(large, large[:0], None)
    teacher = model.teacher_head(model.teacher(large.flatten(0, 1)))
    target = dino.sinkhorn(teacher / 0.04).view(2, 3, -1)
    student = torch.stack([model.head(model.encoder(crop)) for crop in large])
    assert float(metrics["dino_loss"]) == pytest.approx(float(distillation_loss(target, student)), rel=1e-4)
    assert math.isfinite(float(model(large, large[:0], masks)[1]["ibot_loss"]))
    assert math.isfinite(float(model(large, large[:0], torch.zeros_like(masks))[0]))


def test_koleo_is_that_of_a_loop():
    x = torch.randn(6, 5, dtype=torch.float64)
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    wanted = np.mean([-np.log(min(np.linalg.norm(unit[i] - unit[j]) for j in range(6) if j != i)) for i in range(6)])
    assert float(koleo(x)) == pytest.approx(wanted, rel=1e-6)
    assert float(koleo(x[:1])) == 0
    assert math.isfinite(float(koleo(torch.ones(3, 4))))


def test_no_gradient_reaches_the_teacher_and_all_others_get_one():
    model = small(ibot=1.0, koleo=0.1)
    masks = torch.ones(2, 3, 6, dtype=torch.bool)
    loss, _ = model(torch.randn(2, 3, 3, 8, 12), torch.randn(1, 3, 3, 4, 4), masks)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith("teacher"), name


def test_the_teacher_is_a_running_average():
    model = small(momentum=0.9, steps=4)
    for step in range(6):
        before = {name: value.clone() for name, value in model.teacher.state_dict().items()}
        with torch.no_grad():
            for parameter in model.encoder.parameters():
                parameter.add_(torch.randn_like(parameter))
        model.follow()
        keep = 1 - 0.1 * (math.cos(math.pi * min(step / 4, 1)) + 1) / 2
        for name, value in model.teacher.state_dict().items():
            wanted = keep * before[name] + (1 - keep) * model.encoder.state_dict()[name]
            assert torch.allclose(value, wanted, atol=1e-6), (step, name)
    assert int(model.updates) == model.done == 6


def test_prototypes_wait_for_the_first_steps():
    model = small(fixed_steps=1)
    for step in range(2):
        model.zero_grad()
        model(torch.randn(2, 3, 3, 8, 12), torch.randn(1, 3, 3, 4, 4), None)[0].backward()
        assert (model.head.prototypes.grad is None) == (step == 0)
        model.follow()


def test_a_loaded_state_counts_on():
    model, other = small(), small()
    model.follow()
    other.load_state_dict(model.state_dict())
    assert other.done == 1


def test_the_teacher_stays_in_evaluation_mode():
    model = small()
    assert model.encoder.training
    assert not model.train().teacher.training
    assert model.kept is model.teacher


def test_drawn_crops_are_standardized_and_of_two_sizes():
    run = Run(recipe="dino", local_crops=3, ibot=1.0, crop_area=0.3)
    draw = SelfDistillation.draw(run, CONFIG)
    preprocessing = Preprocessing((8, 12), mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.3))
    pixels = torch.zeros(2, 3, 8, 12, dtype=torch.uint8)
    torch.manual_seed(3)
    large, tiny, masks = draw(pixels, preprocessing)
    assert large.shape == (2, 2, 3, 8, 12)
    assert tiny.shape == (3, 2, 3, 4, 4)
    assert masks is not None
    assert masks.shape == (2, 2, 6)
    for channel, (mean, std) in enumerate(zip(preprocessing.mean, preprocessing.std, strict=True)):
        assert torch.allclose(tiny[:, :, channel], torch.tensor(-mean / std))
    torch.manual_seed(3)
    again = draw(pixels, preprocessing)
    assert torch.equal(again[0], large)
    assert torch.equal(again[1], tiny)


def test_masks_cover_half_of_the_crops():
    torch.manual_seed(0)
    masks = random_masks(500, ViTConfig(image_size=40, patch_size=4), torch.device("cpu"))
    share = masks.float().mean(-1)
    assert float((share > 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert float(share[share > 0].min()) >= 0.1
    assert float(share.max()) <= 0.5


def test_a_crop_is_a_part_of_its_image():
    """Of an image whose pixels are their coordinates, the crop's are linear, and cover the share that was asked for."""
    torch.manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    found = views.crop(torch.stack([rows, columns])[None].expand(200, -1, -1, -1), (16, 16), (0.2, 0.5))
    assert found.min() >= 0
    assert found.max() <= 63
    steps = found[:, 0, 1:] - found[:, 0, :-1]
    inner = steps[:, 1:-1]
    assert torch.allclose(inner, inner[:, :1, :1].expand_as(inner), atol=1e-3)
    tall, wide = (inner[:, 0, 0] * 16 / 64), (found[:, 1, 0, 2:] - found[:, 1, 0, 1:-1])[:, 0] * 16 / 64
    share = tall * wide
    assert share.min() >= 0.2 - 1e-3
    assert share.max() <= 0.5 + 1e-3
    assert (wide / tall).max() <= 4 / 3 + 1e-3


def test_colors_change_within_range_and_grays_stay_gray():
    torch.manual_seed(0)
    x = torch.rand(20, 3, 6, 6)
    changed = views.jitter(x)
    assert changed.min() >= 0
    assert changed.max() <= 1
    assert not torch.allclose(changed, x, atol=0.05)
    gray = views.jitter(torch.rand(20, 1, 6, 6).expand(-1, 3, -1, -1))
    assert torch.allclose(gray[:, :1].expand_as(gray), gray, atol=1e-4)


def test_a_blur_keeps_the_mean_and_a_flat_image():
    x = torch.rand(4, 3, 32, 32)
    assert torch.allclose(views.blurred(torch.full((2, 3, 224, 224), 0.3)), torch.tensor(0.3), atol=1e-5)
    torch.manual_seed(0)
    done = views.blurred(x.repeat(1, 1, 7, 7))
    assert done.std() < x.std()
    assert float(done.mean()) == pytest.approx(float(x.mean()), abs=0.01)


def test_both_collapses_of_the_teacher_are_refused():
    healthy = {"feature_rank": 20.0, "feature_spread": 0.5}
    one, none = torch.zeros(2, 3, 8), torch.full((2, 3, 8), 1 / 8)
    one[..., 2] = 1
    spread = torch.eye(8)[torch.arange(6).view(2, 3)]
    for target, message in ((one, "the same prototype"), (none, "no image prefers"), (spread, "")):
        measured = {**healthy, **{name: float(value) for name, value in dino.entropies(target).items()}}
        if message:
            with pytest.raises(TrainingError, match=message):
                check_collapse(measured, "")
        else:
            check_collapse(measured, "")


def test_the_loss_knows_its_own_crops():
    target = torch.softmax(torch.randn(2, 3, 5), -1)
    scores = torch.randn(4, 3, 5)
    changed = scores.clone()
    alone = distillation_loss(target[:1].expand(2, -1, -1) * torch.tensor([1.0, 0.0])[:, None, None], scores)
    changed[0] += torch.randn(3, 5)  # the first crop is not compared with the first target
    assert torch.equal(
        alone, distillation_loss(target[:1].expand(2, -1, -1) * torch.tensor([1.0, 0.0])[:, None, None], changed)
    )
