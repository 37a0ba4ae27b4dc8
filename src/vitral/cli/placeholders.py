"""Placeholders of values in `--help`: a word that says of what kind a value is."""

from __future__ import annotations

from vitral.cli.options import Option

_WORDS = {
    "benchmark": "DATA",
    "cache": "FOLDER",
    "coverage": "FRACTION",
    "crop_area": "FRACTION",
    "crop_fraction": "FRACTION",
    "data": "DATA",
    "data_root": "FOLDER",
    "distill_weight": "FRACTION",
    "drop_path": "FRACTION",
    "dropout": "FRACTION",
    "erase": "FRACTION",
    "example": "PATH",
    "export": "FOLDER",
    "few_shot": "COUNTS",
    "fractions": "FRACTION",
    "freeze": "PATTERN",
    "grace": "SECONDS",
    "host": "ADDRESS",
    "image": "IMAGE",
    "image_size": "PIXELS",
    "init": "WEIGHTS",
    "known_share": "FRACTION",
    "label_separator": "TEXT",
    "label_smoothing": "FRACTION",
    "lr": "RATE",
    "mask": "FRACTION",
    "masks": "PATH",
    "min_lr": "FRACTION",
    "minutes": "MINUTES",
    "move_to": "FOLDER",
    "multiple": "PIXELS",
    "out": "PATH",
    "pack_drop": "FRACTION",
    "pack_min_size": "PIXELS",
    "patch_dropout": "FRACTION",
    "patch_size": "PIXELS",
    "patch_sizes": "PIXELS",
    "report": "PATH",
    "resize_size": "PIXELS",
    "right": "FRACTION",
    "runtime": "PATH",
    "set_": "OPTION",
    "sheet": "PATH",
    "shift": "FRACTION",
    "targets": "COLUMN",
    "teacher": "WEIGHTS",
    "timeout": "SECONDS",
    "token_file": "PATH",
    "train_share": "FRACTION",
    "unknown": "FOLDER",
    "val_fraction": "FRACTION",
    "val_share": "FRACTION",
    "vary": "OPTION",
    "weights_key": "KEY",
    "write": "PATH",
}
"""Option → the word for its values."""
_OTHERS = {int: "N", float: "NUMBER", str: "NAME"}
"""Type of a value → the word for the values of all other options."""


def placeholder(option: Option) -> str:
    """Return the word for a value of an option, such as `PATH`."""
    return _WORDS.get(option.name) or _OTHERS[option.values.element]
