"""Commands on the pages run, and every link has a target.

Blocks of README.md, CONTRIBUTING.md and docs/ run in order, page by page, in a folder of tiny stand-ins: `photos/` with
two classes, `other/` and `unknown/` with none, `cat.jpg`, `labels.csv`, `tags.csv`, `ages.csv`, and weights with the
names of published ones and as many tensors, but narrow and random. The hub is a folder of these too, and the runtime
of a web page a stand-in: nothing is fetched. Training is cut to one epoch, of a network of width 8 unless it starts
from weights, and the generated set to a few images, of which two measure the attribution methods; a server takes a free
port and ends when it listens. Nothing else is changed. The output of `vitral convert` must be as the page shows it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import signal
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import projects
import vitral
from images import noise
from npmpackages import pretend_runtime
from textlines import write_lines
from vitral import errors
from vitral.cli.examples import EXAMPLES
from vitral.cli.main import COMMANDS, main
from vitral.data.sources import planted
from vitral.errors import DataError, UsageError
from vitral.explanation import benchmark
from vitral.inference.engines import int8, openvino
from vitral.kinds import kinds_of
from vitral.model import ViT, ViTConfig
from vitral.model.variants import config_fields
from vitral.serving import server
from vitral.weights import class_names, convert
from vitral.weights.files import write_plain
from vitral.weights.formats import FORMATS
from vitral.weights.formats.format import translated
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import DEFAULTS
from vitral.weights.read import hub
from vitral.workflows.planning import plan as planning
from vitral.workflows.planning.draft import Draft
from vitral.workflows.planning.job import Job
from vitral.workflows.running import execute

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
ENTRY = ROOT / "docs/index.md"
TRANSLATED = sorted(ROOT.glob("docs/index.??.md"))
"""The entry page in other languages: its commands are those of the English one, which run."""
RUN = {"console", "sh", "bash", "python"}

SLOW = [
    "bench",
    "compare",
    "demo",
    "reliability",
    "explain",
    "export",
    "label",
    "multi-label-and-regression",
    "recipes",
    "training",
    "speed",
    "run-folder",
    "explain-evidence",
    "inspect",
    "serve",
    "shards",
    "study",
    "text",
    "predict",
    "weights",
    "README",
    "index",
    "variable-sizes",
    "pretrain",
    "distributed",
    "tracking",
    "getting-started",
    "troubleshooting",
]
"""Pages with commands that take more than a few seconds together."""
MARKS = dict.fromkeys(SLOW, pytest.mark.slow)

NOT_RUN = {
    r"make( |$)": "sets up an environment, or runs these tests",
    r"(python -m )?pip ": "installs",
    r"git ": "works on the repository",
    r"(source|cd|ls|export) ": "changes the user's shell",
    r"(\S*/)?python\d? ": "runs a separate program, for minutes",
    r"(\S*/)?(pytest|ruff|mypy)\b": "runs already",
    r"torchrun |vitral (train|evaluate|predict) .*--nproc": "needs several processes; tests/distributed has them",
    r"curl ": "asks a server; tests/serving does so",
    r"openssl ": "is a program of the system",
    r"[A-Z_]+=": "sets the environment of another process",
}
"""Commands that are not run here, and why."""


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


ABSENT = ("mnist", "fashion-mnist", "cifar10", "cifar100", "places365", "imagenet", "digit-lines", "../shared/data")
"""Data that a test does not download: a command on them is planned until they are missing."""


RUNS = ("train", "pretrain")
"""Commands that make a run."""


HUB = {
    "timm/vit_small_patch16_224.augreg_in21k_ft_in1k": "vit_small",
    "google/vit-base-patch16-224": "vit-base-patch16-224",
}
"""Repositories on the pages → the local folder that replaces them."""
COMMIT = "2f7a1b9c" * 5


def network(family: str, **changes: Any) -> Weights:
    """Make twelve blocks like those of a published network, as wide as Ti/16 and with random values."""
    shape = {"image_size": 224, "patch_size": 16, "classes": 1000, "dim": 192, "depth": 12, "heads": 3, "mlp_dim": 768}
    config = ViTConfig(**{**shape, **changes})
    torch.manual_seed(0)
    state = {name: tensor.normal_(std=0.02) for name, tensor in ViT(config).state_dict().items()}
    return Weights(config, state, DEFAULTS[family](config.image), class_names.default(config.classes), {})


def publish(root: Path) -> None:
    """Write files and folders of weights under their published names."""
    authors = network("jax", activation="gelu-tanh", pre_logits=True, classes=21843)
    convert.write(authors, root / "ViT-B_16.npz", "jax")
    convert.write(network("timm-augreg"), root / "vit_small", "timm")
    convert.write(network("huggingface-vit", norm_eps=1e-12), root / "vit-base-patch16-224", "hf")
    wide = network("torchvision", dim=768, heads=12, mlp_dim=3072, depth=1)  # no narrower one is published
    torch.save(translated(FORMATS["torchvision"], wide), root / "vit_b_16-c867db91.pth")
    torch.save({"model": dict(network("deit").state)}, root / "deit_base_patch16_224-b5f2ef4d.pth")
    torch.save({"teacher": dict(network("deit", classes=0).state)}, root / "dino_deitsmall16_pretrain.pth")
    write_plain(
        root / "odd.safetensors", network("timm-augreg", dim=48, mlp_dim=96).state
    )  # a width that no published size has


def blocks(page: Path) -> list[tuple[str, str]]:
    """List language and text of each fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def commands(kind: str, text: str) -> Iterator[str]:
    """List the commands of a block: in a `console` block the lines after a `$`, else all; no comments or wraps."""
    for line in text.replace("\\\n", " ").splitlines():
        typed = line.strip()
        if kind == "console":
            if not typed.startswith("$ "):
                continue
            typed = typed[2:]
        typed = re.sub(r"\s+#.*$", "", typed).strip()
        if typed and not typed.startswith("#"):
            yield typed


