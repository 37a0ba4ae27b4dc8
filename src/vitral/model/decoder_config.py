"""`DecoderConfig` and `EncoderDecoderConfig`: all choices of a network that reads text from images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitral.errors import UsageError
from vitral.model.config import Activation, ViTConfig
from vitral.model.config_base import ConfigBase

_LARGEST_LENGTH = 100_000


@dataclass(frozen=True)
class DecoderConfig(ConfigBase):
    """Shape and arithmetic of a Transformer decoder. Defaults: the base size of "Attention Is All You Need".

    Tokens are numbers below `vocabulary`. A text is `start_token`, its tokens, `end_token`; shorter texts of a batch
    are filled with `pad_token`.
    """

    vocabulary: int = 128
    length: int = 64  # longest sequence of tokens, with start or end
    start_token: int = 1
    end_token: int = 2
    pad_token: int = 0

    dim: int = 512
    depth: int = 6
    heads: int = 8
    mlp_dim: int = 2048
    memory_dim: int | None = None  # width of the tokens to attend to; None: as `dim`

    position: Literal["learned", "sinusoidal"] = "learned"
    first_position: int = 0  # number of the first sinusoidal position; fairseq counts from after the padding
    scale_embedding: bool = False  # token vectors times √dim before positions are added
    norm_embedding: bool = False  # a norm after the embeddings
    norm: Literal["pre", "post"] = "pre"  # norm of a branch's input or of the sum
    norm_eps: float = 1e-5
    final_norm: bool = True
    activation: Activation = "gelu"
    tied_head: bool = False  # logits by the token vectors themselves, without a bias
    head_bias: bool = True

    dropout: float = 0.0  # after the embeddings and every dense layer but q, k and v
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check_kinds()
        self._check_bounds()
        sizes = ("vocabulary", "length", "dim", "depth", "heads", "mlp_dim")
        if bad := [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) < 1]:
            raise UsageError(f"sizes of a decoder must be positive: {', '.join(bad)}")
        if max(self.vocabulary // 100, self.length, self.memory_dim or 1) > _LARGEST_LENGTH:
            raise UsageError(f"a decoder has at most {_LARGEST_LENGTH:,} positions and channels to attend to")
        if self.memory_dim is not None and self.memory_dim < 1:
            raise UsageError(f"memory_dim={self.memory_dim} is no width")
        if self.dim % self.heads:
            raise UsageError(f"decoder width {self.dim} is not divisible by {self.heads} heads")
        if self.position == "sinusoidal" and (self.dim % 2 or self.dim < 4):
            raise UsageError(f"sinusoidal positions need an even width of at least 4, not {self.dim}")
        if self.first_position < 0 or (self.first_position and self.position != "sinusoidal"):
            raise UsageError("first_position is for sinusoidal positions, and counts from 0")
        if self.tied_head and self.head_bias:
            raise UsageError("a tied head has no bias", hint="head_bias=False")
        special = (self.start_token, self.end_token, self.pad_token)
        if min(special) < 0 or max(special) >= self.vocabulary or self.end_token == self.pad_token:
            why = f"start {special[0]}, end {special[1]} and padding {special[2]} of {self.vocabulary} tokens"
            raise UsageError("start, end and padding must be tokens of the vocabulary", why=why)
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} is not a probability below 1")

    @property
    def mlp(self) -> ViTConfig:
        """The fields that `vitral.model.vit.MLP` reads."""
        return ViTConfig(
            dim=self.dim,
            heads=1,
            mlp_dim=self.mlp_dim,
            activation=self.activation,
            dropout=self.dropout,
            norm_eps=self.norm_eps,
            position="none",
        )


@dataclass(frozen=True)
class EncoderDecoderConfig(ConfigBase):
    """An encoder of images and a decoder of text that attends to the encoder's tokens.

    `project` adds a dense layer from the encoder's width to the decoder's, where these differ and the decoder's keys
    and values do not take the encoder's width themselves.
    """

    encoder: ViTConfig = ViTConfig(classes=0)
    decoder: DecoderConfig = DecoderConfig(memory_dim=768)
    project: bool = False

    def __post_init__(self) -> None:
        self.check_kinds()
        encoder, decoder = self.encoder, self.decoder
        if encoder.classes or encoder.pool == "map" or encoder.final_norm == "pooled" or encoder.pre_logits:
            why = "the decoder reads its tokens; a head or a pooled norm would be without effect"
            raise UsageError("the encoder of a network for text has no head", why=why, hint="classes=0")
        width = decoder.dim if self.project else encoder.dim
        if (decoder.memory_dim or decoder.dim) != width:
            why = f"it attends to tokens of width {decoder.memory_dim or decoder.dim}, and gets {width}"
            raise UsageError("decoder and encoder do not fit", why=why, hint="memory_dim, or project=True")

    @property
    def image(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.encoder.image

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.encoder.image

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.encoder.channels

    @property
    def classes(self) -> int:
        """Size of the vocabulary: each token has a name."""
        return self.decoder.vocabulary

    @property
    def dim(self) -> int:
        """Width of the encoder."""
        return self.encoder.dim

    @property
    def features(self) -> int:
        """Width of the input of the decoder's head."""
        return self.decoder.dim
