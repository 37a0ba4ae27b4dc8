"""The command line: one function a command, each a thin skin over the Python calls.

What a command found goes to standard output (as JSON with `--format json`), everything else to standard error. Exit
codes: 0 done; 1 some of the work failed, each item named; 2 the request cannot be done; 130 stopped by Ctrl-C, after
saving.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import json
import operator
import os
import re
import shlex
import shutil
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.text import Text

from vitral.console import command_line, flag, stderr, stdout, table
from vitral.errors import Interrupted, UsageError, VitralError, unknown


def _help(text: str, name: str | None = None, shown: str | None = None) -> Any:
    """What help says of an option; `shown` stands for the value of what is typed without a flag."""
    return tyro.conf.arg(help=text, help_behavior_hint=_default_hint, name=name, metavar=shown)


def _default_hint(default: str) -> str:
    """What help says of a default; None is what an option has where it is not typed, and the text says what follows."""
    return "" if default in ("None", "") else f"(default: {default})"


Format = Annotated[Literal["text", "json"], _help("how results are printed")]
Device = Annotated[str, _help("auto, cpu, cuda or mps")]
DataRoot = Annotated[str, _help("where named sets are looked for")]
# how predictions are computed, wherever some are
Precision = Annotated[str, _help("auto, bf16, fp32, or int8 after vitral quantize")]
Engine = Annotated[str, _help("auto, plain (the module itself), packed (by oneDNN), compiled (by torch), or openvino")]
Merge = Annotated[int, _help("tokens that are merged in each block of a ViT: faster, less accurate")]
Tta = Annotated[str, _help("mirror (2 views of a picture), shifts (3) or both (6): answers averaged; surer, slower")]


def demo(
    *,
    out: Annotated[str, _help("folder for pictures and maps")] = "vitral-demo",
    format: Format = "text",
) -> int:
    """Try a small network that comes with vitral, on drawings that it makes: no data, no network needed."""
    from vitral.demo.command import demo as run_demo

    found = run_demo(Path(out))
    if format == "json":
        _print_json(found.to_json())
        return 0
    for line in found.about():
        _say(line)
    for prediction in found.predictions:
        _print_prediction(prediction, 3)
    _say(f"\nNamed as drawn: {found.right} of {len(found.predictions)}")
    _say(f"Map      {found.page}: what its answer for one of them rests on")
    _say(f"Sheet    {found.sheet}: all of them")
    _say("\nNext:")
    for command in found.next_commands():
        _say(f"  {_program()} {command}")
    return 0


def train(format: str = "text", **given: Any) -> int:
    """Train a network on a set of pictures; with no other choice, plan everything from the data."""
    from vitral.recipes.execute import train as run_training

    run = run_training(**given)
    if format == "json":
        _print_json(run.result)
    else:
        _print_result(run.folder, run.result)
        if not given.get("quiet"):
            _print_next(run.folder, run.result)
    return 0


_IN_VAIN = 20
"""Epochs without a better one at the end of a run, from which on that is worth a word."""


def _print_result(folder: Path, result: Any) -> None:
    from vitral.evaluation.metrics import Evaluation

    split = "test" if "test" in result else "val"
    where = {
        "test": "test pictures, never seen in training",
        "val": f"validation pictures, which also chose the {'best epoch' if result['epochs'] else 'regularisation'}",
    }[split]
    if split in result:
        evaluation = Evaluation.from_json(result[split])
        low, high = evaluation.accuracy_interval
        accuracy = f"{evaluation.accuracy:.2%} ({low:.1%} to {high:.1%})"
        _say(f"\nAccuracy {accuracy} on {evaluation.images:,} {where}")
    _say(f"Report   {folder / 'report.html'}")
    best, epochs = result.get("best_epoch"), result["epochs"]
    if best and epochs - best >= _IN_VAIN and epochs >= 2 * best:
        _say(f"Epoch {best} of {epochs} was the best; --early-stop {_IN_VAIN} ends such a run sooner")


def _print_next(folder: Path, result: Any) -> None:
    _say("\nNext:")
    run, data = shlex.quote(str(folder)), result["data"]
    commands = [f"evaluate {run}", f"summary {run}"]
    if picture := _one_picture(data):
        commands = [f"predict {run} {shlex.quote(data)}", f"explain {run} {shlex.quote(picture)}", *commands]
    else:
        commands = ["train YOUR_PICTURES/", *commands]
    for command in commands:
        _say(f"  {_program()} {command}")


def _one_picture(folder: str) -> str | None:
    """Some picture in a folder that can be read, without looking through all of it; None where that is no folder or
    holds none.
    """
    from vitral.data.files import is_picture
    from vitral.data.intake import read_image
    from vitral.errors import ImageError

    for place, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for name in sorted(name for name in names if is_picture(name) and not name.startswith(".")):
            with contextlib.suppress(ImageError):
                read_image(os.path.join(place, name))
                return os.path.join(place, name)
    return None


def evaluate(
    run: Annotated[str, _help("run folder or weights file", shown="RUN")],
    data: Annotated[
        str | None, _help("pictures to measure on; by default the run's own held-out ones", shown="[DATA]")
    ] = None,
    /,
    *,
    split: Annotated[
        str | None, _help("train, val or test; by default the furthest from training that there is")
    ] = None,
    data_root: DataRoot = "data",
    bad_images: Annotated[Literal["error", "skip"], _help("unreadable pictures: stop, or leave them out")] = "error",
    report: Annotated[str | None, _help("also write a page with confusion matrix and mistakes to this file")] = None,
    few_shot: Annotated[
        str | None, _help("instead of the head: least squares on the features of 1,5,10,25 pictures a class")
    ] = None,
    knn: Annotated[int | None, _help("instead of the head: nearest neighbours on the features; 20 is usual")] = None,
    cache: Annotated[str | None, _help("where features are kept; else in the user's cache")] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
    merge: Merge = 0,
    tta: Tta = "none",
    format: Format = "text",
) -> int:
    """Measure a run or weights file on its own held-out pictures, or on other data with the same classes."""
    if few_shot is not None or knn is not None:
        if report:
            raise UsageError("--report shows what the head says; --few-shot and --knn do not use it")
        if merge or engine != "auto" or tta != "none":
            why = "--few-shot and --knn read features of the network"
            raise UsageError("--merge, --engine and --tta are for the head", why=why)
        options = {"split": split, "data_root": data_root, "bad_images": bad_images, "cache": cache}
        return _evaluate_features(run, data, few_shot, knn, format, device=device, precision=precision, **options)
    if cache:
        raise UsageError("--cache is where features are kept", hint="--few-shot 1,5,10,25 or --knn 20 make some")
    if report and Path(report).is_dir():
        hint = f"--report {shlex.quote(os.path.join(report, 'report.html'))}"
        raise UsageError("--report is a file, and this is a folder", where=report, hint=hint)
    from vitral.recipes.evaluation import evaluate_pictures
    from vitral.training.progress import counting

    with counting(stderr(), "reading", None) as progress:
        found = evaluate_pictures(
            run, data, split=split, data_root=data_root, bad_images=bad_images, device=device, precision=precision,
            engine=engine, merge=merge, tta=tta, progress=progress,  # type: ignore[arg-type]  # loading checks the name
        )  # fmt: skip
    _say_of(found.predictor)
    if format == "json":
        about: dict[str, Any] = {"model": run, "data": found.source, "split": found.split, **found.evaluation.to_json()}
        if found.beside is not None:
            about["beside"] = dataclasses.asdict(found.beside)
        if found.changed:
            about["changed"] = found.changed
        if found.unreadable:
            about["unreadable"] = list(found.unreadable)
        _print_json(about)
    else:
        print(f"{run} on {'' if found.split == 'all' else 'the '}{found.split} pictures of {found.source}")
        found.evaluation.print_table(stdout())
        if found.beside is not None:
            print(found.beside)
    for note in found.notes:
        _say(f"note: {note}")
    if report:
        used: dict[str, Any] = {
            "split": split, "data_root": data_root, "bad_images": bad_images, "device": device, "precision": precision,
            "engine": engine, "merge": merge, "tta": tta, "report": report,
        }  # fmt: skip
        usual = inspect.signature(evaluate).parameters
        typed = {name: value for name, value in used.items() if value != usual[name].default}
        found.write_report(Path(report), command_line("evaluate", [run] if data is None else [run, data], typed))
        _say(f"Report   {report}")
    return 0


def _evaluate_features(
    run: str, data: str | None, few_shot: str | None, knn: int | None, format: str, **options: Any
) -> int:
    """What the frozen network knows of data whose classes need not be its own."""
    from vitral.recipes.features import evaluate_features
    from vitral.training.progress import counting

    try:
        shots = [int(count) for count in (few_shot or "").split(",")] if few_shot is not None else []
    except ValueError:
        why = f"'{few_shot}' is no list of whole numbers"
        raise UsageError("--few-shot takes pictures a class", why=why, hint="--few-shot 1,5,10,25") from None
    with counting(stderr(), "reading", None) as progress:
        found = evaluate_features(run, data, few_shot=shots, knn=knn, progress=progress, **options)
    if format == "json":
        _print_json({"model": run, **found.to_json()})
    else:
        which = "pictures cut from train" if found.split == "cut from train" else f"{found.split} pictures"
        print(f"features of {run} on the {which} of {found.source}")
        found.print_table(stdout())
    for note in found.notes:
        _say(f"note: {note}")
    return 0


def predict(
    run: Annotated[str, _help("run folder or weights file", shown="RUN")],
    images: Annotated[tuple[str, ...], _help("picture files, and folders of pictures", shown="IMAGE …")] = (),
    /,
    *,
    top: Annotated[int, _help("how many classes to show for each picture")] = 3,
    batch_size: Annotated[int, _help("pictures computed together")] = 32,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
    merge: Merge = 0,
    tta: Tta = "none",
    format: Format = "text",
) -> int:
    """Name what is in pictures, or in all the pictures of folders."""
    from vitral.errors import ImageError
    from vitral.predict import find_pictures, load

    if top < 1 or batch_size < 1:
        raise UsageError("--top and --batch-size must be at least 1")
    paths = find_pictures(images)
    options: Any = {"engine": engine, "merge": merge, "tta": tta}  # it checks the names
    predictor = load(run, device=device, precision=precision, **options)
    _say_of(predictor)
    results, failures = [], []
    for found in predictor.stream(paths, batch_size):
        if isinstance(found, ImageError):
            failures.append(found)
            _say(f"error: {found}")
        elif format == "json":
            results.append(found.to_json(top))
        else:
            _print_prediction(found, top)
    if format == "json":
        _print_json(
            {"model": run, "predictions": results, "errors": [{"image": f.name, "why": f.why} for f in failures]}
        )
    if failures:
        _say(f"{len(failures)} of {len(paths)} could not be read")
    return 1 if failures else 0


def _say_of(predictor: Any) -> None:
    """What one should know of what answers."""
    from vitral.weights.load import unfinished

    if predictor.note:
        _say(f"Engine   {predictor.note}")
    if told := unfinished(predictor.source):
        _say(f"note: {told}")


def _print_prediction(found: Any, top: int) -> None:
    """The picture, and its most probable classes."""
    from vitral.data.dataset import shown

    print(f"{shown(found.name)}\t" + "\t".join(f"{name} {p:.1%}" for name, p in found.top(top)))


def explain(
    run: Annotated[str, _help("run folder or weights file", shown="RUN")],
    images: Annotated[tuple[str, ...], _help("picture files, and folders of pictures", shown="IMAGE …")] = (),
    /,
    *,
    target: Annotated[tuple[str, ...], _help("classes by name or number; else the one that is answered")] = (),
    method: Annotated[str | None, _help("how; by default the method that did best in our own comparison")] = None,
    compare: Annotated[bool, _help("all methods that fit the network, side by side")] = False,
    check: Annotated[
        bool, _help("measure whether each map can be believed (SRG: symmetric relevance gain); draw it grey where not")
    ] = False,
    layer: Annotated[int | None, _help("of methods that look at one layer: which, from 0; -1 is the last")] = None,
    out: Annotated[str | None, _help("folder, or file for one picture; else RUN/explained or ./explained")] = None,
    benchmark: Annotated[str | None, _help("instead: measure the methods on labelled pictures of this data")] = None,
    pictures: Annotated[int, _help("how many of them --benchmark takes: more are surer, and take longer")] = 20,
    masks: Annotated[str | None, _help("for --benchmark: folder of masks, or .csv of boxes, of its pictures")] = None,
    data_root: DataRoot = "data",
    device: Device = "auto",
    precision: Annotated[str, _help("auto, bf16 or fp32")] = "fp32",
    format: Format = "text",
) -> int:
    """Draw what answers rest on: heat maps over pictures, and whether they can be believed."""
    from vitral.explanation.files import explain_files, files_for, question
    from vitral.predict import find_pictures, load
    from vitral.training.run import RunFolder

    if benchmark is not None:
        if images or target or compare or check or out or layer is not None:
            why = "it takes all pictures of DATA and the class that is answered"
            raise UsageError("--benchmark goes with --method, --pictures, --masks and --data-root alone", why=why)
        predictor = load(run, device=device, precision=precision)
        return _benchmark_methods(predictor, benchmark, data_root, method, pictures, masks, format)
    if masks is not None:
        raise UsageError("--masks goes with --benchmark", hint="--benchmark DATA")
    paths = find_pictures(images, "explain")
    predictor = load(run, device=device, precision=precision)
    asked = question(predictor, target, method, compare=compare, layer=layer, check=check)
    files = files_for(paths, asked, out, Path(run) / "explained" if RunFolder(run).is_run() else Path("explained"))
    results, failures, sheet = _draw_heatmaps(explain_files(asked, paths), files, format)
    if sheet and any(map(os.path.isdir, images)):
        from vitral.explanation.drawing import contact_sheet

        left_out = len(paths) - len(failures) - len(sheet)
        drawn = contact_sheet(sheet, files[0].parent / f"contact-sheet-{asked.name}.png", left_out=left_out)
        _say(f"Sheet    {drawn}")
    if format == "json":
        errors = [{"image": failure.name, "why": failure.why} for failure in failures]
        _print_json({"model": run, "explanations": results, "errors": errors})
    elif routing := [one.title for one in asked.used if one.routing]:
        _say(f"note: {', '.join(routing)}: where information was routed, not why this class")
    if failures:
        _say(f"{len(failures)} of {len(paths)} could not be read")
    return 1 if failures else 0


def _benchmark_methods(
    predictor: Any, data: str, data_root: str, method: str | None, pictures: int, masks: str | None, format: str
) -> int:
    """All methods, or one, measured on the pictures of `data` that are furthest from training."""
    from vitral.data import load as load_data
    from vitral.data.sources import planted
    from vitral.explanation.benchmark import MaskOf, benchmark
    from vitral.explanation.masks import masks_from
    from vitral.recipes.evaluation import in_classes_of
    from vitral.training.progress import counting

    dataset = in_classes_of(predictor, load_data(data, root=data_root))
    split = dataset[next(name for name in ("test", "val", "train") if name in dataset.splits)]
    truth: MaskOf | None = planted.masks_for(split) if planted.accepts(data) else None
    if masks is not None:
        truth = masks_from(masks, split)
    with counting(stderr(), "explaining", min(pictures, len(split))) as progress:
        found = benchmark(
            predictor, split, [method] if method else None, count=pictures, masks=truth, progress=progress
        )
    if format == "json":
        _print_json(found.to_json())
    else:
        found.print_table(stdout())
    return 0


def _draw_heatmaps(
    explained: Iterable[Any], files: Sequence[Path], format: str
) -> tuple[list[Any], list[Any], list[Any]]:
    """Write and tell each picture's maps as they come: what JSON says of them, what failed, and maps for a sheet."""
    from vitral.data.dataset import shown
    from vitral.explanation.drawing import SHEET_PICTURES, save, told_checks

    results: list[Any] = []
    failures: list[Any] = []
    sheet: list[Any] = []
    for found, file in zip(explained, files, strict=True):
        if isinstance(found, VitralError):
            failures.append(found)
            _say(f"error: {found}")
            continue
        save(found, file)
        if len(sheet) < SHEET_PICTURES:
            sheet.append(found[0])
        for one in found:
            if format == "json":
                results.append({**one.to_json(), "file": str(file)})
                continue
            said = [one.title, one.method, *told_checks(one)]
            said += [one.note] if one.checks.get("believable") is False else []
            print(f"{shown(one.name)}\t" + "\t".join([*said, shown(str(file))]))
    return results, failures, sheet


