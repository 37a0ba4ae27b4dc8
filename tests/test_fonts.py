"""Lines of drawings: measured, shortened, and with letters of any script that a font is installed for."""

from __future__ import annotations

import numpy as np
import pytest

from vitral import fonts
from vitral.explanation.drawing import fit, fit_title
from vitral.explanation.heatmap import Heatmap

LONG = "Donaudampfschifffahrtsgesellschaftskapitänsmütze"


def heatmap(label: str, against: str = "") -> Heatmap:
    pixels = np.zeros((8, 8, 3), np.uint8)
    return Heatmap(np.zeros((2, 2), np.float32), 0, label, 0.5, "rollout", pixels, "a.png", {}, against=against)


@pytest.mark.parametrize(
    "text", [LONG, LONG.upper(), "猫" * 40, "قطة صغيرة " * 8, "WWWWWWWWWWWW" * 4, "iiiiiiiiii" * 9]
)
def test_a_line_fits_with_both_ends(text):
    for bold in (False, True):
        cut = fit(text, 1.7, 8.5, bold=bold)
        assert fonts.width(cut, 8.5, bold=bold) <= 1.7
        assert fonts.width(cut, 8.5, bold=bold) > 1.4, "no more is cut than has to be"
        start, end = cut.split("…")
        assert text.startswith(start)
        assert text.endswith(end)
    assert fit("cat", 1.7, 8.5) == "cat"


def test_the_width_is_that_of_the_drawn_letters():
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    for text in ("Hello, World", "Ti/16 at 224 × 224", LONG):
        path = TextPath((0, 0), text, 100, prop=FontProperties(family=fonts.families()))
        assert fonts.width(text, 100) * 72 == pytest.approx(path.get_extents().width, rel=0.05)
        bold = TextPath((0, 0), text, 100, prop=FontProperties(family=fonts.families(), weight="bold"))
        assert fonts.width(text, 100, bold=True) * 72 == pytest.approx(bold.get_extents().width, rel=0.06)


def test_a_contrast_keeps_its_words():
    cut = fit_title(heatmap(LONG, LONG[::-1]), 3.0, 9.5)
    assert " rather than " in cut
    label, against = cut.split(" rather than ")
    assert label.startswith("Do")
    assert against.startswith("ez")
    assert fonts.width(cut, 9.5, bold=True) <= 3.0
    assert fit_title(heatmap("cat", "dog"), 3.0, 9.5) == "cat rather than dog"


def test_letters_come_from_the_first_font_that_has_them(monkeypatch):
    monkeypatch.setattr(fonts, "families", lambda: ["DejaVu Sans", "STIXGeneral"])
    assert fonts.pillow_font("cat", 12).getname()[0] == "DejaVu Sans"
    assert fonts.pillow_font("\u1d81 is in STIX alone", 12).getname()[0] == "STIXGeneral"
    assert fonts.pillow_font("猫", 12).getname()[0] == "DejaVu Sans", "in none of them"
