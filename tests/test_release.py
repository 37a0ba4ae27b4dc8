"""Everything that a tag turns into a release: the wheel in a fresh environment, workflows, notes, citation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.release_notes import RefusedError, notes

import vitral
from vitral.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / ".github/workflows"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def run(*command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


UNTESTED = {"gcsfs"}
"""Libraries of an extra that no test uses: there is no server of Google's store to test with."""


class TestPackages:
    def test_the_tested_version_of_every_library_is_pinned(self):
        """Of the package, its extras, and the groups that `make dev` installs."""
        project, groups = PROJECT["project"], PROJECT["dependency-groups"]
        lists = [project["dependencies"], *project["optional-dependencies"].values(), groups["docs"], groups["dev"]]
        listed = [one for names in lists for one in names if isinstance(one, str)]
        pins = (ROOT / "constraints.txt").read_text("utf-8")
        pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
        assert {canonicalize_name(Requirement(one).name) for one in listed} - pinned == UNTESTED

    @pytest.mark.slow
    def test_the_sdist_has_what_builds_and_tests_need(self, built):
        name = f"vitral-{vitral.__version__}"
        with tarfile.open(built / f"{name}.tar.gz") as archive:
            files = set(archive.getnames())
        for wanted in ("src/vitral/kernels/cpu.cpp", "tests/test_release.py", "docs/index.md", "Makefile", "LICENSE"):
            assert f"{name}/{wanted}" in files
        assert not [file for file in files if re.search(r"/(shared|runs|build|\.venv|__pycache__)/", file)]

    @pytest.mark.slow
    def test_the_wheel_works_in_a_fresh_environment(self, built, tmp_path):
        wheel = next(built.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            inside = {path.partition("/")[0] for path in archive.namelist()}
        assert inside == {"vitral", f"vitral-{vitral.__version__}.dist-info"}
        assert wheel.stat().st_size < 14 << 20, "the network in the package is small"
        venv.create(tmp_path / "fresh", with_pip=False)
        python = tmp_path / "fresh/bin/python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
        # it borrows from the tests' environment what vitral depends on, but not the editable vitral
        borrowed = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
        given = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": borrowed}}
        program = tmp_path / "fresh/bin/vitral"
        assert run(program, "--version", **given).stdout == f"vitral {vitral.__version__}\n"
        place = run(python, "-c", "import vitral; print(vitral.__file__)", **given).stdout
        assert Path(place.strip()).is_relative_to(tmp_path / "fresh")
        done = run(program, "demo", "--out", "shown", "--format", "json", **given)
        assert json.loads(done.stdout)
        assert list((tmp_path / "shown").glob("*.png"))


class TestWorkflows:
    def test_they_follow_their_schema(self):
        run(
            Path(sys.executable).with_name("check-jsonschema"),
            "--builtin-schema",
            "vendor.github-workflows",
            *workflows(),
        )

    def test_zizmor_finds_nothing(self, tmp_path):
        program = Path(sys.executable).with_name("zizmor")
        run(program, "--offline", "--quiet", "--no-config", "--strict-collection", *workflows())
        loose = tmp_path / ".github/workflows/loose.yml"
        loose.parent.mkdir(parents=True)
        loose.write_text(re.sub(r"@[0-9a-f]{40} # ", "@", (WORKFLOWS / "ci.yml").read_text("utf-8")))
        done = subprocess.run([program, "--offline", loose], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert "unpinned-uses" in done.stdout

    def test_ci_runs_all_parts(self):
        parts = re.findall(r"set -- (.+)", (ROOT / ".ci/run").read_text("utf-8"))[0].split()
        ci = yaml.safe_load((WORKFLOWS / "ci.yml").read_text("utf-8"))
        assert ci["jobs"]["test"]["strategy"]["matrix"]["part"] == parts
        assert "workflow_call" in ci[True]  # YAML reads the key `on` as true

    def test_commands_run_on_other_systems(self):
        systems = yaml.safe_load((WORKFLOWS / "ci.yml").read_text("utf-8"))["jobs"]["systems"]
        assert systems["strategy"]["matrix"]["system"] == ["windows-latest", "macos-latest"]
        typed = set(re.findall(r"vitral (\w+)", systems["steps"][-1]["run"]))
        assert {"demo", "train", "predict", "verify", "export"} == typed <= set(COMMANDS)

    def test_nothing_is_published_before_the_tests_pass(self):
        jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text("utf-8"))["jobs"]

        def before(name: str) -> set[str]:
            needs = jobs[name].get("needs", [])
            direct = {needs} if isinstance(needs, str) else set(needs)
            return direct.union(*map(before, direct))

        assert jobs["test"]["uses"].endswith("/ci.yml")
        assert before("release") == {"test", "build", "attest", "publish"}
        assert before("publish") == {"test", "build", "attest"}

    def test_commands_exist(self):
        text = "\n".join(path.read_text("utf-8") for path in workflows())
        assert {path for path in re.findall(r"python (tools/\S+)", text) if not (ROOT / path).is_file()} == set()
        groups = set(re.findall(r"--group (\w+)", text))
        assert groups == {"docs", "release"}
        assert groups <= set(PROJECT["dependency-groups"])


def workflows() -> list[Path]:
    """List the workflow files."""
    return sorted(WORKFLOWS.glob("*.yml"))


CHANGES = "# Changelog\n\n## 0.2.0 (2027-01-31)\n\n- New.\n- Mended.\n\n## 0.1.0 (2026-12-01)\n\n- First.\n"


class TestNotes:
    def test_they_are_the_section_of_the_version(self):
        assert notes("v0.2.0", "0.2.0", CHANGES) == "- New.\n- Mended.\n"
        assert notes("v0.1.0", "0.1.0", CHANGES) == "- First.\n"

    @pytest.mark.parametrize(
        ("tag", "version", "changes", "reason"),
        [
            ("v0.3.0", "0.2.0", CHANGES, "the tag is v0.3.0"),
            ("v0.3.0", "0.3.0", CHANGES, "no section 0.3.0"),
            ("v0.2.0", "0.2.0", CHANGES.replace("2027-01-31", "unreleased"), "write the date"),
            ("v0.2.0", "0.2.0", CHANGES.replace("- New.\n- Mended.\n", ""), "is empty"),
        ],
    )
    def test_others_are_refused(self, tag, version, changes, reason):
        with pytest.raises(RefusedError, match=reason):
            notes(tag, version, changes)

    def test_this_version_has_a_section(self):
        changes = re.sub(r"\(unreleased\)", "(2026-12-31)", (ROOT / "CHANGELOG.md").read_text("utf-8"))
        assert "vitral train" in notes(f"v{vitral.__version__}", vitral.__version__, changes)


class TestCitation:
    def test_it_agrees_with_the_package(self):
        cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
        assert cited["version"] == vitral.__version__
        assert cited["license"] == PROJECT["project"]["license"]
        assert [one["name"] for one in cited["authors"]] == [one["name"] for one in PROJECT["project"]["authors"]]
        assert {"cff-version", "message", "title"} <= set(cited)

    @pytest.mark.slow
    def test_cffconvert_accepts_it(self, tmp_path):
        """Its old dependencies go into a folder of its own."""
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), "cffconvert==2.0.0"]
        if subprocess.run(pip, capture_output=True, timeout=150, check=False).returncode:
            pytest.skip("needs cffconvert from the package index")
        code = "from cffconvert.cli.cli import cli; cli()"
        done = run(
            sys.executable, "-c", code, "--validate", "-i", ROOT / "CITATION.cff", env={"PYTHONPATH": str(tmp_path)}
        )
        assert "valid according to schema version 1.2.0" in done.stdout
