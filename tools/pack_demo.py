"""`python -m tools.pack_demo RUN [--data-root FOLDER]`: create the model of `vitral demo` from a finished run.

Converts the best weights to 16 bits, evaluates these on the run's test images, and records their origin.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.atomic import replacing
from vitral.device import choose
from vitral.errors import RunError, UsageError, VitralError
from vitral.evaluation.metrics import Evaluation
from vitral.inference.predictor import Predictor
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.weights.read.references import DEMO
from vitral.workflows.evaluate import evaluate

LARGEST = 2_000_000
"""Largest size of the file in bytes, since it is part of the package."""

LICENSES: Mapping[str, str] = {
    "cifar10": "The weights are vitral's own work, under its license. They were trained on CIFAR-10 (Krizhevsky, Nair, "
    "Hinton; Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images), which states no license.",
}
"""License notes on the data sets that the included model may be trained on."""

_OF_ONE_MACHINE = ("--data-root", "--out")


def pack(run: str | Path, target: Path = DEMO, *, data_root: str | Path | None = None) -> native.Weights:
    """Write the best weights of `run` to `target` in 16 bits, and return them.

    `trained` records their origin: command, time, machine, versions, accuracy on the run's test images, license.
    `data_root` is the folder of these images, by default that of the run.

    Raises `RunError` for an unfinished run, `UsageError` for data without an entry in `LICENSES` and for weights that
    are too large. An existing file is then unchanged.
    """
    folder = RunFolder(run)
    plan = folder.read_plan().run
    if not folder.result.is_file():
        raise RunError("the run is not finished", where=folder.path, hint=f"vitral train --out {folder.path} --resume")
    if plan.data not in LICENSES:
        hint = "add it to LICENSES in tools/pack_demo.py"
        raise UsageError(f"the license of {plan.data} is unknown", where=folder.path, hint=hint)
    result = folder.read_result()
    best = native.read(folder.weights)
    weights = dataclasses.replace(best, state=in_16_bits(best.state))
    predictor = Predictor(
        native.build(weights), weights.preprocessing, weights.classes, machine=choose("auto", "fp32"), engine="plain"
    )
    measured = evaluate(predictor, plan.data, split="test", data_root=data_root or plan.data_root)
    weights = dataclasses.replace(weights, trained=_trained(best, result, measured))
    with replacing(target) as temporary:
        native.save(temporary, weights)
        if (size := temporary.stat().st_size) > LARGEST:
            raise UsageError("too large for the package", where=folder.path, why=f"{size:,} bytes; at most {LARGEST:,}")
    return weights


def _trained(best: native.Weights, result: Mapping[str, Any], test: Evaluation) -> dict[str, Any]:
    """Return the origin of the weights."""
    origin = {name: best.trained[name] for name in ("data", "model", "recipe", "versions")}
    of_run = ("parameters", "epochs", "best_epoch", "seconds", "device", "precision", "seed")
    return {
        **origin,
        **{name: result[name] for name in of_run},
        "command": _command(result["command"]),
        "training_images": result["images"]["train"],
        "test": {"images": test.images, "accuracy": test.accuracy, "accuracy_interval": list(test.accuracy_interval)},
        "license": LICENSES[origin["data"]],
    }


def _command(typed: str) -> str:
    """Return the command that repeats the run, without the paths on the machine that it ran on."""
    words = shlex.split(typed)
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before not in _OF_ONE_MACHINE and word not in _OF_ONE_MACHINE
    ]
    return shlex.join(kept)


def in_16_bits(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Halve the size of the tensors: floats as fp16 or bf16, whichever is closer to the values. `native.build` converts
    back to fp32.
    """

    def error(dtype: torch.dtype) -> float:
        return sum(float((one.to(dtype).double() - one.double()).square().sum()) for one in floats.values())

    floats = {name: one for name, one in state.items() if one.is_floating_point()}
    dtype = min((torch.float16, torch.bfloat16), key=error)  # values beyond fp16 become infinite, and so the error
    return {name: one.to(dtype) if name in floats else one for name, one in state.items()}


def main(words: Sequence[str] | None = None) -> int:
    """Create the file and report it."""
    parser = argparse.ArgumentParser("python -m tools.pack_demo", description=__doc__)
    parser.add_argument("run", help="folder of a finished run")
    parser.add_argument("--data-root", help="folder of the run's data (default: that of the run)")
    arguments = parser.parse_args(words)
    try:
        weights = pack(arguments.run, data_root=arguments.data_root)
    except VitralError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {DEMO}: {DEMO.stat().st_size:,} bytes, accuracy {weights.trained['test']['accuracy']:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
