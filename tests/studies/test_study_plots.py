"""Figures of studies with extreme contents: no text is cut or lies over another."""

from __future__ import annotations

import pytest

from plots import faults
from studies.test_study import supposed
from vitral.studies import drawing
from vitral.studies.study import Study

LONG = tuple(f"timm:vit_small_patch16_{size}.augreg_in21k_ft_in1k" for size in (224, 256, 384, 448, 512, 768))
STUDIES = {
    "one network and share": Study("data", "x", models=("S/16",), fractions=(1.0,), seeds=1),
    "six networks of long names": Study("data", "x", models=LONG, fractions=(0.01, 0.1, 0.5, 1.0), seeds=2),
    "compute": Study("compute", "x", models=("S/16", "BiT-R50x1"), epochs=(1, 3, 10), seeds=2),
    "one recipe": Study("options", "x", vary={"lr": (1e-3,)}, seeds=1),
    "many recipes": Study(
        "options", "x", vary={"lr": (1e-4, 1e-3, 1e-2), "augment": ("none", "affine"), "ema": (0.0, 0.99)}, seeds=2
    ),
}


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("level", [0.05, 0.5, 0.9999])
def test_figures_of_studies(name, level):
    results = supposed(STUDIES[name], lambda factors: level - 0.01 * factors.get("fraction", 0))
    figure = drawing._draw(results)
    figure.set_layout_engine("constrained")
    assert faults(figure) == []
