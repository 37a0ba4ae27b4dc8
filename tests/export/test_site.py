"""`vitral export --to web` in a real browser: what the page computes, shows and asks for."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps
from test_graph import SIZES, exact, rules

import vitral
from browser import DROP, HEIGHTS, PATIENCE, SCREENS, Quiet, Visit, another, hosted, percent, require_chromium
from images import noise
from npmpackages import AXE, real
from vitral.data.images.decode import read_image
from vitral.data.images.preprocessing import Preprocessing
from vitral.demo import IMAGES
from vitral.explanation.drawing import enlarged
from vitral.explanation.explain import explain
from vitral.export import export_model, npm
from vitral.export.graph import FILTERS
from vitral.export.web import _NAMES_ANY, PACKAGE
from vitral.inference.outputs.classes import Classes
from vitral.inference.unknown import Detector, fit_statistics

require_chromium()

CLOSE = 1e-3
DRAWN = {file.name: file.read_bytes() for file in sorted(IMAGES.glob("*.png"))}

pytestmark = (
    pytest.mark.slow
)  # tests of the server's page drive a browser, and those of the command export, in each run


class Poor(Quiet):
    """Knows few types of files, as small hosts do."""

    def guess_type(self, path: Any) -> str:
        known = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
        return known.get(Path(path).suffix, "application/octet-stream")


class Isolated(Quiet):
    """Sends the headers that let a page use threads."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()


@pytest.fixture(scope="module")
def site(tmp_path_factory, predictor) -> Path:
    runtime = real(PACKAGE)
    example, out = IMAGES / "ship.png", tmp_path_factory.mktemp("site") / "demo"
    return export_model(predictor, "web", out=out, runtime=runtime, example=example).folder


@pytest.fixture(scope="module")
def predictor():
    """The demo with a temperature, as trained runs have."""
    demo = vitral.load("demo", device="cpu", precision="fp32")
    demo.output = Classes(demo.classes, temperature=1.5)
    return demo


@pytest.fixture
def visit(browser, url):
    visit = Visit(browser, url, viewport={"width": 1100, "height": 900})
    yield visit
    visit.check()
    visit.context.close()


def detecting(predictor: vitral.Predictor, score: str) -> tuple[vitral.Predictor, dict[str, bool]]:
    """The predictor with a threshold in the middle of the scores of the drawings, and those that are above it."""
    features = predictor.embed(list(DRAWN.values()))
    statistics = fit_statistics(
        np.repeat(features, 4, 0) + np.random.default_rng(0).normal(size=(40, 1)), np.arange(40) % 3
    )
    detector = Detector(score, 0.0, statistics if score == "distance" else {})
    output = dataclasses.replace(predictor.output, unknown=detector)
    other = vitral.Predictor(
        predictor.network,
        predictor.preprocessing,
        predictor.classes,
        machine=predictor.machine,
        source="demo",
        output=output,
    )
    pixels = torch.stack([other.prepare(data) for data in DRAWN.values()])
    scores = np.sort(other.rows(pixels)[:, -1])
    other.output = dataclasses.replace(
        output, unknown=dataclasses.replace(detector, threshold=float(scores[4:6].mean()))
    )
    return other, {name: bool(other(data).unknown) for name, data in DRAWN.items()}


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def variants() -> dict[str, bytes]:
    """Twelve images as other programs write them: formats, sizes, colors, turned by EXIF."""
    drawn = {name.removesuffix(".png"): Image.open(io.BytesIO(data)).convert("RGB") for name, data in DRAWN.items()}
    turned = Image.Exif()
    turned[0x0112] = 6
    transparent = drawn["bird"].convert("RGBA")
    transparent.putalpha(ImageOps.invert(drawn["bird"].convert("L")))
    return {
        "photo.jpg": encoded(drawn["cat"].resize((1500, 1000)), "JPEG", quality=92),
        "turned.jpg": encoded(drawn["ship"].rotate(90), "JPEG", quality=95, exif=turned),
        "turned.png": encoded(drawn["ship"].rotate(90), "PNG", exif=turned),
        "turned.webp": encoded(drawn["ship"].rotate(90), "WEBP", lossless=True, exif=turned),
        "profile.jpg": encoded(drawn["truck"], "JPEG", quality=95, icc_profile=swapped_profile()),
        "gray.jpg": encoded(drawn["dog"].convert("L"), "JPEG", quality=95),
        "gray.png": encoded(drawn["frog"].convert("L"), "PNG"),
        "palette.gif": encoded(drawn["deer"].quantize(64), "GIF"),
        "palette.png": encoded(drawn["horse"].quantize(64), "PNG"),
        "transparent.png": encoded(transparent, "PNG"),
        "small.webp": encoded(drawn["airplane"].resize((20, 14)), "WEBP", lossless=True),
        "noise.bmp": encoded(Image.fromarray(noise(0, (33, 47))), "BMP"),
    }


