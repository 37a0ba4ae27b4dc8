"""JPEGs of 500 × 375 over HTTP, one an inquiry and sixteen, beside `Predictor.stream` on the same bytes in process, and
beside the servers of `benchmarks/servers/`: LitServe, and an application in FastAPI that computes in ONNX Runtime.
All have the same weights in fp32, the same decoder and the same limits of batches. Client and server share the cores.
LitServe has two processes, one for HTTP and one that computes; so has gunicorn, with one core each.

"Throughput" is a closed loop: some connections, each of which waits for its answer; rounds alternate. "Latency" has one
connection, then random arrivals at 70 % of the throughput, then at three times the throughput: the server refuses what
it cannot do, and the answers of the second half may not take longer than those of the first.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitral
from benchmarks.load import Answer, closed_loop, multipart, open_loop, request
from benchmarks.machine import ROOT
from benchmarks.results import Options, Table
from vitral.bench.harness import Sample, alternate, ratio
from vitral.data.images.lazy_torchvision import torchvision
from vitral.data.images.preprocessing import Preprocessing
from vitral.model import create
from vitral.serving.server import bind
from vitral.weights import native
from vitral.weights.native import Weights

SETS = ("imagenet-samples.tar", "hymenoptera.tar")
SIZE = (500, 375)
BATCH, WAIT, QUEUE = 16, 0.002, 256
CONNECTIONS = 32
NETWORKS = {"demo": 2_000, "S/16": 96}
"""Network → images of a round, some seconds each."""
PEERS = {"fastapi": "onnxruntime", "litserve": "litserve"}
"""Server of `benchmarks.servers` → the package that it needs."""
TOGETHER = "vitral, together"
WORKERS = "workers"
TITLES = {
    "fastapi": "FastAPI and ONNX Runtime",
    "litserve": "LitServe",
    "vitral": "vitral serve",
    WORKERS: "vitral under gunicorn, two workers",
    TOGETHER: "vitral serve",
}


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    name: str
    url: str
    path: str
    pid: int

    def cpu(self) -> float:
        """Seconds of CPU of all its processes so far, which are a session of their own (Linux)."""
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = file.read_text().rpartition(")")[2].split()  # proc(5), from the third field on
                if int(fields[3]) == self.pid:
                    ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def requests(self, images: Sequence[bytes]) -> list[bytes]:
        """A request for each image."""
        if self.name != "litserve":
            return [request(self.url, self.path, image) for image in images]
        bodies = [json.dumps({"image": base64.b64encode(image).decode()}).encode() for image in images]
        return [request(self.url, self.path, body, "application/json") for body in bodies]


def run(options: Options) -> list[Table]:
    """Throughput of all, then latency of the servers, for each network that is named (all)."""
    images = _noise() if options.quick else _photographs(options)
    if not images:
        return []
    torchvision()
    rates: list[dict[str, Any]] = []
    latencies: list[dict[str, Any]] = []
    named = [name for name in NETWORKS if name in options.names]
    for network in named or (["demo"] if options.quick else list(NETWORKS)):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            weights = "demo" if network == "demo" else _weights(network, Path(folder))
            servers = [stack.enter_context(_serving(name, weights, Path(folder))) for name in _names()]
            sent = list(itertools.islice(itertools.cycle(images), 32 if options.quick else NETWORKS[network]))
            contenders = list(_contenders(weights, servers, sent))
            rounds = 1 if options.quick else options.rounds or 3
            found = alternate({one.name: one for one in contenders}, rounds=rounds)
            rates += [{"network": network, **row} for row in _rates(contenders, found, len(sent))]
            if not options.quick:
                latencies += [{"network": network, **_latency(one, sent, found[one.name])} for one in servers]
    return [_rate_table(rates), *([_latency_table(latencies)] if latencies else [])]


def _names() -> list[str]:
    """The servers that are installed."""
    missing = [name for name, package in PEERS.items() if importlib.util.find_spec(package) is None]
    for name in missing:
        print(f"not installed, left out: {TITLES[name]} (pip install {PEERS[name]})")
    managed = [WORKERS] if importlib.util.find_spec("gunicorn") else []
    return ["vitral", *managed, *(name for name in PEERS if name not in missing)]


@contextlib.contextmanager
def _serving(name: str, weights: str, folder: Path) -> Iterator[Server]:
    """A server in a process of its own, warmed by one request."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    path = "/v1/predict" if name in ("vitral", WORKERS) else "/predict"
    if name == WORKERS:
        made = f"vitral.serving:app({{'it': {weights!r}}}, precision='fp32', device='cpu')"
        words = ["gunicorn", "-k", "uvicorn_worker.UvicornWorker", "-w", "2", "-b", f"127.0.0.1:{port}", made]
    elif name == "vitral":
        words = ["vitral", "serve", f"it={weights}", "--port", str(port), "--precision", "fp32", "--device", "cpu"]
        words += ["--batch-size", str(BATCH), "--batch-wait", str(1000 * WAIT), "--queue", str(QUEUE)]
    else:
        words = [f"benchmarks.servers.{name}", weights, str(port), str(BATCH), str(WAIT)]
    with open(folder / f"{name}.log", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **({"OMP_NUM_THREADS": "1"} if name == WORKERS else {})},
        )
        try:
            server = Server(name, f"http://127.0.0.1:{port}", path, process.pid)
            _wait_for(server, process, log)
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):  # LitServe leaves processes behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(server: Server, process: subprocess.Popen[bytes], log: io.TextIOWrapper, seconds: float = 180) -> None:
    end, image = time.monotonic() + seconds, _encoded(Image.new("RGB", SIZE), "JPEG")
    while closed_loop(server.url, server.requests([image]), 1)[0].status != 200:
        if process.poll() is not None or time.monotonic() > end:
            log.seek(0)
            raise RuntimeError(f"{server.name} does not serve:\n{log.read()[-3000:]}")
        time.sleep(0.2)


