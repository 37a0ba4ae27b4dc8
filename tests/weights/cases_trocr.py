"""TrOCR: `VisionEncoderDecoderModel` of transformers with a ViT or DeiT and a TrOCR decoder, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from parity import Case, randomized
from torch import Tensor

TEXT = torch.tensor([[2, 4, 5, 6, 7], [2, 8, 2, 16, 3]])


def built(encoder: str = "ViT", encoding: dict[str, Any] | None = None, **decoding: Any) -> Any:
    """A network of transformers; `encoding` and `decoding` are fields of its two configurations."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "image_size": 16,
        "patch_size": 4,
    }
    first = getattr(transformers, f"{encoder}Config")(**{**shape, **(encoding or {})})
    usual = {"vocab_size": 17, "d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    second = transformers.TrOCRConfig(**{**usual, "max_position_embeddings": 12, **decoding})
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(first, second)
    return randomized(transformers.VisionEncoderDecoderModel(config=config))


def case(*encoder: Any, **decoding: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = built(*encoder, **decoding)

        def write(folder: Path) -> Path:
            model.save_pretrained(folder)
            return folder

        def logits(images: Tensor) -> Tensor:
            return model(pixel_values=images, decoder_input_ids=TEXT).logits

        return Case(write, logits, ((16, 16),), text=TEXT)

    return make


SMALL = {"scale_embedding": True, "tie_word_embeddings": False, "d_model": 32, "cross_attention_hidden_size": 24}
BASE = {
    "use_learned_position_embeddings": False,
    "layernorm_embedding": False,
    "activation_function": "relu",
    "scale_embedding": True,
}
CASES = {
    "hf-trocr/learned": case(),
    "hf-trocr/base": case("ViT", {"qkv_bias": False}, **BASE),
    "hf-trocr/projected": case(d_model=32, tie_word_embeddings=False),
    "hf-trocr-deit/small": case("DeiT", **SMALL),
}