def look_inside(
    model: Annotated[
        str, _help("run folder, weights file, timm:NAME, hf:ORG/NAME, or a name such as S/16", shown="MODEL")
    ],
    /,
    *,
    data: Annotated[str | None, _help("pictures to measure on; by default the run's own", shown="[DATA]")] = None,
    split: Annotated[str | None, _help("train, val or test; by default val, else test, else train")] = None,
    pictures: Annotated[int, _help("how many to measure on, evenly spread over the split")] = 128,
    layers: Annotated[tuple[int, ...], _help("which, from 0; -1 is the last; by default all")] = (),
    prefix: Annotated[
        Literal["drop", "keep"], _help("class token and registers in attention distance: left out, or at distance 0")
    ] = "drop",
    components: Annotated[int, _help("principal components of the patch filters")] = 28,
    out: Annotated[str | None, _help("folder; else RUN/inspect or ./inspect/NAME")] = None,
    data_root: DataRoot = "data",
    device: Device = "auto",
    precision: Annotated[str, _help("auto, bf16 or fp32")] = "fp32",
    format: Format = "text",
) -> int:
    """Draw what a network has learned: patch filters, positions, how far its heads look (Figure 7 of the paper)."""
    from vitral.recipes.inspection import folder_for, inspect
    from vitral.training.progress import counting

    folder = folder_for(model) if out is None else Path(out)
    with counting(stderr(), "looking", pictures) as progress:
        found = inspect(
            model, data, split=split, pictures=pictures, layers=layers or None, prefix=prefix, components=components,
            out=folder, data_root=data_root, device=device, precision=precision, progress=progress,
        )  # fmt: skip
    if format == "json":
        _print_json(found.to_json())
        return 0
    for line in found.summary():
        print(line)
    for note in found.notes:
        _say(f"note: {note}")
    _say(f"Page     {folder / 'inspect.html'}")
    return 0


