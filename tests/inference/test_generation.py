"""Greedy and beam search, compared with a search of all texts and with texts one by one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from vitral.errors import UsageError
from vitral.inference.generation import Search, generate, texts_of
from vitral.model import Decoder, DecoderConfig
from vitral.model.decoder import greedy

CONFIG = DecoderConfig(vocabulary=4, length=5, dim=8, depth=1, heads=2, mlp_dim=12, start_token=1, end_token=2)


def decoder(seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7)
    return model


def memories(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(9))


@torch.no_grad()
def log_probabilities(model: Decoder, memory: torch.Tensor, text: tuple[int, ...]) -> list[float]:
    """Of each token of a text, its end included, without a cache."""
    logits = model(torch.tensor([[1, *text[:-1]]]), memory[None]).log_softmax(-1)[0]
    return [float(row[token]) for row, token in zip(logits, text, strict=True)]


def all_texts(longest: int) -> list[tuple[int, ...]]:
    """Every text that ends, and every unfinished one of the largest length."""
    others = [token for token in range(4) if token != 2]
    ended = [(*text, 2) for n in range(longest) for text in itertools.product(others, repeat=n)]
    return ended + list(itertools.product(others, repeat=longest))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_with_enough_beams_the_best_of_all_texts_is_found(seed, penalty):
    model, memory = decoder(seed), memories()
    found = generate(model, memory, Search(beams=100, length_penalty=penalty, longest=4))
    for one, text in zip(memory, found, strict=True):
        scores = {t: sum(log_probabilities(model, one, t)) / len(t) ** penalty for t in all_texts(4)}
        best = max(scores, key=lambda t: scores[t])
        assert (*text.tokens, *[2] * text.ended) == best
        assert text.score(penalty) == pytest.approx(scores[best], abs=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_confidence_is_the_probability_of_the_text(beams):
    model, memory = decoder(2), memories(6)
    for one, text in zip(memory, generate(model, memory, Search(beams=beams)), strict=True):
        logs = log_probabilities(model, one, (*text.tokens, *[2] * text.ended))
        torch.testing.assert_close(list(text.log_probabilities), logs, atol=1e-5, rtol=1e-5)
        assert text.confidence == pytest.approx(math.exp(sum(logs)), rel=1e-4)
        assert 0 < text.confidence <= 1


@pytest.mark.parametrize("beams", [1, 2])
def test_a_batch_generates_what_each_image_alone_does(beams):
    model, memory = decoder(3), 3 * memories(6)
    with torch.no_grad():
        model.head.bias[2] += 1.0
    together = generate(model, memory, Search(beams=beams))
    alone = [generate(model, one[None], Search(beams=beams))[0] for one in memory]
    assert [text.tokens for text in together] == [text.tokens for text in alone]
    assert len({text.tokens for text in together}) > 1


def test_greedy_takes_the_likeliest_token_at_every_place():
    model, memory = decoder(4), memories(4)
    for one, text in zip(memory, generate(model, memory), strict=True):
        so_far: list[int] = [1]
        with torch.no_grad():
            while len(so_far) <= CONFIG.length and so_far[-1] != 2:
                so_far.append(int(model(torch.tensor([so_far]), one[None])[0, -1].argmax()))
        assert (*text.tokens, *[2] * text.ended) == tuple(so_far[1:])


@pytest.mark.parametrize("search", [Search(), Search(beams=3, length_penalty=0.5), Search(longest=2)])
def test_rows_of_a_search_are_its_texts(search):
    model, memory = decoder(2), 3 * memories(6)
    rows, wanted = search(model, memory), generate(model, memory, search)
    for text, one in zip(texts_of(rows, CONFIG.end_token), wanted, strict=True):
        kept = text.tokens[: len(one.tokens)] if search.longest else text.tokens
        assert kept == one.tokens
        torch.testing.assert_close(text.log_probabilities[: len(one.log_probabilities)], one.log_probabilities)
    if search == Search():
        torch.testing.assert_close(rows, greedy(model, memory))
    with pytest.raises(UsageError, match="mask"):
        search(model, memory, torch.ones(6, 4, dtype=torch.bool))


def test_a_text_is_cut_at_the_largest_length():
    model, memory = decoder(4), memories(1)
    with torch.no_grad():
        model.head.bias[2] = -1e4
    for beams in (1, 3):
        (text,) = generate(model, memory, Search(beams=beams, longest=3))
        assert len(text.tokens) == 3
        assert not text.ended
        assert len(generate(model, memory, Search(beams=beams, longest=99))[0].tokens) == CONFIG.length
    assert generate(model, memory[:0]) == []


@pytest.mark.parametrize("options", [{"beams": 0}, {"length_penalty": -1.0}, {"longest": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(UsageError):
        Search(**options)
