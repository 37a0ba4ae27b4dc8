"""Networks that read text as two ONNX graphs: an encoder of images, and a step of the decoder with its cache.

    keys, values = encoder.run(None, {"images": images})        # each (blocks, B, heads, image tokens, d)
    logits, past_keys, past_values = step.run(None, {           # logits (B, V) of the token after `tokens`
        "past_keys": past_keys, "past_values": past_values,     # (blocks, B, heads, tokens so far, d), at first none
        "tokens": tokens, "keys": keys, "values": values,       # tokens (B, 1) int64, at first the start
    })

The metadata `vitral.text` has the numbers of the special tokens, the largest length and the shape of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitral.bounded import parse
from vitral.export.target import Job, recorded_warnings
from vitral.model import DecoderConfig, EncoderDecoder
from vitral.model.decoder import Cache

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

ENCODER, STEP = "encoder.onnx", "decoder_step.onnx"
CACHE = ("keys", "values")
PAST = ("past_keys", "past_values")
SHORTEST = 3
"""Least length of a decoder: torch.export fixes a size of 0 or 1, so the example of a cache has two tokens or more."""
METADATA = "vitral.text"
"""Key of the metadata that a program needs to generate texts, besides the names of the tokens."""


def facts(config: DecoderConfig) -> dict[str, object]:
    """Return what a program needs to generate texts, besides the names of the tokens."""
    return {
        "start": config.start_token,
        "end": config.end_token,
        "padding": config.pad_token,
        "length": config.length,
        "cache": {"blocks": config.depth, "heads": config.heads, "head_dim": config.dim // config.heads},
    }


class Encoder(nn.Module):
    """Images (B, C, H, W) to the keys and values of all blocks: each (blocks, B, heads, N, d)."""

    def __init__(self, network: EncoderDecoder):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.network.encode(images)
        blocks: Any = self.network.decoder.blocks
        keys, values = zip(*[block.cross.keys_values(memory) for block in blocks], strict=True)
        return torch.stack(keys), torch.stack(values)


class Step(nn.Module):
    """One token (B, 1) to the logits (B, V) of the next one, and the cache with that token."""

    def __init__(self, network: EncoderDecoder):
        super().__init__()
        self.decoder = network.decoder

    def forward(
        self, past_keys: Tensor, past_values: Tensor, tokens: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        past = list(zip(past_keys.unbind(), past_values.unbind(), strict=True))
        memory = list(zip(keys.unbind(), values.unbind(), strict=True))
        cache = Cache([*past], [*memory], None, past_keys.shape[3])
        logits = self.decoder.step(tokens, cache)[:, -1]
        extended = [one for one in cache.text if one is not None]
        return logits, torch.stack([one[0] for one in extended]), torch.stack([one[1] for one in extended])


def programs(job: Job, network: EncoderDecoder) -> dict[str, tuple[ExportedProgram, list[str], list[str], list[str]]]:
    """Trace both parts: file → program, names of its inputs and outputs, and of the axes of its first input."""
    config, prep, batch = network.config.decoder, job.preprocessing, Dim("batch", min=1)
    encoder, step = Encoder(network).eval(), Step(network).eval()
    images = torch.zeros(2, prep.channels, *prep.image_size)
    past = torch.zeros(config.depth, 2, config.heads, min(3, config.length - 1), config.dim // config.heads)
    tokens = torch.full((2, 1), config.start_token)
    with recorded_warnings(job.warnings), torch.no_grad():  # tensors of their own: equal ones become one input
        keys, values = encoder(images)
        before = {1: batch, 3: Dim("past", min=0, max=config.length - 1)}
        shapes = (before, before, {0: batch}, {1: batch}, {1: batch})
        return {
            ENCODER: (
                torch.export.export(encoder, (images,), dynamic_shapes=({0: batch},)),
                [job.input_name],
                [*CACHE],
                ["batch"],
            ),
            STEP: (
                torch.export.export(step, (past, past.clone(), tokens, keys, values), dynamic_shapes=shapes),
                [*PAST, "tokens", *CACHE],
                ["logits", *(f"next_{name}" for name in PAST)],
                ["blocks", "batch", "heads", "past"],
            ),
        }


def reader(
    folder: Path, session_for: Callable[[Path], tuple[InferenceSession, str]]
) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """Load both parts by `session_for`: the runtime's title, and a function from images to the rows of `greedy`."""
    (encoder, title), (step, _) = session_for(folder / ENCODER), session_for(folder / STEP)
    about = parse(encoder.get_modelmeta().custom_metadata_map[METADATA])

    def run(images: np.ndarray) -> np.ndarray:
        return greedy(encoder, step, images, about)

    return title, run


def greedy(
    encoder: InferenceSession, step: InferenceSession, images: np.ndarray, about: Mapping[str, Any]
) -> np.ndarray:
    """Generate the likeliest token at every place by two sessions: rows (B, 2 × length), as `model.decoder.greedy`."""
    count, shape = len(images), about["cache"]
    image = dict(zip(CACHE, encoder.run(None, {"images": images}), strict=True))
    past = [np.zeros((shape["blocks"], count, shape["heads"], 0, shape["head_dim"]), np.float32) for _ in PAST]
    tokens, ended = np.full((count, 1), about["start"]), np.zeros((count, 1), bool)
    rows = np.zeros((count, 2, about["length"]), np.float32)
    rows[:, 0] = about["padding"]
    for place in range(about["length"]):
        if ended.all():
            break
        logits, *past = step.run(None, {**dict(zip(PAST, past, strict=True)), "tokens": tokens, **image})
        logs = logits - logits.max(1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(1, keepdims=True))
        tokens = np.where(ended, about["padding"], logs.argmax(1)[:, None])
        rows[:, 0, place], rows[:, 1, place] = tokens[:, 0], np.where(ended, 0, logs.max(1, keepdims=True))[:, 0]
        ended |= tokens == about["end"]
    return rows.reshape(count, -1)