def summary(
    model: Annotated[str, _help("a name (S/16, mnist-7562), a run folder or a weights file", shown="MODEL")],
    /,
    *,
    image_size: Annotated[int | tuple[int, int] | None, _help("pixels: one number, or height and width")] = None,
    channels: Annotated[int | None, _help("1 for grey, 3 for colour")] = None,
    classes: Annotated[int | None, _help("outputs of the head")] = None,
    batch: Annotated[int, _help("pictures in the input")] = 1,
    full: Annotated[bool, _help("show every block, also those that are alike")] = False,
    format: Format = "text",
) -> int:
    """Show the layers of a named network, a run or a weights file: shapes, parameters, FLOPs, memory."""
    from vitral.model import config, summarize
    from vitral.weights.references import is_weights

    given = {"image_size": image_size, "channels": channels, "classes": classes}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    beside_runs = len(Path(model).parts) > 1 and Path(model).parent.is_dir()  # a run, though misspelt
    if is_weights(model) or beside_runs:
        from vitral.weights.load import read

        shape = dataclasses.replace(read(model).weights.config, **changes)
    else:
        shape = config(model, **changes)
    found = summarize(shape, batch=batch, name=model)
    if format == "json":
        _print_json(found.to_json())
    else:
        found.print_table(stdout(), full=full)
    return 0


