"""Draw the images of `vitral demo`: ten, one of each class of CIFAR-10, made here and free of anyone's rights.

    python tools/draw_demo_images.py      # writes src/vitral/demo/images/


A scene is a function that paints shapes on a `Canvas` from back to front. Coordinates are percent of the side, from the
upper left corner; colors are 0–255. Scenes are drawn at three times the size and scaled down, which smooths edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIDE = 160
"""Side of an image in pixels."""

_LARGE = 3 * SIDE
_UNIT = _LARGE / 100
_LIGHT = np.array([0.75, 0.55])  # of shading, from above (y) and from the left (x)

Color = tuple[float, float, float]
Point = tuple[float, float]


class Canvas:
    """A canvas to paint on: `pixels` (480, 480, 3) float, 0–255."""

    def __init__(self, top: Color, bottom: Color):
        """Fill the background with a gradient."""
        self.pixels = _ramp(top, bottom, _LARGE).repeat(_LARGE, 1)

    def paint(
        self, mask: np.ndarray, color: Color, below: Color | None = None, *, relief: float = 0, opacity: float = 1
    ) -> None:
        """Paint a color, or a gradient down to the color `below`, where `mask` (480, 480) is set.

        `relief` makes the shape look rounded: its edge is shaded over this percentage of the side, with light from the
        upper left.
        """
        window = _window(mask, 0)
        part = mask[window]
        paint = _ramp(color, below or color, len(part)).repeat(part.shape[1], 1)
        if relief:
            paint *= _shading(mask, relief * _UNIT, window)[..., None]
        target = self.pixels[window]
        target += (paint.clip(0, 255) - target) * (part * opacity)[..., None]

    def shade(self, mask: np.ndarray, amount: float, soft: float) -> None:
        """Darken the pixels under a mask whose edge is blurred over `soft` percent of the side."""
        window = _window(mask, round(3 * soft * _UNIT))
        self.pixels[window] *= 1 - amount * _blurred(mask[window], soft * _UNIT)[..., None]

    def roughen(self, texture: np.ndarray, amount: float, mask: np.ndarray | None = None) -> None:
        """Vary the brightness by up to `amount`; `texture` is −1 to 1."""
        change = amount * texture if mask is None else amount * texture * mask
        self.pixels *= 1 + change[..., None]

    def finished(self, seed: int) -> np.ndarray:
        """Return the image, uint8 (160, 160, 3), with a faint grain as in photographs."""
        pixels = self.pixels.reshape(SIDE, 3, SIDE, 3, 3).mean((1, 3))
        grain = np.random.default_rng(seed).normal(0, 2.5, (SIDE, SIDE, 1))
        return (pixels + grain).round().clip(0, 255).astype(np.uint8)


# Shapes: each a mask (480, 480) of 0 and 1 ----------------------------------------------------------------------------


def polygon(*points: Point) -> np.ndarray:
    """Fill a polygon."""
    return _drawn(lambda draw: draw.polygon([(x * _UNIT, y * _UNIT) for x, y in points], fill=255))


def blob(*points: Point) -> np.ndarray:
    """Fill a smooth closed curve through all points (Catmull–Rom)."""
    p = np.array(points)
    before, after, last = np.roll(p, 1, 0), np.roll(p, -1, 0), np.roll(p, -2, 0)
    t = np.linspace(0, 1, 16, endpoint=False)[:, None, None]
    curve = 0.5 * (
        2 * p
        + (after - before) * t
        + (2 * before - 5 * p + 4 * after - last) * t**2
        + (3 * p - before - 3 * after + last) * t**3
    )
    return polygon(*map(tuple, curve.transpose(1, 0, 2).reshape(-1, 2)))


def mirrored(side: int, *points: Point) -> np.ndarray:
    """Fill a `blob` with x relative to the middle of the image: to the left if `side` is −1, to the right if 1."""
    return blob(*((50 + side * x, y) for x, y in points))


def ellipse(x: float, y: float, wide: float, high: float | None = None, turn: float = 0) -> np.ndarray:
    """Fill an ellipse around (x, y) with these semi-axes, turned clockwise by degrees."""
    around = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    a, b, angle = wide * np.cos(around), (high or wide) * np.sin(around), np.radians(turn)
    xs, ys = x + a * np.cos(angle) - b * np.sin(angle), y + a * np.sin(angle) + b * np.cos(angle)
    return polygon(*zip(xs, ys, strict=True))


def box(left: float, top: float, right: float, bottom: float, round: float = 0) -> np.ndarray:
    """Fill a rectangle, optionally with rounded corners."""
    ends = [left * _UNIT, top * _UNIT, right * _UNIT, bottom * _UNIT]
    return _drawn(lambda draw: draw.rounded_rectangle(ends, round * _UNIT, fill=255))


def stroke(width: float, *points: Point) -> np.ndarray:
    """Draw a line through the points with round ends and joints."""
    ends = [(x * _UNIT, y * _UNIT) for x, y in points]
    radius = width * _UNIT / 2

    def draw_line(draw: ImageDraw.ImageDraw) -> None:
        draw.line(ends, 255, max(1, round(2 * radius)), joint="curve")
        for x, y in ends:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)

    return _drawn(draw_line)


def texture(seed: int, across: int, down: int, octaves: int = 3) -> np.ndarray:
    """Return smooth noise (480, 480), −1 to 1, with `across` × `down` spots; each octave halves size and amplitude."""
    rng, noise = np.random.default_rng(seed), np.zeros((_LARGE, _LARGE), np.float32)
    for octave in range(octaves):
        small = rng.uniform(-1, 1, (down << octave, across << octave)).astype(np.float32)
        wide = Image.fromarray(small).resize((_LARGE, _LARGE), Image.Resampling.BICUBIC)
        noise += np.asarray(wide) / 2**octave
    return noise / np.abs(noise).max()


def _drawn(draw: Callable[[ImageDraw.ImageDraw], object]) -> np.ndarray:
    image = Image.new("L", (_LARGE, _LARGE))
    draw(ImageDraw.Draw(image))
    return np.asarray(image, np.float32) / 255


def _ramp(top: Color, bottom: Color, rows: int) -> np.ndarray:
    """(rows, 1, 3)"""
    return np.linspace(top, bottom, rows, dtype=np.float32)[:, None]


def _window(mask: np.ndarray, margin: int) -> tuple[slice, slice]:
    """Return the bounding box of a mask as slices of rows and columns, extended by `margin` pixels."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    top, left = max(0, rows[0] - margin), max(0, columns[0] - margin)
    return slice(top, rows[-1] + 1 + margin), slice(left, columns[-1] + 1 + margin)


