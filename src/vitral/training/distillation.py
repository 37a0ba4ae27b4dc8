"""Learning from a network that has learned: its answers to the same pictures as a part of the loss.

Sources: "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), equation 1 and section 2; that both networks
see the same view of each picture is the finding of arXiv 2106.05237.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.dataset import some
from vitral.data.transforms import Preprocessing
from vitral.errors import UsageError
from vitral.model import Network
from vitral.weights.labels import match
from vitral.weights.native import Weights, build


@dataclass(frozen=True, eq=False)
class Teacher:
    """A network in evaluation mode that says what it sees in pictures prepared for another one."""

    network: Network
    own: Preprocessing
    """How the teacher wants its pictures."""
    scale: Tensor
    """(C, 1, 1): with `shift`, what makes pictures of the student's mean and deviation those of the teacher's."""
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
        """The teacher that these weights make, for pictures prepared as `given` with these `classes`."""
        network = build(weights).requires_grad_(False).to(device)
        own = weights.preprocessing
        (mean, std), (own_mean, own_std) = (
            (torch.tensor(p.mean)[:, None, None], torch.tensor(p.std)[:, None, None]) for p in (given, own)
        )
        scale, shift = std / own_std, (mean - own_mean) / own_std
        order = torch.tensor(order_of(classes, weights.classes))
        # once for the run: a GPU is waited for to take such numbers
        scale, shift, order = (numbers.to(device) for numbers in (scale, shift, order))
        return cls(network, own, scale, shift, order, weight, temperature)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, K) fp32, in the data's order of classes, of pictures (B, C, H, W) as the student gets them."""
        return self.network(self.prepared(images)).float()[:, self.order]

    def prepared(self, images: Tensor) -> Tensor:
        """The same pixels at the teacher's size, mean and deviation."""
        if tuple(images.shape[2:]) != self.own.image_size:
            mode = "bicubic" if self.own.interpolation == "bicubic" else "bilinear"
            images = F.interpolate(images, size=self.own.image_size, mode=mode, antialias=True)
        return images * self.scale + self.shift

    def loss(self, logits: Tensor, answers: Tensor) -> Tensor:
        """T² KL(teacher ‖ student) of logits (B, K), both softened by the temperature T: its gradient does not shrink
        with 1/T².
        """
        T = self.temperature
        student, teacher = (F.log_softmax(each / T, dim=1) for each in (logits, answers))
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * T**2


def order_of(classes: tuple[str, ...], teachers: tuple[str, ...], source: object = None) -> list[int]:
    """The teacher's index of each class; `UsageError` shows the difference where the classes are not the same."""
    found = match(classes, teachers)
    order = [index for index in found if index is not None]
    if len(order) == len(classes) == len(teachers):
        return order
    lacking = [name for name, index in zip(classes, found, strict=True) if index is None]
    more = [name for index, name in enumerate(teachers) if index not in order]
    told = [f"it does not know {some(lacking)}"] if lacking else []
    told += [f"it also knows {some(more)}"] if more else []
    why, hint = "; ".join(told), "a teacher for these classes: vitral train DATA --init TEACHER --out …"
    raise UsageError("the teacher's classes are not the data's", where=source, why=why, hint=hint)
