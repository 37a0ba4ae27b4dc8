"""Initial weights of a network that reads text: of the encoder, and of a decoder that writes the same characters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vitral.data import DataSet
from vitral.data.tokens import END, PADDING, START
from vitral.errors import UsageError
from vitral.model import DecoderConfig, EncoderDecoder, EncoderDecoderConfig, ViTConfig
from vitral.model.config_base import pair
from vitral.training.options import Run
from vitral.weights import native
from vitral.weights.load import fit, read
from vitral.weights.loaded import Loaded
from vitral.weights.native import Weights

_ENCODER = "encoder."


@dataclass(frozen=True, eq=False)
class InitialReader(Loaded):
    """Weights of an encoder, without a head, and those of its decoder if it is used, too."""

    decoder: DecoderConfig | None = None
    """None for a new decoder."""
    project: bool = False
    rest: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the decoder, and of the projection before it."""

    def load_into(self, network: EncoderDecoder) -> None:
        """Load the weights into a network; a new decoder keeps its random ones."""
        native.load_state(network.encoder, self.weights.state)
        if self.decoder is not None:
            native.load_state(network, {**network.state_dict(), **self.rest})


def read_reader(given: Mapping[str, Any], dataset: DataSet, proposed: Run) -> InitialReader:
    """Read `init` as an encoder of lines: at the given image size, else at that of the recipe.

    The decoder of a network that reads text is kept if its characters are those of the data, it is long enough, and
    neither `decoder_dim` nor `decoder_depth` states another one.
    """
    loaded = read(given["init"])
    config = loaded.weights.config
    if isinstance(config, EncoderDecoderConfig):
        encoder = _encoder_of(loaded, config)
    elif isinstance(config, ViTConfig):
        encoder = _headless(loaded, config)
    else:
        why = "the decoder attends to the tokens of a ViT"
        raise UsageError(f"--init {given['init']} cannot read text", why=why, hint="use the weights of a ViT")
    patch = pair(encoder.weights.config.patch_size)  # type: ignore[union-attr]  # it is a ViT
    wanted = pair(given.get("image_size") or proposed.size)
    size = tuple(-(-n // p) * p for n, p in zip(wanted, patch, strict=True))
    encoder = fit(encoder, image_size=size, channels=given.get("channels"))
    own = encoder.weights.preprocessing
    fitting = dataclasses.replace(own, resize="letterbox", resize_size=None, crop_fraction=1.0)  # whole lines
    weights = dataclasses.replace(encoder.weights, preprocessing=fitting, classes=(), output={})
    found = InitialReader(weights, encoder.account, encoder.format, encoder.reference)
    if not isinstance(config, EncoderDecoderConfig):
        return found
    if other := _another_decoder(loaded.weights, config.decoder, given, dataset):
        return dataclasses.replace(found, account=found.account.noted(f"the decoder is new: {other}"))
    rest = {name: one for name, one in loaded.weights.state.items() if not name.startswith(_ENCODER)}
    lines = {line.source: line for line in loaded.account.lines if line.ours in rest}
    account = dataclasses.replace(
        found.account, lines=tuple(lines.get(line.source, line) for line in found.account.lines)
    )
    return dataclasses.replace(found, account=account, decoder=config.decoder, project=config.project, rest=rest)


def _another_decoder(weights: Weights, decoder: DecoderConfig, given: Mapping[str, object], dataset: DataSet) -> str:
    """Return the reason for a new decoder; empty if that of the weights is used."""
    length = dataset["train"].labels.shape[1]
    tokens = decoder.start_token, decoder.end_token, decoder.pad_token
    if weights.classes != dataset.classes or tokens != (START, END, PADDING):
        return "the data have other characters"
    if decoder.length < length:
        return f"the one in the weights writes at most {decoder.length} tokens, and the texts have up to {length}"
    stated = [f"decoder_{name}" for name in ("dim", "depth") if given.get(f"decoder_{name}") is not None]
    other = [name for name in stated if given[name] != getattr(decoder, name.removeprefix("decoder_"))]
    return f"another {other[0].replace('_', ' ')} is requested" if other else ""


def _encoder_of(loaded: Loaded, config: EncoderDecoderConfig) -> Loaded:
    """The encoder of a network that reads text."""
    weights = loaded.weights
    state = {k.removeprefix(_ENCODER): one for k, one in weights.state.items() if k.startswith(_ENCODER)}
    lines = tuple(
        dataclasses.replace(line, ours=line.ours.removeprefix(_ENCODER))
        if line.ours and line.ours.startswith(_ENCODER)
        else dataclasses.replace(line, fate="left out", ours=None, note="of the decoder")
        for line in loaded.account.lines
    )
    part = Weights(config.encoder, state, weights.preprocessing, (), weights.trained)
    return dataclasses.replace(loaded, weights=part, account=dataclasses.replace(loaded.account, lines=lines))


def _headless(loaded: Loaded, config: ViTConfig) -> Loaded:
    """A ViT without head and pooling; the norm of pooled tokens becomes one of each token."""
    loaded = fit(loaded, classes=0, new_head=True)
    state: dict[str, Tensor] = {}
    for name, tensor in loaded.weights.state.items():
        if not name.startswith("attn_pool."):
            state[f"norm.{name.removeprefix('fc_norm.')}" if name.startswith("fc_norm.") else name] = tensor
    changes: dict[str, Any] = {"pool": "mean"} if config.pool == "map" else {}
    changes |= {"final_norm": "tokens"} if config.final_norm == "pooled" else {}
    bare = dataclasses.replace(loaded.weights.config, **changes)
    lines = tuple(
        dataclasses.replace(line, fate="left out", ours=None, note="pooling, which a decoder does not need")
        if line.ours and line.ours.startswith("attn_pool.")
        else line
        for line in loaded.account.lines
    )
    weights = dataclasses.replace(loaded.weights, config=bare, state=state)
    return dataclasses.replace(loaded, weights=weights, account=dataclasses.replace(loaded.account, lines=lines))