def swapped_profile() -> bytes:
    """A profile with red and blue exchanged: whoever applies it gets other colors."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return profile.replace(b"rXYZ", b"----").replace(b"bXYZ", b"rXYZ").replace(b"----", b"bXYZ")


ASK = """
async ([name, content, options]) => {
  const source = await import("./source.js");
  const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
  return source.predict(new File([bytes], name), name, options);
}
"""


def asked(visit: Visit, name: str, data: bytes, **options: str) -> Any:
    """The page's answer as plain data."""
    visit.page.wait_for_function("() => document.getElementById('title').textContent === 'demo'")
    return visit.page.evaluate(ASK, [name, base64.b64encode(data).decode(), {"top": "10", **options}])


class TestAnswers:
    def test_the_example_is_answered(self, visit, predictor):
        visit.page.get_by_role("button", name="Try the example").click()
        visit.page.wait_for_function("() => document.getElementById('label').textContent === 'ship'", timeout=60_000)
        assert visit.text("confidence") == percent(predictor(DRAWN["ship.png"]).confidence)

    def test_images_of_all_kinds_are_answered_as_python_does(self, visit, predictor):
        images = {**DRAWN, **variants()}
        assert len(images) == 22
        for name, data in images.items():
            wanted, found = predictor(data), asked(visit, name, data)
            assert found["label"] == wanted.label, name
            shares = {one["class"]: one["probability"] for one in found["top"]}
            assert shares.keys() == set(predictor.classes)
            assert max(abs(shares[one] - p) for one, p in wanted.top(10)) < CLOSE, name

    def test_every_orientation_of_a_webp_is_turned_as_pillow_turns_it(self, visit, predictor):
        for turn in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = turn
            data = encoded(Image.fromarray(noise(turn, (40, 61))), "WEBP", lossless=True, exif=exif)
            wanted, found = predictor(data), asked(visit, "turned.webp", data)
            shares = {one["class"]: one["probability"] for one in found["top"]}
            assert max(abs(shares[one] - p) for one, p in wanted.top(10)) < CLOSE, turn

    def test_the_map_is_that_of_explain(self, visit, predictor):
        for target in ("", "truck"):
            found = asked(visit, "ship.png", DRAWN["ship.png"], explain="fullgrad+", target=target)["explanation"]
            wanted = explain(predictor, DRAWN["ship.png"], target or None)[0]
            assert (found["method"], found["label"]) == (wanted.method, wanted.label)
            values = np.array(found["values"]).reshape(wanted.values.shape)
            np.testing.assert_allclose(values, wanted.values, atol=1e-4 * np.abs(wanted.values).max())
            for kind, image in (("overlay", wanted.overlay()), ("image", enlarged(wanted.image))):
                drawn = Image.open(io.BytesIO(base64.b64decode(found[kind].partition(",")[2]))).convert("RGB")
                assert drawn.size == image.size
                assert np.abs(np.asarray(drawn, int) - np.asarray(image, int)).max() <= 3, (target, kind)

    def test_what_is_no_image_is_explained(self, visit):
        visit.hand_over(("half.png", DRAWN["cat.png"][:300]))
        visit.page.get_by_role("alert").wait_for()
        assert "The image cannot be read" in visit.text("problem")