def shown_outputs(text: str) -> Iterator[tuple[str, list[str]]]:
    """Iterate over the commands of a `console` block, each with the words of its output on the page, if any."""
    for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output.split()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader before the first command."""
    root = tmp_path_factory.mktemp("reader")
    rows, tags, ages = ["file,label"], ["file,labels"], ["file,age"]
    for label in ("cat", "dog"):
        (root / "photos" / label).mkdir(parents=True)
        for number in range(8):
            path = Path("photos", label, f"{number}.jpg")
            bright = label == "dog"  # so that features tell them apart
            Image.fromarray(noise(number + 8 * bright, (24, 32)) // 2 + 100 * bright).save(root / path)
            rows.append(f"{path},{label}")
            tags.append(f"{path},{label}{'|outdoor' * (number % 2)}")
            ages.append(f"{path},{number + 0.5}")
    for name, lines in (("labels", rows), ("tags", tags), ("ages", ages)):
        (root / f"{name}.csv").write_text("\n".join(lines) + "\n")
    Image.fromarray(noise(99, (24, 32))).save(root / "cat.jpg")
    for name in ("other", "unknown"):
        (root / name).mkdir()
        Image.fromarray(noise(98, (24, 32))).save(root / name / "tree.jpg")
    projects.write(root / "project.safetensors", *projects.parts(classes=("cat", "dog")))
    write_lines(root / "lines")
    (root / "token").write_text(f"{COMMIT}\n")  # as of `openssl rand`
    publish(root)
    return root


@pytest.fixture
def place(prepared: Path, tmp_path: Path) -> Path:
    """The folder of a reader of this page alone: no page meets runs of another."""
    return shutil.copytree(prepared, tmp_path / "reader")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Plan runs as typed, then reduce them; missing data are refused, not downloaded."""
    monkeypatch.chdir(place)
    pretend_runtime(monkeypatch, Path(os.environ["XDG_CACHE_HOME"]))
    original, load = planning.resolve, planning.load

    def resolve(draft: Draft) -> Job:
        original(draft)  # the typed options must make sense as they stand
        small = {"epochs": 1, "device": "cpu", "batch_size": 8, "accumulate": 1}
        model = draft.given.get("model", draft.recipe.run.model)
        if not draft.given.get("init") and config_fields(model)[0] is ViTConfig:
            small |= {"dim": 8, "depth": 3, "heads": 2, "mlp_dim": 8}
        given = {name: value for name, value in draft.given.items() if name != "minutes"}
        return original(dataclasses.replace(draft, given={**given, **small}))

    monkeypatch.setattr(planning, "resolve", resolve)
    monkeypatch.setattr(planning, "load", lambda data, **more: load(data, **more, download=False))
    monkeypatch.setattr(execute, "_report", lambda running, *parts: running.folder.report.write_text("a page"))
    monkeypatch.setattr(planted, "SIZES", {"train": 96, "val": 24, "test": 24})
    measure = benchmark.benchmark
    monkeypatch.setattr(benchmark, "benchmark", lambda *data, count, **more: measure(*data, count=2, **more))
    monkeypatch.setattr(hub, "resolve", served)
    serve_on = server.serve_on

    def serve_briefly(*given: Any, grace: float, started: Any) -> int:
        return serve_on(*given, grace=1, started=end_by_signal)

    monkeypatch.setattr(server, "serve_on", serve_briefly)
    monkeypatch.setenv("COLUMNS", "160")