def _shading(mask: np.ndarray, radius: float, window: tuple[slice, slice]) -> np.ndarray:
    """Return the brightness factors, around 1, of a rounded shape in the window; the blurred mask is its height."""
    wide = _window(mask, round(2 * radius))
    down, across = np.gradient(_blurred(mask[wide], radius))
    rows, columns = (slice(a.start - b.start, a.stop - b.start) for a, b in zip(window, wide, strict=True))
    return 1 + (down * _LIGHT[0] + across * _LIGHT[1])[rows, columns] * radius * 1.3


def _blurred(mask: np.ndarray, radius: float) -> np.ndarray:
    """Blur a mask by a Gaussian with a standard deviation of `radius` pixels, extending the mask's edge values."""
    pad = int(2 * radius) + 1
    padded = np.pad(mask, pad, mode="edge")
    down, across = np.fft.fftfreq(padded.shape[0])[:, None], np.fft.rfftfreq(padded.shape[1])[None]
    gauss = np.exp(-2 * (np.pi * radius) ** 2 * (down**2 + across**2))
    blurred = np.fft.irfft2(np.fft.rfft2(padded) * gauss, padded.shape)
    return blurred[pad:-pad, pad:-pad].astype(np.float32)


# Parts of scenes ------------------------------------------------------------------------------------------------------


def _sky(seed: int, top: Color = (74, 132, 204), bottom: Color = (196, 219, 236), clouds: float = 0.8) -> Canvas:
    canvas = Canvas(top, bottom)
    cover = texture(seed, 3, 6, 5).clip(0, 1) ** 0.8
    canvas.paint(cover, (248, 249, 252), opacity=clouds)
    return canvas