class TestHosts:
    """The page where people put it: hosts that know few types, below a path, and a network that is cut later."""

    def test_a_poor_host_below_a_path_answers_after_the_network_was_cut(self, browser, site):
        with hosted(site.parent, Poor) as address:
            visit = Visit(browser, f"{address}{site.name}/")
            visit.page.wait_for_function("() => document.getElementById('status').textContent === 'No image yet.'")
            visit.page.wait_for_load_state("networkidle")
        visit.context.set_offline(True)
        assert asked(visit, "ship.png", DRAWN["ship.png"])["label"] == "ship"
        visit.check()
        visit.context.close()

    def test_the_bytes_are_shown_and_a_file_that_is_missing_is_named(self, browser, site):
        with hosted(site) as address:
            context = browser.new_context()
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            page.add_init_script("""
              window.said = [];
              new MutationObserver(() => window.said.push(document.getElementById("status")?.textContent))
                .observe(document, { childList: true, subtree: true, characterData: true });
            """)
            context.route("**/runtime/*.js", lambda route: route.abort())
            page.goto(address)
            page.get_by_role("alert").wait_for()
            problem, said = page.locator("#problem").inner_text(), page.evaluate("() => window.said")
            context.close()
        assert "The page is not complete" in problem
        assert "runtime/ort." in problem
        assert any(one and "Loading the network: " in one and "MB" in one for one in said)


RESIZE = """
async ([images, rules]) => {
  const { prepare } = await import("./resize.js");
  return images.flatMap(([height, width, pixels]) => {
    const rgba = new Uint8ClampedArray(4 * height * width).fill(255);
    [...atob(pixels)].forEach((letter, i) => (rgba[4 * Math.floor(i / 3) + (i % 3)] = letter.charCodeAt(0)));
    const strip = (top, count) => rgba.slice(4 * top * width, 4 * (top + count) * width);
    return rules.map((rule) => btoa(String.fromCharCode(...prepare(width, height, strip, rule))));
  });
}
"""


@exact
@pytest.mark.parametrize("interpolation", FILTERS)
def test_images_are_resized_to_the_bytes_of_training(visit, interpolation):
    gray = Preprocessing((24, 40), 1, "crop", interpolation=interpolation, mean=(0.5,), std=(0.5,))
    own = [*rules(interpolation), gray]
    images = [noise(number, size) for number, size in enumerate(SIZES)]
    given = [[*one.shape[:2], base64.b64encode(one.tobytes()).decode()] for one in images]
    found = visit.page.evaluate(RESIZE, [given, json.loads(json.dumps([one.to_json() for one in own]))])
    wanted = [
        one.geometry(read_image(image, channels=one.channels)).numpy().tobytes() for image in images for one in own
    ]
    assert [base64.b64decode(one) for one in found] == wanted


