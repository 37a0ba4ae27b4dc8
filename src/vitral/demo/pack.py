"""`python -m vitral.demo.pack RUN [--data-root FOLDER]`: make the network of `vitral demo` from a finished run.

The best weights in 16 bits, measured anew on the run's test pictures as they then are, with where they come from.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitral.device import choose
from vitral.errors import RunError, UsageError, VitralError
from vitral.evaluation.metrics import Evaluation
from vitral.predict import Predictor
from vitral.recipes.evaluation import evaluate
from vitral.training.run import RunFolder
from vitral.weights import native
from vitral.weights.files import replacing
from vitral.weights.references import DEMO

LARGEST = 2_000_000
"""Bytes that the file may have: everyone who installs vitral downloads it."""

LICENCES: Mapping[str, str] = {
    "cifar10": "The weights are vitral's own work, under its licence. They were trained on CIFAR-10 (Krizhevsky, Nair, "
    "Hinton; Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images), which states no licence.",
}
"""What is known of the rights in data that a network in the package may be trained on."""

_OF_ONE_MACHINE = ("--data-root", "--out")


def pack(run: str | Path, target: Path = DEMO, *, data_root: str | Path | None = None) -> native.Weights:
    """Write the best weights of `run` to `target`, in 16 bits; what was written.

    Where they come from is told in `trained`: command, time, machine, versions, accuracy on the run's test pictures,
    licence. `data_root` is where these pictures lie, by default where the run found them.

    Raises `RunError` for a run that is not finished, `UsageError` for data whose licence is not looked into and for
    weights that are too large; the file that was there stays.
    """
    folder = RunFolder(run)
    plan = folder.read_plan().run
    if not folder.result.is_file():
        raise RunError("the run is not finished", where=folder.path, hint=f"vitral train --out {folder.path} --resume")
    if plan.data not in LICENCES:
        raise UsageError(f"no licence is noted for {plan.data}", where=folder.path, hint="LICENCES in demo/pack.py")
    result = folder.read_result()
    best = native.read(folder.weights)
    weights = dataclasses.replace(best, state=native.in_16_bits(best.state))
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
    """Where the weights come from."""
    told = {name: best.trained[name] for name in ("data", "model", "recipe", "versions")}
    of_run = ("parameters", "epochs", "best_epoch", "seconds", "device", "precision", "seed")
    return {
        **told,
        **{name: result[name] for name in of_run},
        "command": _command(result["command"]),
        "training_pictures": result["images"]["train"],
        "test": {
            "images": test.images, "accuracy": test.accuracy, "accuracy_interval": list(test.accuracy_interval)
        },
        "licence": LICENCES[told["data"]],
    }  # fmt: skip


def _command(typed: str) -> str:
    """The command that repeats the run, without where files lie on the machine that it ran on."""
    words = shlex.split(typed)
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before not in _OF_ONE_MACHINE and word not in _OF_ONE_MACHINE
    ]
    return shlex.join(kept)


def main(words: Sequence[str] | None = None) -> int:
    """Pack, and say what was written."""
    parser = argparse.ArgumentParser("python -m vitral.demo.pack", description=__doc__)
    parser.add_argument("run", help="folder of a finished run")
    parser.add_argument("--data-root", help="where the run's data lie; by default where it found them")
    asked = parser.parse_args(words)
    try:
        weights = pack(asked.run, data_root=asked.data_root)
    except VitralError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {DEMO}: {DEMO.stat().st_size:,} bytes, accuracy {weights.trained['test']['accuracy']:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