def _leaves(seed: int, near: Color, far: Color) -> Canvas:
    """Paint an out-of-focus background."""
    canvas = Canvas(far, near)
    canvas.roughen(texture(seed, 4, 4, 2), 0.3)
    return canvas


def _ground(canvas: Canvas, horizon: float, far: Color, near: Color, seed: int, rough: float = 0.15) -> np.ndarray:
    """Paint land from the horizon to the lower edge, with a coarser texture in the foreground."""
    mask = box(-1, horizon, 101, 101)
    canvas.paint(mask, far, near)
    canvas.roughen(texture(seed, 14, 30, 4), rough, mask)
    return mask


def _trees(canvas: Canvas, top: float, color: Color, seed: int) -> None:
    """Paint a row of distant round trees, down to the ground."""
    rng = np.random.default_rng(seed)
    crowns = [ellipse(x, top + rng.uniform(4, 9), rng.uniform(6, 10), 8) for x in range(-4, 112, 7)]
    mask = np.maximum.reduce([box(-1, top + 9, 101, 70), *crowns])
    red, green, blue = color
    canvas.paint(mask, color, (0.7 * red, 0.7 * green, 0.7 * blue), relief=1.5)
    canvas.roughen(texture(seed, 16, 20, 4), 0.3, mask)


def _wheel(canvas: Canvas, x: float, y: float, radius: float) -> None:
    canvas.paint(ellipse(x, y, radius), (38, 38, 42), relief=1.5)
    canvas.paint(ellipse(x, y, radius * 0.6), (188, 192, 198), relief=1.5)
    canvas.paint(ellipse(x, y, radius * 0.42), (92, 95, 102), relief=1)
    canvas.paint(ellipse(x, y, radius * 0.14), (205, 207, 212))


def _eye(canvas: Canvas, x: float, y: float, radius: float, iris: Color, slit: bool = False) -> None:
    canvas.paint(ellipse(x, y, radius * 1.18), (34, 28, 24))
    canvas.paint(ellipse(x, y, radius), iris, relief=radius / 2)
    canvas.paint(ellipse(x, y, radius * (0.3 if slit else 0.62), radius * 0.8), (14, 12, 12))
    canvas.paint(ellipse(x - radius * 0.3, y - radius * 0.35, radius * 0.22), (255, 255, 255))


# Scenes ---------------------------------------------------------------------------------------------------------------


def _airplane() -> Canvas:
    canvas = _sky(3)
    far_wing = polygon((52, 46), (60, 45), (73, 29), (68, 29))
    canvas.paint(far_wing, (176, 184, 196), (150, 158, 172))
    canvas.paint(polygon((12, 24), (19, 24), (33, 47), (20, 50)), (44, 84, 158), (36, 66, 130), relief=1)
    body = blob((8, 50), (22, 45.5), (50, 43), (76, 43), (88, 46), (93, 51), (88, 55), (74, 57.5), (46, 57.5), (22, 55))
    canvas.paint(body, (250, 251, 253), (205, 210, 219), relief=4)
    canvas.paint(body * box(0, 53.4, 100, 54.6), (44, 84, 158))
    canvas.paint(polygon((8, 47), (22, 48.5), (16, 54), (2, 58), (0, 57)), (214, 219, 227), (160, 168, 182), relief=0.8)
    for x in np.arange(30, 82, 3.4):
        canvas.paint(ellipse(x, 48.8, 0.85, 1.15), (58, 74, 100))
    canvas.paint(blob((84.5, 46.2), (88, 46.8), (90, 49), (85.5, 48.8)), (46, 58, 80))
    canvas.paint(box(48, 62.5, 60, 68.5, 3), (232, 235, 240), (140, 148, 162), relief=2)
    canvas.paint(ellipse(59.6, 65.5, 1.4, 3), (60, 66, 80))
    near_wing = polygon((44, 53), (63, 53), (38, 83), (30, 84))
    canvas.paint(near_wing, (228, 232, 238), (164, 172, 186), relief=1.2)
    canvas.paint(polygon((44, 53), (48, 53), (32, 83.7), (30, 84)), (150, 158, 172))
    return canvas


