"""The numbers behind Figure 7 of "An Image is Worth 16x16 Words" (arXiv 2010.11929) and its relatives; no drawing.

From the weights alone: `patch_filters`, `position_similarity`. From pictures: `attention_distance` (with entropy),
`token_norms`, `cka`, which `measure` gets in one pass over them, and `head_maps` of one picture. Attention is seen a
layer at a time and dropped; what is kept grows with the number of pictures only for norms, a number a token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import UsageError, unknown
from vitral.explanation.capture import POOL, Seen, capture, plain, wide
from vitral.explanation.methods.method import quiet, readout
from vitral.model import ViT
from vitral.model.conv_stem import ConvStem
from vitral.model.resnet import HybridStem

Prefix = Literal["drop", "keep"]
PREFIXES = ("drop", "keep")
"""What becomes of prefix tokens in attention distance and entropy; see `attention_distance`."""

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
LEAST_FOR_CKA = 4
"""Pictures: the unbiased estimator divides by n − 3."""

_MAP_NUMBERS = 2**25  # of attention that one batch may have in one layer
_TOKEN_NUMBERS = 2**27  # of tokens that one batch may have in all layers
_LARGEST_BATCH = 32


def to_plain(value: Any) -> Any:
    """Arrays as nested lists of numbers of six digits, NaN as None; for JSON."""
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


class _Plain:
    """A dataclass that turns itself into plain data; what is large and can be had elsewhere is left out."""

    _left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {f.name: to_plain(getattr(self, f.name)) for f in fields if f.name not in self._left_out}


# From the weights alone -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PatchFilters(_Plain):
    """What the first layer looks for."""

    components: np.ndarray
    """(n, C, p, q): principal components of the kernels, the most important first, each of length 1."""
    explained: np.ndarray
    """(n,): each component's share of the kernels' variance."""
    kernels: np.ndarray
    """(D, C, p, q): the kernels themselves. Not in `to_json`: they are in the weights."""
    source: str
    """Which layer's kernels they are."""
    notes: tuple[str, ...] = ()

    _left_out = ("kernels",)


def patch_filters(model: nn.Module, components: int = 28) -> PatchFilters:
    """Principal components of the D patch kernels as vectors of C·p·q numbers (ViT paper, 4.5 and Figure 7 left).

    There are at most min(D, C·p·q) of them. Signs are free in a decomposition: the largest number of each is made
    positive. In a hybrid the patches are cut from features, so the kernels are those of the ResNet's root, standardised
    as they are when it computes. Raises `UsageError` for a network without attention and for fewer than 1 component.
    """
    network = plain(model)
    if components < 1:
        raise UsageError(f"{components} components", why="there must be at least one")
    notes: list[str] = []
    embed: Any = network.patch_embed
    with torch.no_grad():
        if embed.hybrid:
            source, weight = _first(embed.backbone)
            notes.append(f"a hybrid cuts patches from features: shown is the {source}")
        else:
            source, weight = "patch embedding", embed.proj.weight
    kernels = wide(weight.detach()).cpu().double().numpy()
    if kernels.shape[1] not in (1, 3):
        notes.append(f"{kernels.shape[1]} channels: the picture shows the first three as red, green and blue"
                     if kernels.shape[1] > 3 else "two channels: the picture shows them as red and green")  # fmt: skip
    found, explained = _principal(kernels.reshape(len(kernels), -1), components)
    shape = (len(found), *kernels.shape[1:])
    return PatchFilters(
        found.reshape(shape).astype(np.float32), explained, kernels.astype(np.float32), source, tuple(notes)
    )


def _first(backbone: HybridStem | ConvStem) -> tuple[str, Tensor]:
    """The kernels that see the picture, as they are when they compute."""
    if isinstance(backbone, ConvStem):
        return "first convolution 3×3 of its stem", backbone.layers[0].conv.weight  # type: ignore[union-attr, return-value]
    return "root convolution 7×7 of its ResNet, stride 2", backbone.stem.conv.standardised()