@dataclass(frozen=True)
class Contender:
    """A way to predict all images, with the seconds of CPU that each round took."""

    name: str
    predict: Callable[[], object]
    cpu: Callable[[], float]
    seconds: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        before = self.cpu()
        self.predict()
        self.seconds.append(self.cpu() - before)


def _contenders(weights: str, servers: Sequence[Server], images: Sequence[bytes]) -> Iterator[Contender]:
    predictor = vitral.load(weights, device="cpu", precision="fp32")

    def stream() -> None:
        for _ in predictor.stream(images):
            pass

    yield Contender("Predictor.stream", stream, time.process_time)
    for one in servers:
        yield Contender(one.name, _all_answered(one.url, one.requests(images), CONNECTIONS), one.cpu)
        if one.name == "vitral":
            parts = [images[at : at + BATCH] for at in range(0, len(images), BATCH)]
            together = [multipart(one.url, one.path, part) for part in parts]
            yield Contender(TOGETHER, _all_answered(one.url, together, 4), one.cpu)


def _all_answered(url: str, requests: Sequence[bytes], connections: int) -> Callable[[], None]:
    def send() -> None:
        answers = closed_loop(url, requests, connections)
        if wrong := [one.status for one in answers if one.status != 200]:
            raise RuntimeError(f"{len(wrong)} of {len(answers)} requests failed: {wrong[:5]}")

    return send


def _rates(contenders: Sequence[Contender], found: dict[str, Sample], count: int) -> Iterator[dict[str, Any]]:
    stream = contenders[0]
    for one in contenders:
        sample = found[one.name]
        yield {
            "way": TITLES.get(one.name, one.name),
            "n": sample.n,
            "median": count / sample.median,
            "images": None if one is stream else BATCH if one.name == TOGETHER else 1,
            "least": count / max(sample.seconds),
            "greatest": count / min(sample.seconds),
            "ratio": ratio(found[stream.name], sample),
            "cpu": 1000 * min(one.seconds) / count,
            "others": None if one is stream or WORKERS not in found else ratio(sample, found[WORKERS]),
        }


