"""LitServe, whose worker process decodes and computes."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import litserve
import numpy as np
import torch

from benchmarks.servers import best, words
from vitral.containers import cores
from vitral.data.images.lazy_torchvision import torchvision
from vitral.inference.loading import load


class API(litserve.LitAPI):
    """Images come as base64 in JSON, as in its documentation."""

    def __init__(self, weights: str, size: int, wait: float):
        super().__init__(max_batch_size=size, batch_timeout=wait)
        self.weights = weights

    def setup(self, device: str) -> None:
        torchvision()
        self.predictor = load(self.weights, device="cpu", precision="fp32")
        self.pool = ThreadPoolExecutor(cores())

    def decode_request(self, request: dict[str, str]) -> bytes:
        return base64.b64decode(request["image"])

    def batch(self, inputs: list[bytes]) -> torch.Tensor:
        return torch.stack(list(self.pool.map(self.predictor.prepare, inputs)))

    def predict(self, images: torch.Tensor) -> np.ndarray:
        return self.predictor.logits(images).softmax(1).numpy()

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> list[dict[str, Any]]:
        return best(output, self.predictor)


if __name__ == "__main__":
    api = API(words().weights, words().size, words().wait)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(port=words().port, log_level="warning", generate_client_file=False)