def _automobile() -> Canvas:
    canvas = _sky(8, clouds=0.5)
    _trees(canvas, 34, (86, 124, 66), 4)
    _ground(canvas, 60, (146, 146, 150), (112, 112, 118), 5, 0.08)
    canvas.shade(ellipse(50, 80, 43, 4.5), 0.7, 1.6)
    cabin = blob((22, 52), (32, 37), (42, 32.5), (62, 32.5), (74, 39), (84, 52), (52, 57))
    canvas.paint(cabin, (186, 26, 30), relief=3)
    rear = polygon((29, 51), (36, 39.5), (42, 36.2), (50, 36), (50, 51))
    front = polygon((53, 36), (62, 36), (70, 41), (77, 51), (53, 51))
    canvas.paint(rear + front, (52, 72, 92), (134, 158, 176))
    canvas.paint(polygon((40, 37), (45, 36), (35, 51), (31, 51)), (232, 240, 246), opacity=0.35)
    upper = (6, 62), (8, 54.5), (22, 50.5), (50, 49.5), (80, 50), (92, 55), (95, 64)
    body = blob(*upper, (93, 73), (80, 76), (22, 76), (8, 73))
    canvas.paint(body, (222, 40, 40), (142, 14, 20), relief=4)
    canvas.paint(stroke(0.5, (51.5, 51), (51.5, 73)), (110, 10, 14))
    canvas.paint(stroke(0.5, (9, 62), (50, 60.5), (93, 62.5)), (246, 118, 112), opacity=0.7)
    for handle in (45, 70):
        canvas.paint(box(handle, 56.5, handle + 4, 57.7, 0.5), (240, 190, 186))
    canvas.paint(ellipse(91.5, 59.5, 3, 2.2), (255, 246, 206), relief=0.8)
    canvas.paint(ellipse(8, 58.5, 1.8, 2.2), (255, 128, 76))
    canvas.paint(box(5, 69, 15, 72, 1), (70, 72, 78))
    canvas.paint(box(85, 69, 95, 72, 1), (70, 72, 78))
    for x in (26, 75):
        canvas.paint(ellipse(x, 73, 10.2), (22, 12, 14))
        _wheel(canvas, x, 74, 8.6)
    return canvas


def _bird() -> Canvas:
    canvas = _leaves(21, (128, 152, 104), (176, 196, 176))
    bark = blob((-5, 78), (30, 75.5), (70, 76), (105, 71), (105, 79), (70, 83.5), (30, 83.5), (-5, 86))
    canvas.paint(bark, (120, 90, 62), (70, 50, 34), relief=2.5)
    canvas.roughen(texture(22, 8, 60, 3), 0.25, bark)
    for x in (44, 51):
        canvas.paint(stroke(1.6, (x, 68), (x + 1, 77)), (92, 66, 48))
        canvas.paint(stroke(1.4, (x - 2.5, 77.5), (x + 1, 76.5), (x + 4, 78)), (92, 66, 48))
    canvas.paint(polygon((30, 55), (38, 64), (13, 92), (6, 90)), (88, 74, 64), (62, 52, 46), relief=1.5)
    back = (28, 58), (36, 43), (52, 35), (56, 25), (66, 18), (77, 21)
    body = blob(*back, (80, 30), (77, 42), (74, 56), (62, 69), (44, 71))
    canvas.paint(body, (138, 116, 96), (112, 94, 80), relief=5)
    breast = blob((77, 30), (80, 40), (76, 56), (63, 69), (50, 70), (58, 58), (62, 44), (68, 32))
    canvas.paint(breast * body, (220, 106, 48), (240, 224, 200), relief=3)
    wing = blob((27, 60), (36, 46), (50, 41), (60, 47), (58, 57), (44, 65), (30, 67))
    canvas.paint(wing, (104, 88, 76), (74, 62, 56), relief=3)
    for low in (54, 58.5, 62.5):
        canvas.paint(stroke(0.7, (32, low + 3), (45, low), (56, low - 6)), (56, 46, 42))
    canvas.paint(polygon((78.5, 25.5), (90, 30), (78.5, 31.5)), (70, 62, 50), (40, 36, 32), relief=0.8)
    _eye(canvas, 71.5, 26.5, 2.6, (40, 26, 18))
    return canvas