def end_by_signal() -> None:
    """End a server that has just begun to listen."""
    signal.raise_signal(signal.SIGTERM)


def served(reference: str) -> hub.Fetched:
    """Resolve a reference to the folders of `HUB`, under a commit."""
    repository, _ = hub.parse(reference)
    return hub.Fetched(Path(HUB[repository]), f"{reference.split('@')[0]}@{COMMIT}", COMMIT)


def type_in(command: str) -> None:
    """Run one command line as a reader would."""
    if any(re.match(pattern, command) for pattern in NOT_RUN):
        return
    words = shlex.split(command)
    assert re.fullmatch(r"(\S*/)?vitral", words[0]), f"neither run nor listed in NOT_RUN: {command}"
    if "--resume" in words and "--out" in words:
        folder = Path(words[words.index("--out") + 1])
        (folder / "result.json").unlink(missing_ok=True)  # so that there is something to go on with
    elif "--out" not in words and words[1] in RUNS:
        words.append("--overwrite")
    if words[1] in RUNS and not {"--help", "-h"} & set(words):
        words.append("--quiet")
    if words[1] == "train" and not {"--init", "--resume", "--recipe", "--model", "--help"} & set(words):
        words += [
            "--init",
            "none",
        ]  # the network in the package cannot be cut down; docs/pretrained-model.md starts from it
    if words[1:2] == ["serve"] or "--serve" in words:
        words += ["--port", "0"]
    try:
        code = main(words[1:] if "--debug" in words else [*words[1:], "--debug"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except DataError:
        assert any(word in ABSENT or word.startswith(ABSENT[-1]) for word in words), command
        return
    except UsageError as refused:  # integers, on a CPU that gets them wrong; OpenVINO, on one that is limited
        limited = openvino.limitation() and "OpenVINO is not available" in str(refused)
        if not limited and not (int8.unavailable_reason() and "int8 cannot be computed here" in str(refused)):
            raise
        return
    assert code == 0, command


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=MARKS.get(page.stem, ())) for page in PAGES if page not in TRANSLATED],
    ids=_named,
)
def test_commands_of_a_page_run(page, capsys):
    reader = {"__name__": "reader"}  # types in the blocks of a page one after the other
    for kind, text in blocks(page):
        if kind in ("console", "sh", "bash"):
            outputs = [output for _, output in shown_outputs(text)] if kind == "console" else []
            for number, command in enumerate(commands(kind, text)):
                type_in(command)
                said = capsys.readouterr().out.split()
                if command.startswith("vitral convert ") and kind == "console" and outputs[number]:
                    assert said == outputs[number], command
        elif kind == "python" and not re.search(r"^\s*\.\.\.", text, re.MULTILINE):
            if "vitral.train(" in text:  # a run that the page made before would be in the way
                shutil.rmtree("runs/photos", ignore_errors=True)
            with contextlib.redirect_stdout(None):
                exec(compile(text, f"{page.name}", "exec"), reader)  # noqa: S102 - our own pages


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_examples_of_the_help_run():
    assert list(EXAMPLES) == list(COMMANDS)
    type_in("vitral train photos/ --out runs/other")  # to compare with
    for name, example in EXAMPLES.items():
        assert example.startswith(f"vitral {name}")
        type_in(example)