class TestPage:
    def test_an_image_a_class_and_the_slider(self, visit, predictor):
        visit.give(("ship.png", DRAWN["ship.png"]))
        wanted, page = predictor(DRAWN["ship.png"]), visit.page
        assert (visit.text("label"), visit.text("confidence")) == (wanted.label, percent(wanted.confidence))
        assert visit.text("title") == "demo"
        page.get_by_role("slider", name="Explanation").fill("30")
        assert page.locator("#overlay").evaluate("(image) => getComputedStyle(image).opacity") == "0.3"
        page.get_by_role("button", name="truck").click()
        page.wait_for_function("() => document.getElementById('caption').textContent.includes('Evidence for truck')")
        page.get_by_role("combobox", name="Explanation").select_option(label="none")
        page.wait_for_function("() => document.getElementById('overlay').hidden")

    def test_an_image_given_before_the_model_is_known_is_answered(self, browser, url):
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        held: list[Any] = []
        context.route("**/model.json", lambda route: held.append(route))
        page.goto(url)
        page.evaluate(DROP, ["drop", ["ship.png"], [base64.b64encode(DRAWN["ship.png"]).decode()]])
        assert page.locator("#title").inner_text() != "demo"
        for route in held:
            route.continue_()
        context.unroute("**/model.json")
        page.wait_for_function("() => document.getElementById('status').textContent.startsWith('ship.png:')")
        context.close()

    def test_opened_as_a_file_it_says_what_it_needs(self, browser, site):
        page = browser.new_page()
        page.goto((site / "index.html").as_uri())
        assert page.locator("#about").inner_text().startswith("This page does not work as a file")
        assert "python -m http.server" in page.locator("#about").inner_text()
        page.close()

    @pytest.mark.parametrize("score", ["confidence", "energy", "distance"])
    def test_unknown_images_are_those_of_python(self, browser, predictor, tmp_path, score):
        other, wanted = detecting(predictor, score)
        assert len(set(wanted.values())) == 2, "some are unknown"
        exported = export_model(other, "web", out=tmp_path / "site", runtime=real(PACKAGE))
        assert not any("unknown" in one for one in exported.warnings)
        with hosted(exported.folder) as address:
            visit = Visit(browser, address)
            found = {name: asked(visit, name, data) for name, data in DRAWN.items()}
            assert {name: one["unknown"] for name, one in found.items()} == wanted
            name = next(name for name in wanted if wanted[name])
            visit.give((name, DRAWN[name]))
            nearest = other(DRAWN[name]).top(1)[0]
            assert visit.text("label") == "none of the ten classes"
            assert visit.text("confidence") == f"nearest: {nearest[0]}, {percent(nearest[1])}"
            assert not visit.page.locator("#limits").is_visible()
            visit.check()
            visit.context.close()

    def test_a_page_that_knows_no_unknown_images_says_so(self, visit, browser, url):
        """As that of a ResNet whose threshold is of a distance."""
        facts = json.loads((visit.page.request.get(f"{url}model.json")).text())
        context = browser.new_context()
        note = json.dumps({**facts, "unknown_note": _NAMES_ANY})
        context.route("**/model.json", lambda route: route.fulfill(body=note))
        page = context.new_page()
        page.goto(url)
        page.locator("#limits").wait_for()
        assert page.locator("#limits").inner_text().startswith("It names one of these classes for any image")
        context.close()

    def test_paste_choose_and_photograph(self, visit, tmp_path):
        visit.give(("cat.png", DRAWN["cat.png"]), kind="paste")
        (tmp_path / "dog.png").write_bytes(DRAWN["dog.png"])
        visit.page.get_by_label("Choose an image").set_input_files(str(tmp_path / "dog.png"))
        visit.answered("dog.png")
        visit.page.get_by_role("button", name="Use the camera").click()
        visit.page.get_by_role("button", name="Take photo").click()
        visit.page.wait_for_function("() => document.getElementById('status').textContent.startsWith('photo ')")
        assert not visit.page.locator("#camera-dialog").is_visible()
        assert visit.page.evaluate("document.getElementById('camera-view').srcObject") is None, "the camera is off"
        assert visit.page.locator("#gallery button").count() == 3

    def test_by_keyboard_alone(self, visit, predictor):
        page = visit.page
        visit.give(("ship.png", DRAWN["ship.png"]))
        page.locator(".skip").focus()
        reached = []
        for _ in range(8):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert reached[:6] == ["file", "camera", "example", "method", "names-title", "opacity"]
        assert reached[6].startswith("ship")
        page.locator("#opacity").focus()
        page.keyboard.press("Home")
        assert page.locator("#opacity").get_attribute("aria-valuetext") == "0 percent"
        confidence = predictor(DRAWN["ship.png"]).confidence
        assert page.get_by_role("status").text_content().startswith(f"ship.png: ship, {100 * confidence:.1f}")
        tree = page.locator("body").aria_snapshot()
        for wanted in ('heading "demo"', 'slider "Explanation"', "heat map of the evidence for ship"):
            assert wanted in tree, tree

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_axe_finds_nothing(self, browser, url, scheme):
        script = npm.members(real(AXE), ["package/axe.min.js"])["package/axe.min.js"].decode()
        visit = Visit(browser, url, color_scheme=scheme, viewport={"width": 1100, "height": 900}, bypass_csp=True)
        visit.page.evaluate(script)
        found = [visit.page.evaluate("axe.run()")]
        visit.give(("ship.png", DRAWN["ship.png"]))
        found.append(visit.page.evaluate("axe.run()"))
        visit.page.get_by_role("button", name="Use the camera").click()
        visit.page.get_by_role("button", name="Take photo").wait_for()
        found.append(visit.page.evaluate("axe.run()"))
        assert [[(one["id"], one["nodes"][0]["html"]) for one in each["violations"]] for each in found] == [[], [], []]
        assert all(len(each["passes"]) > 5 for each in found), [len(each["passes"]) for each in found]
        visit.context.close()

    @pytest.mark.parametrize(("width", "scheme"), SCREENS)
    def test_it_fits_every_screen(self, browser, url, width, scheme, tmp_path):
        size = {"width": width, "height": HEIGHTS[width]}
        visit = Visit(browser, url, viewport=size, color_scheme=scheme)
        visit.give(*((f"{name}.png", DRAWN[f"{name}.png"]) for name in ("cat", "truck", "ship")))
        visit.fits(width)
        visit.screenshot(f"site-{width}-{scheme}", tmp_path)
        visit.check()
        visit.context.close()


