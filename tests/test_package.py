"""The package as a whole: fast to import, correct public names, layers in order."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import vitral
from vitral import errors

SOURCE = Path(vitral.__file__).parent

LAYERS = [
    {"activity", "bounded", "_version", "web", "fonts", "drawing", "wording", "spoken", "epoch_metrics", "containers"},
    {"defects"},
    {"errors", "console", "glossary", "folders", "stopping", "thread_pool"},
    {"filesystem", "frames"},
    {"digest"},
    {"plugins", "kinds", "imports"},
    {"atomic", "system"},
    {"device"},
    {"kernels"},
    {"model"},
    {"data", "distributed"},
    {"weights"},
    {"inference"},
    {"training", "evaluation", "explanation"},
    {"pretraining"},
    {"recipes", "trackers"},
    {"workflows"},
    {"studies"},
    {"bench", "demo", "serving", "testing"},
    {"export", "labeling"},
    {"cli"},
]
"""Lowest first. A part imports those below it, and of its own layer only itself."""

PURE = {
    "kernels": {"bounded", "wording", "errors", "folders", "digest", "system"},
    "model": {"bounded", "wording", "errors", "console", "folders", "digest", "plugins", "kinds", "kernels"},
    "serving": {
        "bounded",
        "wording",
        "_version",
        "web",
        "errors",
        "console",
        "stopping",
        "containers",
        "system",
        "data",
        "weights",
        "inference",
        "explanation",
    },
}
"""Parts that import less than their layer allows: a kernel knows no network, a network no device and no data, a server
nothing of training."""

LONG = {
    "weights/formats/huggingface.py": "twelve model types of one library, each a few lines of data",
}
"""Modules over 450 lines, each with the reason."""


def test_importing_is_light():
    """torch takes seconds to import; `vitral --help` should not wait for it."""
    code = (
        "import sys; import vitral, vitral.errors\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'matplotlib', 'sklearn', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_mistakes_do_not_wait_for_what_reads_images():
    """torchvision takes as long to import as torch and imports torch's compiler; errors must not wait for it."""
    code = (
        "import sys; from vitral.cli.main import main\n"
        "mistakes = 'train --nonsense', 'train no-such-folder', 'predict demo no-such.jpg', 'evaluate no-run'\n"
        "assert all(main(words.split()) == 2 for words in mistakes)\n"
        "heavy = {'torchvision', 'torch._dynamo', 'sklearn', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


@pytest.mark.slow
def test_an_image_is_predicted_without_torchvision(tmp_path):
    """Few images are decoded by Pillow: importing torchvision takes longer than decoding a thousand images."""
    for n in range(12):
        Image.new("RGB", (40, 30), (n, 90, 30)).save(tmp_path / f"{n:02}.{'png' if n % 2 else 'jpg'}")
    code = (
        "import sys, vitral; from pathlib import Path; from vitral.cli.main import main\n"
        "assert main(['predict', 'demo', sys.argv[1]]) == 0\n"
        "heavy = {'torchvision', 'torch._dynamo', 'sklearn', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120, capture_output=True)


@pytest.mark.slow
def test_threads_that_need_torchvision_do_not_meet():
    """Two threads that import different parts of torchvision at the same time would get an incomplete module."""
    code = (
        "import sys; from concurrent.futures import ThreadPoolExecutor\n"
        "from vitral.data.images import decode, lazy_torchvision as lazy\n"
        "assert not lazy.loaded() and decode._jpeg_operator() is None and 'torchvision' not in sys.modules\n"
        "lazy._MANY = 1\n"
        "with ThreadPoolExecutor(8) as pool: list(pool.map(lazy.preload, range(12)))\n"
        "assert lazy.loaded() and decode._jpeg_operator() is not None and lazy.torchvision().transforms.v2"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from vitral.cli.main import main; assert main(['--help']) == 0; assert main(['--version']) == 0\n"
        "assert main(['evaluate', '--help']) == 0 and main(['evaluate', '--tpo']) == 2\n"
        "assert main(['trian']) == 2; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert vitral.__version__ in done.stdout
    assert "nearest: train" in done.stderr


def test_public_names():
    assert vitral.__all__ == sorted(vitral.__all__)
    assert set(vitral._HOME) == set(vitral.__all__)
    for name in vitral.__all__:
        value = getattr(vitral, name)
        assert value.__doc__, name
        module, _, inner = vitral._HOME[name].partition(":")
        assert value is getattr(importlib.import_module(module), inner or name)
    assert set(vitral.__all__) <= set(dir(vitral))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        vitral.trian  # noqa: B018


def test_functions_are_not_hidden_by_packages():
    """docs/decisions/0001."""
    for name in ("train", "evaluate", "load", "create"):
        importlib.import_module("vitral.cli.main")
        assert callable(getattr(vitral, name))
        assert not (SOURCE / name).exists()
        assert not (SOURCE / f"{name}.py").exists()


def imports(path: Path) -> set[str]:
    """List the parts of vitral that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = {name.split(".")[1] for name in found if name.startswith("vitral.")}
    return parts - {"__version__"}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_only(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part in ("__init__", "__main__"):
        return
    level = next(i for i, layer in enumerate(LAYERS) if part in layer)
    allowed = PURE.get(part) or set().union(*LAYERS[:level])
    assert imports(path) <= allowed | {part}


def module_graph() -> dict[str, set[str]]:
    """Map module → modules of vitral that it imports, also inside functions."""
    parts = {path: ("vitral", *path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    modules = {path: ".".join(names).removesuffix(".__init__") for path, names in parts.items()}
    known = set(modules.values())
    graph: dict[str, set[str]] = {}
    for path, module in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in known else str(node.module) for name in inner}
        graph[module] = (found & known) - {module}
    return graph


def test_no_module_imports_itself_through_others():
    graph, done = module_graph(), set()

    def follow(module: str, way: list[str]) -> None:
        assert module not in way, " → ".join([*way[way.index(module) :], module])
        if module not in done:
            for imported in sorted(graph[module]):
                follow(imported, [*way, module])
            done.add(module)

    for module in sorted(graph.keys() - {"vitral"}):  # which imports every public name
        follow(module, [])


def test_recipes_import_neither_workflows_nor_networks():
    """A recipe is a short function from statistics to a plan."""
    for path in (SOURCE / "recipes").glob("*.py"):
        assert imports(path) <= {"data", "device", "errors", "folders", "recipes", "training"}, path
        assert len(path.read_text("utf-8").splitlines()) <= 230, path


def test_each_file_of_the_command_line_holds_one_family():
    from vitral.cli.main import COMMANDS

    homes = {name: command.__module__.rpartition(".")[2] for name, command in COMMANDS.items()}
    assert {home for name, home in homes.items() if name.startswith("data ")} == {"data"}
    shared = {"__init__", "main", "help", "options", "output", "parsing", "completion", "ranks", "plan_only", "check"}
    shared |= {"placeholders", "terms", "examples"}
    files = {path.stem for path in (SOURCE / "cli").glob("*.py")}
    assert files == shared | set(homes.values())


def test_modules_are_short():
    lines = {p.relative_to(SOURCE).as_posix(): len(p.read_text("utf-8").splitlines()) for p in SOURCE.rglob("*.py")}
    assert {name for name, count in lines.items() if count > 500} == set(LONG)


def test_the_network_asks_for_no_device_and_looks_for_no_patches():
    """docs/decisions/0018: kernels decide, and modules declare what may be replaced."""
    tree = ast.parse((SOURCE / "model/vit.py").read_text("utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not names & {"vars", "setattr"}
    assert not attributes & {"__dict__", "is_autocast_enabled", "is_grad_enabled", "is_compiling", "is_cuda"}
    assert not texts & {"cpu", "cuda", "mps"}


def test_every_part_has_its_layer():
    parts = {
        p.name.removesuffix(".py") for p in SOURCE.iterdir() if not p.name.startswith("__") and p.suffix in ("", ".py")
    }
    assert parts == set().union(*LAYERS)


def test_the_tree_of_errors_is_drawn_as_it_is():
    drawn = re.findall(r"^ {4}([│├└─ ]*)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    parents: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    for lead, name in drawn:
        while stack and stack[-1][0] >= len(lead):
            stack.pop()
        parents[name] = stack[-1][1] if stack else "Exception"
        stack.append((len(lead), name))
    defined = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.VitralError)
    }
    assert parents == defined


def test_an_error_is_at_most_five_lines_whatever_it_holds():
    error = errors.VitralError("what\nnow", where="a\nb", why="c\r\nd", hint="e\n\nf")
    assert str(error).splitlines() == ["what now", "  where: a b", "  why: c d", "  try: e  f"]
    assert error.exit_code == 2


def test_unknown_names_show_the_nearest():
    assert "nearest: cosine" in str(errors.unknown("schedule", "Cosin", ["cosine", "linear"]))
    assert errors.nearest("momentun", ["momentum", "moment", "amount"]) == ["momentum", "moment"]
    assert errors.nearest("epoch", ["epochs", "each", "echo"]) == ["epochs"]  # others are far behind
    told = str(errors.unknown("thing", "zzz", [f"n{i:02}" for i in range(20)]))
    assert "known: n00, n01" in told
    assert told.endswith("…")
