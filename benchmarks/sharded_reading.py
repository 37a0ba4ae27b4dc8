"""Images in shards beside images in files, and the cost of an index: time to open it, memory for each record.

The same JPEGs are read from a folder and from shards, in the same random order, by one thread, from the system's cache:
bytes alone, and decoded. The index is of shards that are sparse files, as many as stated; a separate process opens it,
cuts a validation split, takes the fingerprint and orders an epoch, as `vitral train` does. Memory is anonymous
(`RssAnon`) and mapped (`RssFile`, the index, which the system may drop), above that after importing; the peak counts
both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio
from vitral.data import Split, load
from vitral.data.shards.index import RECORD, Index, Manifest, Shard, digest_of
from vitral.data.shards.writing import write_shards

_OPEN = """
import json, sys, time
import torch
from vitral.data import load
from vitral.data.checks.fingerprint import Fingerprint
from vitral.data.shards.order import epoch_order
from vitral.data.splits import with_validation

def memory():
    kinds = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line[:3] == "Rss"}
    return kinds["RssAnon"], kinds["RssFile"]

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

before = memory()
started = time.perf_counter()
dataset = load(sys.argv[1])
opened = time.perf_counter() - started
parts = with_validation(dataset)
Fingerprint.of(dataset, parts)
ready = time.perf_counter() - started
order = epoch_order(parts["train"], torch.Generator().manual_seed(0))
found = [now - then for now, then in zip(memory(), before)]
print(json.dumps([opened, ready, *found, peak() - sum(before)]))
"""


def run(options: Options) -> list[Table]:
    """Measure reading, then opening."""
    with tempfile.TemporaryDirectory() as folder:
        return [_reading(Path(folder), options), _opening(Path(folder), options)]


def _reading(root: Path, options: Options) -> Table:
    count = 600 if options.quick else 4000
    rng = np.random.default_rng(0)
    for i in range(count):
        place = root / "photos" / f"class{i % 10}"
        place.mkdir(parents=True, exist_ok=True)
        smooth = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((256, 192))
        smooth.save(place / f"{i}.jpg", quality=90)
    write_shards(load(root / "photos"), root / "shards", shard_bytes=4 << 20)
    shards = load(root / "shards")["train"]
    places = {name.rpartition("photos/")[2]: i for i, name in enumerate(load(root / "photos")["train"].names)}
    files = load(root / "photos")["train"].select([places[name.rpartition(":")[2]] for name in shards.names])
    order = rng.permutation(count).tolist()

    def read(split: Split) -> None:
        for i in order:
            split.fetch(i)

    def decode(split: Split) -> None:
        for i in order:
            split.image(i, 3)

    rows = []
    for way, work in (("bytes", read), ("decoded", decode)):
        programs = {"files": lambda work=work: work(files), "shards": lambda work=work: work(shards)}
        found = alternate(programs, rounds=3 if options.quick else 9)
        for source, sample in found.items():
            speed = 1 / ratio(sample, found["files"])
            rows.append({"what": way, "source": source, **sample.columns(1e6 / count), "speed": speed})
    columns = {
        "what": "read",
        "source": "from",
        "n": "n|d",
        "median": "µs an image|.1f",
        "least": "least|.1f",
        "greatest": "greatest|.1f",
        "speed": "speed : files|.2f",
    }
    return Table(f"{count:,} JPEGs of 256 × 192 in random order", columns, rows)


def _opening(root: Path, options: Options) -> Table:
    rows = []
    sizes = ((10, 10**5), (1000, 10**5)) if options.quick else ((10, 10**5), (10_000, 10**6), (10_000, 10**7))
    for shards, records in sizes:
        folder = root / f"{shards}-{records}"
        write_empty(folder, shards, records // shards)
        command = [sys.executable, "-c", _OPEN, str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        opened, ready, anonymous, mapped, peak = json.loads(done.stdout)
        rows.append(
            {
                "shards": shards,
                "records": records,
                "open": opened,
                "ready": ready,
                "anonymous": anonymous / records,
                "mapped": mapped / records,
                "peak": peak / records,
            }
        )
    columns = {
        "shards": "shards|,d",
        "records": "images|,d",
        "open": "s to open|.2f",
        "ready": "s to split|.2f",
        "anonymous": "bytes an image|.0f",
        "mapped": "and mapped|.0f",
        "peak": "peak of both|.0f",
    }
    return Table("Opening an index", columns, rows)


def write_empty(folder: Path, shards: int, records: int) -> None:
    """Write a folder of sparse shards with this many records each, and their index."""
    folder.mkdir()
    size, count = 110_592, shards * records
    for k in range(shards):
        with open(folder / f"train-{k:06}.tar", "wb") as file:
            file.truncate(size * records)
    rows = np.zeros(count, RECORD)
    number = np.arange(count)
    rows["offset"], rows["size"], rows["digest"] = number % records * size, size - 2048, number + 1
    rows["label"] = np.random.default_rng(0).integers(0, 1000, count)
    names = np.char.add("train/n01440764/", np.char.zfill(number.astype(str), 9)).astype("S25")
    text = np.frombuffer(names.tobytes(), np.uint8)
    rows["name"] = (number + 1) * 25
    about = tuple(Shard(f"train-{k:06}.tar", records, size * records, "0" * 64) for k in range(shards))
    index = Index(about, rows, text, digest_of(rows, text))
    Manifest("photos", tuple(map(str, range(1000))), {"train": index}).save(folder)
