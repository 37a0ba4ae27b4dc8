"""The Transformer's decoder (arXiv 1706.03762): text, token by token, from the tokens of an image.

    images (B, C, H, W) ─ encoder ─ memory (B, N, M) ────────────┐
    tokens (B, T) ─ embedding ─ + positions ─ blocks: attention ─ cross attention ─ MLP ─ norm ─ head ─ (B, T, V)

Shapes: batch B, text tokens T, image tokens N, width D, of the memory M, head width d, vocabulary V. A block has three
branches: attention to the text so far, attention to the image, MLP.

A text is generated token by token. Keys and values of the image and of earlier tokens do not change, so a `Cache` keeps
them: a step computes its new tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral import kernels
from vitral.errors import UsageError
from vitral.kernels import linear, random
from vitral.model.decoder_config import DecoderConfig, EncoderDecoderConfig
from vitral.model.initialization import init_decoder_
from vitral.model.position import Grid
from vitral.model.vit import MLP, Observer, ViT

KeyValues = tuple[Tensor, Tensor]
"""Keys and values, each (B, heads, tokens, d)."""


@dataclass(eq=False)
class Cache:
    """Keys and values of each block: of the text so far, and of the image."""

    text: list[KeyValues | None]
    memory: list[Tensor | KeyValues]
    """The image's tokens (B, N, M) before the first step."""
    mask: Tensor | None = None
    """(B, 1, 1, N) bool, True for image tokens that count."""
    length: int = 0
    """Number of text tokens so far."""

    def select(self, rows: Tensor, *, memory: bool = True) -> Cache:
        """The cache of the texts `rows` (B',), in that order; a text may occur several times.

        Without `memory`, each text takes the place of one of the same image, whose keys and values stay.
        """

        def pick(one: KeyValues) -> KeyValues:
            return one[0].index_select(0, rows), one[1].index_select(0, rows)

        text = [None if one is None else pick(one) for one in self.text]
        if not memory:
            return Cache(text, self.memory, self.mask, self.length)
        mask = None if self.mask is None else self.mask.index_select(0, rows)
        selected = [one.index_select(0, rows) if isinstance(one, Tensor) else pick(one) for one in self.memory]
        return Cache(text, selected, mask, self.length)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(queries, keys) bool, True where a token may attend: to itself and to earlier ones.

    The queries are the last of the keys.
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class TextAttention(nn.Module):
    """Multi-head attention of text tokens (B, T, D)."""

    backend: Callable[..., Tensor] = staticmethod(kernels.attention)
    observer: Observer | None = None
    """Both as in `vitral.model.vit.Attention`."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.dim // config.heads
        self.attention_dropout, self.dropout = config.attention_dropout, config.dropout


class CausalAttention(TextAttention):
    """Attention of each token to itself and to earlier ones."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, past: KeyValues | None = None) -> tuple[Tensor, KeyValues]:
        """Attend from x to `past` and to x. Returns the result (B, T, D), and keys and values of both."""
        B, T, _ = x.shape
        q, k, v = linear(x, self.qkv).view(B, T, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mask = causal_mask(T, k.shape[2], x.device) if T > 1 else None  # a single last token attends to all
        out = _attend(self, q, k, v, mask)
        return random.dropout(linear(out, self.proj), self.dropout, self.training), (k, v)


class CrossAttention(TextAttention):
    """Attention to image tokens (B, N, M)."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.q = nn.Linear(config.dim, config.dim)
        self.kv = nn.Linear(config.memory_dim or config.dim, 2 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, memory: Tensor | KeyValues, mask: Tensor | None = None) -> tuple[Tensor, KeyValues]:
        """Attend from x to the image's tokens, or to their keys and values, which are returned with the result."""
        q = linear(x, self.q).view(*x.shape[:2], self.heads, self.head_dim).transpose(1, 2)
        k, v = self.keys_values(memory) if isinstance(memory, Tensor) else memory
        out = _attend(self, q, k, v, mask)
        return random.dropout(linear(out, self.proj), self.dropout, self.training), (k, v)

    def keys_values(self, memory: Tensor) -> KeyValues:
        """Keys and values of the image's tokens (B, N, M)."""
        B, N, _ = memory.shape
        k, v = linear(memory, self.kv).view(B, N, 2, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        return k, v


def _attend(part: TextAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √d) v with concatenated heads, (B, T, D). `mask` is bool, True where a key counts."""
    rate = part.attention_dropout if part.training else 0.0
    out = part.backend(q, k, v, attn_mask=mask, dropout_p=rate, scale=part.head_dim**-0.5)
    if part.observer is not None:
        part.observer(q, k, v, mask, out)
    return out.transpose(1, 2).flatten(2)


class DecoderBlock(nn.Module):
    """Attention to the text, attention to the image, MLP; each with a residual and a norm, of its input or the sum."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.norm1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = CausalAttention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.cross = CrossAttention(config)
        self.norm3 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config.mlp)

    def forward(
        self, x: Tensor, memory: Tensor | KeyValues, mask: Tensor | None = None, past: KeyValues | None = None
    ) -> tuple[Tensor, KeyValues, KeyValues]:
        """(B, T, D) to (B, T, D); and keys and values of the text, with those of `past`, and of the image."""
        if self.pre_norm:
            mixed, past = self.attn(self.norm1(x), past)
            x = x + mixed
            seen, image = self.cross(self.norm2(x), memory, mask)
            x = x + seen
            return x + self.mlp(self.norm3(x)), past, image
        mixed, past = self.attn(x, past)
        x = self.norm1(x + mixed)
        seen, image = self.cross(x, memory, mask)
        x = self.norm2(x + seen)
        return self.norm3(x + self.mlp(x)), past, image


class Decoder(nn.Module):
    """Text tokens (B, T) and image tokens (B, N, M) to logits (B, T, V) of the token after each."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        D = config.dim
        self.token_embed = nn.Embedding(config.vocabulary, D)
        if config.position == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, config.length, D))
        if config.norm_embedding:
            self.norm_embed = nn.LayerNorm(D, eps=config.norm_eps)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.depth))
        if config.final_norm:
            self.norm = nn.LayerNorm(D, eps=config.norm_eps)
        if not config.tied_head:
            self.head = nn.Linear(D, config.vocabulary, bias=config.head_bias)
        if not self.token_embed.weight.is_meta:
            init_decoder_(self)

    def forward(self, tokens: Tensor, memory: Tensor | Cache, mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of whole texts, or with a `Cache` of the tokens that follow it (see `step`).

        `mask` (B, N), bool, is True where an image token counts.
        """
        return self.step(tokens, memory if isinstance(memory, Cache) else self.begin(memory, mask))

    def begin(self, memory: Tensor, mask: Tensor | None = None) -> Cache:
        """An empty text's cache, for image tokens (B, N, M)."""
        keys = None if mask is None else mask[:, None, None]
        return Cache([None] * len(self.blocks), [memory] * len(self.blocks), keys)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits (B, T, V) of the tokens that follow those in `cache`, which is extended."""
        x = self.embed(tokens, cache.length)
        for number, block in enumerate(self.blocks):
            x, cache.text[number], cache.memory[number] = block(x, cache.memory[number], cache.mask, cache.text[number])
        cache.length += tokens.shape[1]
        return self.classify(x)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Vectors (B, T, D) of tokens at the positions from `start` on; `UsageError` for too long a text."""
        config, stop = self.config, start + tokens.shape[1]
        if stop > config.length:
            raise UsageError(f"a text of {stop} tokens is too long", why=f"the decoder has {config.length} positions")
        x = self.token_embed(tokens)
        if config.scale_embedding:
            x = x * math.sqrt(config.dim)
        x = x + (self.pos_embed[:, start:stop] if config.position == "learned" else self.sinusoids(start, stop, x))
        if config.norm_embedding:
            x = self.norm_embed(x)
        return random.dropout(x, config.dropout, self.training)

    def sinusoids(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Sines, then cosines, of each position (tensor2tensor; fairseq): (T, D)."""
        half = self.config.dim // 2
        frequencies = torch.exp(torch.arange(half, device=like.device) * -(math.log(10_000) / (half - 1)))
        positions = torch.arange(start, stop, device=like.device) + self.config.first_position
        angles = positions[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)

    def classify(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) from the output of the last block."""
        if self.config.final_norm:
            x = self.norm(x)
        return F.linear(x, self.token_embed.weight) if self.config.tied_head else self.head(x)


def greedy(decoder: Decoder, memory: Tensor, mask: Tensor | None = None, longest: int | None = None) -> Tensor:
    """Generate the likeliest token at every place, up to the end: rows (B, 2 × length), fp32.

    The first half has the tokens, filled with padding after the end, the second half their log probabilities, filled
    with zeros. `longest` limits the number of tokens.
    """
    config, cache = decoder.config, decoder.begin(memory, mask)
    last = torch.full((len(memory), 1), config.start_token, device=memory.device)
    ended = torch.zeros(len(memory), 1, dtype=torch.bool, device=memory.device)
    rows = memory.new_zeros(len(memory), 2, config.length, dtype=torch.float32)
    rows[:, 0] = config.pad_token
    for place in range(min(longest or config.length, config.length)):
        if ended.all():
            break
        log, last = decoder(last, cache)[:, -1].float().log_softmax(dim=1).max(dim=1, keepdim=True)
        last = last.masked_fill(ended, config.pad_token)
        rows[:, :, place] = torch.cat([last.float(), log.masked_fill(ended, 0.0)], dim=1)
        ended = ended | (last == config.end_token)
    return rows.flatten(1)


class Encoder(ViT):
    """A ViT without a head: images (B, C, H, W) to all tokens (B, N, D), after the final norm."""

    def answer(self, x: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """All tokens from the output of `embed`."""
        x = self.transform(x, grid, mask)
        return self.norm(x) if self.config.final_norm == "tokens" else x


class EncoderDecoder(nn.Module):
    """Images (B, C, H, W) and text so far (B, T) to logits (B, T, V) of the token after each.

    All tokens of the encoder are the memory: class token, registers and patches, after its final norm.
    """

    backend: Callable[[Decoder, Tensor, Tensor | None], Tensor] = staticmethod(greedy)
    """Generates texts from the memory (B, N, M), whose mask is (B, N): rows as those of `greedy`."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.encoder)
        if config.project:
            self.project = nn.Linear(config.encoder.dim, config.decoder.dim)
        self.decoder = Decoder(config.decoder)
        if config.project and not self.project.weight.is_meta:
            init_decoder_(self.project)

    def forward(self, images: Tensor, tokens: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); without `tokens` the texts that `backend` generates, as rows (B, 2 × length).

        `mask` (B, rows × columns), bool, is True where a patch counts.
        """
        memory, keys = self.encode(images, mask), self.token_mask(mask)
        return self.backend(self.decoder, memory, keys) if tokens is None else self.decoder(tokens, memory, keys)

    def encode(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Image tokens (B, N, M), the memory of the decoder."""
        x = self.encoder(images, mask)
        return linear(x, self.project) if self.config.project else x

    def token_mask(self, mask: Tensor | None) -> Tensor | None:
        """Mask (B, N) of all image tokens from one of patches; tokens before the patches always count."""
        return None if mask is None else F.pad(mask, (self.config.encoder.prefix, 0), value=True)

    @property
    def checkpointing(self) -> bool:
        """Recompute the encoder's blocks in backward: less memory, more time."""
        return self.encoder.checkpointing

    @checkpointing.setter
    def checkpointing(self, value: bool) -> None:
        self.encoder.checkpointing = value