def test_functions_of_the_tour_exist():
    """A link of the tour that names a function leads to the module that defines it."""
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./(src/\S+\.py)\)", (ROOT / "docs/tour.md").read_text("utf-8"))
    named = [(name, path) for name, path in links if not name.endswith(".py")]
    assert len(named) > 40
    for name, path in named:
        owner, _, function = name.rpartition(".")
        body = ast.parse((ROOT / path).read_text("utf-8")).body
        if owner:
            body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
        found = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in found or path.endswith(f"/{function}.py"), f"{name} is not in {path}"


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_links_of_a_page_have_targets(page):
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


@pytest.mark.parametrize("page", TRANSLATED, ids=_named)
def test_a_translation_is_in_step(page):
    """Code, commands within sentences, sections and links are those of the English page."""
    text, original = (one.read_text("utf-8") for one in (page, ENTRY))
    assert blocks(page) == blocks(ENTRY)
    for pattern in (r"(?<!`)`([^`\n]+)`(?!`)", r"^(#+) ", r"\]\((?!index)([^)]+)\)"):
        assert re.findall(pattern, text, re.MULTILINE) == re.findall(pattern, original, re.MULTILINE), pattern
    others = {one.name for one in (*TRANSLATED, ENTRY)} - {page.name}
    assert others == set(re.findall(r"\]\((index[^)]*)\)", text))


SENTENCES = {"ja": "[\u3040-\u30ff].*。$", "ko": "[\uac00-\ud7a3].*(다|요)\\.$"}
"""Language → the last line of a sentence in it. A translation has a line here."""


@pytest.mark.parametrize("page", TRANSLATED, ids=_named)
def test_a_translation_is_in_its_language(page):
    lines = page.read_text("utf-8").splitlines()
    pattern = SENTENCES[page.name.split(".")[1]]
    assert sum(re.search(pattern, line) is not None for line in lines) >= 7


def test_the_readme_links_every_translation():
    languages = {page.name.split(".")[1] for page in TRANSLATED}
    assert languages == set(SENTENCES)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert languages == set(re.findall(r"\]\(docs/index\.(\w\w)\.md\)", readme))


def rows_of_contributing() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("| to add |")[2]
    return [line for line in text.partition("\n\n")[0].splitlines()[2:] if line]


@pytest.mark.parametrize("row", rows_of_contributing(), ids=lambda row: row.split("|")[1].strip())
def test_a_row_of_contributing_names_files_and_tables_that_exist(row):
    """Files are named from the root, from src/vitral, or from a folder below it; tables are assigned somewhere."""
    named = re.findall(r"`([^`]+)`", row)
    for one in named:
        if re.fullmatch(r"[\w./*-]+/[\w./*-]*|\w+\.(py|md|js|toml|txt)", one):
            pattern = one.replace("XX", "??").strip("/")
            assert [*ROOT.glob(pattern), *(ROOT / "src/vitral").rglob(pattern)], f"there is no {one}"
    code = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    code += "".join(
        path.read_text("utf-8")
        for root in ("docs/site", "tests", "benchmarks", "tools")
        for path in (ROOT / root).rglob("*.py")
    )
    for name in named:
        if re.fullmatch(r"_?[A-Z][A-Z_]{2,}", name) and name != "RUN":
            assert re.search(rf"^ *{name}\b.*=", code, re.MULTILINE), f"there is no table {name}"


def test_every_page_has_its_place_in_the_navigation():
    site = runpy.run_path(str(ROOT / "docs/site/navigation.py"))
    placed = {site["START"]}.union(*site["NAVIGATION"].values())
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix("").as_posix()
        below = any(fnmatch(name, pattern) for pattern in site["CHILDREN"].values())
        assert name in placed or below, f"give {name} a line in NAVIGATION of docs/site/navigation.py"
    assert {name for name in placed if not list(ROOT.glob(f"{name}.*"))} == set()


