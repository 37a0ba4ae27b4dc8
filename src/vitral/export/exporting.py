"""Export a network: load it, write it for another runtime, prove the result, keep it if it passes."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitral import __version__
from vitral.atomic import replacing_folder, write_text
from vitral.bounded import parse
from vitral.data import DataSet
from vitral.data.dataset import SPLITS
from vitral.data.images.depth import leveled
from vitral.data.images.example import example as example_image
from vitral.data.loader import Progress
from vitral.data.options import DataOptions
from vitral.data.shards.reading import sha256_of
from vitral.device import plain_modes
from vitral.digest import read_json, sealed_json
from vitral.errors import ExportError, RunError, UsageError, unknown
from vitral.export.explained import method_of
from vitral.export.onnx_text import METADATA, SHORTEST, facts
from vitral.export.proof import AT_ONCE, BARS, Proof, prove
from vitral.export.sample import LEAST, Sample, readable, sample
from vitral.export.target import Job, Precision, Target
from vitral.export.targets import TARGETS
from vitral.folders import EXPORT
from vitral.inference.generation import Search, search_of
from vitral.inference.options import InferenceOptions
from vitral.inference.outputs import Output
from vitral.inference.outputs.classes import Classes
from vitral.inference.outputs.output import require_classes
from vitral.inference.own_sizes import refuse_own_sizes
from vitral.inference.predictor import Predictor
from vitral.inference.unknown import Detector
from vitral.kinds import checked
from vitral.model import EncoderDecoder
from vitral.model.registry import config_to_json
from vitral.model.settings import check_head
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.weights.fitted import CHANGES
from vitral.weights.read.references import name_of
from vitral.workflows.evaluate import data_for, in_classes_of, left_out_bad

EXACT = InferenceOptions("cpu", "fp32", "plain")
"""Options of the network that an export must match."""
CALIBRATION = 256
"""Most training images to measure the ranges of int8 on."""
PROOF = {"fp32": LEAST, "fp16": LEAST, "int8": 1000}
"""Images of a proof by precision: 64 are too few to measure a loss of 0.5 points."""


@dataclass(frozen=True, eq=False)
class Exported:
    """An export that passed its proof, or failed it and was accepted."""

    folder: Path
    proof: Proof
    record: dict[str, Any]
    """The content of `export.json`."""

    @property
    def warnings(self) -> list[str]:
        """Every warning of a tracer or converter."""
        return list(self.record["warnings"])


@checked
@plain_modes()
def export_model(
    model: str | Path | Predictor | nn.Module,
    to: str,
    data: str | Path | None = None,
    *,
    precision: Precision = "fp32",
    with_preprocessing: bool = False,
    out: str | Path | None = None,
    overwrite: bool = False,
    accept: bool = False,
    images: int | None = None,
    runtime: str | Path | None = None,
    example: str | Path | None = None,
    data_root: str | Path = "data",
    bad_images: str = "error",
    progress: Progress | None = None,
) -> Exported:
    """Export `model` for the runtime `to`, and prove the result. `model` is a run folder, a weights file, a predictor
    or a network in memory.

    The parity check runs the export in its runtime, and compares it with the network on `images` images of `data`, by
    default of the model's own run. If there are fewer than 64 images, it adds the bundled drawings. The limits are
    `proof.BARS`.
    `accept` keeps an fp16 or int8 export that exceeds them. The export is the folder `out`, by default
    `folder_for(…)`. An existing folder is replaced only if it is an older export and `overwrite` is set. `runtime` is
    the archive of ONNX Runtime Web for a web page, which is else fetched; `example` is an image that the page offers.

    Raises `ExportError`, with the `proof`, for an export that fails; its files are removed. Raises `UsageError` for a
    network or a precision that the target does not support; `MissingExtraError` without the target's packages.
    """
    target = _target(to, precision, with_preprocessing, accept)
    for option, given in {"--runtime": runtime, "--example": example}.items():
        if given is not None and to != "web":
            raise UsageError(f"{option} is for --to web", why=f"{target.title} needs none", hint="leave it out")
    count = PROOF[precision] if images is None else images
    if count < LEAST:
        raise UsageError(f"a proof takes at least {LEAST} images", hint=f"--images {LEAST}")
    predictor = copy.copy(model) if isinstance(model, Predictor) else EXACT.load(model)
    folder = Path(out) if out is not None else folder_for(predictor.source, to, precision, with_preprocessing)
    check_free(folder, overwrite)
    _check_network(predictor)
    _check_text(predictor, target, precision, with_preprocessing)
    _check_task(predictor.output, to, precision, with_preprocessing)
    target.check_installed()
    options = DataOptions(data, None, data_root, bad_images)
    if left_out_bad(predictor):
        options = replace(options, bad_images="skip")
    dataset = _data(predictor, options)
    job = _job(predictor, target, precision, with_preprocessing, dataset, skip=options.skip)
    offered = b"" if example is None else example_image(example)
    job = replace(job, name=name_of(predictor.source) or "network", runtime=runtime, example=offered)
    images_of_proof = sample(dataset, predictor.output, count, skip=options.skip, levels=predictor.preprocessing.levels)
    with replacing_folder(folder) as made:
        return _write(target, job, images_of_proof, predictor, made, folder, accept, progress)


def _write(
    target: Target,
    job: Job,
    images: Sample,
    predictor: Predictor,
    made: Path,
    folder: Path,
    accept: bool,
    progress: Progress | None,
) -> Exported:
    """Write the export into `made`, prove it, and add the JSON files that describe it."""
    versions = target.write(job, made)
    files = files_in(made)
    size = sum((made / name).stat().st_size for name in files)
    proof = prove(job, target.load(made), images, predictor.output, size, progress)
    if proof.failure and not accept:
        first = f"; first {proof.first}" if proof.first else ""
        hint = "--precision fp32, or --accept to keep it anyway"
        if job.precision == "fp32":
            hint = "please report it, with vitral summary of the network"
        what = f"the {target.title} export does not match its network"
        raise ExportError(what, where=predictor.source, why=f"{proof.failure}{first}", hint=hint, proof=proof)
    if not job.with_preprocessing:
        write_text(made / "preprocessing.json", json.dumps(_preprocessing(predictor, job), indent=1) + "\n")
        files.append("preprocessing.json")
    record = {
        "written by": "vitral export",
        "target": target.name,
        "precision": job.precision,
        "with_preprocessing": job.with_preprocessing,
        "model": predictor.source,
        "network": config_to_json(job.network.config),
        "classes": list(predictor.classes),
        "weights": job.metadata["vitral.weights"],
        "versions": {"vitral": __version__, **versions},
        "input": job.input_name,
        "output": job.output_name,
        "files": files,
        "sha256": {name: sha256_of(made / name) for name in files},
        "proof": proof.to_json(),
        "accepted": bool(proof.failure),
        "warnings": job.warnings,
        **_unknown(job.unknown),
    }
    write_text(made / EXPORT, sealed_json(record, indent=1))
    return Exported(folder, proof, record)


def folder_for(model: str, to: str, precision: str = "fp32", with_preprocessing: bool = False) -> Path:
    """Return the default folder of an export: in the run if it can be written, otherwise `export/NAME` here."""
    parts = [to, *([precision] if precision != "fp32" else []), *(["with-preprocessing"] if with_preprocessing else [])]
    name = "-".join(parts)
    if place := RunFolder(model).place_for("export"):
        return place / name
    return Path("export") / (re.sub(r"[^\w.+-]+", "-", model).strip("-.") or "model") / name


def _target(to: str, precision: str, with_preprocessing: bool, accept: bool) -> Target:
    """Return the target `to`. `UsageError` for an unsupported option names the targets that support it."""
    if to not in TARGETS:
        raise unknown("target", to, TARGETS)
    if precision not in BARS:
        raise unknown("precision of an export", precision, BARS)
    target = TARGETS[to]
    if precision not in target.precisions:
        others = ", ".join(f"--to {one.name}" for one in TARGETS.values() if precision in one.precisions)
        hint = f"{others} --precision {precision}, or --to {to} --precision {target.precisions[0]}"
        why = f"it supports {', '.join(target.precisions)}"
        raise UsageError(f"{target.title} does not support {precision}", why=why, hint=hint)
    if with_preprocessing and not target.preprocesses:
        others = ", ".join(f"--to {one.name}" for one in TARGETS.values() if one.preprocesses)
        why = "preprocessing.json describes it instead"
        raise UsageError(f"{target.title} does not support preprocessing in the graph", why=why, hint=others)
    if accept and precision == "fp32":
        why = "an fp32 export must match its network"
        raise UsageError("--accept is for fp16 and int8", why=why, hint="leave it out")
    return target


def _check_network(predictor: Predictor) -> None:
    """Raise `UsageError` for a network without classes, and for a predictor that is not in fp32 on a CPU."""
    if not predictor.classes:
        why = "it computes features, and a proof compares probabilities"
        hint = "vitral convert … --classes N --new-head, and train it"
        what = "a network without a head cannot be exported"
        raise UsageError(what, where=predictor.source or None, why=why, hint=hint)
    refuse_own_sizes(predictor.preprocessing, "export", predictor.source)
    if altered := [change for change in predictor.changes if change in ("views", "int8")]:
        why = f"this predictor computes {CHANGES[altered[0]].where}"
        raise UsageError("an export is of the network itself", why=why, hint="vitral.load(…) without tta and int8")
    machine = predictor.machine
    if machine.device.type != "cpu" or machine.precision != "fp32":
        hint = 'vitral.load(…, device="cpu", precision="fp32")'
        raise UsageError(f"this predictor computes in {machine.precision} on {machine.device}", hint=hint)


def _check_text(predictor: Predictor, target: Target, precision: str, with_preprocessing: bool) -> None:
    """Raise `UsageError` for what an export of a network that reads text does not support."""
    if not isinstance(predictor.network, EncoderDecoder):
        return
    asked = {
        target.title: target.name != "onnx",
        precision: precision != "fp32",
        "preprocessing in the graph": with_preprocessing,
    }
    if bad := [name for name, on in asked.items() if on]:
        why, hint = "its decoder runs step by step: two graphs of ONNX in fp32", "--to onnx, and no other option"
        raise UsageError(f"{bad[0]} does not support networks that read text", why=why, hint=hint)
    if predictor.network.config.decoder.length < SHORTEST:
        why = "a step of the decoder is traced after two tokens"
        raise UsageError("texts of one character are not exported", why=why, hint="--task class, for single characters")
    if search_of(predictor.network) != Search():
        why = "the parity check compares texts of greedy search"
        raise UsageError("this predictor reads by beam search", why=why, hint="vitral.load(…, beams=1)")


def _check_task(output: Output, to: str, precision: str, with_preprocessing: bool) -> None:
    """Raise `UsageError` for what an export of labels or numbers does not support yet."""
    if to == "web":
        require_classes(output, "a web page", "--to onnx, with the meaning of its logits in preprocessing.json")
    if precision == "int8":
        require_classes(output, "a proof of int8", "--precision fp32, or fp16")
    if with_preprocessing:
        require_classes(output, "preprocessing in the graph", "leave it out; preprocessing.json has the steps")


def check_free(folder: Path, overwrite: bool, option: str = "--out") -> None:
    """Raise `RunError` for a folder, named by `option`, that exists and must not be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise RunError("the target exists already", where=folder, hint=f"--overwrite, or another {option}")
    if not _is_export(folder):
        why = "vitral did not write all of its files"
        raise RunError("will not overwrite this", where=folder, why=why, hint=f"choose another folder with {option}")