def models(*, format: Format = "text") -> int:
    """List the networks that can be named."""
    from vitral.model.variants import catalogue

    entries = catalogue()
    if format == "json":
        _print_json(entries)
        return 0
    found = table()
    for name in ("name", "width", "layers", "heads", "MLP", "parameters", "note"):
        found.add_column(name, justify="left" if name in ("name", "note") else "right", no_wrap=name != "note")
    for entry in entries:
        sizes = (
            "" if entry[k] is None else f"{entry[k]:,}" for k in ("dim", "depth", "heads", "mlp_dim", "parameters")
        )
        found.add_row(entry["name"], *sizes, entry["note"])
    stdout().print(found)
    _say("\nAny patch size goes with any size: S/4, Ti/16x8; any stem: R50+S/16. Layers of one: vitral summary S/16")
    return 0


def quantize(
    run: Annotated[str, _help("run folder or weights file", shown="RUN")],
    data: Annotated[str | None, _help("pictures to measure on; by default the run's own", shown="[DATA]")] = None,
    /,
    *,
    pictures: Annotated[int, _help("how many training pictures the ranges are measured on")] = 256,
    judged: Annotated[int, _help("how many held-out pictures show what it costs and gains")] = 1000,
    bad_images: Annotated[Literal["error", "skip"], _help("unreadable pictures: stop, or leave them out")] = "error",
    data_root: DataRoot = "data",
    format: Format = "text",
) -> int:
    """Make --precision int8 possible for a network on a CPU, and measure whether it pays."""
    from vitral.recipes.quantization import quantize as measure
    from vitral.training.progress import counting

    with counting(stderr(), "measuring", None) as progress:
        found = measure(
            run, data, pictures=pictures, judged=judged, data_root=data_root, bad_images=bad_images, progress=progress
        )
    if format == "json":
        _print_json({"model": run, **found.to_json()})
    else:
        found.print_table(stdout())
        _say(f"Ranges   {found.file}")
    return 0