def test_every_name_of_the_reference_exists():
    text = (ROOT / "docs/site/python.rst").read_text("utf-8")
    names = re.findall(r"^\.\. auto(?:function|class|module):: (\S+)$", text, re.MULTILINE)
    assert len(names) == len(set(names))
    for name in names:
        pkgutil.resolve_name(name)
    missing = {f"vitral.{name}" for name in vitral.__all__} - set(names)
    assert missing == set(), "give them a place in docs/site/python.rst"


def test_the_readme_lists_every_command():
    section = (ROOT / "README.md").read_text("utf-8").split("\n## Commands\n")[1].split("\n## ")[0]
    groups = re.findall(r"^- (.*(?:\n  .*)*)", section, re.MULTILINE)
    assert len(groups) == 5
    assert sorted(re.findall(r"`([^`]+)`", "".join(groups))) == sorted(COMMANDS)


def test_the_readme_cites_the_version_and_authors_of_the_citation_file():
    readme, citation = ((ROOT / name).read_text("utf-8") for name in ("README.md", "CITATION.cff"))
    entry = dict(re.findall(r"^  (\w+) = \{+(.*?)\}+,?$", readme.split("```bibtex")[1], re.MULTILINE))
    assert f'title: "{entry["title"]}"' in citation
    assert f'name: "{entry["author"]}"' in citation
    assert f"version: {entry['version']}" in citation


def test_the_first_hour_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text("utf-8")
    assert "](docs/getting-started.md)" in text
    assert "](docs/troubleshooting.md)" in text


def test_blocks_are_found():
    """With a wrong pattern nothing would run and everything would pass."""
    text = (
        "x\n```console\n$ vitral models  # all\nMu ...\n$ vitral train a \\\n  --epochs 3\n```\n```python\nx = 1\n```\n"
    )
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in found] == ["console", "python"]
    assert list(commands(*found[0])) == ["vitral models", "vitral train a    --epochs 3"]
    kinds = {kind for page in PAGES for kind, _ in blocks(page)}
    assert "console" in kinds
    assert kinds <= RUN | {"", "text", "json", "toml", "yaml", "make", "bibtex"}, (
        "a language that is neither run nor known"
    )


def described() -> dict[str, Any]:
    """Return name → function or class: the public ones, and the classes of what public functions return."""
    found = {name: getattr(vitral, name) for name in vitral.__all__}
    for value in [one for one in found.values() if inspect.isfunction(one)]:
        kind = kinds_of(inspect.unwrap(value))["return"]
        if inspect.isclass(kind) and kind.__module__.startswith("vitral.") and not issubclass(kind, list):
            found.setdefault(kind.__name__, kind)
    return found


def section(text: str, title: str) -> str:
    """Return the lines of a section of a docstring."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", f"{inspect.cleandoc(text)}\n", re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


@pytest.mark.parametrize("name", [name for name, one in described().items() if inspect.isfunction(one)])
def test_a_docstring_has_all_sections(name):
    function = getattr(vitral, name)
    arguments = inspect.signature(inspect.unwrap(function)).parameters
    assert re.findall(r"^(\w+): ", section(function.__doc__, "Args"), re.MULTILINE) == list(arguments)
    assert section(function.__doc__, "Returns")
    for error in re.findall(r"^(\w+): ", section(function.__doc__, "Raises"), re.MULTILINE):
        assert issubclass(getattr(errors, error), errors.VitralError | KeyboardInterrupt)


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_examples_of_docstrings_run():
    for out in ("runs/photos", "runs/other"):
        vitral.train("photos/", model="Ti/16", epochs=1, out=out, quiet=True)
    for name, one in described().items():
        code = section(one.__doc__, "Example")
        assert code, f"{name} has no example"
        with contextlib.redirect_stdout(None):
            exec(compile(code, f"<example of {name}>", "exec"), {"vitral": vitral, "torch": torch})  # noqa: S102 - ours
