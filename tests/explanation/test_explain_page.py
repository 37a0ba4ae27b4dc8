"""The pages on explanation describe methods, checks and distances as the code computes them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from vitral.explanation.benchmark import Benchmark, Estimate, Row
from vitral.explanation.faithfulness import RANDOM_MAPS, better_than_random
from vitral.explanation.inspect.attention_distance import local_attention, uniform_attention
from vitral.explanation.inspect.panels import worked_example
from vitral.explanation.methods import METHODS
from vitral.explanation.methods.method import quiet
from vitral.explanation.methods.select import DEFAULT
from vitral.model import ViT, ViTConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("explain-methods", "explain-evidence", "inspect")
PAGE = "\n".join((DOCS / f"{name}.md").read_text("utf-8") for name in PAGES)
GRID, LAYERS = 4, 3


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without its header."""
    lines = PAGE.split(f"\n{heading}\n")[1].split("\n")
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("| ")) :]
    table = table[: next(i for i, line in enumerate(table) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


METHOD_ROWS = {cells[0].strip("`"): cells[1:] for cells in rows("## The methods")}


def test_the_table_of_methods_has_every_method_in_order():
    assert list(METHOD_ROWS) == list(METHODS)
    assert DEFAULT in METHODS
    assert all(len(cells) == 6 for cells in METHOD_ROWS.values())


def test_the_evidence_has_every_method():
    """In the table of SRG on three sets of images, and in the table of a planted patch."""
    text = (DOCS / "explain-evidence.md").read_text("utf-8")
    for measured in (r"-?\d+\.\d\d \(", r"\d+\.\d%"):
        assert sorted(re.findall(rf"^\| `([\w+-]+)` \| {measured}", text, re.MULTILINE)) == sorted(METHODS)


def test_every_method_is_defined_with_its_source():
    text = PAGE.split("\n### Definitions\n")[1].split("\n**LibraGrad**")[0]
    found = dict(re.findall(r"^- \*\*`([^`]+)`\*\*: (.*?)(?=^- |\Z)", text, re.DOTALL | re.MULTILINE))
    assert list(found) == list(METHODS)
    for name, method in METHODS.items():
        for paper in re.findall(r"\d{4}\.\d{5}", method.source):
            assert f"https://arxiv.org/abs/{paper}" in found[name], name
        for equation in re.findall(r"equations? \d(?: and \d)?|section \d|D\.8|Figure 6", method.source):
            assert equation in " ".join(found[name].split()), name


@pytest.mark.parametrize("name", METHODS)
def test_a_row_says_what_the_method_does(name, monkeypatch):
    """Kind of map, supported networks, completeness and number of passes."""
    _, shows, any_network, adds_up, forward, back = METHOD_ROWS[name]
    method = METHODS[name]
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=16, patch_size=16 // GRID, dim=16, depth=LAYERS, heads=2, mlp_dim=16, classes=4))
    with torch.no_grad():
        model.head.weight.normal_()
    passes, backward, original = [0], [0], torch.autograd.grad

    def gradient(*arguments, **options):
        backward[0] += 1
        return original(*arguments, **options)

    def count(_module, arguments):
        passes[0] += len(arguments[0])

    monkeypatch.setattr(torch.autograd, "grad", gradient)
    handle = model.blocks[0].register_forward_pre_hook(count)
    with quiet(model):
        made = method.run(model, torch.randn(1, 3, 16, 16), torch.tensor([[2]]))
    handle.remove()
    assert shows == ("routing" if method.routing else "class")
    assert any_network == ("yes" if method.any_network else "no")
    assert adds_up == ("no" if made.completeness is None else "yes")
    numbers = {"N + 1": GRID**2 + 1, "L": LAYERS}
    assert passes[0] == numbers.get(forward) or passes[0] == int(forward)
    assert backward[0] == numbers.get(back) or backward[0] == int(back)


def test_every_column_of_the_benchmark_is_a_check_of_the_page():
    one = Estimate(0.5, 0.4, 0.6, 8)
    full = Row("rollout", *[one] * 9, milliseconds=1.0)
    out = io.StringIO()
    Benchmark("run", 8, 8, 8, one, (2, 2), ("", "", ""), (full,)).print_table(Console(file=out, width=300))
    heads = [line for line in out.getvalue().splitlines() if line.startswith("method")]
    columns = [re.sub(r" [↓↑]", "", name) for head in heads for name in re.split(r"\s{2,}", head.strip())]
    assert columns[0] == "method"
    assert columns[-1] == "ms"
    assert [name for name in columns[1:-1] if name != "method"] == [cells[0] for cells in rows("## Checks of a map")]


def test_the_page_states_the_rule_for_random_maps():
    assert f"no more than 3 of {RANDOM_MAPS} random maps" in " ".join(PAGE.split())
    blind = torch.linspace(0.01, 1, RANDOM_MAPS)[None, :, None]
    passing, failing = blind[0, -3, 0] - 1e-4, blind[0, -4, 0] - 1e-4
    assert better_than_random(torch.full((1, 1), float(passing)), blind).item()
    assert not better_than_random(torch.full((1, 1), float(failing)), blind).item()


def test_the_worked_example_and_the_reference_lines_are_right():
    example = worked_example()
    block = PAGE.split("## Attention distance")[1].split("```text\n")[1].split("```")[0]
    numbers = [[float(x) for x in re.findall(r"\d+\.\d", line)] for line in block.splitlines()[1:]]
    weights, pixels, products = ([row[i : i + 3] for row in numbers] for i in (0, 3, 6))
    assert weights == example.weights.tolist()
    assert pixels == pytest.approx(example.pixels, abs=0.051)
    assert products == pytest.approx(example.products, abs=0.051)
    assert numbers[1][9] == pytest.approx(example.distance, abs=0.051)
    text = " ".join(PAGE.split())
    grids = ((3, 3), (16, 16)), ((8, 8), (4, 4)), ((14, 14), (16, 16))
    far = [f"{uniform_attention(*one):.1f}" for one in grids]
    near = [f"{local_attention(*one)[0]:.1f}" for one in grids]
    assert f"{far[0]} pixels for this grid. For 8 × 8 patches of 4 pixels (CIFAR-10 here) it is {far[1]}" in text
    assert f"for 14 × 14 patches of 16 pixels {far[2]}" in text
    assert f"{near[0]}, {near[1]} and {near[2]} pixels" in text
