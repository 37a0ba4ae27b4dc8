"""The page of `vitral label --export`: a static folder, on which a visitor teaches classes in the browser alone.

    index.html, page.css, teach.css, main.js, …   the page
    model.onnx                                    images (B, C, H, W) to the features (B, D) of a built-in model
    model.json                                    its name, hash and preprocessing, and features to test a browser with
    runtime/                                      ONNX Runtime Web, as in the page of `vitral export --to web`
    export.json                                   the SHA-256 of each file

The page saves a project (`vitral.weights.project`), which names the model. So it is a built-in one, never a path or a
hub: loading a project opens no file that a stranger chose.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitral import __version__, web
from vitral.atomic import replacing_folder, write_text
from vitral.data.shards.reading import sha256_of
from vitral.device import plain_modes
from vitral.digest import sealed_json
from vitral.errors import ExportError, UsageError
from vitral.export.exporting import EXACT, check_free, files_in
from vitral.export.graph import check_exact
from vitral.export.onnx import FILE, converted, packages, session_for
from vitral.export.sample import LEAST, drawings
from vitral.export.target import Job, exportable, traced
from vitral.export.web import CSP, check_image, runtime_archive, write_runtime
from vitral.folders import EXPORT
from vitral.inference.predictor import Predictor
from vitral.model import ViT
from vitral.weights.project import built_in_weights, hash_of
from vitral.weights.read.references import BACKBONE, BUILT_IN, is_included
from vitral.wording import either

CLOSE = 1e-4
"""Largest difference of a feature, relative to the largest feature, that the parity check accepts."""


@plain_modes()
def export_teaching(
    folder: str | Path,
    model: str = BACKBONE,
    *,
    classes: Sequence[str] = (),
    runtime: str | Path | None = None,
    overwrite: bool = False,
) -> float:
    """Write the page into a folder, and return the largest relative difference of its features from the model's.

    `classes` are the names that the page begins with; `runtime` is the archive of ONNX Runtime Web, which is otherwise
    fetched. An existing folder is replaced only if it is such a page and `overwrite` is set.

    Raises `UsageError` for a model that is not built in, `RunError` for a folder with files, `MissingExtraError`
    without the packages of ONNX, and `ExportError` if the features differ; nothing is written then.
    """
    folder = Path(folder)
    if not is_included(model):
        why = "the projects that it saves name a model, and only a built-in one is on every machine"
        hint = f"leave out --init, or use {either(BUILT_IN)}"
        raise UsageError("this page needs a built-in model", where=model, why=why, hint=hint)
    check_free(folder, overwrite, "--export")
    packages()
    job = _job(EXACT.load(model), model)
    check_exact(job.preprocessing, hint="leave out --init")
    archive = runtime_archive(runtime)
    with replacing_folder(folder) as made:
        program = traced(job, exportable(job.network))
        converted(job, program, [job.input_name], ["features"], axes=("batch",)).save(made / FILE)
        difference = _difference(job, made / FILE)
        if not difference <= CLOSE:
            why = f"features differ by {difference:.2g} of the largest one"
            hint = "please report it, with your version of onnxruntime"
            what = "the page does not compute what the model does"
            raise ExportError(what, where=model, why=why, hint=hint, proof=difference)
        write_runtime(archive, made / "runtime")
        for path, asset in web.TEACH.items():
            write_text(made / path, web.text(asset))
        write_text(made / "index.html", web.teaching_page(CSP, __version__))
        write_text(made / "model.json", json.dumps(_described(job, model, classes), separators=(",", ":")) + "\n")
        write_text(made / EXPORT, sealed_json(_record(job, model, made), indent=1))
    return difference


def _job(predictor: Predictor, model: str) -> Job:
    """Return the network without its head, which then ends in the features."""
    network = copy.deepcopy(predictor.network)
    assert isinstance(network, ViT), "built-in models are ViTs"
    network.reset_classifier(0)
    metadata = {
        "vitral.version": __version__,
        "vitral.preprocessing": json.dumps(predictor.preprocessing.to_json()),
        "vitral.weights": hash_of(built_in_weights(model)),
    }
    return Job(network.eval(), predictor.preprocessing, "fp32", False, metadata, name=model)


@torch.inference_mode()
def _difference(job: Job, file: Path) -> float:
    """Compare the graph in ONNX Runtime with the network, on drawings: one image at a time, as in the page."""
    session, _ = session_for(file)
    images, own = drawings((), LEAST), job.preprocessing
    largest, differing = 0.0, 0.0
    for number in range(len(images)):
        pixels = own.standardize(own.geometry(images.image(number, own.channels))[None])
        wanted = job.network(pixels).numpy()
        found = session.run(None, {job.input_name: pixels.numpy()})[0]
        largest, differing = max(largest, np.abs(wanted).max()), max(differing, np.abs(found - wanted).max())
    return float(differing / largest)


def _record(job: Job, model: str, made: Path) -> dict[str, Any]:
    """Return the content of `export.json`, by which `vitral verify` and `--overwrite` know the folder."""
    files = files_in(made)
    return {
        "written by": "vitral label",
        "model": model,
        "weights": job.metadata["vitral.weights"],
        "versions": {"vitral": __version__},
        "files": files,
        "sha256": {name: sha256_of(made / name) for name in files},
    }


@torch.inference_mode()
def _described(job: Job, model: str, classes: Sequence[str]) -> dict[str, Any]:
    """Return the content of `model.json`, which the page reads."""
    features = job.network(check_image(job))[0]
    return {
        "name": model,
        "vitral": __version__,
        "weights": job.metadata["vitral.weights"],
        "width": len(features),
        "preprocessing": job.preprocessing.to_json(),
        "classes": list(classes),
        "check": features.tolist(),
    }
