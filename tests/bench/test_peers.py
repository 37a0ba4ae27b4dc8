"""Peers build the same network as ours, and those that cannot are named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import vitral
from vitral.bench import peers
from vitral.bench.peers import PEERS, Peer, chosen, is_plain
from vitral.data.loader import Batch
from vitral.errors import UsageError
from vitral.model import ViTConfig

TINY = ViTConfig(image_size=32, patch_size=16, dim=16, depth=2, heads=2, mlp_dim=32, classes=5)
pytestmark = pytest.mark.filterwarnings("default")  # the peers have warnings of their own


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_builds_the_same_network(name: str) -> None:
    pytest.importorskip(PEERS[name].package)
    model = PEERS[name].build(TINY).eval()
    images = torch.randn(3, 3, 32, 32)
    assert peers.logits(model, images, "fp32").shape == (3, 5)
    assert peers.logits(model, images, "bf16").dtype == torch.bfloat16
    found, ours = (sum(p.numel() for p in one.parameters()) for one in (model, vitral.ViT(TINY)))
    if name.startswith("vit-pytorch"):  # what it says of itself: fewer biases, and no class token
        assert 0.9 * ours < found < 1.1 * ours
    else:
        assert found == ours


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_timm_is_channels_last(device: str) -> None:
    pytest.importorskip("timm")
    patches = peers.network(PEERS["timm"], TINY, device).get_parameter("patch_embed.proj.weight")
    assert patches.is_contiguous(memory_format=torch.channels_last) == (device == "cuda")


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_learns(name: str) -> None:
    """A peer's step trains: the loss on one batch falls."""
    pytest.importorskip(PEERS[name].package)
    torch.manual_seed(0)
    model = PEERS[name].build(TINY).train()
    batch = Batch(torch.randn(4, 3, 32, 32), torch.arange(4), torch.arange(4).numpy())
    optimizer = peers.optimizer(model)
    optimizer.param_groups[0]["lr"] = 1e-2

    def loss() -> float:
        return float(torch.nn.functional.cross_entropy(model(batch.images), batch.labels).detach())

    before = loss()
    for _ in range(5):
        peers.step(model, optimizer, "fp32", batch)
    assert loss() < before
    assert all(p.grad is None for p in model.parameters())


def test_peers_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "is_installed", True)
    assert list(chosen(["all"], TINY)[0]) == list(PEERS)
    assert chosen(["none"], TINY) == ({}, [])
    assert list(chosen(["torchvision", "timm"], TINY)[0]) == ["timm", "torchvision"], "the order is that of the table"


def test_a_name_that_is_no_peers_shows_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown peer 'tim'\n.*nearest: timm"):
        chosen(["tim"], TINY)
    with pytest.raises(UsageError, match="exclude other names"):
        chosen(["all", "timm"], TINY)


def test_what_is_not_installed_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "vit_pytorch" else name)
    found, notes = chosen(["all"], TINY)
    assert list(found) == ["timm", "transformers", "torchvision"]
    assert notes == ["not installed, left out: vit-pytorch (pip install vit-pytorch)"]


@pytest.mark.parametrize(
    "changes", [{"pool": "mean"}, {"norm": "post"}, {"registers": 2}, {"activation": "swiglu"}, {"logits_tanh": True}]
)
def test_a_network_of_another_kind_has_no_peers(changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "is_installed", True)
    found, notes = chosen(["all"], dataclasses.replace(TINY, **changes))
    assert found == {}
    assert "the plain ViT only" in notes[0]


def test_sizes_leave_a_network_plain() -> None:
    assert all(is_plain(vitral.model.config(name)) for name in ("Ti/16", "S/16", "B/32", "L/16"))
    assert not is_plain(vitral.model.config("R26+S/32"))
    assert not is_plain(vitral.model.config("BiT-R50x1"))


def test_images_that_a_peer_cannot_take_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "is_installed", True)
    for changes in ({"image_size": (32, 48)}, {"channels": 1}, {"patch_size": (16, 8)}):
        found, notes = chosen(["all"], dataclasses.replace(TINY, **changes))
        assert set(PEERS) - set(found) == {"torchvision"}
        assert notes == ["left out: torchvision, which support square images of three channels only"]
