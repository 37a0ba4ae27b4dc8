"""A loss of one's own: the focal loss (Lin et al. 2017) in vitral's loop, and a run that every command reads.

python examples/custom_loss.py digits runs/focal
vitral predict runs/focal digit.png
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import vitral


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """Return a loss for each image (B,), in which images that are predicted well count less."""
    each = F.cross_entropy(logits, labels, reduction="none")
    return (1 - (-each).exp()) ** gamma * each


def main(data: str = "digits", out: str = "runs/focal", **options: Any) -> vitral.TrainedRun:
    """Train on `data` with the focal loss; `options` are those of `vitral.train`."""
    return vitral.train(data, loss=focal, out=out, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