def _is_export(folder: Path) -> bool:
    """True if a folder contains an export and nothing else."""
    try:
        known = {EXPORT, *read_json(folder / EXPORT)["files"]}
        return known >= set(files_in(folder))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def files_in(folder: Path) -> list[str]:
    """Paths of all files of a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _data(predictor: Predictor, options: DataOptions) -> DataSet | None:
    """Load the data, by default the data of the model's own run; None for weights without a run."""
    if options.data is None and not RunFolder(predictor.source).is_run():
        return None
    dataset, _ = data_for(predictor, options, "export")
    return leveled(in_classes_of(predictor, dataset), predictor.preprocessing.levels)


def _job(
    predictor: Predictor,
    target: Target,
    precision: Precision,
    with_preprocessing: bool,
    dataset: DataSet | None,
    *,
    skip: bool,
) -> Job:
    output = predictor.output
    check_head(predictor.network, len(predictor.classes))
    job = Job(
        predictor.network,
        predictor.preprocessing,
        precision,
        with_preprocessing,
        metadata(predictor),
        temperature=output.temperature if isinstance(output, Classes) else 1.0,
    )
    detector: Detector | None = getattr(output, "unknown", None)
    lacking = _lacking(detector, job, target) if detector else ""
    if lacking:
        answer = "the export answers with a class for any image"
        job.warnings.append(f"{answer}, without the threshold of unknown images: {lacking}")
    job = replace(job, unknown=None if lacking else detector, names_any=bool(lacking))
    if precision != "int8":
        return job
    if dataset is None:
        model = shlex.quote(predictor.source) if predictor.source else "WEIGHTS"
        why = "ranges are measured on training images, which a weights file does not name"
        raise UsageError("int8 needs images", why=why, hint=f"vitral export {model} DATA --to onnx --precision int8")
    split = dataset[next(name for name in SPLITS if name in dataset.splits)].spread(CALIBRATION)
    split = (readable(split) if skip else split).with_levels(job.preprocessing.levels)
    job.calibration.extend(_inputs(job, [split.image(i, job.preprocessing.channels) for i in range(len(split))]))
    return job


