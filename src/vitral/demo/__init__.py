"""`vitral demo`: a trained model and images to try it on, without data and without an internet connection.

`model.safetensors` is loaded when `demo` is given as weights, and `pack` creates it from a run. `command` implements
the command. `tools/draw_demo_images.py` draws `images/`.
"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).with_name("images")
"""The drawings, one for each class: `CLASS.png`, 160 × 160 pixels."""
