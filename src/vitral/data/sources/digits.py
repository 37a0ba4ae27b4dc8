"""`digits`: 1,797 handwritten digits of 8 × 8 pixels that ship with scikit-learn, for use offline.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (the test part of that set).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitral.data.dataset import DataSet, Numbered, Pixels, Split


def accepts(data: str) -> bool:
    """True for the name of the embedded set."""
    return data.lower() == "digits"


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """Load train and test splits, 80% and 20% of every class, always the same images."""
    from sklearn.datasets import load_digits  # takes a second to import
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = labels.astype(np.int64)
    chosen = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    splits = {}
    for name, index in zip(("train", "test"), map(np.sort, chosen), strict=True):
        splits[name] = Split(Numbered(f"digits/{name}", len(index)), labels[index], Pixels(pixels[index]))
    return DataSet("digits", tuple("0123456789"), splits, data)