class TestRuntime:
    def test_the_policy_holds(self, visit):
        visit.give(("ship.png", DRAWN["ship.png"]))
        policy = visit.page.locator("meta[http-equiv]").get_attribute("content")
        assert "unsafe-inline" not in policy
        assert "script-src 'self' 'wasm-unsafe-eval';" in policy
        refused = "() => { try { return String(eval('1 + 1')); } catch (error) { return error.name; } }"
        assert visit.page.evaluate(refused) in ("EvalError", "2")  # the debugger's own evaluation may be exempt
        assert len(visit.requested) > 8
        assert sum(url.endswith(".wasm") for url in visit.requested) == 1

    def test_threads_where_the_host_isolates_the_page(self, browser, site):
        with hosted(site, Isolated) as address:
            visit = Visit(browser, address)
            visit.give(("ship.png", DRAWN["ship.png"]))
            assert visit.page.evaluate("crossOriginIsolated")
            assert visit.text("label") == "ship"
            visit.check()
            visit.context.close()

    def test_a_network_that_computes_something_else_is_not_used(self, browser, site, tmp_path):
        other = tmp_path / "other"
        other.mkdir()
        for path in site.iterdir():
            (other / path.name).symlink_to(path)
        facts = json.loads((site / "model.json").read_text())
        facts["check"][0] += 0.01
        (other / "model.json").unlink()
        (other / "model.json").write_text(json.dumps(facts))
        with hosted(other) as address:
            visit = Visit(browser, address)
            visit.hand_over(("ship.png", DRAWN["ship.png"]))
            visit.page.get_by_role("alert").wait_for()
            assert "it computes something else than the network that was exported" in visit.text("problem")
            visit.context.close()

    @pytest.mark.soak
    def test_webgpu_in_software(self, browser, url, predictor):
        switches = "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"
        with another(browser, *switches) as other:
            visit = Visit(other, url)
            visit.page.set_default_timeout(180_000)
            if not visit.page.evaluate("navigator.gpu.requestAdapter().then(Boolean)"):
                pytest.skip("needs a Chromium with SwiftShader")
            found = asked(visit, "ship.png", DRAWN["ship.png"])
            assert any("asyncify.wasm" in one for one in visit.requested)
            assert not any(one.endswith("threaded.wasm") for one in visit.requested)
            assert found["confidence"] == pytest.approx(predictor(DRAWN["ship.png"]).confidence, abs=CLOSE)
