"""Self-distillation without labels: DINO (arXiv 2104.14294), with iBOT's loss of masked patches (arXiv 2111.07832) and
KoLeo (arXiv 2304.07193) on request.

A student sees two large and some small crops of each image, a teacher the large ones. The student learns to assign
every crop to the same prototypes as the teacher assigns another crop of the image. The teacher is a running average of
the student, and its outputs are centered, so that it does not assign all images to one prototype.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.distributed import whole_batch
from vitral.distributed.tensors import local
from vitral.kernels import random
from vitral.model import ViT, ViTConfig
from vitral.pretraining.method import Draw, Inputs, Method
from vitral.pretraining.views import SMALL, View
from vitral.training.objectives.objective import share_of
from vitral.training.options import Run

STUDENT_TEMPERATURE = 0.1
CENTER_MOMENTUM = 0.9
MASKED_IMAGES, MASKED_PATCHES = 0.5, (0.1, 0.5)
"""iBOT: share of the large crops with masked patches, and range of the fraction of their patches."""


class Head(nn.Module):
    """Scores (B, K) of prototypes for features (B, D): an MLP to a unit vector, and its cosine with each prototype."""

    def __init__(self, dim: int, prototypes: int):
        super().__init__()
        hidden, narrow = min(2048, 4 * dim), min(256, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, narrow)
        )
        self.prototypes = nn.Parameter(torch.empty(prototypes, narrow).normal_(std=0.02))
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, fixed: bool = False) -> Tensor:
        """With `fixed`, prototypes get no gradient."""
        prototypes = self.prototypes.detach() if fixed else self.prototypes
        return F.linear(F.normalize(self.mlp(x), dim=-1), F.normalize(prototypes, dim=-1))


class SelfDistillation(Method):
    """Student, teacher, their heads, and the centers of the teacher's outputs."""

    center: Tensor
    patch_center: Tensor
    updates: Tensor

    def __init__(
        self,
        encoder: ViT,
        *,
        prototypes: int,
        steps: int,
        momentum: float = 0.996,
        temperature: float = 0.04,
        centering: str = "mean",
        ibot: float = 0.0,
        koleo: float = 0.0,
        fixed_steps: int = 0,
    ):
        """`steps` are those of the run, over which the teacher's momentum rises to 1. Prototypes are fixed for the
        first `fixed_steps`, which helps in the beginning (section 3.2). `centering` is "mean" or "sinkhorn"; `ibot` and
        `koleo` are weights of their losses.
        """
        super().__init__()
        self.encoder, self.head = encoder, Head(encoder.config.features, prototypes)
        encoder.any_size = True
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        if ibot:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.config.dim))
            self.register_buffer("patch_center", torch.zeros(prototypes))
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.steps, self.momentum, self.temperature = max(1, steps), momentum, temperature
        self.centering, self.ibot, self.koleo, self.fixed_steps = centering, ibot, koleo, fixed_steps
        self._done: int | None = None
        self.train()

    @classmethod
    def of(cls, encoder: ViT, run: Run, steps: int) -> SelfDistillation:
        """The method as a run describes it."""
        return cls(
            encoder,
            prototypes=run.prototypes,
            steps=steps,
            momentum=run.teacher_momentum,
            temperature=run.teacher_temperature,
            centering=run.centering,
            ibot=run.ibot,
            koleo=run.koleo,
            fixed_steps=steps // run.epochs,
        )

    @staticmethod
    def draw(run: Run, config: ViTConfig) -> Draw:
        """Large crops (2, B, C, H, W), small crops (n, B, C, h, w) and, with iBOT, masks (2, B, N) of patches."""
        large, small = views(run, config)

        def draw(pixels: Tensor, preprocessing: Preprocessing) -> Inputs:
            images = pixels.float() / 255
            both = _standardized(torch.stack([view(images) for view in large]), preprocessing)
            several = [view(images) for view in small]
            others = _standardized(torch.stack(several), preprocessing) if several else both[:0]
            return both, others, random_masks(len(images), config, pixels.device) if run.ibot else None

        return draw

    @property
    def kept(self) -> ViT:
        """The teacher, which is better than the student."""
        return self.teacher

    def train(self, mode: bool = True) -> SelfDistillation:
        """Set the mode of the student; the teacher always predicts as in evaluation."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_head.eval()
        return self

    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False) -> object:
        self._done = None
        return super().load_state_dict(state_dict, strict, assign)

    @property
    def done(self) -> int:
        """Optimizer steps so far; read from a GPU once."""
        if self._done is None:
            self._done = int(self.updates)
        return self._done

    @torch.no_grad()
    def follow(self) -> None:
        """Update the teacher, and the statistics of its batch norms; its momentum rises to 1 along a cosine."""
        keep = 1 - (1 - self.momentum) * (math.cos(math.pi * min(self.done / self.steps, 1)) + 1) / 2
        for teacher, student in ((self.teacher, self.encoder), (self.teacher_head, self.head)):
            own, new = ([local(one) for one in network.parameters()] for network in (teacher, student))
            torch._foreach_lerp_(own, new, 1 - keep)
        for mean, latest in zip(self.teacher.buffers(), self.encoder.buffers(), strict=True):
            mean.lerp_(latest, 1 - keep) if mean.is_floating_point() else mean.copy_(latest)
        self._done = self.done + 1
        self.updates += 1

    def forward(self, large: Tensor, small: Tensor, masks: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of standardized crops: `large` (2, B, C, H, W), `small` (n, B, C, h, w); `masks` (2, B, N) for iBOT."""
        fixed = self.done < self.fixed_steps
        with torch.no_grad():
            seen, patches = features(self.teacher, large.flatten(0, 1), with_patches=masks is not None)
            teacher = self.teacher_head(seen).float().unflatten(0, large.shape[:2])
        with random.repeated(len(large)):
            own, hidden = features(self.encoder, large.flatten(0, 1), masks, self.mask_token if self.ibot else None)
        students = [self.head(own, fixed).unflatten(0, large.shape[:2])]
        if len(small):
            with random.repeated(len(small)):
                others, _ = features(self.encoder, small.flatten(0, 1))
            students.append(self.head(others, fixed).unflatten(0, small.shape[:2]))
        target = self._targets(teacher, self.center)
        loss = share_of(distillation_loss(target, torch.cat(students).float()))
        metrics = {"dino_loss": loss.detach(), **entropies(target)}
        if masks is not None:
            assert patches is not None
            assert hidden is not None
            masked = self._masked_loss(patches, hidden, masks.flatten(0, 1), fixed)
            loss, metrics = loss + self.ibot * masked, {**metrics, "ibot_loss": masked.detach()}
        if self.koleo:
            apart = sum(koleo(one.float()) for one in own.unflatten(0, large.shape[:2]))
            assert isinstance(apart, Tensor)
            loss, metrics = loss + self.koleo * apart, {**metrics, "koleo_loss": apart.detach()}
        if self.training:
            self._recenter(self.center, teacher.flatten(0, 1))
        return loss, metrics

    def _masked_loss(self, patches: Tensor, hidden: Tensor, masks: Tensor, fixed: bool) -> Tensor:
        """Cross-entropy of the student's masked patches (V, N) with the teacher's, which sees them."""
        with torch.no_grad():
            teacher = self.teacher_head(patches).float()
            hard = masks if self.centering == "sinkhorn" else None
            target = self._targets(teacher, self.patch_center, hard)
        student = F.log_softmax(self.head(hidden, fixed).float() / STUDENT_TEMPERATURE, dim=-1)
        each = -(target * student).sum(-1) * masks
        counts = masks.sum(1)
        loss = (each.sum(1) / counts.clamp(min=1)).sum() / whole_batch.total((counts > 0).sum()).clamp(min=1)
        if self.training:
            self._recenter(self.patch_center, teacher.flatten(0, 1))
        return loss

    def _targets(self, scores: Tensor, center: Tensor, used: Tensor | None = None) -> Tensor:
        """Probabilities of prototypes from the teacher's scores (…, K); with `used` (…), only of these rows."""
        if self.centering == "mean":
            return F.softmax((scores - center) / self.temperature, dim=-1)
        target = torch.zeros_like(scores)
        rows = scores[used] if used is not None else scores.flatten(0, -2)
        balanced = sinkhorn(rows / self.temperature)
        if used is None:
            return balanced.view_as(scores)
        target[used] = balanced
        return target

    @torch.no_grad()
    def _recenter(self, center: Tensor, outputs: Tensor) -> None:
        center.lerp_(whole_batch.mean(outputs.flatten(0, -2)), 1 - CENTER_MOMENTUM)