def _lacking(detector: Detector, job: Job, target: Target) -> str:
    """Return why the reader of an export cannot compute the score of unknown images; "" if it can."""
    if job.precision == "int8":
        return "it was measured without int8"
    if detector.score == "distance" and not (target.distances and method_of(job.network)):
        return "it compares features, which this export does not return"
    if detector.score == "energy" and job.with_preprocessing:
        return "it needs logits, and this export returns probabilities"
    return ""


def _inputs(job: Job, images: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield inputs of the graph for these images."""
    if job.with_preprocessing:
        yield from images
        return
    for start in range(0, len(images), AT_ONCE):
        pixels = torch.stack([job.preprocessing.geometry(one) for one in images[start : start + AT_ONCE]])
        yield job.preprocessing.standardize(pixels).numpy()


def metadata(predictor: Predictor) -> dict[str, str]:
    """Return the metadata of an export as text: labels, preprocessing, hash of the weights, version."""
    network = predictor.network
    return {
        "vitral.version": __version__,
        "vitral.classes": json.dumps(list(predictor.classes)),
        "vitral.preprocessing": json.dumps(predictor.preprocessing.to_json()),
        **({"vitral.output": json.dumps(output)} if (output := predictor.output.to_json()) else {}),
        **({METADATA: json.dumps(facts(network.config.decoder))} if isinstance(network, EncoderDecoder) else {}),
        "vitral.weights": f"sha256:{native.digest(predictor.network.state_dict())}",
    }


def _preprocessing(predictor: Predictor, job: Job) -> dict[str, object]:
    """Return the content of `preprocessing.json`: steps from an image to the input, and classes of the output."""
    levels = predictor.preprocessing.levels
    scaled = [f"values of 16 bits: {levels[0]} becomes 0 and {levels[1]} becomes 255"] if levels else []
    texts = {"generation": parse(job.metadata[METADATA])} if METADATA in job.metadata else {}
    return {
        "input": {"name": job.input_name, "layout": "batch, channels, height, width", "dtype": "float32"},
        "steps": [*scaled, "resize and crop as below", "pixel / 255", "(pixel - mean) / std, for each channel"],
        "preprocessing": predictor.preprocessing.to_json(),
        "output": {"name": job.output_name, **predictor.output.meaning(), **texts, **_unknown(job.unknown)},
        "classes": list(predictor.classes),
    }


def _unknown(detector: Detector | None) -> dict[str, object]:
    """Return how a program without vitral recognizes an image of no known class."""
    if detector is None:
        return {}
    return {"unknown": {"score": _FORMULAS[detector.score], "above": detector.threshold}}


_FORMULAS = {
    "confidence": "1 - the largest probability",
    "energy": "-log(sum(exp(logits)))",
    "distance": "the output 'distance'",
}
"""Score of unknown images → how to compute it from the outputs."""
