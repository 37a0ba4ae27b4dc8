"""Text from a network that reads it: greedy and beam search with length normalization.

A text of n tokens, its end among them, has the score log p / n^penalty, where p is the product of the probabilities of
its tokens. Without normalization short texts win, because every token makes p smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.model import Decoder, EncoderDecoder
from vitral.model.decoder import greedy

N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True)
class Search:
    """Options of generation. One beam is greedy search: the likeliest token at every place.

    It is a `backend` of `EncoderDecoder`, too.
    """

    beams: int = 1
    length_penalty: float = 1.0
    """Exponent of the number of tokens; 0: no normalization, larger values prefer longer texts."""
    longest: int | None = None
    """Largest number of tokens, the end among them; None: as many as the decoder has positions."""

    def __post_init__(self) -> None:
        if not 1 <= self.beams <= 100:
            raise UsageError(f"beams must be 1 to 100, not {self.beams}", hint="--beams 4")
        if not 0 <= self.length_penalty <= 10:
            raise UsageError(f"the length penalty is an exponent from 0 to 10, not {self.length_penalty:g}")
        if self.longest is not None and self.longest < 1:
            raise UsageError(f"a text has at least one token, not {self.longest}")

    def __call__(self, decoder: Decoder, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Rows (B, 2 × length), as those of `vitral.model.decoder.greedy`, of the texts that `generate` finds."""
        if mask is not None:
            raise UsageError("a search of texts takes whole images", why="there is a mask", hint="greedy search")
        config, found = decoder.config, generate(decoder, memory, self)
        filled = memory.new_zeros(len(found), 2, config.length, dtype=torch.float32)
        filled[:, 0] = config.pad_token
        for row, text in zip(filled, found, strict=True):
            tokens = [*text.tokens, *[config.end_token] * text.ended]
            row[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.float32)
            row[1, : len(tokens)] = torch.tensor(text.log_probabilities)
        return filled.flatten(1)


def search_by(network: N, beams: int) -> N:
    """Return the network, which generates with so many beams from now on; one beam leaves it as it is.

    Raises `UsageError` for several beams of a network that reads no text.
    """
    if beams == 1:
        return network
    search = Search(beams)
    if not isinstance(network, EncoderDecoder):
        why = "it predicts in one pass, without a search"
        raise UsageError(f"--beams {beams} is for networks that read text", why=why, hint="leave it out")
    network.backend = search
    return network


def search_of(network: nn.Module) -> Search:
    """Return the search by which a network generates; greedy search of networks that read no text."""
    found = getattr(network, "backend", None)
    return found if isinstance(found, Search) else Search()


def only_generates(network: nn.Module, engine: str, altered: bool) -> bool:
    """True for a network that reads text. Raises `UsageError` for an engine or changes that cannot generate it."""
    if not isinstance(network, EncoderDecoder):
        return False
    if engine not in ("auto", "plain") or altered:
        why = "no other engine, no int8 and no views generate text"
        raise UsageError("a network that reads text is computed by its module", why=why, hint="--engine plain")
    return True


@dataclass(frozen=True)
class Generated:
    """One text, without start and end."""

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    """Of each token and, if `ended`, of the end."""
    ended: bool
    """False if the text was cut at the largest number of tokens."""

    @property
    def confidence(self) -> float:
        """Probability of the whole text, its end included."""
        return math.exp(sum(self.log_probabilities))

    def score(self, length_penalty: float) -> float:
        """Sum of log probabilities over (number of tokens, the end included)^penalty."""
        return sum(self.log_probabilities) / max(len(self.log_probabilities), 1) ** length_penalty


@torch.inference_mode()
def generate(decoder: Decoder, memory: Tensor, search: Search | None = None) -> list[Generated]:
    """Generate a text for each image from its tokens (B, N, M)."""
    search = search or Search()
    longest = min(search.longest or decoder.config.length, decoder.config.length)
    if search.beams == 1:
        rows = greedy(decoder, memory, longest=longest).unflatten(1, (2, -1))[..., :longest]
        return texts_of(rows.flatten(1), decoder.config.end_token)
    return _Beams(decoder, memory, search, longest).search()


def texts_of(rows: Tensor, end: int) -> list[Generated]:
    """Read rows (B, 2 × length), as those of `vitral.model.decoder.greedy`, whose texts finish with the token `end`."""
    return [_until_end(end, list(map(int, tokens)), logs) for tokens, logs in rows.unflatten(1, (2, -1)).tolist()]