def _cat() -> Canvas:
    canvas = _leaves(31, (150, 128, 108), (196, 182, 166))
    fur, pale = (176, 130, 82), (238, 224, 202)
    canvas.paint(blob((8, 101), (16, 74), (34, 62), (66, 62), (84, 74), (92, 101)), fur, (130, 92, 56), relief=6)
    for side in (-1, 1):
        ear = mirrored(side, (10, 28), (17, 16), (26, 7), (31, 8), (35, 22), (37, 42))
        canvas.paint(ear, fur, (160, 114, 70), relief=2)
        canvas.paint(mirrored(side, (17, 28), (21, 20), (27, 13), (29.5, 15), (32, 34)), (224, 160, 142))
    head = blob((50, 20), (70, 24), (86, 42), (86, 60), (72, 76), (50, 82), (28, 76), (14, 60), (14, 42), (30, 24))
    canvas.paint(head, (192, 144, 92), (176, 132, 88), relief=7)
    for x, low in ((50, 38), (42, 36), (58, 36)):
        canvas.paint(stroke(2.4, (x + (x - 50) * 0.3, 22.5), (x, low)), (98, 64, 36), opacity=0.8)
    for side in (-1, 1):
        for y in (52, 59, 66):
            canvas.paint(stroke(1.9, (50 + side * 37, y - 3), (50 + side * 26, y)), (98, 64, 36), opacity=0.75)
    canvas.paint(blob((50, 56), (62, 60), (68, 69), (60, 78), (50, 81), (40, 78), (32, 69), (38, 60)), pale, relief=3)
    for x in (34, 66):
        _eye(canvas, x, 48, 6.6, (158, 186, 74), slit=True)
    canvas.paint(blob((45.5, 60.5), (50, 59.5), (54.5, 60.5), (50, 65.5)), (214, 124, 116), relief=1)
    canvas.paint(stroke(0.8, (50, 65), (50, 69), (45, 72), (40.5, 70)), (96, 62, 48))
    canvas.paint(stroke(0.8, (50, 69), (55, 72), (59.5, 70)), (96, 62, 48))
    for side in (-1, 1):
        for y, out in ((66, 63), (69, 70), (72, 77)):
            canvas.paint(stroke(0.45, (50 + side * 14, y), (50 + side * 43, out)), (252, 250, 244), opacity=0.9)
    canvas.roughen(texture(33, 40, 90, 2), 0.07)
    return canvas


def _four_legged(canvas: Canvas, coat: Color, dark: Color, thick: float) -> None:
    """Paint body and legs of an animal that faces right."""
    canvas.shade(ellipse(46, 91, 34, 3.5), 0.55, 1.8)
    for x, lean in ((33, -2), (60, 2)):  # the far legs
        canvas.paint(stroke(thick, (x, 60), (x + lean, 76), (x + lean * 0.4, 90)), dark)
    for x, lean in ((26, -3), (67, 1)):
        canvas.paint(stroke(thick * 1.5, (x + 1, 58), (x + lean * 0.5, 70)), coat, relief=1.2)
        canvas.paint(stroke(thick, (x, 66), (x + lean, 78), (x + lean * 0.3, 91)), coat, dark, relief=1)
        canvas.paint(box(x - 2.2, 89.5, x + 2.6, 93, 0.8), (44, 34, 30))
    body = blob((20, 52), (24, 43), (38, 41), (54, 43), (66, 39), (75, 47), (73, 60), (62, 66), (44, 67), (28, 66))
    canvas.paint(body, coat, dark, relief=5)


