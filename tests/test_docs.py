"""What the pages tell to type is typed, and every link leads somewhere.

Blocks of README.md, CONTRIBUTING.md and docs/ run in order, page by page, in a folder of tiny stand-ins: `photos/` with
two classes, `cat.jpg`, `labels.csv`, and weights under the names of published ones, with as many tensors but narrow and
random. The hub is a folder of these too: nothing is fetched. Training is cut to one epoch, of a network of width 8
unless it goes on from weights, and the generated set to a few pictures, of which methods of attribution are
measured on two; nothing else is changed. What a page shows of `vitral convert` must be what it prints.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from pictures import noise
from vitral.cli import COMMANDS, main
from vitral.data.sources import planted
from vitral.errors import DataError, UsageError
from vitral.evaluation import report
from vitral.explanation import benchmark
from vitral.model import ViT, ViTConfig, quantized
from vitral.recipes import planning
from vitral.weights import convert, hub, labels
from vitral.weights.files import write_plain
from vitral.weights.formats import FORMATS
from vitral.weights.formats.format import translated
from vitral.weights.native import Weights
from vitral.weights.preprocessing import DEFAULTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
RUN = {"console", "sh", "bash", "python"}

NOT_RUN = {
    r"make( |$)": "sets up an environment, or runs these very tests",
    r"(python -m )?pip ": "installs",
    r"git ": "works on the repository",
    r"(source|cd|ls|export) ": "belongs to the shell that it is typed in",
    r"(\S*/)?python\d? ": "runs a program of its own, in minutes",
    r"(\S*/)?(pytest|ruff|mypy)\b": "is what runs here",
    r"torchrun ": "needs several processes",
    r"[A-Z_]+=": "sets the environment of a process of its own",
}
"""Commands that are not run here, and why."""

ABSENT = ("mnist", "fashion-mnist", "cifar10", "cifar100", "places365", "imagenet", "../shared/data")
"""Data that a test does not download: a command on them is planned as far as the refusal to find them."""


HUB = {
    "timm/vit_small_patch16_224.augreg_in21k_ft_in1k": "vit_small",
    "google/vit-base-patch16-224": "vit-base-patch16-224",
}
"""Repositories that pages fetch from → the folder here that is served in their place."""
COMMIT = "2f7a1b9c" * 5


def network(family: str, **changes: Any) -> Weights:
    """Twelve blocks like those of a published network, narrow and with random numbers."""
    shape = {"image_size": 224, "patch_size": 16, "classes": 1000, "dim": 64, "depth": 12, "heads": 2, "mlp_dim": 96}
    config = ViTConfig(**{**shape, **changes})
    torch.manual_seed(0)
    state = {name: tensor.normal_(std=0.02) for name, tensor in ViT(config).state_dict().items()}
    return Weights(config, state, DEFAULTS[family](config.image), labels.default(config.classes), {})


def publish(root: Path) -> None:
    """Files and folders of weights, called as their makers call them."""
    authors = network("jax", activation="gelu-tanh", pre_logits=True, classes=21843)
    convert.write(authors, root / "ViT-B_16.npz", "jax")
    convert.write(network("timm-augreg"), root / "vit_small", "timm")
    convert.write(network("huggingface-vit", norm_eps=1e-12), root / "vit-base-patch16-224", "hf")
    torch.save(translated(FORMATS["torchvision"], network("torchvision")), root / "vit_b_16-c867db91.pth")
    torch.save({"model": dict(network("deit").state)}, root / "deit_base_patch16_224-b5f2ef4d.pth")
    torch.save({"teacher": dict(network("deit", classes=0).state)}, root / "dino_deitsmall16_pretrain.pth")
    write_plain(root / "odd.safetensors", network("timm-augreg", dim=48).state)  # a width that no published size has


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def commands(kind: str, text: str) -> Iterator[str]:
    """The commands of a block: in a `console` block the lines after a `$`, else all; without comments and wraps."""
    for line in text.replace("\\\n", " ").splitlines():
        typed = line.strip()
        if kind == "console":
            if not typed.startswith("$ "):
                continue
            typed = typed[2:]
        typed = re.sub(r"\s+#.*$", "", typed).strip()
        if typed and not typed.startswith("#"):
            yield typed


def shown(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a `console` block with the words that the block shows as its output; none where it shows none."""
    for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output.split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reader could be."""
    root = tmp_path_factory.mktemp("reader")
    rows = ["file,label"]
    for label in ("cat", "dog"):
        (root / "photos" / label).mkdir(parents=True)
        for number in range(8):
            path = Path("photos", label, f"{number}.jpg")
            Image.fromarray(noise(number + 8 * (label == "dog"), (24, 32))).save(root / path)
            rows.append(f"{path},{label}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    Image.fromarray(noise(99, (24, 32))).save(root / "cat.jpg")
    publish(root)
    return root


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Runs are planned as typed and then cut down; data that are not here are refused, not downloaded."""
    monkeypatch.chdir(place)
    original, load = planning.resolve, planning.load

    def resolve(plan: Any, given: dict[str, Any], dataset: Any) -> Any:
        original(plan, given, dataset)  # what is typed must make sense as it stands
        small = {"epochs": 1, "device": "cpu", "batch_size": 8, "accumulate": 1}
        if not given.get("init"):
            small |= {"dim": 8, "depth": 3, "heads": 2, "mlp_dim": 8}
        return original(plan, {**given, **small}, dataset)

    monkeypatch.setattr(planning, "resolve", resolve)
    monkeypatch.setattr(planning, "load", lambda data, root="data": load(data, root=root, download=False))
    monkeypatch.setattr(report, "write_report", lambda path, content: path.write_text("a page"))
    monkeypatch.setattr(planted, "SIZES", {"train": 96, "val": 24, "test": 24})
    measure = benchmark.benchmark
    monkeypatch.setattr(benchmark, "benchmark", lambda *data, count, **more: measure(*data, count=2, **more))
    monkeypatch.setattr(hub, "resolve", served)
    monkeypatch.setenv("COLUMNS", "160")