def data_check(
    data: Annotated[str, _help("folder, .csv, .tar, .zip, IDX folder, or a name", shown="DATA")],
    /,
    *,
    data_root: DataRoot = "data",
    format: Format = "text",
) -> int:
    """Look through a data set: counts, sizes, unreadable files, duplicates, leaks between splits."""
    from vitral.data import load
    from vitral.data.check import check

    found = check(load(data, root=data_root))
    if format == "json":
        _print_json(found.to_json())
    else:
        found.print_table(stdout())
    return 0 if found.is_sound else 1


def data_cache(
    *,
    clear: Annotated[bool, _help("remove them all; runs that read them go on")] = False,
    format: Format = "text",
) -> int:
    """List the decoded pictures that are kept on disk, or remove them with --clear."""
    from datetime import datetime

    from vitral.data.cache import PixelCache

    cache = PixelCache()
    entries = cache.entries()
    if clear:
        cache.clear()
    total = sum(entry.nbytes for entry in entries)
    if format == "json":
        listed = [dataclasses.asdict(entry) for entry in entries]
        _print_json({"folder": str(cache.folder), "bytes": total, "cleared": clear, "entries": listed})
        return 0
    rows = table()
    for name in ("pictures of", "pictures", "MiB", "last used"):
        rows.add_column(name, justify="right" if name in ("pictures", "MiB") else "left")
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
        rows.add_row(Text(entry.title), f"{entry.pictures:,}", f"{entry.nbytes / 2**20:,.1f}", used)
    stdout().print(rows if entries else "nothing is kept")
    _say(f"{total / 2**20:,.1f} MiB {'removed from' if clear else 'in'} {cache.folder}")
    return 0