def _deer() -> Canvas:
    canvas = _leaves(41, (120, 142, 84), (98, 122, 84))
    _ground(canvas, 70, (134, 152, 78), (96, 116, 54), 42, 0.3)
    coat, dark = (178, 122, 72), (126, 82, 48)
    for side in (-1, 1):
        x = 80.5 + side * 2.5
        for ends in (((0, 20), (6, 11), (3, 2)), ((6, 11), (12, 6))):
            canvas.paint(stroke(1.7, *((x + side * out, y) for out, y in ends)), (150, 122, 88), relief=0.5)
    _four_legged(canvas, coat, dark, 3.2)
    canvas.paint(blob((60, 46), (67, 36), (72, 24), (84, 24), (83, 38), (77, 52), (68, 58)), coat, dark, relief=3)
    canvas.paint(blob((75, 27), (66, 20), (64, 22), (72, 30)), (160, 108, 66), relief=1)
    head = blob((74, 22), (82, 19), (88, 24), (97, 33), (95, 37), (86, 36), (76, 32))
    canvas.paint(head, coat, (150, 102, 62), relief=2.5)
    canvas.paint(ellipse(95.5, 34.2, 1.8, 1.6), (38, 30, 28))
    _eye(canvas, 84, 26.5, 1.5, (44, 28, 20))
    canvas.paint(blob((19, 50), (15, 54), (18, 60), (22, 56)), (244, 236, 222), relief=1)
    canvas.paint(blob((34, 63), (50, 64), (62, 63), (50, 67.5)), (226, 200, 166), opacity=0.8)
    for x, y in ((32, 47), (39, 46), (46, 48), (36, 52), (44, 53), (52, 48), (51, 54), (29, 53)):
        canvas.paint(ellipse(x, y, 1, 0.8), (238, 220, 190), opacity=0.85)
    return canvas


def _horse() -> Canvas:
    canvas = _sky(52, clouds=0.5)
    _trees(canvas, 38, (94, 128, 76), 54)
    _ground(canvas, 58, (150, 172, 84), (98, 130, 50), 53, 0.22)
    coat, dark, mane = (132, 74, 40), (78, 42, 24), (44, 26, 20)
    canvas.paint(blob((22, 46), (15, 48), (9, 62), (10, 80), (15, 76), (18, 62), (25, 54)), mane, relief=2)
    _four_legged(canvas, coat, dark, 4.2)
    canvas.paint(blob((54, 46), (66, 34), (73, 18), (86, 17), (86, 32), (78, 50), (68, 60)), coat, dark, relief=3.5)
    canvas.paint(blob((58, 42), (63, 32), (69, 16), (76, 11), (79, 14), (74, 24), (70, 38), (64, 46)), mane, relief=1.5)
    head = blob((74, 16), (82, 13), (89, 19), (98, 34), (96, 40), (90, 40), (80, 32))
    canvas.paint(head, coat, (108, 60, 34), relief=3)
    canvas.paint(blob((75, 17), (75.5, 10), (78, 6.5), (80, 11), (81, 16)), coat, relief=1)
    canvas.paint(blob((91, 34), (97, 34), (97, 39), (92, 40)), (84, 56, 46), relief=1)
    canvas.paint(ellipse(96, 35.6, 0.9), (30, 20, 18))
    _eye(canvas, 84, 21.5, 1.6, (36, 22, 16))
    return canvas


def _dog() -> Canvas:
    canvas = _leaves(61, (104, 142, 76), (150, 180, 118))
    coat, pale = (206, 158, 96), (244, 228, 200)
    canvas.paint(blob((14, 101), (22, 78), (36, 66), (64, 66), (78, 78), (86, 101)), coat, (160, 116, 66), relief=6)
    canvas.paint(blob((38, 101), (40, 82), (50, 76), (60, 82), (62, 101)), pale, relief=3)
    head = blob((50, 13), (66, 17), (76, 32), (74, 52), (66, 68), (50, 78), (34, 68), (26, 52), (24, 32), (34, 17))
    canvas.paint(head, (216, 170, 108), (196, 148, 90), relief=7)
    for side in (-1, 1):
        ear = mirrored(side, (16, 17), (26, 19), (35, 36), (36, 56), (30, 64), (25, 54), (22, 36))
        canvas.paint(ear, (150, 98, 52), (112, 70, 38), relief=2.5)
    canvas.paint(blob((47.5, 15), (52.5, 15), (54, 40), (62, 56), (50, 60), (38, 56), (46, 40)), pale, opacity=0.75)
    canvas.paint(blob((50, 50), (62, 54), (66, 64), (60, 74), (50, 77), (40, 74), (34, 64), (38, 54)), pale, relief=4)
    canvas.paint(blob((44, 68), (50, 69.5), (56, 68), (55, 80), (50, 83), (45, 80)), (222, 108, 112), relief=2)
    canvas.paint(stroke(0.9, (38, 65), (43.5, 68.5), (50, 66), (56.5, 68.5), (62, 65)), (74, 50, 40))
    canvas.paint(blob((42.5, 52), (50, 50), (57.5, 52), (55, 58.5), (50, 60.5), (45, 58.5)), (34, 28, 28), relief=2)
    canvas.paint(ellipse(47.5, 53, 2, 0.9), (170, 166, 166), opacity=0.7)
    for x in (38, 62):
        _eye(canvas, x, 40, 4, (96, 58, 30))
    canvas.roughen(texture(63, 40, 90, 2), 0.06)
    return canvas