def _until_end(end: int, tokens: Sequence[int], logs: Sequence[float]) -> Generated:
    """The text up to its end; without an end, all of it."""
    ended = end in tokens
    count = tokens.index(end) if ended else len(tokens)
    return Generated(tuple(tokens[:count]), tuple(logs[: count + ended]), ended)


class _Beams:
    """Beam search for a batch: `beams` unfinished texts for each image, the likeliest first."""

    def __init__(self, decoder: Decoder, memory: Tensor, search: Search, longest: int):
        self.decoder, self.options, self.longest = decoder, search, longest
        self.images, self.beams = len(memory), search.beams
        self.cache = decoder.begin(memory.repeat_interleave(self.beams, dim=0))
        self.tokens = torch.full(
            (self.images * self.beams, 1), decoder.config.start_token, dtype=torch.long, device=memory.device
        )
        self.logs = memory.new_zeros(self.images * self.beams, 0, dtype=torch.float32)
        self.finished: list[list[Generated]] = [[] for _ in range(self.images)]

    def search(self) -> list[Generated]:
        """Extend all texts by a token until no unfinished one of an image can win."""
        open_ = [True] * self.images
        while self.tokens.shape[1] <= self.longest and any(open_):
            self._extend(open_)
            open_ = [self._can_win(image) for image in range(self.images)]
        for image in range(self.images):
            for row in range(image * self.beams, (image + 1) * self.beams):
                self._finish(image, row, ended=False)
        return [self._sorted(image)[0] for image in range(self.images)]

    def _extend(self, open_: Sequence[bool]) -> None:
        """Add a token to every text: of the likeliest 2 × beams of an image, those that do not end go on."""
        new = self.decoder(self.tokens[:, -1:], self.cache)[:, -1].float().log_softmax(dim=1)  # (B, V)
        totals = self.logs.sum(1, keepdim=True) + new
        if self.tokens.shape[1] == 1:  # all beams of an image are the same text
            totals.view(self.images, self.beams, -1)[:, 1:] = -math.inf
        vocabulary = new.shape[1]
        best = totals.view(self.images, -1).topk(min(2 * self.beams, self.beams * vocabulary), dim=1)
        rows, chosen, logs = [], [], []
        for image, (values, places) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            going: list[tuple[int, int, float]] = []
            for rank, (value, place) in enumerate(zip(values, places, strict=True)):
                row, token = image * self.beams + place // vocabulary, place % vocabulary
                if value == -math.inf:
                    break
                if token != self.decoder.config.end_token:
                    going.append((row, token, float(new[row, token])))
                elif rank < self.beams and open_[image]:
                    self._finish(image, row, ended=True, log=float(new[row, token]))
            nothing = (image * self.beams, self.decoder.config.pad_token, -math.inf)  # more beams than texts
            for row, token, log in (going + [nothing] * self.beams)[: self.beams]:
                rows.append(row)
                chosen.append(token)
                logs.append(log)
        kept, added, more = (torch.tensor(one, device=new.device) for one in (rows, chosen, logs))
        self.logs = torch.cat([self.logs[kept], more[:, None]], dim=1)
        self.tokens = torch.cat([self.tokens[kept], added[:, None]], dim=1)
        self.cache = self.cache.select(kept, memory=False)

    def _finish(self, image: int, row: int, *, ended: bool, log: float | None = None) -> None:
        logs = [*self.logs[row].tolist(), *([] if log is None else [log])]
        if -math.inf not in logs:
            self.finished[image].append(Generated(tuple(self.tokens[row, 1:].tolist()), tuple(logs), ended))

    def _sorted(self, image: int) -> list[Generated]:
        return sorted(self.finished[image], key=lambda text: text.score(self.options.length_penalty), reverse=True)

    def _can_win(self, image: int) -> bool:
        """True if the likeliest unfinished text may still score above the finished ones.

        Its log probability cannot rise, and is divided by at most the longest text's length.
        """
        if len(self.finished[image]) < self.beams:
            return True
        first = float(self.logs[image * self.beams].sum())
        worst = self._sorted(image)[self.beams - 1].score(self.options.length_penalty)
        return first / self.longest**self.options.length_penalty > worst
