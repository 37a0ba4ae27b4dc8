"""The files in deploy/: they parse, run without root, and type options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vitral.cli.options import options_of
from vitral.cli.parsing import parse
from vitral.cli.serve import serve

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

yaml = pytest.importorskip("yaml", reason="needs PyYAML")


def checked(words: list[str]) -> dict:
    """The options of a `vitral serve` with these words."""
    return parse("serve", options_of(serve), words)


def entry() -> list[str]:
    line = re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    words = yaml.safe_load(line[1])
    assert words[:2] == ["vitral", "serve"]
    return words[2:]


def test_the_container_is_no_root_and_needs_a_token():
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert text.index("USER 10001") < text.index("ENTRYPOINT")
    given = checked([*entry(), "demo"])
    assert given["host"] == "0.0.0.0"
    assert "no_auth" not in given


def test_compose():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ours = services["vitral"]
    assert checked([*entry(), *ours["command"]])["runs"] == ("photos=/models/photos",)
    assert "VITRAL_TOKEN" in ours["environment"]
    assert int(ours["stop_grace_period"].rstrip("s")) > 30
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["vitral:8000"]
    assert job["authorization"]["credentials_file"] == services["prometheus"]["configs"][0]["target"]


def test_kubernetes():
    deployment, service, budget = yaml.safe_load_all((DEPLOY / "kubernetes" / "vitral.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = checked([*entry(), *container["args"]])
    assert given["grace"] < pod["terminationGracePeriodSeconds"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == {"app": "vitral"}


def test_systemd():
    lines = (DEPLOY / "vitral.service").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    words = shlex.split(values["ExecStart"])
    assert words[1] == "serve"
    assert checked(words[2:])["grace"] < int(values["TimeoutStopSec"])
    assert values["DynamicUser"] == "yes"