def _frog() -> Canvas:
    canvas = _leaves(71, (112, 92, 62), (84, 86, 56))
    _ground(canvas, 55, (120, 98, 66), (92, 72, 46), 72, 0.35)
    canvas.shade(ellipse(50, 84, 42, 6), 0.6, 2)
    skin, dark = (124, 164, 66), (74, 108, 38)
    for side in (-1, 1):
        thigh = mirrored(side, (20, 58), (36, 52), (44, 62), (42, 76), (28, 82), (18, 74))
        canvas.paint(thigh, skin, dark, relief=4)
        foot = mirrored(side, (26, 80), (40, 77), (48, 82), (46, 86), (28, 86))
        canvas.paint(foot, (112, 150, 60), dark, relief=1.5)
    body = blob((50, 32), (68, 36), (76, 52), (74, 70), (62, 80), (38, 80), (26, 70), (24, 52), (32, 36))
    canvas.paint(body, skin, dark, relief=7)
    belly = blob((50, 60), (64, 61), (68, 70), (60, 79), (40, 79), (32, 70), (36, 61))
    canvas.paint(belly, (222, 222, 158), (196, 196, 128), relief=4)
    for side in (-1, 1):
        arm = mirrored(side, (22, 60), (27, 66), (24, 78), (27, 86), (15, 86), (17, 76), (16, 66))
        canvas.paint(arm, skin, dark, relief=2.5)
        canvas.paint(ellipse(50 + side * 15, 32, 9), (132, 172, 70), dark, relief=3)
        _eye(canvas, 50 + side * 15.5, 31, 5.4, (226, 176, 58))
    canvas.paint(stroke(1.1, (27, 52), (36, 57), (50, 58.5), (64, 57), (73, 52)), (56, 76, 30))
    for x in (47.5, 52.5):
        canvas.paint(ellipse(x, 45, 0.8), (56, 76, 30))
    for x, y, size in ((40, 41, 2), (59, 40, 1.7), (31, 47, 1.5), (69, 47, 1.8), (17, 62, 2.4), (83, 63, 2.4)):
        canvas.paint(ellipse(x, y, size), (70, 98, 40), opacity=0.75)
    return canvas


def _ship() -> Canvas:
    canvas = _sky(81, clouds=0.6)
    sea = box(-1, 58, 101, 101)
    canvas.paint(sea, (74, 122, 154), (24, 66, 106))
    canvas.roughen(texture(82, 10, 70, 4), 0.25, sea)
    canvas.paint(box(38, 34, 72, 53), (250, 250, 250), (206, 212, 220), relief=1.2)
    canvas.paint(box(44, 25, 66, 35), (252, 252, 252), (214, 219, 226), relief=1)
    canvas.paint(box(58, 18, 66, 26), (246, 246, 246), (206, 212, 220), relief=0.8)
    for x in (46, 53):
        funnel = polygon((x, 25.5), (x + 1, 14), (x + 5.5, 14), (x + 5, 25.5))
        canvas.paint(funnel, (214, 66, 44), (160, 40, 28), relief=1.5)
        canvas.paint(polygon((x + 0.8, 16.5), (x + 1, 14), (x + 5.5, 14), (x + 5.4, 16.5)), (40, 40, 46))
    canvas.paint(stroke(0.7, (76, 53), (76, 22)), (112, 100, 88))
    canvas.paint(stroke(0.35, (76, 23), (92, 51)), (112, 100, 88))
    canvas.paint(stroke(0.35, (76, 23), (64, 27)), (112, 100, 88))
    canvas.paint(stroke(0.7, (22, 54), (22, 32)), (112, 100, 88))
    for y, left, right in ((29, 46, 64), (39, 40, 70), (46, 40, 70)):
        for window in np.arange(left, right, 3.2):
            canvas.paint(box(window, y, window + 1.7, y + 2.4, 0.4), (64, 86, 116))
    canvas.paint(box(59, 20, 65.4, 22.5, 0.4), (64, 86, 116))
    hull = blob((7, 51), (30, 53), (70, 53), (97, 47.5), (94, 57), (88, 68.5), (50, 70), (15, 69), (9, 62))
    canvas.paint(hull, (46, 62, 92), (24, 34, 56), relief=3)
    canvas.paint(hull * box(0, 65, 100, 100), (164, 44, 36), (120, 28, 24))
    canvas.paint(stroke(0.8, (8, 53.4), (30, 55.3), (70, 55.3), (95.4, 50)), (236, 238, 242))
    for porthole in range(16, 86, 5):
        canvas.paint(ellipse(porthole, 59.5, 0.9), (206, 214, 226))
    canvas.shade(box(10, 70, 92, 77), 0.5, 1.8)
    foam = blob((4, 70), (30, 68.6), (60, 69.4), (88, 67.5), (98, 70.5), (80, 72), (40, 72.5), (10, 73))
    canvas.paint(foam * (0.35 + 0.65 * texture(83, 26, 60, 3).clip(0, 1)), (244, 250, 252), opacity=0.9)
    return canvas


