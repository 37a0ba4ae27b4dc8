"""The modules of the page have the types that their comments state, by TypeScript's compiler."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from importlib.resources import files
from pathlib import Path

import pytest

from npmpackages import TYPESCRIPT, real

OPTIONS = {
    **dict.fromkeys(("allowJs", "checkJs", "noEmit", "strict", "noUnusedLocals", "noImplicitReturns"), True),
    "target": "es2022",
    "module": "es2022",
    "moduleResolution": "bundler",
    "lib": ["es2023", "dom", "dom.iterable"],
    "types": [],
}
NEEDED = re.compile(r"package/(package\.json|lib/(_?tsc\.js|lib\.[\w.]*d\.ts))")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    folder = tmp_path_factory.mktemp("typescript")
    with tarfile.open(real(TYPESCRIPT), "r:gz") as packed:
        packed.extractall(folder, [one for one in packed if NEEDED.fullmatch(one.name)], filter="data")
    return folder / "package/lib/tsc.js"


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A copy of the modules."""
    for one in files("vitral.web").joinpath("label").iterdir():
        if one.name.endswith(".js"):
            (tmp_path / one.name).write_text(one.read_text("utf-8"), "utf-8")
    return tmp_path


def complaints(compiler: Path, folder: Path) -> list[str]:
    """The lines that the compiler prints."""
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": OPTIONS, "include": ["*.js"]}))
    command = ["node", str(compiler), "-p", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout.splitlines()


def test_the_modules_agree_with_their_types(compiler: Path, modules: Path):
    assert complaints(compiler, modules) == []


def test_mistakes_are_found(compiler: Path, modules: Path):
    module = modules / "trial.js"
    text = module.read_text().replace("this.store.words(number)", "this.store.wrds(number)")
    module.write_text(text.replace("draw(found, image, name) {", "draw(found, image, name) {\n    found.best;"))
    found = "\n".join(complaints(compiler, modules))
    assert "Property 'wrds' does not exist on type 'Store'" in found
    assert "Property 'best' does not exist on type 'Answer'" in found


def test_each_module_fits_a_few_screens(modules: Path):
    lines = {one.name: len(one.read_text("utf-8").splitlines()) for one in modules.glob("*.js")}
    assert len(lines) > 10
    assert max(lines.values()) < 300, lines
