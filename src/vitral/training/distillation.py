"""Knowledge distillation: the logits of a trained network for the same images as part of the loss.

Sources: "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), equation 1 and section 2. Both networks see
the same view of each image, as arXiv 2106.05237 recommends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError
from vitral.model import Network
from vitral.weights.class_names import match
from vitral.weights.native import Weights, build
from vitral.wording import some


@dataclass(frozen=True, eq=False)
class Teacher:
    """A trained network in evaluation mode, applied to images preprocessed for the student."""

    network: Network
    preprocessing: Preprocessing
    """The teacher's own preprocessing."""
    scale: Tensor
    """(C, 1, 1): with `shift`, converts images from the student's mean and deviation to the teacher's."""
    shift: Tensor
    order: Tensor
    """(K,): the teacher's index of each class."""
    weight: float
    """Share of the loss, 0 to 1."""
    temperature: float

    @classmethod
    def of(
        cls,
        weights: Weights,
        given: Preprocessing,
        classes: tuple[str, ...],
        device: torch.device,
        *,
        weight: float,
        temperature: float,
    ) -> Teacher:
        """Build a teacher from weights, for images preprocessed as `given`, with these `classes`."""
        network = build(weights).requires_grad_(False).to(device)
        own = weights.preprocessing
        (mean, std), (own_mean, own_std) = (
            (torch.tensor(p.mean)[:, None, None], torch.tensor(p.std)[:, None, None]) for p in (given, own)
        )
        scale, shift = std / own_std, (mean - own_mean) / own_std
        order = torch.tensor(class_order(classes, weights.classes))
        # copied once per run: each copy synchronizes with a GPU
        scale, shift, order = (tensor.to(device) for tensor in (scale, shift, order))
        return cls(network, own, scale, shift, order, weight, temperature)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, K) fp32, in the data's order of classes, for the student's images (B, C, H, W)."""
        return self.network(self.prepare(images)).float()[:, self.order]

    def prepare(self, images: Tensor) -> Tensor:
        """Convert the student's images to the teacher's size, mean and deviation."""
        return at_size(images, self.preprocessing) * self.scale + self.shift

    def loss(self, logits: Tensor, teacher_logits: Tensor, weights: Tensor | None = None) -> Tensor:
        """T² KL(teacher ‖ student) of logits (B, K), both divided by the temperature T; the mean over images, of each
        with its weight (B,).

        The factor T² keeps the gradient from shrinking with 1/T².
        """
        T = self.temperature
        student, teacher = (F.log_softmax(each / T, dim=1) for each in (logits, teacher_logits))
        if weights is None:
            return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * T**2
        losses = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
        return (weights * losses).mean() * T**2


def at_size(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Resize floats (B, C, H, W) to the size that a teacher expects; those of this size are returned as they are."""
    if tuple(images.shape[2:]) == preprocessing.image_size:
        return images
    mode = "bicubic" if preprocessing.interpolation == "bicubic" else "bilinear"
    return F.interpolate(images, size=preprocessing.image_size, mode=mode, antialias=True)


def class_order(classes: tuple[str, ...], teachers: tuple[str, ...], source: object = None) -> list[int]:
    """The teacher's index of each class; `UsageError`, which reports the difference, if the classes differ."""
    indices = match(classes, teachers)
    order = [index for index in indices if index is not None]
    if len(order) == len(classes) == len(teachers):
        return order
    missing = [name for name, index in zip(classes, indices, strict=True) if index is None]
    extra = [name for index, name in enumerate(teachers) if index not in order]
    differences = [f"it does not know {some(missing)}"] if missing else []
    differences += [f"it also knows {some(extra)}"] if extra else []
    why, hint = "; ".join(differences), "a teacher for these classes: vitral train DATA --init TEACHER --out …"
    raise UsageError("the teacher's classes are not the data's", where=source, why=why, hint=hint)