def _truck() -> Canvas:
    canvas = _sky(93, (120, 164, 214), (214, 226, 234), clouds=0.6)
    _trees(canvas, 46, (112, 134, 96), 94)
    _ground(canvas, 66, (140, 138, 136), (104, 102, 104), 92, 0.09)
    canvas.shade(ellipse(50, 86, 46, 4), 0.7, 1.6)
    canvas.paint(box(8, 70, 92, 76), (52, 54, 60), relief=1)
    canvas.paint(box(4, 22, 64, 71, 1), (240, 241, 243), (196, 200, 208), relief=2)
    for x in np.arange(11, 64, 7.5):
        canvas.paint(stroke(0.5, (x, 24), (x, 69)), (170, 175, 184))
    canvas.paint(box(4.4, 60, 63.6, 66), (206, 60, 44), (176, 48, 36))
    cab = blob((66, 34), (70, 31), (80, 31.5), (86, 38), (90, 52), (95, 57), (96, 66), (95, 76), (66, 76))
    canvas.paint(cab, (214, 62, 44), (142, 32, 26), relief=3)
    canvas.paint(polygon((71, 37), (79.5, 37), (84, 41), (87, 52), (71, 52)), (58, 76, 94), (146, 168, 184))
    canvas.paint(polygon((74, 37), (78, 37), (75, 52), (71, 52)), (236, 242, 246), opacity=0.3)
    canvas.paint(stroke(0.5, (69, 36), (69, 74)), (104, 22, 18))
    canvas.paint(box(71, 58, 75, 59.4, 0.5), (240, 196, 188))
    canvas.paint(box(88.5, 72, 97.5, 77.5, 1), (198, 202, 208), (120, 124, 132), relief=1)
    canvas.paint(ellipse(93.5, 65.5, 1.9, 2.6), (255, 246, 208), relief=0.7)
    for x in (16, 34, 80):
        canvas.paint(ellipse(x, 77.5, 9.2), (26, 27, 31))
        _wheel(canvas, x, 79, 8)
    return canvas


SCENES: Mapping[str, Callable[[], Canvas]] = {
    "airplane": _airplane,
    "automobile": _automobile,
    "bird": _bird,
    "cat": _cat,
    "deer": _deer,
    "dog": _dog,
    "frog": _frog,
    "horse": _horse,
    "ship": _ship,
    "truck": _truck,
}
"""Class → function that draws it, in the order of CIFAR-10's class indices."""


def draw(name: str) -> np.ndarray:
    """Draw the image of a class, uint8 (160, 160, 3); deterministic."""
    return SCENES[name]().finished(list(SCENES).index(name))


def main() -> None:
    """Write the images into the package."""
    folder = Path(__file__).resolve().parents[1] / "src/vitral/demo/images"
    folder.mkdir(exist_ok=True)
    for name in SCENES:
        Image.fromarray(draw(name)).save(folder / f"{name}.png", "PNG", optimize=True)


if __name__ == "__main__":
    main()
