"""Faithfulness measures, compared with networks of known ground truth and with scipy."""

from __future__ import annotations

import io
import json
import math
import warnings

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from tiny import SHAPE, network
from torch import nn

from vitral.data.dataset import Pixels, Split
from vitral.data.images.preprocessing import Preprocessing
from vitral.device import choose
from vitral.errors import UsageError
from vitral.explanation import benchmark as b
from vitral.explanation import faithfulness as f
from vitral.explanation.explain import explain
from vitral.explanation.heatmap import Heatmap
from vitral.explanation.methods import METHODS
from vitral.inference.predictor import Predictor
from vitral.model import ViT, ViTConfig

GRID = (4, 4)


class Linear(nn.Module):
    """Two logits: the weighted sum of the patches' mean colors, and its negative."""

    def __init__(self, weights: torch.Tensor):
        super().__init__()
        self.weights = nn.Parameter(weights.float())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        cells = nn.functional.avg_pool2d(images.mean(1), images.shape[-1] // self.weights.shape[1])
        found = (cells * self.weights).sum((1, 2))
        return torch.stack([found, -found], dim=1)


def toy(seed: int = 0):
    """A linear network, images, and the true contribution of each patch beyond the fill."""
    generator = torch.Generator().manual_seed(seed)
    model = Linear(torch.randn(GRID, generator=generator)).eval()
    images = torch.randn(6, 3, 8, 8, generator=generator)
    cells = nn.functional.avg_pool2d(images.mean(1), 2)
    truth = (cells - cells.mean((1, 2), keepdim=True)) * model.weights.detach()
    return model, images, truth[:, None]


def targets(images, number=0):
    return torch.full((len(images), 1), number)


def test_curves_of_a_linear_network_are_sums_of_what_is_left():
    model, images, truth = toy()
    found = f.curves(model, images, truth, targets(images), "most")
    blank = model(images.mean((2, 3), keepdim=True).expand_as(images))[:, :1].detach()
    order = truth.flatten(1).sort(descending=True).values
    wanted = torch.cat([torch.zeros(6, 1), order.cumsum(1)], dim=1)
    wanted = blank + order.sum(1, keepdim=True) - wanted
    assert found.shape == (6, 1, 17)
    torch.testing.assert_close(found[:, 0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fill", f.FILLS)
@pytest.mark.parametrize("order", ["most", "least"])
@pytest.mark.parametrize("steps", [1, 5, 100])
def test_curves_begin_with_the_image_and_end_without_it(fill, order, steps):
    model, images, truth = toy()
    for of in ("logit", "probability"):
        found = f.curves(model, images, truth, targets(images, 1), order, steps=steps, fill=fill, of=of)
        assert found.shape == (6, 1, min(steps, 16) + 1)
        ends = torch.stack([model(images), model(f.FILLS[fill](images, GRID))])
        ends = (ends if of == "logit" else ends.softmax(-1))[..., 1]
        torch.testing.assert_close(found[:, 0, [0, -1]].T, ends.detach(), rtol=1e-5, atol=1e-5)


def test_the_true_map_has_the_largest_gain_and_its_opposite_the_smallest():
    model, images, truth = toy()
    best = f.srg(model, images, truth, targets(images))
    # In closed form: with one patch a step, each patch's share times how much later it goes.
    order = truth.flatten(1).sort(descending=True).values
    places = torch.arange(16)
    wanted = (order * (15 - 2 * places)).sum(1) / 16
    torch.testing.assert_close(best[:, 0], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(f.srg(model, images, -truth, targets(images)), -best, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(f.srg(model, images, -truth, targets(images, 1)), best, rtol=1e-4, atol=1e-5)
    many = f.srg(model, images, f.random_maps(images, GRID, 200), targets(images).expand(6, 200))
    assert (many < best).all()
    assert (many.mean(1).abs() < 4 * many.std(1) / math.sqrt(200)).all()  # a random order gains nothing


def test_a_few_steps_hide_as_many_patches_each():
    assert f.hidden_at(9, 100).tolist() == list(range(10))
    assert f.hidden_at(196, 4).tolist() == [0, 49, 98, 147, 196]
    assert f.hidden_at(10, 4).tolist() == [0, 2, 5, 8, 10]
    assert f.area(torch.ones(3, 5), 10, 4).tolist() == [1, 1, 1]


def test_ties_come_in_no_order_but_the_same_each_time():
    images = torch.randn(300, 1, 4, 4)
    ranked = f.ranking(torch.zeros(300, 1, 4, 4), images)[:, 0]
    assert torch.equal(ranked, f.ranking(torch.zeros(300, 1, 4, 4), images)[:, 0])
    assert torch.equal(ranked[7:8], f.ranking(torch.zeros(1, 1, 4, 4), images[7:8])[:, 0])
    assert (ranked.float().mean(0) - 7.5).abs().max() < 5 * math.sqrt((16**2 - 1) / 12 / 300)
    close = torch.tensor([1.0, 1 + 1e-7, 1 + 1e-7, 0.5] * 4).view(1, 1, 4, 4)  # smaller gaps than noise could keep
    found = f.ranking(close, images[:1])[0, 0].tolist()
    assert sorted(found[:8]) == [1, 2, 5, 6, 9, 10, 13, 14]
    assert sorted(found[12:]) == [3, 7, 11, 15]
    with pytest.raises(UsageError, match="not finite"):
        f.ranking(torch.full((1, 1, 4, 4), torch.nan), images[:1])


def test_deletion_and_insertion_are_areas_of_probabilities():
    model, images, truth = toy()
    most = f.curves(model, images, truth, targets(images), "most", of="probability")
    least = f.curves(model, images, truth, targets(images), "least", of="probability", fill="blur")
    share = torch.arange(17) / 16
    torch.testing.assert_close(f.deletion(model, images, truth, targets(images)), torch.trapezoid(most, share))
    torch.testing.assert_close(f.insertion(model, images, truth, targets(images)), torch.trapezoid(least, share))
    assert (
        f.deletion(model, images, truth, targets(images)) < f.deletion(model, images, -truth, targets(images))
    ).all()
    with pytest.raises(UsageError, match="nearest: blur"):
        f.deletion(model, images, truth, targets(images), fill="blurr")


def test_blur_keeps_colors_and_little_else():
    images = torch.randn(2, 3, 32, 48)
    blurred = f.blurred(images, (4, 6))
    assert blurred.std() < 0.15 * images.std()
    torch.testing.assert_close(f.blurred(torch.full_like(images, 0.7), (4, 6)), torch.full_like(images, 0.7))
    assert f.blurred(torch.randn(1, 1, 3, 2), (3, 2)).shape == (1, 1, 3, 2)


def test_rank_correlation_is_scipys():
    first, second = torch.randn(2, 3, 4, 5), torch.randint(0, 6, (2, 3, 4, 5)).float()  # with ties
    wanted = [[stats.spearmanr(first[i, j].flatten(), second[i, j].flatten())[0] for j in range(3)] for i in range(2)]
    torch.testing.assert_close(f.rank_correlation(first, second), torch.tensor(wanted, dtype=torch.float32))
    flat = torch.zeros(2, 3, 4, 5)
    assert f.rank_correlation(flat, flat + 1).eq(1).all()
    assert f.rank_correlation(first, flat).eq(0).all()


def test_relevance_inside_a_mask():
    maps = torch.tensor([[3.0, 1.0], [-5.0, 0.0]])[None, None]
    mask = np.zeros((8, 8), bool)
    mask[:4, 2:] = True  # half of the first patch, all of the second
    covered = f.coverage(mask, (2, 2))
    assert covered.tolist() == [[0.5, 1], [0, 0]]
    assert torch.equal(f.coverage(covered > 0, (2, 2)), (covered > 0).float())
    assert f.inside(maps, covered[None]).item() == pytest.approx((3 * 0.5 + 1) / 4)
    assert f.inside(torch.ones(1, 1, 2, 2), covered[None]).item() == pytest.approx(covered.mean().item())
    assert f.inside(-maps.abs(), covered[None]).item() == 0
    assert f.hits(maps, covered[None]).item() == 1
    assert f.hits(-maps, covered[None]).item() == 0
    assert f.hits(torch.zeros(1, 1, 2, 2), covered[None]).item() == 0.5  # among equals: by chance
    assert f.hits(maps, torch.tensor([[[0.1, 1.0], [0, 0]]])).item() == 0  # a corner of the mask is not the mask
    assert f.hits(maps, torch.zeros(1, 2, 2)).item() == 0
    assert f.coverage(np.ones((7, 9), bool), (2, 2)).tolist() == [[1, 1], [1, 1]]


def test_the_gaussian_is_centered():
    for grid in ((4, 4), (3, 5)):
        found = f.gaussian_map(grid)
        torch.testing.assert_close(found, found.flip(0).flip(1))
        assert found.argmax() in (5, 7)
    assert f.gaussian_map((9, 9))[4, 4] == 1


def test_intervals_are_students_and_cover():
    values = np.random.default_rng(0).normal(size=12).tolist()
    found, wanted = b.Estimate.of(values), stats.t.interval(0.95, 11, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(wanted)
    assert found.count == 12
    assert b.Estimate.of([]) is None
    assert b.Estimate.of([2.0]) == b.Estimate(2.0, None, None, 1)
    samples = np.random.default_rng(1).normal(size=(2000, 8))
    covered = np.mean([e.low <= 0 <= e.high for e in map(b.Estimate.of, samples)])
    assert covered == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("shape", ["normal", "even", "heavy"])
def test_one_random_map_in_ten_is_believable(shape):
    """For any distribution of random gains, if negated maps have negated gains."""
    drawn = np.random.default_rng(0)
    draw = {"normal": drawn.normal, "even": lambda size: drawn.uniform(-1, 1, size), "heavy": drawn.standard_cauchy}
    gains = torch.from_numpy(draw[shape](size=(40_000, f.RANDOM_MAPS + 1)))
    found = f.better_than_random(gains[:, :1], gains[:, 1:, None])
    assert found.float().mean().item() == pytest.approx(0.1, abs=0.006)
    assert not f.better_than_random(torch.zeros(3, 1), torch.zeros(3, 19, 1)).any()


@pytest.mark.slow
def test_the_true_map_is_believable_if_one_patch_decides():
    """Two deviations above the random mean are impossible there."""
    weights = torch.zeros(8, 8)
    weights[2, 3] = 1
    images = torch.randn(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images[:, :, 2, 3] += 3
    model = Linear(weights).eval()
    gain = f.srg(model, images, weights.expand(100, 1, 8, 8), targets(images))
    random = f.srg(model, images, f.random_maps(images, (8, 8), f.RANDOM_MAPS), targets(images).expand(100, 19))
    assert f.better_than_random(gain, random[..., None]).float().mean() >= 0.97
    assert ((random.mean(1) + 2 * random.std(1))[:, None] > gain).float().mean() > 0.5
    wrong = f.srg(model, images, -weights.expand(100, 1, 8, 8), targets(images))
    assert not f.better_than_random(wrong, random[..., None]).any()


def sighted(**changes) -> ViT:
    """Random weights under which patches matter."""
    model = network(ViTConfig(**SHAPE | {"image_size": 16} | changes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def test_checks_of_a_map():
    model = sighted(pool="mean")
    images = torch.randn(3, 3, 16, 16)
    wanted = torch.tensor([[0, 1], [1, 2], [3, 4]])
    found = f.check_faithfulness(model, images, wanted, "occlusion")
    assert len(found) == 6
    assert json.loads(json.dumps(found)) == found
    assert found[0]["protocol"] == "SRG (mean, 16 steps)"
    assert sum(one["believable"] for one in found) >= 5
    maps = METHODS["occlusion"].run(model, images, wanted)
    with torch.no_grad():
        gains = f.srg(model, images, maps.values, wanted, steps=25)
        random = f.random_maps(images, GRID, f.RANDOM_MAPS)
        random = torch.stack(
            [f.srg(model, images, random, wanted[:, t : t + 1].expand(3, f.RANDOM_MAPS)) for t in range(2)], -1
        )
        gaussian = f.srg(model, images, f.gaussian_map(GRID).expand(3, 2, -1, -1), wanted)
    for name, values in (
        ("srg", gains),
        ("random_srg", random.mean(1)),
        ("random_srg_std", random.std(1)),
        ("gaussian_srg", gaussian),
    ):
        torch.testing.assert_close(torch.tensor([one[name] for one in found]).view(3, 2), values, rtol=1e-3, atol=1e-5)
    alone = f.check_faithfulness(
        model, images[1:2], wanted[1:2], "occlusion", maps=METHODS["occlusion"].run(model, images[1:2], wanted[1:2])
    )
    for one, other in zip(alone, found[2:4], strict=True):
        assert one["srg"] == pytest.approx(other["srg"], rel=1e-3)
        assert one["random_srg"] == pytest.approx(other["random_srg"], rel=1e-3, abs=1e-5)


def test_routing_does_not_depend_on_the_class():
    model, images = sighted(), torch.randn(2, 3, 16, 16)
    for name in ("rollout", "attention"):
        checks = f.check_faithfulness(model, images, targets(images), name)
        assert [one["target_sensitivity"] for one in checks] == [0, 0]
    checks = f.check_faithfulness(model, images, targets(images), "occlusion")
    assert min(one["target_sensitivity"] for one in checks) > 0.05


def test_maps_of_a_constant_network_are_not_believable():
    model, images = sighted(), torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        model.head.weight.zero_()
    for name in ("rollout", "occlusion", "rise"):
        for one in f.check_faithfulness(model, images, targets(images), name):
            assert (one["srg"], one["random_srg"], one["gaussian_srg"], one["believable"]) == (0, 0, 0, False)
    with torch.no_grad():  # rounding is no gain: a head so small that only the last digit of its logits moves
        model.head.weight.normal_(std=1e-9)
        model.head.bias.fill_(3.0)
    for one in f.check_faithfulness(model, images, targets(images), "rollout"):
        assert (one["srg"], one["believable"]) == (0, False)


def test_other_weights_are_as_large_and_give_other_maps():
    model, images = sighted(dim=64, pool="mean"), torch.randn(16, 3, 16, 16)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    other = f.randomized(model)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert not torch.equal(one, two), name
        if one.numel() > 1000:
            assert two.std().item() == pytest.approx(one.std().item(), rel=0.1)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    maps = [METHODS["occlusion"].run(m, images, targets(images)).values for m in (model, other, f.randomized(model))]
    assert f.rank_correlation(maps[0], maps[0]).min() == pytest.approx(1)
    assert f.rank_correlation(maps[0], maps[1]).mean().abs() < 0.2
    assert torch.equal(maps[1], maps[2])


def predictor(model: ViT) -> Predictor:
    size = model.config.image
    machine = choose("cpu", "fp32")
    return Predictor(model, Preprocessing(size), [f"class {i}" for i in range(5)], machine=machine, source="a network")


def split(count: int = 6, size: tuple[int, int] = (16, 16)) -> Split:
    pixels = np.random.default_rng(0).integers(0, 256, (count, *size, 3), dtype=np.uint8)
    return Split([f"image {i}" for i in range(count)], np.zeros(count, np.int64), Pixels(pixels))


METHODS_AT_HAND = {"rollout": {}, "occlusion": {}, "rise": {"masks": 64}}


@pytest.mark.slow
def test_benchmark():
    network = predictor(sighted(pool="mean"))
    images, done = split(12), []
    answers = [network(images.image(i)).probabilities.argmax() for i in range(12)]
    right = Split(images.names, np.where(np.arange(12) < 9, answers, (np.array(answers) + 1) % 5), images.fetch)

    def masks(number: int) -> np.ndarray | None:
        mask = np.zeros((16, 16), bool)
        mask[:4, :8] = True
        return None if number == 0 else mask

    found = b.benchmark(network, right, METHODS_AT_HAND, count=12, masks=masks, batch_size=5, progress=done.append)
    again = b.benchmark(network, right, METHODS_AT_HAND, count=12, masks=masks, batch_size=5)
    assert sum(done) == 12
    assert (found.images, found.right, found.masks, found.grid) == (12, 9, 8, (4, 4))
    assert found.area.mean == pytest.approx(1 / 8)
    assert found.protocols == ("SRG (mean, 16 steps)", "deletion (mean, 16 steps)", "insertion (blur, 16 steps)")
    rows = {row.method: row for row in found.rows}
    assert list(rows) == [*METHODS_AT_HAND, "random", "gaussian"]
    assert found.best == "occlusion"
    assert rows["occlusion"].srg.low > max(0, rows["random"].srg.high)
    assert rows["occlusion"].believable.mean > 0.9
    assert rows["occlusion"].deletion.mean < rows["random"].deletion.mean
    assert rows["occlusion"].insertion.mean > rows["random"].insertion.mean
    assert rows["random"].srg.low < 0 < rows["random"].srg.high
    assert rows["random"].inside.mean == pytest.approx(1 / 8, abs=0.04)
    assert rows["random"].milliseconds is None
    assert rows["rollout"].target_sensitivity.mean == 0
    assert rows["occlusion"].target_sensitivity.mean > 0.1
    assert abs(rows["occlusion"].randomized.mean) < 0.4
    data = [json.loads(json.dumps(one.to_json())) for one in (found, again)]
    for one in data:
        for row in one["rows"]:
            assert (row.pop("milliseconds") is None) == (row["method"] in ("random", "gaussian"))
    assert data[0] == data[1]
    console = Console(file=io.StringIO(), width=200)
    found.print_table(console)
    shown = console.file.getvalue()
    assert shown.splitlines()[0].startswith("a network: 12 images, 9 of them classified correctly")
    assert "completeness" not in shown.splitlines()[1]
    assert "deletion (mean, 16 steps)" in shown


def test_benchmark_agrees_with_the_functions_for_one_image():
    model = sighted()
    network, images = predictor(model), split(1)
    found = b.benchmark(network, [images.image(0)], ["rollout"], masks=lambda _: np.eye(4, dtype=bool))
    row = found.rows[0]
    images = network.preprocessing.standardize(network.prepare(images.image(0))[None])
    answer = model(images).argmax(1, keepdim=True)
    maps = METHODS["rollout"].run(model, images, answer).values
    wanted = {
        "srg": f.srg(model, images, maps, answer),
        "deletion": f.deletion(model, images, maps, answer),
        "insertion": f.insertion(model, images, maps, answer),
        "inside": f.inside(maps, torch.eye(4)[None]),
        "hits": f.hits(maps, torch.eye(4)[None]),
    }
    for name, value in wanted.items():
        assert getattr(row, name) == b.Estimate(pytest.approx(value.item(), rel=1e-4, abs=1e-6), None, None, 1)
    assert found.right is None


def test_masks_are_preprocessed_like_their_images():
    preprocessing = Preprocessing((16, 16), resize="letterbox", mean=(0.9,) * 3)
    network = Predictor(sighted(), preprocessing, list("abcde"))
    mask = np.zeros((16, 32), bool)
    mask[:, :16] = True  # the left half of an image that fills the two rows in the middle
    assert b._preprocessed(mask, (4, 4), network).round().tolist() == [[0] * 4, [1, 1, 0, 0], [1, 1, 0, 0], [0] * 4]


def test_benchmark_refuses():
    network = predictor(sighted())
    with pytest.raises(UsageError, match="unknown method"):
        b.benchmark(network, split(), ["roll-out"])
    with pytest.raises(UsageError, match="no image"):
        b.benchmark(network, [], ["rollout"])


def test_explain_with_checks():
    model, images = sighted(), torch.randn(3, 3, 16, 16)
    found = explain(model, images, [1, 2], method="rollout", check=True, batch_size=2)
    assert all(isinstance(one, Heatmap) for one in found)
    wanted = f.check_faithfulness(model, images[2:], torch.tensor([[1, 2]]), "rollout")
    assert [one.checks["srg"] for one in found[4:]] == pytest.approx([one["srg"] for one in wanted], rel=1e-3)
    for number, (one, checks) in enumerate(zip(found[4:], wanted, strict=True)):
        maps, classes = torch.from_numpy(one.values)[None, None], torch.tensor([[number + 1]])
        for name, measure, last in (("deletion", f.deletion, -1), ("insertion", f.insertion, 0)):
            curve = checks[f"{name}_curve"]
            assert checks[name] == pytest.approx(measure(model, images[2:], maps, classes, steps=25).item(), abs=1e-5)
            assert curve[last] != pytest.approx(one.probability, abs=1e-6)
            assert curve[-1 - last] == pytest.approx(one.probability, abs=1e-6)  # nothing hidden
        alike = METHODS["rollout"].run(f.randomized(model), images[2:], classes).values
        assert checks["randomized"] == pytest.approx(f.rank_correlation(maps, alike).item(), abs=1e-5)
    assert all(one.checks == {} for one in explain(model, images, method="rollout"))
    with torch.no_grad():
        model.head.weight.zero_()
    assert explain(model, images[0], 1, method="rollout", check=True)[0].note.startswith("no better than a random map")


def test_completeness_is_passed_on_and_half_precision_works():
    model, images = sighted().bfloat16(), torch.randn(2, 3, 16, 16).bfloat16()
    maps = f.Maps(torch.randn(2, 1, 4, 4), completeness=torch.tensor([[0.5], [0.25]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = f.check_faithfulness(model, images, targets(images), "occlusion", maps=maps)
    assert [one["completeness"] for one in found] == [0.5, 0.25]
