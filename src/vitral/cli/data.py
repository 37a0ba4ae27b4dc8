"""`vitral data check`, `vitral data shard` and `vitral data cache`."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated

from rich.text import Text

from vitral.cli.check import Files, check_images, check_labels
from vitral.cli.options import BadImages, ClassFolders, DataRoot, Device, Format, Help
from vitral.cli.output import print_json, say
from vitral.console import command_line, counting, stderr, stdout, table
from vitral.defects import Kind
from vitral.errors import Interrupted, UsageError, check_positive
from vitral.wording import count

Data = Annotated[str, Help("folder, .csv, .tar, .zip, IDX folder, shards, or the name of a data set", "DATA")]


def data_check(
    data: Data,
    *,
    labels: Annotated[
        bool, Help("rank labels by how likely they are wrong, with a sheet of the most doubtful images")
    ] = False,
    near: Annotated[
        bool, Help("also search near-duplicates by features of a network, and measure how many it finds")
    ] = False,
    init: Annotated[str, Help("weights of the features: a run, a file, timm:NAME, …")] = "backbone",
    folds: Annotated[int, Help("with --labels: number of folds")] = 5,
    write: Annotated[
        str | None, Help("write all findings to this .csv; with --labels, all images with suggested labels")
    ] = None,
    move_to: Annotated[
        str | None, Help("move the files of the findings to this folder; with --labels, those likely wrong")
    ] = None,
    move_back: Annotated[bool, Help("move files back; DATA is a folder that --move-to wrote")] = False,
    kinds: Annotated[tuple[Kind, ...], Help("with --write and --move-to: only these findings")] = (),
    sheet: Annotated[
        str | None, Help("draw near-duplicates side by side in this .png; with --labels, doubtful labels")
    ] = None,
    device: Device = "auto",
    bad_images: BadImages = "skip",
    class_folders: ClassFolders = None,
    levels: Annotated[
        tuple[int, int] | None, Help("black and white of floats and of gray images with 16 bits and more")
    ] = None,
    data_root: DataRoot = "data",
    format: Format = "text",
) -> int:
    """Check a data set: unreadable files, copies, leaks between splits, blurred and odd images, doubtful labels."""
    from vitral.data import load
    from vitral.data.checks.moving import check_movable
    from vitral.data.checks.moving import move_back as take_back
    from vitral.data.targets import Labeling

    if move_back:
        say(f"moved {count(take_back(Path(data)), 'file')} back")
        return 0
    files = Files(write, move_to, sheet, kinds)
    files.check()
    if near and labels:
        raise UsageError("--near and --labels are two checks", hint="leave one out")
    dataset = load(data, root=data_root, wanted=Labeling(class_folders=class_folders or "auto"))
    if move_to is not None:
        check_movable(dataset, Path(move_to))
    if labels:
        return check_labels(dataset, init, folds, bad_images, files, device, format)
    return check_images(dataset, near, init, levels, files, device, format)


def data_shard(
    data: Data,
    *,
    out: Annotated[str, Help("new folder of the shards")],
    shard_mb: Annotated[int, Help("size of a shard in MB; the last one is smaller")] = 256,
    val_fraction: Annotated[float, Help("share of train to write as val, if there is none")] = 0.0,
    seed: Annotated[int, Help("seed of the order of the images")] = 0,
    data_root: DataRoot = "data",
    bad_images: BadImages = "error",
    class_folders: ClassFolders = None,
    format: Format = "text",
) -> int:
    """Pack a data set into tar shards in random order, with an index and hashes. Run it again to continue."""
    from vitral.data import load
    from vitral.data.checks.groups import near_sets, with_near
    from vitral.data.checks.validate import drop_unopened, left_out
    from vitral.data.shards.writing import write_shards
    from vitral.data.splits import with_validation
    from vitral.data.targets import Labeling

    check_positive(shard_mb=(shard_mb, 256))
    dataset = load(data, root=data_root, wanted=Labeling(class_folders=class_folders or "auto"))
    dataset = drop_unopened(dataset) if bad_images == "skip" else dataset
    if val_fraction and "val" not in dataset.splits:
        dataset = with_near(dataset, {"train": near_sets(dataset["train"])})
    dataset = with_validation(dataset, val_fraction, seed)
    total = sum(map(len, dataset.splits.values()))
    try:
        with counting(stderr(), "sharding", total) as done:
            written = write_shards(
                dataset, out, shard_bytes=shard_mb * 10**6, seed=seed, skip=bad_images == "skip", progress=done
            )
    except KeyboardInterrupt:
        typed = {"out": out, "shard_mb": shard_mb, "val_fraction": val_fraction, "seed": seed}
        typed |= {"data_root": data_root, "bad_images": bad_images, "class_folders": class_folders}
        defaults = {name: one.default for name, one in inspect.signature(data_shard).parameters.items()}
        changed = {name: value for name, value in typed.items() if value != defaults[name]}
        raise Interrupted(command_line("data", ["shard", data], changed)) from None
    if format == "json":
        print_json({"data": data, **written.to_json()})
    for split, (shards, images, size) in written.splits.items():
        counted = count(shards, "shard")
        say(f"{split:8} {count(images, 'image')} in {counted}, {size / 1e6:,.1f} MB")
    if written.kept:
        say(f"kept {written.kept:,} shards from before the interruption")
    if note := left_out(written.left_out):
        say(note)
    return 0


def data_cache(
    *,
    clear: Annotated[bool, Help("remove all of them; runs that are reading them continue")] = False,
    format: Format = "text",
) -> int:
    """List the decoded images and remote shards in the caches on disk; remove them with --clear."""
    from datetime import datetime

    from vitral.data.pixel_cache import PixelCache
    from vitral.data.shards.cache import ShardCache

    cache, shards = PixelCache(), ShardCache()
    entries, shard_bytes = cache.entries(), shards.bytes
    if clear:
        cache.clear()
        shards.clear()
    total = sum(entry.nbytes for entry in entries)
    if format == "json":
        listed = [dataclasses.asdict(entry) for entry in entries]
        remote = {"folder": str(shards.folder), "bytes": shard_bytes}
        print_json({"folder": str(cache.folder), "bytes": total, "cleared": clear, "entries": listed, "shards": remote})
        return 0
    rows = table()
    for name in ("images of", "images", "MiB", "last used"):
        rows.add_column(name, justify="right" if name in ("images", "MiB") else "left")
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
        rows.add_row(Text(entry.title), f"{entry.images:,}", f"{entry.nbytes / 2**20:,.1f}", used)
    stdout().print(rows if entries else "the cache is empty")
    where = "removed from" if clear else "in"
    say(f"{total / 2**20:,.1f} MiB {where} {cache.folder}")
    if shard_bytes:
        say(f"{shard_bytes / 2**20:,.1f} MiB of remote shards {where} {shards.folder}")
    return 0