def convert(
    source: Annotated[str, _help("run, weights file, folder, timm:NAME or hf:ORG/NAME", shown="SOURCE")],
    target: Annotated[str, _help("file or folder to write; it must not exist", shown="TARGET")],
    /,
    *,
    to: Annotated[Literal["native", "timm", "hf", "torchvision", "jax"], _help("whose format to write")] = "native",
    image_size: Annotated[int | tuple[int, int] | None, _help("resize positions to this size")] = None,
    patch_size: Annotated[int | tuple[int, int] | None, _help("resize the patches' kernels to this size")] = None,
    channels: Annotated[int | None, _help("make the first layer fit this many channels")] = None,
    classes: Annotated[int | None, _help("a head for so many classes, with --new-head")] = None,
    new_head: Annotated[bool, _help("replace the head by zeros")] = False,
    from_: Annotated[str | None, _help("format of the source, where it cannot be told", name="from")] = None,
    heads: Annotated[int | None, _help("attention heads, where the source does not tell")] = None,
    scheme: Annotated[str | None, _help("how positions are resized; by default as the source's origin does")] = None,
    account: Annotated[bool, _help("show what became of every tensor")] = False,
    format: Format = "text",
) -> int:
    """Turn weights of any known format into those of another library, and tell where every tensor went."""
    from vitral.weights.convert import convert

    found = convert(
        source, target, to, format=from_, heads=heads, scheme=scheme, new_head=new_head, image_size=image_size,
        patch_size=patch_size, channels=channels, classes=classes,
    )  # fmt: skip
    if format == "json":
        _print_json(found.to_json())
    else:
        found.print_table(stdout(), full=account)
        for path in found.written:
            print(f"wrote {path}")
    return 0


def bench(
    models: Annotated[
        tuple[str, ...], _help("names such as S/16, run folders, weights files; by default S/16", shown="[MODEL …]")
    ] = (),
    /,
    *,
    what: Annotated[
        tuple[Literal["inference", "training", "jpeg"], ...],
        _help("inference, one training step, or training from picture files"),
    ] = ("inference", "training"),
    image_size: Annotated[tuple[int, ...], _help("pixels, one or several sizes; by default the network's")] = (),
    batch: Annotated[
        tuple[int, ...], _help("pictures, one or several; by default 1 and 32, in training 32, on a GPU 256")
    ] = (),
    precision: Annotated[tuple[str, ...], _help("auto, bf16, fp32, or both of them")] = ("auto",),
    device: Device = "auto",
    peers: Annotated[
        tuple[str, ...], _help("timm, transformers, torchvision, vit-pytorch, vit-pytorch-flash; or all, or none")
    ] = ("all",),
    engines: Annotated[
        tuple[str, ...], _help("of ours in inference, beside auto: plain, int8, openvino, openvino-int8; or all")
    ] = ("auto",),
    compile: Annotated[bool, _help("also under torch.compile, ours and each peer")] = False,
    rounds: Annotated[int, _help("turns that everyone takes")] = 5,
    data: Annotated[str | None, _help("folder or archive of pictures that jpeg trains from")] = None,
    data_root: DataRoot = "data",
    out: Annotated[str | None, _help("also write everything that was measured to this JSON file")] = None,
    format: Format = "text",
) -> int:
    """Measure speed and memory beside the other libraries that are installed, all in turn."""
    from vitral.bench.command import Asked, bench
    from vitral.weights.files import write_text

    asked = Asked(
        models or ("S/16",), what, image_size, batch, precision, device, peers, engines, compile, rounds, data,
        data_root,
    )  # fmt: skip
    with _measuring() as progress:
        found = bench(asked, progress)
    if format == "json":
        _print_json(found.to_json())
    else:
        found.print_table(stdout())
    for note in found.notes:
        _say(f"note: {note}")
    if out:
        write_text(Path(out), json.dumps(found.to_json(), indent=1) + "\n")
        _say(f"Figures  {out}")
    return 0


@contextlib.contextmanager
def _measuring() -> Iterator[Callable[[str, int, int], None]]:
    """A bar; the function to call with what is being measured, how much of it is done, and how much there is."""
    from vitral.training.progress import progress_bar

    with progress_bar(stderr()) as bar:
        task = bar.add_task("", total=None, note="")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "explain": explain,
    "inspect": look_inside,
    "summary": summary,
    "models": models,
    "convert": convert,
    "quantize": quantize,
    "data check": data_check,
    "data cache": data_cache,
    "bench": bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; no traceback without `--debug`."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a reader that has left is caught
        return code
    except Interrupted as stopped:
        what = "Stopped and saved. To go on" if stopped.saved else "Stopped before anything was saved. To begin anew"
        _say(f"\n{what}:\n  {_program()}{stopped.command.removeprefix('vitral')}")
        return stopped.exit_code
    except VitralError as error:
        if debug:
            raise
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("\nStopped.")
        return 130
    except BrokenPipeError:  # `vitral models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        from vitral.device import out_of_memory

        said = " ".join(str(error).split())[:300]
        if out_of_memory(error):
            _say("error: not enough memory" + f"\n  why: {said}" * bool(said))
            _say(
                "  try: fewer or smaller pictures together, or a smaller network; where a GPU has no more, --device cpu"
            )
            return 2
        _say(f"error: {type(error).__name__}: {said}")
        _say("  this is a mistake of vitral's, not yours; --debug shows where, and a report of it is welcome")
        return 2


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        import vitral

        print(f"vitral {vitral.__version__}")
        return 0
    name, rest = " ".join(words[:2]), words[2:]
    if name not in COMMANDS:
        name, rest = words[0], words[1:]
    if family := [one for one in COMMANDS if one.startswith(f"{name} ")]:
        typed = " ".join(word for word in words[:2] if not word.startswith("-"))
        raise unknown("command", typed, family, hint=f"vitral {family[0]} --help")
    if name.startswith("-"):
        raise unknown("option", name, ("--help", "--version"), hint="vitral --help")
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS, hint="vitral --help")
    command = COMMANDS[name]
    if command is train:
        return train(**_train_options(rest))
    parameters = inspect.signature(command).parameters.values()
    _refuse_unknown_options(rest, [one.name for one in parameters if one.kind is one.KEYWORD_ONLY], name)
    return _parse(command, rest, name)