def served(reference: str) -> hub.Fetched:
    """A hub that has what is in `HUB`, under a commit."""
    repository, _ = hub.parse(reference)
    return hub.Fetched(Path(HUB[repository]), f"{reference.split('@')[0]}@{COMMIT}", COMMIT)


def type_in(command: str) -> None:
    """Run one command line as a reader would."""
    if any(re.match(pattern, command) for pattern in NOT_RUN):
        return
    words = shlex.split(command)
    assert re.fullmatch(r"(\S*/)?vitral", words[0]), f"neither run nor on the list of what is not: {command}"
    if "--resume" in words and "--out" in words:
        folder = Path(words[words.index("--out") + 1])
        (folder / "result.json").unlink(missing_ok=True)  # so that there is something to go on with
    elif "--out" not in words and words[1] == "train":
        words.append("--overwrite")
    if words[1:2] == ["train"] and not {"--help", "-h"} & set(words):
        words.append("--quiet")
    try:
        code = main(words[1:] if "--debug" in words else [*words[1:], "--debug"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except DataError:
        assert any(word in ABSENT or word.startswith(ABSENT[-1]) for word in words), command
        return
    except UsageError as refused:  # integers, on a processor that gets them wrong
        if not (quantized.lacking() and "int8 cannot be computed here" in str(refused)):
            raise
        return
    assert code == 0, command


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_runs(page, capsys):
    for kind, text in blocks(page):
        if kind in ("console", "sh", "bash"):
            outputs = [output for _, output in shown(text)] if kind == "console" else []
            for number, command in enumerate(commands(kind, text)):
                type_in(command)
                said = capsys.readouterr().out.split()
                if command.startswith("vitral convert ") and kind == "console" and outputs[number]:
                    assert said == outputs[number], command
        elif kind == "python" and not re.search(r"^\s*\.\.\.", text, re.MULTILINE):
            if "vitral.train(" in text:  # a run that the page made before would be in the way
                shutil.rmtree("runs/photos", ignore_errors=True)
            with contextlib.redirect_stdout(None):
                exec(compile(text, f"{page.name}", "exec"), {"__name__": "reader"})  # noqa: S102 - our own pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path) if path else page
        assert aim.exists(), f"{page.name} links to {target}"
        if anchor and aim.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", aim.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page.name} links to {target}"


def test_the_readme_lists_every_command():
    section = (ROOT / "README.md").read_text("utf-8").split("\n## Commands\n")[1].split("\n## ")[0]
    assert [found.split(" ")[0] for found in re.findall(r"^\| `vitral ([^`]+)`", section, re.MULTILINE)] == [
        name.split(" ")[0] for name in COMMANDS
    ]


def test_blocks_are_found():
    """Were the pattern above wrong, nothing would be run and all would pass."""
    text = (
        "x\n```console\n$ vitral models  # all\nMu ...\n$ vitral train a \\\n  --epochs 3\n```\n```python\nx = 1\n```\n"
    )
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in found] == ["console", "python"]
    assert list(commands(*found[0])) == ["vitral models", "vitral train a    --epochs 3"]
    kinds = {kind for page in PAGES for kind, _ in blocks(page)}
    assert "console" in kinds
    assert kinds <= RUN | {"", "text", "json", "toml", "yaml", "make"}, "a language that is neither run nor known"
