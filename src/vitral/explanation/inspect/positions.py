"""Cosine similarity of position embeddings (Figure 7, center)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitral.explanation.capture import require_vit, wide
from vitral.explanation.inspect.plain import PlainData
from vitral.model import ViT


@dataclass(frozen=True, eq=False)
class PositionSimilarity(PlainData):
    """Similarity of all pairs of positions."""

    kind: str
    """The network's position scheme."""
    values: np.ndarray | None
    """(r, c, rows, columns): similarity of the position at (`at_rows[i]`, `at_columns[j]`) with every other; None if
    the scheme has nothing to compare."""
    at_rows: tuple[int, ...]
    at_columns: tuple[int, ...]
    measure: str
    """Name of the similarity measure, or the reason why there is none."""
    patch: tuple[int, int]
    """Height and width of a patch in pixels."""

    @property
    def of_neighbors(self) -> float:
        """Mean similarity of adjacent positions, minus the mean similarity of positions that are further apart."""
        assert self.values is not None
        height, width = self.values.shape[2:]
        rows = np.abs(np.arange(height) - np.array(self.at_rows)[:, None])
        columns = np.abs(np.arange(width) - np.array(self.at_columns)[:, None])
        distance = rows[:, None, :, None] + columns[None, :, None, :]
        return float(self.values[distance == 1].mean() - self.values[distance > 1].mean())


def position_similarity(model: nn.Module, most: int | None = None) -> PositionSimilarity:
    """Similarity of each position with all others (ViT paper, 4.5 and Figure 7 center), for the network's own grid.

    Learned and sin-cos: cosine of the embeddings, without prefix entries; 0 for a zero vector. Rotary: mean over
    frequencies f of cos(θ_f(i) − θ_f(j)), the score of a query with an equal key at another position relative to its
    own, if all pairs of their components have equal length. With `most`, at most that many evenly spaced rows and
    columns are compared with all.
    """
    network = require_vit(model)
    config = network.config
    rows, columns = config.grid
    selected = [_spread(n, most) for n in (rows, columns)]
    name, at = config.position, (tuple(selected[0]), tuple(selected[1]))
    vectors, measure = _positions(network)
    if vectors is None:
        return PositionSimilarity(name, None, (), (), measure, config.patch)
    picked = vectors.unflatten(0, (rows, columns))[at[0], :][:, at[1]].flatten(0, 1)
    values = (picked @ vectors.T).view(len(at[0]), len(at[1]), rows, columns)
    return PositionSimilarity(name, values.float().numpy(), *at, measure, config.patch)


@torch.no_grad()
def _positions(network: ViT) -> tuple[Tensor | None, str]:
    """Vectors (N, F) in double precision, whose products are the similarities, and the name of the measure."""
    config = network.config
    if config.position == "learned":
        vectors = wide(network.pos_embed)[0, config.placed :].cpu().double()
    elif config.rope is not None and config.rope.kind == "mixed":
        return None, "every head of every block has its own rotary frequencies"
    elif config.position == "rotary" or config.rope is not None:
        rotation = (config.rope or network.position).rotation(config.grid, config.dim // config.heads, 0)
        assert rotation is not None
        angles = torch.cat([part.cpu().double() for part in rotation], dim=1) / (config.dim // config.heads) ** 0.5
        return angles, "mean over frequencies of cos(difference of the two positions' angles)"
    elif (table := network.position.table(config.grid, config.dim)) is not None:
        vectors = table.cpu().double()
    else:
        return None, "the network has no positions: it treats an image as a bag of patches"
    return nn.functional.normalize(vectors, dim=1), "cosine of the two positions' embeddings"


def _spread(count: int, most: int | None) -> list[int]:
    """At most `most` evenly spaced numbers of 0 … count − 1, including the first and the last."""
    if most is None or count <= most:
        return list(range(count))
    return np.linspace(0, count - 1, most).round().astype(int).tolist()