def _principal(vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Components (n, F) with deterministic signs, and shares of the variance (n,)."""
    count = min(count, *vectors.shape)
    total = vectors.var(axis=0).sum() * len(vectors)
    if len(vectors) < 2 or total == 0:  # nothing varies
        return np.zeros((0, vectors.shape[1])), np.zeros(0)
    from sklearn.decomposition import PCA  # takes a second to import

    pca = PCA(count, svd_solver="full").fit(vectors)
    found = pca.components_
    largest = np.take_along_axis(found, np.abs(found).argmax(axis=1)[:, None], axis=1)
    return found * np.where(largest < 0, -1, 1), pca.explained_variance_ * (len(vectors) - 1) / total


@dataclass(frozen=True, eq=False)
class PositionSimilarity(_Plain):
    """How alike positions are to the network."""

    kind: str
    """The network's position scheme."""
    values: np.ndarray | None
    """(r, c, rows, columns): of the position in row `at_rows[i]` and column `at_columns[j]` with every other; None
    where the scheme has nothing to compare."""
    at_rows: tuple[int, ...]
    at_columns: tuple[int, ...]
    measure: str
    """What the numbers are, or why there are none."""
    patch: tuple[int, int]
    """Height and width of a patch in pixels."""


def position_similarity(model: nn.Module, most: int | None = None) -> PositionSimilarity:
    """Similarity of each position with all others (ViT paper, 4.5 and Figure 7 centre), for the network's own grid.

    Learned and sin-cos: cosine of the embeddings (prefix entries left out; a vector of zeros is like nothing, 0).
    Rotary: mean over frequencies f of cos(θ_f(i) − θ_f(j)): what a query scores with an equal key at another place,
    relative to its own, where all pairs of their numbers are equally long. With `most`, that many rows and columns at
    most, spread evenly, are compared with all.
    """
    network = plain(model)
    config = network.config
    rows, columns = config.grid
    chosen = [_spread(n, most) for n in (rows, columns)]
    name, at = config.position, (tuple(chosen[0]), tuple(chosen[1]))
    vectors, measure = _positions(network)
    if vectors is None:
        return PositionSimilarity(name, None, (), (), measure, config.patch)
    picked = vectors.unflatten(0, (rows, columns))[at[0], :][:, at[1]].flatten(0, 1)
    values = (picked @ vectors.T).view(len(at[0]), len(at[1]), rows, columns)
    return PositionSimilarity(name, values.float().numpy(), *at, measure, config.patch)


@torch.no_grad()
def _positions(network: ViT) -> tuple[Tensor | None, str]:
    """Vectors (N, F) whose products are the similarities, in double precision."""
    config = network.config
    if config.position == "learned":
        vectors = wide(network.pos_embed)[0, config.placed :].double().cpu()
    elif config.position == "rotary":
        rotation = network.position.rotation(config.grid, config.dim // config.heads, 0)
        assert rotation is not None
        angles = torch.cat([part.double() for part in rotation], dim=1) / (config.dim // config.heads) ** 0.5
        return angles, "mean over frequencies of cos(difference of the two positions' angles)"
    elif (table := network.position.table(config.grid, config.dim)) is not None:
        vectors = table.double()
    else:
        return None, "the network has no positions: to it a picture is a bag of patches"
    return nn.functional.normalize(vectors, dim=1), "cosine of the two positions' embeddings"


def _spread(count: int, most: int | None) -> list[int]:
    """At most `most` of 0 … count − 1, evenly, the first and the last among them."""
    if most is None or count <= most:
        return list(range(count))
    return np.linspace(0, count - 1, most).round().astype(int).tolist()


# Attention distance and entropy ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionDistance(_Plain):
    """How far each head looks, and how widely it spreads its attention."""

    layers: tuple[int, ...]
    distance: np.ndarray
    """(L, heads) pixels: mean over queries and pictures of Σ_j a_ij ‖p_i − p_j‖."""
    entropy: np.ndarray
    """(L, heads) nats: mean over queries and pictures of −Σ_j a_ij ln a_ij."""
    keys: int
    """Tokens that a query can look at; ln of it is the largest entropy."""
    uniform: float
    """Pixels: the distance of a head that looks at all patches alike."""
    local: float
    """Pixels: of one that looks at its own patch and the (up to 8) around it alike. Of its own patch alone: 0."""
    local_entropy: float
    """Nats: of the same head."""
    prefix: Prefix
    grid: tuple[int, int]
    patch: tuple[int, int]
    pictures: int

    @property
    def entropy_share(self) -> np.ndarray:
        """(L, heads): entropy over the largest possible, ln(keys); 0 where there is one key only."""
        return self.entropy / math.log(self.keys) if self.keys > 1 else np.zeros_like(self.entropy)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return super().to_json() | {"entropy_share": to_plain(self.entropy_share)}


def attention_distance(
    model: nn.Module, images: Tensor, *, prefix: Prefix = "drop", layers: Sequence[int] | None = None
) -> AttentionDistance:
    """Attention distance (ViT paper, D.7, Figures 7 right and 11) and entropy of standardised pictures (B, C, H, W).

    p are the centres of patches in pixels: grid distance × patch size on each axis. The paper does not say what becomes
    of the class token. `prefix="drop"`: queries are patches, keys are patches, and each row is divided by its sum;
    queries that look at no patch at all do not count. `"keep"`: prefix tokens stay as keys, at distance 0, so that a
    head that looks at the class token looks near; as to distance this is the same as dropping them and not dividing.

    Raises `UsageError` for an empty set of pictures, for values that are not finite, and for layers that there are not.
    """
    found = measure(model, images, prefix=prefix, layers=layers, parts=("attention",)).attention
    assert found is not None
    return found


class _Attention:
    """Sums of distance and entropy over queries, a layer and head at a time."""

    def __init__(self, network: ViT, grid: tuple[int, int], prefix: Prefix):
        self.network, self.grid, self.prefix = network, grid, prefix
        self.sums: dict[int, Tensor] = {}  # layer → (3, heads): distance, entropy, queries
        self.distances: Tensor | None = None

    def attention(self, layer: int, attention: Tensor) -> None:
        """Take a layer's (B, heads, N, N)."""
        if layer == POOL:
            return
        if self.distances is None:
            self.distances = patch_distances(self.grid, self.network.config.patch).to(attention)
        first = self.network.config.prefix
        rows = attention[:, :, first:]
        patches = rows[..., first:]
        far = (patches * self.distances).sum(-1)
        if self.prefix == "keep":
            counted, spread = torch.ones_like(far), torch.special.entr(rows).sum(-1)
        else:  # entropy of a/s is Σ −a ln a / s + ln s
            total = patches.sum(-1)
            counted = (total > torch.finfo(total.dtype).tiny).to(total.dtype)
            total = torch.where(counted > 0, total, 1.0)
            far, spread = far / total, torch.special.entr(patches).sum(-1) / total + total.log()
        sums = torch.stack([(x * counted).double().sum((0, 2)) for x in (far, spread, torch.ones_like(far))])
        self.sums[layer] = self.sums.get(layer, torch.zeros_like(sums)) + sums

    def tokens(self, seen: Seen) -> None:
        """Nothing: attention alone counts."""

    def result(self, layers: tuple[int, ...], pictures: int) -> AttentionDistance:
        """What was seen."""
        sums = torch.stack([self.sums[layer] for layer in layers]).cpu().numpy()
        config = self.network.config
        queries = np.where(sums[:, 2] > 0, sums[:, 2], np.nan)
        keys = self.grid[0] * self.grid[1] + (config.prefix if self.prefix == "keep" else 0)
        local, spread = local_attention(self.grid, config.patch)
        return AttentionDistance(
            layers, sums[:, 0] / queries, sums[:, 1] / queries, keys, uniform_attention(self.grid, config.patch),
            local, spread, self.prefix, self.grid, config.patch, pictures,
        )  # fmt: skip


def patch_distances(grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """(N, N) pixels between the centres of patches, fp32."""
    sides = [torch.arange(n, dtype=torch.float32) * side for n, side in zip(grid, patch, strict=True)]
    centres = torch.cartesian_prod(*sides)
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")


def uniform_attention(grid: tuple[int, int], patch: tuple[int, int]) -> float:
    """Mean distance in pixels where every query looks at all patches alike: Σ over offsets (u, v) of the pairs that are
    so far apart, (rows − |u|)(columns − |v|), times their distance √((u p)² + (v q)²), over N².
    """
    pairs, away = zip(*((n - np.abs(u), u) for n in grid for u in [np.arange(1 - n, n)]), strict=True)
    far = np.hypot(away[0][:, None] * patch[0], away[1][None] * patch[1])
    return float(pairs[0] @ far @ pairs[1]) / (grid[0] * grid[1]) ** 2


def local_attention(grid: tuple[int, int], patch: tuple[int, int]) -> tuple[float, float]:
    """Mean distance in pixels and mean entropy in nats where every query looks at itself and its neighbours alike."""
    far, near = np.zeros(grid), np.zeros(grid)
    rows, columns = np.arange(grid[0])[:, None], np.arange(grid[1])[None]
    for u in (-1, 0, 1):
        for v in (-1, 0, 1):
            there = (rows + u >= 0) & (rows + u < grid[0]) & (columns + v >= 0) & (columns + v < grid[1])
            far += there * math.hypot(u * patch[0], v * patch[1])
            near += there
    return float((far / near).mean()), float(np.log(near).mean())


# Norms of tokens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenNorms(_Plain):
    """How large tokens are after each block."""

    layers: tuple[int, ...]
    quantiles: np.ndarray
    """(L, 7): of the patches' norms, at `QUANTILES`."""
    prefix: np.ndarray
    """(L, prefix): mean norm of each token before the patches."""
    prefix_names: tuple[str, ...]
    threshold: np.ndarray
    """(L,): above it a patch is an outlier."""
    outliers: np.ndarray
    """(L,): how many there are."""
    where: np.ndarray
    """(L, rows, columns): how many pictures have one there."""
    rule: str
    pictures: int
    norms: np.ndarray
    """(L, B, N): of every patch; not in `to_json`."""

    _left_out = ("norms",)

    @property
    def outlier_share(self) -> np.ndarray:
        """(L,): outliers over all patches of all pictures."""
        return self.outliers / self.norms[0].size


RULE = "norm > 2 × median and > median + 6 × MAD of the layer's patches (MAD: median distance from the median)"


def token_norms(model: nn.Module, images: Tensor, *, layers: Sequence[int] | None = None) -> TokenNorms:
    """Euclidean norms of tokens after each block; few of outlying norm are what registers are for (arXiv 2309.16588).

    A patch is an outlier where its norm is above twice the median and above the median + 6 × the median absolute
    deviation of all patches of its layer: the first alone would count the tail of a wide distribution, the second alone
    that of a narrow one. The paper sets its bound by eye. Raises as `attention_distance`.
    """
    found = measure(model, images, layers=layers, parts=("norms",)).norms
    assert found is not None
    return found


class _Norms:
    """Norms of all tokens, a picture at a time."""

    def __init__(self, network: ViT, grid: tuple[int, int]):
        self.network, self.grid = network, grid
        self.parts: dict[int, list[Tensor]] = {}

    def attention(self, layer: int, attention: Tensor) -> None:
        """Nothing: tokens alone count."""

    def tokens(self, seen: Seen) -> None:
        """Take what a batch gave."""
        for layer in seen.layers:
            self.parts.setdefault(layer, []).append(wide(seen.tokens[layer]).norm(dim=-1).cpu())

    def result(self, layers: tuple[int, ...], pictures: int) -> TokenNorms:
        """What was seen."""
        config = self.network.config
        every = torch.stack([torch.cat(self.parts[layer]) for layer in layers]).double().numpy()
        prefix, norms = every[:, :, : config.prefix], every[:, :, config.prefix :]
        flat = norms.reshape(len(layers), -1)
        median = np.median(flat, axis=1)
        spread = np.median(np.abs(flat - median[:, None]), axis=1)
        threshold = np.maximum(2 * median, median + 6 * spread)
        above = norms > threshold[:, None, None]
        where = above.sum(axis=1).reshape(-1, *self.grid)
        return TokenNorms(
            layers, np.quantile(flat, QUANTILES, axis=1).T, prefix.mean(axis=1), prefix_names(self.network), threshold,
            above.sum(axis=(1, 2)), where, RULE, pictures, norms.astype(np.float32),
        )  # fmt: skip


def prefix_names(network: ViT) -> tuple[str, ...]:
    """What the tokens before the patches are called, in order."""
    config = network.config
    registers = tuple(f"register {i + 1}" for i in range(config.registers))
    return ("class",) * config.cls_token + ("distillation",) * config.dist_token + registers


# Likeness of layers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Likeness(_Plain):
    """How alike the representations of layers are."""

    layers: tuple[int, ...]
    """`POOL` (−1) is what enters the first block."""
    values: np.ndarray
    """(L + 1, L + 1): linear CKA; NaN where a layer gives all pictures the same."""
    pictures: int
    batch: int
    measure: str = "linear CKA, unbiased minibatch estimate, over all tokens"


def cka(
    model: nn.Module, images: Tensor, *, layers: Sequence[int] | None = None, batch_size: int | None = None
) -> Likeness:
    """Linear centred kernel alignment between what enters the first block and what each block gives.

    CKA(X, Y) = HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)) with K = X Xᵀ, L = Y Yᵀ (Kornblith et al. 2019, arXiv 1905.00414).
    A picture's representation is all of its tokens, end to end, as in Raghu et al. 2021 (arXiv 2108.08810). HSIC is the
    unbiased estimate of Song et al. 2012, averaged over minibatches of at least 4 pictures (Nguyen et al. 2021,
    arXiv 2010.15327), so it does not depend on the size of the batch but for noise; a smaller rest is left out. Values
    can be a little below 0. Raises as `attention_distance`, and `UsageError` for fewer than 4 pictures.
    """
    found = measure(model, images, layers=layers, parts=("cka",), batch_size=batch_size).likeness
    assert found is not None
    return found


class _Likeness:
    """Sums of HSIC for all pairs of layers over batches."""

    def __init__(self) -> None:
        self.sums: np.ndarray | None = None
        self.pictures, self.batch = 0, 0

    def attention(self, layer: int, attention: Tensor) -> None:
        """Nothing: tokens alone count."""

    def tokens(self, seen: Seen) -> None:
        """Take what a batch gave."""
        count = len(seen.tokens[POOL])
        if count < LEAST_FOR_CKA:
            return
        kernels = torch.stack([gram(seen.tokens[layer]) for layer in (POOL, *seen.layers)])
        sums = hsic(kernels).cpu().numpy()
        self.sums = sums if self.sums is None else self.sums + sums
        self.pictures, self.batch = self.pictures + count, max(self.batch, count)

    def result(self, layers: tuple[int, ...], pictures: int) -> Likeness:
        """What was seen."""
        assert self.sums is not None
        own = np.diagonal(self.sums)
        size = np.sqrt(np.where(own > 0, own, np.nan))
        return Likeness((POOL, *layers), self.sums / (size[:, None] * size[None]), self.pictures, self.batch)


def gram(tokens: Tensor) -> Tensor:
    """X Xᵀ (B, B) in double precision of representations (B, …), centred first: HSIC does not change, rounding does."""
    x = wide(tokens).flatten(1)
    x = (x - x.mean(0)).double() if x.device.type != "mps" else x - x.mean(0)
    return x @ x.T


def hsic(kernels: Tensor) -> Tensor:
    """Unbiased HSIC (L, L) of all pairs of kernels (L, n, n), n ≥ 4; Song et al. 2012, equation 5."""
    n = kernels.shape[-1]
    off = kernels * (1 - torch.eye(n, dtype=kernels.dtype, device=kernels.device))
    rows = off.sum(-1)
    totals = rows.sum(-1)
    traces = off.flatten(1) @ off.flatten(1).T  # tr(K L) of symmetric kernels
    both = torch.outer(totals, totals) / ((n - 1) * (n - 2))
    return (traces + both - 2 / (n - 2) * (rows @ rows.T)) / (n * (n - 3))


# One pass over the pictures -------------------------------------------------------------------------------------------


class _Observer(Protocol):
    def attention(self, layer: int, attention: Tensor) -> None: ...
    def tokens(self, seen: Seen) -> None: ...


@dataclass(frozen=True, eq=False)
class Measured:
    """What `measure` found; None for what was not asked for."""

    attention: AttentionDistance | None = None
    norms: TokenNorms | None = None
    likeness: Likeness | None = None


PARTS = ("attention", "norms", "cka")


def measure(
    model: nn.Module,
    images: Tensor,
    *,
    parts: Sequence[str] = PARTS,
    prefix: Prefix = "drop",
    layers: Sequence[int] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Measured:
    """`attention_distance`, `token_norms` and `cka` of standardised pictures (B, C, H, W), in one pass over them.

    By default the size of a batch is what fits: one layer's attention and all layers' tokens are held at a time.
    """
    network = plain(model)
    if prefix not in PREFIXES:
        raise unknown("choice for prefix tokens:", prefix, PREFIXES)
    check_images(images)
    if "cka" in parts and len(images) < LEAST_FOR_CKA:
        raise UsageError(f"{len(images)} pictures are too few to compare layers", why=f"CKA needs {LEAST_FOR_CKA}")
    if batch_size is not None and batch_size < (LEAST_FOR_CKA if "cka" in parts else 1):
        raise UsageError(f"batches of {batch_size} are too small", why=f"CKA needs {LEAST_FOR_CKA} pictures at a time")
    if layers is not None and not len(layers):
        raise UsageError("no layers to look at", why="the list is empty")
    size = images.shape[2] // network.config.patch[0], images.shape[3] // network.config.patch[1]
    attention, norms, likeness = _Attention(network, size, prefix), _Norms(network, size), _Likeness()
    observers: dict[str, _Observer] = {"attention": attention, "norms": norms, "cka": likeness}
    watching = [observers[part] for part in parts]
    numbers = _pass(network, images, watching, layers, batch_size or _fitting(network, size), progress)
    return Measured(
        attention.result(numbers, len(images)) if "attention" in parts else None,
        norms.result(numbers, len(images)) if "norms" in parts else None,
        likeness.result(numbers, len(images)) if "cka" in parts else None,
    )


def check_images(images: Tensor) -> None:
    """`UsageError` where there is nothing to look at."""
    if images.ndim != 4 or not len(images):
        raise UsageError("there are no pictures to measure on", why=f"got a tensor of shape {tuple(images.shape)}")
    if not images.isfinite().all():
        bad = int((~images.isfinite().flatten(1).all(1)).sum())
        raise UsageError("pictures with values that are not finite", why=f"{bad} of {len(images)}; masked or damaged?")


def _pass(
    network: ViT, images: Tensor, watching: Sequence[_Observer], layers: Sequence[int] | None, batch_size: int,
    progress: Callable[[int], None] | None,
) -> tuple[int, ...]:  # fmt: skip
    """Show the observers each batch; the numbers of the layers that were watched."""
    wanted = {
        "reduce": any(isinstance(one, _Attention) for one in watching),
        "tokens": not all(isinstance(one, _Attention) for one in watching),
    }

    def show(layer: int, attention: Tensor) -> None:
        for observer in watching:
            observer.attention(layer, attention)

    weight = next(network.parameters())
    with torch.no_grad(), quiet(network):
        for batch in _batches(images, batch_size):
            with capture(
                network, layers, attention=False, tokens=wanted["tokens"], reduce=show if wanted["reduce"] else None
            ) as seen:
                network(batch.to(weight.device, weight.dtype))
            for observer in watching:
                observer.tokens(seen)
            if progress is not None:
                progress(len(batch))
    return seen.layers


def _batches(images: Tensor, size: int) -> Iterator[Tensor]:
    """Parts of at most `size`, nearly equal, so that the last one is not too small to estimate anything from."""
    yield from images.tensor_split(-(-len(images) // size))


def _fitting(network: ViT, grid: tuple[int, int]) -> int:
    """Pictures in a batch; at least as many as CKA needs, twice over, so that equal parts never have fewer."""
    config, tokens = network.config, grid[0] * grid[1] + network.config.prefix
    of_maps = _MAP_NUMBERS // (config.heads * tokens * tokens)
    of_tokens = _TOKEN_NUMBERS // ((config.depth + 1) * tokens * config.dim)
    return min(_LARGEST_BATCH, max(2 * LEAST_FOR_CKA, min(of_maps, of_tokens)))


# One picture ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadMaps(_Plain):
    """Where the heads look for what the network's head reads, in one picture."""

    layers: tuple[int, ...]
    """`POOL` (−1) is a MAP head."""
    values: np.ndarray
    """(L, heads, rows, columns): attention to each patch."""
    elsewhere: np.ndarray
    """(L, heads): attention to prefix tokens; with `values` it adds up to 1."""
    query: str
    """Whose attention it is."""


@torch.no_grad()
def head_maps(model: nn.Module, image: Tensor, layers: int | Sequence[int] | None = None) -> HeadMaps:
    """Attention of what the head reads, head by head, for one standardised picture (C, H, W) or (1, C, H, W).

    That is the class token's row (with a distillation token, the mean of both), the mean over the tokens that are
    averaged, or for a MAP head the mean over tokens weighted by its own attention, which is given too, as the last
    layer, `POOL`. By default all layers.
    """
    network = plain(model)
    images = image[None] if image.ndim == 3 else image
    check_images(images)
    if len(images) != 1:
        raise UsageError(f"{len(images)} pictures", why="maps of heads are of one picture at a time")
    weight = next(network.parameters())
    with quiet(network), capture(network, [layers] if isinstance(layers, int) else layers) as seen:
        network(images.to(weight.device, weight.dtype))
    pooled = seen.attention(POOL) if POOL in seen.q else None
    tokens = seen.q[seen.layers[0]].shape[2]
    read = readout(network, tokens, 1, weight.device, pooled)[0]
    rows = [torch.einsum("i,hij->hj", read.to(a), a) for layer in seen.layers for a in [seen.attention(layer)[0]]]
    numbers = seen.layers
    if pooled is not None:
        rows, numbers = [*rows, pooled[0, :, 0]], (*numbers, POOL)
    found = torch.stack([row.float() for row in rows]).cpu()
    first = network.config.prefix
    maps = found[..., first:].unflatten(-1, seen.grid).numpy()
    return HeadMaps(numbers, maps, found[..., :first].sum(-1).numpy(), _QUERIES[network.config.pool])


_QUERIES = {
    "cls": "the class token",
    "cls-mean": "the class token and the mean of all patches",
    "mean": "the mean of all patches",
    "mean-all": "the mean of all tokens",
    "map": "the tokens, weighted as the MAP head reads them",
}
