"""Compute one network in all ways with each edit of vit.py, in a fork each; print the values as JSON.

python edited_checks.py FOLDER     FOLDER/vitral: a copy of the package; FOLDER/edits.json: name → source of vit.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  # before the forks, which then need no time for it
import torch


def values(x: torch.Tensor) -> list[float]:
    return [round(float(v), 6) for v in x.detach().float().flatten()]


COMPILED = ("", "Attention.attend", "Attention.mix", "MLP.hidden", "ViT.pool")
"""Edits for which the network is compiled, too: it takes seconds."""


def checks(name: str) -> dict[str, Any]:
    import vitral
    from vitral.model.packing import packed_logits

    torch.set_num_threads(1)
    found: dict[str, Any] = {"training": [], "prediction": [], "packing": [], "compiled": []}
    for changes in ({"pool": "mean", "layer_scale": 0.5}, {"pool": "cls"}, {"pool": "map", "layer_scale": 0.5}):
        torch.manual_seed(0)
        network = vitral.create("mu/4", image_size=16, dim=64, heads=1, depth=2, mlp_dim=64, classes=3, **changes)
        with torch.no_grad():
            for parameter in network.parameters():  # also those that begin at 0
                parameter.add_(0.1 * torch.randn_like(parameter))
        images = torch.randn(2, 3, 16, 16)
        with torch.autocast("cpu", torch.bfloat16):
            network.train()
            logits = network(images)
            logits.float().square().sum().backward()
        found["training"] += values(logits) + values(network.blocks[0].attn.qkv.weight.grad.sum())
        network.eval()
        predictor = vitral.load(network, device="cpu", precision="bf16")
        pixels = (torch.rand(2, 3, 16, 16) * 255).byte()
        found["prediction"] += values(predictor.logits(pixels))
        found["engine"] = predictor.engine
        if changes["pool"] != "map":
            found["together"] = refusal(partial(packed_logits, network, list(images)))
            found["packing"] += [] if found["together"] else values(packed_logits(network, list(images)))
        elif name in COMPILED:
            found["compiled"] += values(torch.compile(network, backend="eager")(images))
        packed = partial(vitral.load, network, device="cpu", precision="bf16", engine="packed")
        found["packed"] = refusal(packed)
        found["capture"] = refusal(partial(vitral.explain, network, images, method="rollout"))
        found["default map"] = refusal(partial(vitral.explain, network, images))
    return found


def refusal(act: Callable[[], object]) -> str:
    from vitral.errors import UsageError

    try:
        act()
    except UsageError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    target, found = folder / "vitral" / "model" / "vit.py", {}
    original = target.read_text("utf-8")
    for name, source in {"": original, **json.loads((folder / "edits.json").read_text())}.items():
        target.write_text(source, "utf-8")
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            with os.fdopen(writing, "w") as out:
                out.write(json.dumps(checks(name)))
                out.flush()
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            text = answer.read()
        assert os.waitpid(pid, 0)[1] == 0, name
        found[name] = json.loads(text)
    print(json.dumps(found))


main(Path(sys.argv[1]))