def _overview() -> str:
    lines = ["Vision Transformers: train, measure, understand and ship them.", "", "usage: vitral COMMAND …", ""]
    width = max(map(len, COMMANDS))
    lines += [f"  {name:<{width}}  {(command.__doc__ or '').strip()}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "vitral COMMAND --help tells the rest. To begin: vitral demo"])


def _train_options(words: Sequence[str]) -> dict[str, Any]:
    """The options that were typed, of a class made from the fields of `Run`: the command line has Python's names."""
    from vitral.training.run import Run

    hints = typing.get_type_hints(Run)
    fields: list[Any] = []
    for item in sorted(dataclasses.fields(Run), key=_place):
        about: Any = tyro.conf.arg(help=item.metadata["help"], help_behavior_hint=_SETTLED.get(item.name, ""))
        kind = _without_none(hints[item.name])
        default = False if kind is bool and item.default is None else item.default
        if item.name == "data":
            kind, default = Annotated[kind, tyro.conf.Positional], None
            about = dataclasses.replace(about, metavar="[DATA]")
        fields.append((item.name, Annotated[kind, about], dataclasses.field(default=default)))
    common: list[Any] = []
    for name, kind, default, text in (
        ("resume", bool, False, "go on with the run in --out from where it stopped, to the same bits on a processor"),
        ("overwrite", bool, False, "replace the run in --out"),
        ("quiet", bool, False, "print nothing but the result"),
        ("format", Literal["text", "json"], "text", "how the result is printed"),
    ):
        about = _help(text) if default is not False else tyro.conf.arg(help=text, help_behavior_hint="")
        kind = Annotated[kind, about, tyro.conf.FlagCreatePairsOff]
        common.append((name, kind, dataclasses.field(default=default)))
    fields[len(_FIRST) : len(_FIRST)] = common
    options = dataclasses.make_dataclass("TrainOptions", fields, frozen=True)
    options.__doc__ = f"{train.__doc__}\n\nWhat is not typed is for the plan, which is told before training."
    _refuse_unknown_options(words, [name for name, *_ in fields if name != "data"], "train")
    parsed = _parse(options, words, "train")
    typed = {_option_name(word) for word in words if word.startswith("--")}
    if parsed.data is not None:
        typed.add("data")
    return {name: getattr(parsed, name) for name, *_ in fields if name in typed}


def _without_none(kind: Any) -> Any:
    """The type of an option that is typed: None is what it has where it is not."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    return kind if type(None) not in typing.get_args(kind) else functools.reduce(operator.or_, options)


_FIRST = (
    "data", "init", "recipe", "model", "image_size", "epochs", "minutes", "batch_size", "lr", "augment", "early_stop",
    "seed", "device", "precision", "out",
)  # fmt: skip
"""What is typed most often stands first in `--help`."""


def _place(item: Any) -> int:
    return _FIRST.index(item.name) if item.name in _FIRST else len(_FIRST)


_SETTLED = {
    "data": "(default: digits)",
    "data_root": "(default: data)",
    "seed": "(default: 0)",
    "recipe": "(default: small; with --init finetune)",
    "out": "(default: runs/NAME)",
    "device": "(default: auto)",
    "bad_images": "(default: error)",
    "freeze": "(default: nothing)",
}
"""What `--help` says of options that no plan decides."""


def _option_name(word: str) -> str:
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    return name.removeprefix("no_")


def _refuse_unknown_options(words: Sequence[str], names: Iterable[str], command: str) -> None:
    known = {*(name.rstrip("_") for name in names), "help"}  # `from_`, where Python has the word for itself
    for word in words:
        name = _option_name(word)
        if not word.startswith("--") or len(word) == 2 or name in known:
            continue
        hint = f"vitral {command} --help"
        if name in _PLACED:
            where = " ".join(["RUN"] * (command == "evaluate" and name == "data") + [_PLACED[name]])
            raise UsageError(f"{_PLACED[name]} is typed without --{name}", hint=f"vitral {command} {where}")
        typed = word.partition("=")[0]
        shown = _negated if typed.startswith("--no-") else flag
        meant = {shown(other): shown(ours) for other, ours in _CALLED.items() if ours in known}
        raise unknown("option", typed, map(shown, known), hint=hint, elsewhere=meant)


def _negated(name: str) -> str:
    return flag(f"no_{name}")


_CALLED = {
    "learning_rate": "lr", "batch": "batch_size", "bs": "batch_size", "wd": "weight_decay", "opt": "optimizer",
    "optim": "optimizer", "img_size": "image_size", "input_size": "image_size", "size": "image_size",
    "num_epochs": "epochs", "sched": "schedule", "scheduler": "schedule", "lr_scheduler": "schedule",
    "warmup_epochs": "warmup", "clip_grad": "clip", "grad_clip": "clip", "grad_accum_steps": "accumulate",
    "smoothing": "label_smoothing", "reprob": "erase", "random_erasing": "erase", "model_ema": "ema",
    "num_workers": "workers", "pretrained": "init", "checkpoint": "init", "weights": "init", "output": "out",
    "output_dir": "out", "save_dir": "out", "val_split": "val_fraction", "patience": "early_stop",
    "random_seed": "seed", "dtype": "precision", "amp": "precision", "arch": "model", "topk": "top", "k": "top",
}  # fmt: skip
"""What others call our options: found where they are typed, not understood."""


_PLACED = {"data": "DATA", "run": "RUN", "model": "MODEL", "images": "IMAGES"}
"""What has no flag where it stands first; `--data` is an option of commands that have it."""


def _parse(command: Callable[..., Any], words: Sequence[str], name: str) -> Any:
    """Call `command` with what was typed; tyro's complaint becomes one of ours, of at most five lines."""
    complaint = io.StringIO()
    if not {"-h", "--help"}.isdisjoint(words):
        words = ["--help"]  # beside other words tyro's help leaves out what they stand for
    try:
        with contextlib.redirect_stderr(complaint), warnings.catch_warnings():
            # options that the plan decides have None as their default whatever their type: meant, and not for the user
            warnings.simplefilter("ignore", UserWarning)
            call = tyro.cli(_deferred(command), args=words, prog=f"vitral {name}", description=command.__doc__)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _readable(_first_paragraph(complaint.getvalue()), words, f"vitral {name} --help") from None
    return call()


def _first_paragraph(panel: str) -> str:
    """What tyro says in its box, without title, border and advice. The title is in the border, or, where the terminal
    has ASCII only and there is no border, in a paragraph of its own.
    """
    lines = [line.strip("│ ") for line in panel.splitlines()]
    paragraphs = [list(lines) for rule, lines in itertools.groupby(lines, _is_rule) if not rule]
    told = paragraphs[0 if panel.startswith("╭") else 1 :]
    return " ".join(" ".join(told[0]).split()) if told else ""


def _readable(complaint: str, words: Sequence[str], hint: str) -> UsageError:
    """tyro's complaint about these words, without Python's for numbers and choices."""
    if found := re.match(r"invalid choice '(.*)' for argument '(\S+)'. Expected one of \((.*)\)", complaint):
        return unknown(f"value of {found[2]}:", found[1], re.findall(r"'([^']*)'", found[3]), hint=hint)
    if found := re.match(r"Unrecognized options: (.*)", complaint):
        what = "unknown option" if found[1].startswith("-") else "more words than it reads"
        before = dict(zip(words[1:], words, strict=False)).get(found[1].split()[0], "")
        switch = before.startswith("--") and "=" not in before
        why = f"{before} takes no value: it is typed or left out" if switch else None
        return UsageError(f"{what}: {found[1]}", why=why, hint=hint)
    if found := re.match(r"Missing value for argument '(\S+)'", complaint):
        return UsageError(f"{found[1]} needs a value", hint=hint)
    option, value = re.match(r"Error parsing (\S+):", complaint), re.search(r"'([^']*)'", complaint)
    kind = re.search(r"\b(float|int)\b", complaint)
    if option is None or value is None or kind is None:
        return UsageError(complaint or "cannot read the command", hint=hint)
    number = "a number" if kind[1] == "float" else "a whole number"
    return UsageError(f"{option[1]} takes {number}, not '{value[1]}'", hint=hint)


def _is_rule(line: str) -> bool:
    return line.startswith(("╭", "╰")) or (line != "" and set(line) <= {"─", "-"})


def _deferred(command: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """A function of the same signature that only remembers its arguments: errors of the work are not the parser's."""

    @functools.wraps(command)
    def remember(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(command, *args, **kwargs)

    return tyro.conf.configure(tyro.conf.DisallowNone)(remember)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _program() -> str:
    """How to call vitral here: by its name, or by its path where the shell does not find it."""
    own = os.path.basename(sys.argv[0]) == "vitral" and not shutil.which("vitral")
    return os.path.relpath(sys.argv[0]) if own else "vitral"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