def _rate_table(rows: list[dict[str, Any]]) -> Table:
    columns = {
        "network": "network",
        "way": "by",
        "images": "images a request|d",
        "n": "n|d",
        "median": "images/s|.0f",
        "least": "least|.0f",
        "greatest": "greatest|.0f",
        "ratio": "rate : stream|.2f",
        "others": "two workers : it|.2f",
        "cpu": "CPU, ms an image|.2f",
    }
    return Table(f"Throughput, fp32, {CONNECTIONS} connections, batches of at most {BATCH}", columns, rows)


def _latency(server: Server, images: Sequence[bytes], throughput: Sample) -> dict[str, Any]:
    """Milliseconds of one request, at 70 % of the throughput and at three times as much."""
    rate, requests = len(images) / throughput.median, server.requests(images)
    alone = [one.seconds for one in closed_loop(server.url, requests[: max(20, len(images) // 10)], 1)]
    usual = open_loop(server.url, requests, 0.7 * rate)
    flood = list(itertools.islice(itertools.cycle(requests), max(3 * len(requests), 4 * QUEUE)))
    over = open_loop(server.url, flood, 3 * rate)
    accepted = [one for one in over if one.status == 200]
    middle = over[len(over) // 2].due
    first = [one.seconds for one in accepted if one.due < middle]
    second = [one.seconds for one in accepted if one.due >= middle]
    refused = [one.seconds for one in over if one.status == 503]
    one, at_70 = statistics.median(alone), _p99([each.seconds for each in usual])
    return {
        "way": TITLES[server.name],
        "rate": rate,
        "alone": 1000 * one,
        "p99": 1000 * at_70,
        "ratio": at_70 / one,
        "accepted": len(accepted) / len(over),
        "refused": len(refused) / len(over),
        "lost": _lost(over),
        "rate_over": len(accepted) / max(each.due + each.seconds for each in over),
        "refusal": 1000 * statistics.median(refused) if refused else None,
        "p99_first": 1000 * _p99(first),
        "p99_second": 1000 * _p99(second),
    }


def _lost(answers: Sequence[Answer]) -> int:
    return sum(one.status not in (200, 503) for one in answers)


def _p99(seconds: Sequence[float]) -> float:
    return float(np.percentile(seconds, 99)) if seconds else float("nan")


def _latency_table(rows: list[dict[str, Any]]) -> Table:
    columns = {
        "network": "network",
        "way": "by",
        "alone": "one request, ms|.1f",
        "p99": "p99 at 70 %, ms|.1f",
        "ratio": "p99 : one|.2f",
        "rate_over": "at 300 %: images/s|.0f",
        "refused": "503s|.0%",
        "lost": "lost|d",
        "refusal": "a 503, ms|.1f",
        "p99_first": "p99 of the first half, ms|.0f",
        "p99_second": "of the second, ms|.0f",
    }
    return Table("Latency with one connection, at 70 % and at 300 % of the throughput", columns, rows)


def _weights(network: str, folder: Path) -> str:
    """A file of random weights for a thousand classes."""
    torch.manual_seed(0)
    model = create(network, classes=1000)
    config = model.config
    preprocessing = Preprocessing(image_size=config.image)
    classes = tuple(f"class {number}" for number in range(1000))
    path = folder / "it.safetensors"
    native.save(path, Weights(config, model.state_dict(), preprocessing, classes, {}))
    return str(path)


def _photographs(options: Options) -> list[bytes]:
    """Photographs, each scaled to the size."""
    found = [image for name in SETS if (path := options.data(name)) for image in _photographs_of(path)]
    return [_encoded(image.convert("RGB").resize(SIZE), "JPEG") for image in found[:256]]


def _photographs_of(path: Path) -> Iterator[Image.Image]:
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.lower().endswith((".jpg", ".jpeg")) and (file := archive.extractfile(member)):
                yield Image.open(io.BytesIO(file.read()))


def _noise() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 60, 80, 3), dtype=np.uint8)
    return [_encoded(Image.fromarray(one), "JPEG") for one in pixels]


def _encoded(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return file.getvalue()
