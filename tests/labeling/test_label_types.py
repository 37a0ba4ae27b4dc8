"""The modules of the pages have the types that their comments state, by TypeScript's compiler."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from npmpackages import TYPESCRIPT, real
from vitral import web

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


@pytest.fixture(params=[web.LABEL, web.TEACH], ids=["label", "teach"])
def every_module(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the modules of a page."""
    return copied(request.param, tmp_path)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A copy of the modules of `vitral label`."""
    return copied(web.LABEL, tmp_path)


def copied(assets: Mapping[str, str], folder: Path) -> Path:
    """Copy the modules of a page into a folder, as they are beside the page."""
    for name, asset in assets.items():
        if name.endswith(".js"):
            (folder / name.removeprefix("/")).write_text(web.text(asset), "utf-8")
    return folder


def complaints(compiler: Path, folder: Path) -> list[str]:
    """The lines that the compiler prints."""
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": OPTIONS, "include": ["*.js"]}))
    command = ["node", str(compiler), "-p", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout.splitlines()


def test_the_modules_agree_with_their_types(compiler: Path, every_module: Path):
    assert complaints(compiler, every_module) == []


def test_mistakes_are_found(compiler: Path, modules: Path):
    module = modules / "trial.js"
    text = module.read_text().replace("this.store.words(number)", "this.store.wrds(number)")
    module.write_text(text.replace("draw(found, image, name) {", "draw(found, image, name) {\n    found.best;"))
    found = "\n".join(complaints(compiler, modules))
    assert "Property 'wrds' does not exist on type 'Store'" in found
    assert "Property 'best' does not exist on type 'Answer'" in found


def test_each_module_fits_a_few_screens(every_module: Path):
    lines = {one.name: len(one.read_text("utf-8").splitlines()) for one in every_module.glob("*.js")}
    assert len(lines) > 10
    assert max(lines.values()) < 300, lines
