"""Every network of `vitral.create` is exported and proven, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VARIANTS, moderate

import vitral
from running import sampled, soak
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError
from vitral.export import TARGETS, export_model
from vitral.export.proof import prove
from vitral.export.sample import sample
from vitral.export.target import Job
from vitral.export.web import write_graph
from vitral.inference.outputs.classes import Classes
from vitral.model import BITS, CONV_STEMMED, HYBRIDS, SIZES, BiTConfig, Network, config, network

pytestmark = pytest.mark.slow

HEADLESS = "headless"
WARNINGS = (
    "not found in decomp table",  # OpenVINO's list of operators is older than this torch
    "Skipping constant folding",  # of standardized weights, which the runtime folds
)
"""Known warnings of tracers and converters. They are reported, and harmless."""
SMALL: dict[str, Any] = {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16, "classes": 5}
NAMED = {"S/16": {}, **{name: {} for name in (*CONV_STEMMED, *HYBRIDS)}, **{name: {} for name in BITS[:1]}}
"""A name of each kind, to build with fewer and narrower layers."""


WITH_HEAD = [name for name in VARIANTS if name != HEADLESS]
EVERY = slice(None)
SHARES = {"onnx": slice(0, None, 3), "openvino": slice(1, None, 3), "web": slice(2, None, 6)}
"""Every option is exported by torch, whose graph the others convert, and most by one of them. VITRAL_SOAK=1: by all."""


def cases(names: Sequence[str]) -> list[tuple[str, str]]:
    """(name, target): each target has its share of the names, in a soak all of them."""
    return [(name, to) for to, share in SHARES.items() for name in names[soak(EVERY, share)]]


def cut_down(name: str) -> Network:
    """Build the named network with few layers and random values."""
    torch.manual_seed(0)
    own = config(name)
    if isinstance(own, BiTConfig):
        network = vitral.create(name, layers=(1,) * len(own.layers), image_size=33, classes=5)
    else:
        stem = {"stem": (1,) * len(own.stem)} if own.stem is not None else {}
        network = vitral.create(name, image_size=2 * own.patch[0], **SMALL, **stem)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network.eval()


def check(network: Network, to: str, folder: Path) -> None:
    """Export a network and prove it within the limits of `vitral export`."""
    own = network.config
    preprocessing = Preprocessing(own.image, own.channels, mean=(0.5,) * own.channels, std=(0.5,) * own.channels)
    job = Job(network.requires_grad_(False), preprocessing, "fp32", False, {"vitral.version": vitral.__version__})
    target = TARGETS[to]
    (write_graph if to == "web" else target.write)(job, folder)  # the page's other files depend on no network
    names = tuple(map(str, range(own.classes)))
    proof = prove(job, target.load(folder), sample(None, Classes(names), 64), Classes(names), 0)
    assert not proof.failure, proof
    assert proof.images == 64
    assert not [one for one in job.warnings if not any(known in one for known in WARNINGS)], job.warnings


@pytest.mark.parametrize("name", sampled(WITH_HEAD, 4))
def test_every_option_of_a_configuration_by_torch(name, tmp_path):
    check(moderate(VARIANTS[name]).float(), "torch", tmp_path)


@pytest.mark.parametrize(("name", "to"), sampled(cases(WITH_HEAD), 5))
def test_every_option_of_a_configuration(name, to, tmp_path):
    check(moderate(VARIANTS[name]).float(), to, tmp_path)


@pytest.mark.parametrize(("name", "to"), sampled([*((name, "torch") for name in NAMED), *cases(list(NAMED))], 4))
def test_every_kind_of_named_network(name, to, tmp_path):
    check(cut_down(name), to, tmp_path)


OTHERS = ("timm:test_efficientnet", "timm:test_vit", "torchvision:shufflenet_v2_x0_5")
"""Networks of other libraries: convolutions with batch norms, attention, shuffled channels."""


@pytest.mark.parametrize(("name", "to"), sampled([(name, to) for name in OTHERS for to in ("onnx", "torch")], 4))
def test_networks_of_other_libraries(name, to, tmp_path):
    torch.manual_seed(0)
    check(network(config(name, classes=5, image_size=32)).eval(), to, tmp_path)


@pytest.mark.parametrize("to", TARGETS)
def test_a_network_without_a_head_is_refused_by_name(to, tmp_path):
    with pytest.raises(UsageError, match="a network without a head cannot be exported"):
        export_model(moderate(VARIANTS[HEADLESS]).float(), to, out=tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_every_kind_has_a_name_here():
    stems = {name.partition("+")[0] for name in (*CONV_STEMMED, *HYBRIDS)}
    assert {name.partition("+")[0] for name in NAMED if "+" in name} == stems
    assert {"S"} <= SIZES.keys()
