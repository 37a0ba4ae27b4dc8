"""The site of the documentation, built once and strictly: every page, every public name, every link, on any screen."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from filelock import FileLock

import vitral
import vitral.testing
from browser import chromium, require_chromium
from npmpackages import AXE, real
from running import soak
from test_docs import PAGES, ROOT, blocks
from vitral.cli.main import COMMANDS
from vitral.export import npm

MOVED = runpy.run_path(str(ROOT / "docs/site/navigation.py"))["MOVED"]
PHONE, DESKTOP = (390, 844), (1280, 900)


def build(root: Path, out: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    program = [sys.executable, str(ROOT / "tools/build_site.py"), str(out), str(root), *settings]
    return subprocess.run(program, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this repository, which all processes of a run of the tests share."""
    place = tmp_path_factory.getbasetemp()
    if "VITRAL_TESTS_RUN" in os.environ:  # for all stages
        place = Path(tempfile.gettempdir())
    elif "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    out, log = place / "docs-site", place / "docs-site.log"
    with FileLock(place / "docs-site.lock"):
        if not log.exists():
            done = build(ROOT, out)
            log.write_text(done.stderr if done.returncode else "")
    assert log.read_text() == ""
    return out


def html(site: Path) -> list[Path]:
    """List the pages of a site, without source files and redirections."""
    found = [path for path in sorted(site.rglob("*.html")) if path.relative_to(site).parts[0] not in ("src", "_static")]
    moved = {site / f"{page}.html" for page in MOVED}
    return [path for path in found if path != site / "index.html" and path not in moved]


@pytest.mark.slow
class TestContents:
    def test_every_page_of_the_repository_is_in_the_navigation(self, site):
        start = (site / "docs/index.html").read_text("utf-8")
        for page in PAGES:
            name = os.path.relpath(page, ROOT / "docs").removesuffix(".md")
            assert name == "index" or f'href="{name}.html"' in start, name

    def test_every_public_name_and_command_has_its_description(self, site):
        described = inventory(site)
        assert {f"vitral.{name}" for name in vitral.__all__} <= described
        assert {f"vitral.testing.{name}" for name in vitral.testing.__all__} <= described
        code = "".join(text for page in PAGES for _, text in blocks(page))
        used = [
            f"{module}.{name.strip()}"
            for module, names in re.findall(r"from (vitral\.[\w.]+) import ([\w, ]+)", code)
            for name in names.split(",")
        ]
        assert len(used) > 10
        assert {name for name in used if f"vitral.{name.rpartition('.')[2]}" not in described} <= described
        page = (site / "docs/site/commands.html").read_text("utf-8")
        assert re.findall(r"<h2>vitral ([\w ]+)<", page) == list(COMMANDS)

    def test_every_link_has_a_target(self, site):
        pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
        anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
        links = [
            (path, unquote(address).partition("#"))
            for path, text in pages.items()
            for address in set(re.findall(r'<a [^>]*?href="([^"]+)"', text))
            if not re.match(r"[a-z]+:", address)
        ]
        assert len(links) > 5000
        for path, (file, _, anchor) in links:
            target = (path.parent / file).resolve() if file else path
            assert target.is_file(), f"{path} links to {file}"
            assert not anchor or anchor in anchors[target], f"{path} links to {file}#{anchor}"

    def test_links_to_sources_lead_to_pages(self, site):
        tour = (site / "docs/tour.html").read_text("utf-8")
        assert 'href="../src/vitral/model/vit.py.html"' in tour
        assert "scaled" in (site / "src/vitral/kernels/reference.py.html").read_text("utf-8")
        assert 'href="kernels/cpu.cpp.html"' in (site / "src/vitral/kernels.html").read_text("utf-8")
        assert 'href="docs/decisions/README.html"' in (site / "README.html").read_text("utf-8")
        assert 'href="github/workflows/release.yml.html"' in (site / "CONTRIBUTING.html").read_text("utf-8")

    def test_former_addresses_lead_to_the_new_pages(self, site):
        for old, new in MOVED.items():
            assert not (ROOT / f"{old}.md").exists()
            text = (site / f"{old}.html").read_text("utf-8")
            (target,) = set(re.findall(r'href="([^"]+)"', text))
            assert (site / old).parent.joinpath(target).resolve() == (site / f"{new}.html").resolve()

    def test_translations_name_their_language(self, site):
        translated = [page.stem for page in (ROOT / "docs").glob("index.??.md")]
        assert translated
        for name, language in (*((one, one.split(".")[1]) for one in translated), ("index", "en"), ("predict", "en")):
            assert f' lang="{language}" ' in (site / f"docs/{name}.html").read_text("utf-8").partition("<head>")[0]


def inventory(site: Path) -> set[str]:
    """List the names of Python that the site describes."""
    data = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(data).decode().splitlines() if " py:" in line}


@pytest.mark.slow
def test_a_broken_link_fails_the_build(tmp_path):
    (tmp_path / "README.md").write_text("# A page\n\n[itself](README.md), [nothing](docs/nowhere.md)\n")
    done = build(tmp_path, tmp_path / "out", "-Droot_doc=README", "-Dinclude_patterns=README.md")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "docs/nowhere.md" not in line] == [], "the only complaint"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require_chromium()
    with chromium() as running:
        yield running


@pytest.mark.slow
class TestInABrowser:
    def test_no_page_scrolls_sideways_on_a_phone(self, site, browser):
        page = opened(browser, PHONE)
        for path in html(site)[:: soak(1, 4)]:
            page.goto(path.as_uri(), wait_until="domcontentloaded")
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0], path
        page.context.close()

    @pytest.mark.parametrize(
        ("screen", "names"),
        [
            (PHONE, ["docs/index", "docs/index.ko", "docs/predict"]),
            (DESKTOP, ["docs/site/commands", "src/vitral/digest.py", "search"]),
        ],
    )
    def test_axe_finds_nothing_serious(self, site, browser, screen, names):
        script = npm.members(real(AXE), ["package/axe.min.js"])["package/axe.min.js"].decode()
        page = opened(browser, screen)
        for name in names:
            page.goto((site / f"{name}.html").as_uri())
            page.evaluate(script)
            found = page.evaluate("axe.run()")
            assert len(found["passes"]) > 10
            serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
            assert [(one["id"], one["nodes"][0]["html"]) for one in serious] == [], name
        page.context.close()

    def test_figures_and_reasons_come_after_pages_that_tell_how(self, site, browser):
        page = opened(browser, DESKTOP)
        page.goto((site / "search.html").as_uri() + "?q=wrong+labels")
        page.locator("#search-results li a").first.wait_for()
        links = [link.get_attribute("href") for link in page.locator("#search-results li a").all()]
        late = [bool(re.match(r"(benchmarks|docs/(decisions|log))/", link)) for link in links]
        assert "docs/check-data.html" in links[:3]
        assert not any(late[:8]), links[:8]
        page.context.close()

    def test_search_finds_a_page_by_its_words(self, site, browser):
        page = opened(browser, DESKTOP)
        page.goto((site / "search.html").as_uri() + "?q=conformal")
        page.locator("#search-results li a").first.wait_for()
        assert any(
            "reliability.html" in link.get_attribute("href") for link in page.locator("#search-results li a").all()
        )
        page.context.close()


def opened(browser: Any, screen: tuple[int, int]) -> Any:
    """Open an empty page of a size."""
    return browser.new_context(viewport={"width": screen[0], "height": screen[1]}).new_page()
