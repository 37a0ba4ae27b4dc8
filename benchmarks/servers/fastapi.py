"""An application in FastAPI that computes in ONNX Runtime, as its users write one."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request

from benchmarks.servers import best, words
from vitral.containers import cores
from vitral.data.images.lazy_torchvision import torchvision
from vitral.export.exporting import metadata
from vitral.export.target import Job
from vitral.export.targets import TARGETS
from vitral.inference.loading import load
from vitral.inference.predictor import Predictor


def application(weights: str, size: int, wait: float) -> FastAPI:
    """Serve `POST /predict`."""
    predictor = load(weights, device="cpu", precision="fp32", engine="plain")
    compute = _onnxruntime(predictor)
    decoding, computing = ThreadPoolExecutor(cores()), ThreadPoolExecutor(1)
    waiting: asyncio.Queue[tuple[Any, asyncio.Future[np.ndarray]]] = asyncio.Queue()
    app = FastAPI()

    async def batches() -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch, end = [await waiting.get()], time.perf_counter() + wait
            while len(batch) < size:
                try:
                    batch.append(await asyncio.wait_for(waiting.get(), max(0.0, end - time.perf_counter())))
                except TimeoutError:
                    break
            images = np.stack([image for image, _ in batch])
            rows = await loop.run_in_executor(computing, compute, images)
            for row, (_, answer) in zip(rows, batch, strict=True):
                answer.set_result(row)

    tasks = []

    @app.post("/predict")
    async def predict(request: Request) -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        if not tasks:
            tasks.append(loop.create_task(batches()))
        data = await request.body()
        image = await loop.run_in_executor(decoding, lambda: predictor.prepare(data).numpy())
        answer: asyncio.Future[np.ndarray] = loop.create_future()
        await waiting.put((image, answer))
        return best(await answer, predictor)

    return app


def _onnxruntime(predictor: Predictor) -> Callable[[np.ndarray], np.ndarray]:
    """The exported network: images (B, C, H, W) uint8 to probabilities (B, K)."""
    preprocessing = predictor.preprocessing
    with tempfile.TemporaryDirectory() as folder:
        TARGETS["onnx"].write(Job(predictor.model, preprocessing, "fp32", False, metadata(predictor)), Path(folder))
        runtime = TARGETS["onnx"].load(Path(folder))
    scale, mean = (np.array(one, np.float32).reshape(-1, 1, 1) for one in (preprocessing.std, preprocessing.mean))

    def compute(images: np.ndarray) -> np.ndarray:
        logits = runtime.run((images.astype(np.float32) / 255 - mean) / scale)
        grown = np.exp(logits - logits.max(1, keepdims=True))
        return grown / grown.sum(1, keepdims=True)

    return compute


if __name__ == "__main__":
    torchvision()
    uvicorn.run(application(words().weights, words().size, words().wait), port=words().port, log_level="warning")