def features(
    encoder: ViT, images: Tensor, masks: Tensor | None = None, token: Tensor | None = None, with_patches: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Pooled features (V, D) of images, and features of their patches (V, N, D) with `with_patches` or `masks` (…, N),
    at which patches are replaced by `token`.
    """
    if masks is None and not with_patches:
        return encoder(images), None
    config = encoder.config
    grid = images.shape[2] // config.patch[0], images.shape[3] // config.patch[1]
    x = encoder.patch_embed(images)
    if masks is not None and token is not None:
        x = torch.where(masks.reshape(len(x), -1, 1), token.to(x.dtype), x)
    x = encoder.transform(encoder.place(x, grid), grid)
    patches = x[:, config.prefix :]
    return encoder.pool(x), encoder.norm(patches) if config.final_norm == "tokens" else patches


def sinkhorn(scores: Tensor, iterations: int = 3) -> Tensor:
    """Probabilities (n, K) from logits (n, K), so that all prototypes get about equally many of the n rows
    (Sinkhorn-Knopp, as in SwAV and DINOv2).
    """
    rows = whole_batch.count(scores)
    if not rows:
        return scores
    log = scores - whole_batch.logsumexp(scores, (0, 1))
    for _ in range(iterations):
        log = log - whole_batch.logsumexp(log, (0,)) - math.log(scores.shape[1])
        log = log - log.logsumexp(1, keepdim=True)
        log = log - math.log(rows)
    return (log + math.log(rows)).exp()


def distillation_loss(target: Tensor, student: Tensor) -> Tensor:
    """Mean cross-entropy of the student's scores (V, B, K) with the teacher's probabilities (2, B, K) of every other
    crop. The first two crops of the student are the crops of the teacher.
    """
    predicted = F.log_softmax(student / STUDENT_TEMPERATURE, dim=-1)
    pairs = -torch.einsum("tbk,vbk->tv", target, predicted) / target.shape[1]
    own = torch.eye(len(target), len(student), device=pairs.device, dtype=torch.bool)
    return pairs.masked_fill(own, 0.0).sum() / (~own).sum()


def koleo(x: Tensor) -> Tensor:
    """Mean of -log of the distance of each feature (B, D), at length 1, to its nearest neighbor (KoLeo)."""
    unit = F.normalize(x, dim=-1)
    every, rows = whole_batch.all_rows(unit), whole_batch.own_rows(len(unit))
    if len(every) < 2:
        return unit.sum() * 0
    similar = (unit @ every.T).detach()
    similar[:, rows.start : rows.stop].fill_diagonal_(-1.0)
    nearest = every[similar.argmax(1)]
    return share_of(-F.pairwise_distance(unit, nearest, eps=1e-8).add(1e-8).log().mean())


@torch.no_grad()
def entropies(target: Tensor) -> dict[str, Tensor]:
    """Entropies of the teacher's probabilities (2, B, K) as shares of log K: `usage_entropy` of their mean, 0 if all
    images are assigned to one prototype. Also the mean `target_entropy` of each, 1 if nothing is assigned.
    """
    most = math.log(target.shape[-1])
    mean = whole_batch.mean(target.flatten(0, 1))

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp(min=1e-12).log()).sum(-1) / most

    return {"usage_entropy": share_of(entropy(mean)), "target_entropy": share_of(entropy(target).mean())}


def views(run: Run, config: ViTConfig) -> tuple[list[View], list[View]]:
    """The two large views and the small ones, with the probabilities of the paper; small images are not blurred."""
    blur = max(config.image) > SMALL
    least, limit = 0.05 if blur else 0.15, run.crop_area
    large = [
        View(config.image, (limit, 1.0), blur=1.0 * blur, mirror=run.flip),
        View(config.image, (limit, 1.0), blur=0.1 * blur, solarize=0.2, mirror=run.flip),
    ]
    size = local_size(run, config)
    return large, [View(size, (min(least, limit), limit), blur=0.5 * blur, mirror=run.flip)] * run.local_crops


def local_size(run: Run, config: ViTConfig) -> tuple[int, int]:
    """Height and width of small crops: about 3/7 of the image, as 96 of 224, in whole patches."""
    height, width = (max(1, round(n * 3 / 7 / p)) * p for n, p in zip(config.image, config.patch, strict=True))
    return height, width


def seen(run: Run, config: ViTConfig) -> float:
    """Pixels of the student's crops of an image, as a fraction of the image's."""
    return 2 + run.local_crops * math.prod(local_size(run, config)) / math.prod(config.image)


def random_masks(images: int, config: ViTConfig, device: torch.device) -> Tensor:
    """Masks (2, B, N), bool, True at masked patches: of half of the crops, 10 to 50% of the patches."""
    count = config.grid[0] * config.grid[1]
    total = random.total(images)
    share = torch.empty(2, total, 1, device=device).uniform_(*MASKED_PATCHES)
    chosen = torch.rand(2, total, 1, device=device) < MASKED_IMAGES
    rank = torch.rand(2, total, count, device=device).argsort(-1).argsort(-1)
    return random.kept(chosen & (rank < (share * count).round()), 1)


def _standardized(views: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Standardize views (V, B, C, H, W) from 0 to 1."""
    mean, std = (views.new_tensor(of)[:, None, None] for of in (preprocessing.mean, preprocessing.std))
    return (views - mean) / std
