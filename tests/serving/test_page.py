"""The page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

import vitral
from browser import HEIGHTS, SCREENS, Visit, chromium, percent, require_chromium
from npmpackages import AXE, real
from serving.serverprocess import serving
from textlines import draw, write_reader
from vitral.demo import IMAGES
from vitral.export import npm

TOKEN = "a-token-of-24-characters"

require_chromium()


@pytest.fixture(scope="module")
def server(write_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "tokens").write_text(TOKEN)
    sky = write_run(folder / "sky", seed=1)
    reader = write_reader(folder / "reader.safetensors")
    with serving(
        "demo",
        str(sky),
        f"reader={reader}",
        "--precision",
        "fp32",
        "--token-file",
        str(folder / "tokens"),
        "--example",
        str(IMAGES / "ship.png"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def browser(server):
    """The server first: it is a fork of this process, in which the browser's event loop does not run yet."""
    with chromium() as running:
        yield running


class Guest(Visit):
    """A visit to a server with a token."""

    def enter_token(self) -> None:
        self.page.get_by_role("textbox", name="Token").fill(TOKEN)
        self.page.get_by_role("button", name="Use token").click()
        self.page.wait_for_function("() => document.getElementById('title').textContent === 'demo'")


@pytest.fixture
def visit(browser, server):
    visit = Guest(browser, server.url, viewport={"width": 1100, "height": 900})
    visit.enter_token()
    yield visit
    visit.check()
    visit.context.close()


@pytest.fixture(scope="module")
def predictor():
    return vitral.load("demo", precision="fp32")


def test_a_dropped_image_is_answered_as_python_does(visit, predictor, drawings):
    visit.give(("ship.png", drawings["ship.png"]))
    wanted = predictor(drawings["ship.png"])
    assert visit.text("label") == wanted.label == "ship"
    assert visit.text("confidence") == percent(wanted.confidence)
    rows = visit.page.locator("#classes li").all()
    for row, (name, probability) in zip(rows, wanted.top(8), strict=True):
        assert row.inner_text().split("\n")[:2] == [name, percent(probability)]
    width = visit.page.locator("#classes .bar i").first.evaluate("(bar) => bar.style.width")
    assert float(width.rstrip("%")) == pytest.approx(100 * wanted.confidence, abs=0.06)


def test_the_example_is_an_image_without_metadata(visit, predictor, drawings):
    visit.page.get_by_role("button", name="Try the example").click()
    visit.page.wait_for_function("() => document.getElementById('label').textContent === 'ship'")
    assert visit.text("confidence") == percent(predictor(drawings["ship.png"]).confidence)


def test_a_photograph_keeps_its_colors_under_a_map_of_half_opacity(visit, drawings):
    visit.give(("ship.png", drawings["ship.png"]))
    style = "(image) => [getComputedStyle(image).filter, getComputedStyle(image).opacity]"
    assert visit.page.locator("#image").evaluate(style) == ["grayscale(0)", "1"]
    assert visit.page.locator("#overlay").evaluate(style) == ["none", "0.5"]
    visit.page.get_by_role("slider", name="Explanation").fill("100")
    assert visit.page.locator("#image").evaluate(style) == ["grayscale(1)", "1"]


def test_class_names_come_before_the_size_of_the_network(visit, predictor):
    first = ", ".join(predictor.classes[:8])
    assert visit.text("about").startswith(f"10 classes: {first} and 2 more. ")
    assert "million parameters" in visit.text("about").partition(first)[2]


def test_an_unknown_image_is_none_of_the_classes(visit, predictor, drawings):
    def unknown(route):
        answer = route.fetch()
        (prediction,) = answer.json()["predictions"]
        prediction |= {"label": "unknown", "unknown": True}
        route.fulfill(response=answer, json={"predictions": [prediction]})

    visit.context.route("**/v1/predict", unknown)
    visit.give(("ship.png", drawings["ship.png"]))
    nearest = f"nearest: ship, {percent(predictor(drawings['ship.png']).confidence)}"
    assert (visit.text("label"), visit.text("confidence")) == ("none of the ten classes", nearest)
    assert f"none of the ten classes, {nearest}" in visit.page.locator("#gallery button").inner_text()


def test_an_image_that_is_not_sure_names_the_nearest_class(visit, predictor, drawings):
    sure = {"ship.png": "ship", "cat.png": "not sure"}

    def answered(route):
        answer = route.fetch()
        (prediction,) = answer.json()["predictions"]
        prediction["answer"] = sure[prediction["image"]]
        route.fulfill(response=answer, json={"predictions": [prediction]})

    visit.context.route("**/v1/predict", answered)
    visit.give(("ship.png", drawings["ship.png"]))
    assert (visit.text("label"), visit.text("confidence")) == (
        "ship",
        percent(predictor(drawings["ship.png"]).confidence),
    )
    visit.give(("cat.png", drawings["cat.png"]))
    cat = predictor(drawings["cat.png"])
    assert (visit.text("label"), visit.text("confidence")) == (
        "not sure",
        f"perhaps: {cat.label}, {percent(cat.confidence)}",
    )


def test_the_explanation_is_shown_over_the_image(visit, predictor, drawings):
    visit.give(("ship.png", drawings["ship.png"]))
    page = visit.page
    assert page.locator("#overlay").is_visible()
    assert page.locator("#overlay").evaluate("(image) => image.complete && image.naturalWidth") == 448
    image, overlay = (page.locator(f"#{name}").bounding_box() for name in ("image", "overlay"))
    assert image == pytest.approx(overlay, abs=1), "the network sees the whole of a square image"
    assert page.locator("#image").get_attribute("src").startswith("blob:"), "the image itself, not 32 x 32 pixels"
    page.get_by_role("slider", name="Explanation").fill("30")
    assert page.locator("#overlay").evaluate("(image) => getComputedStyle(image).opacity") == "0.3"
    assert page.locator("#opacity-value").inner_text() == "30%"
    assert "Evidence for ship" in visit.text("caption")
    page.get_by_role("button", name="truck").click()
    page.wait_for_function("() => document.getElementById('caption').textContent.includes('Evidence for truck')")
    assert page.evaluate("document.activeElement.textContent").startswith("truck")
    page.get_by_role("combobox", name="Explanation").select_option(label="none")
    page.wait_for_function("() => document.getElementById('overlay').hidden")
    assert page.locator("#image").get_attribute("src").startswith("blob:")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, server, drawings, scheme):
    """Before a token is given, with an answer and its map, and with an error."""
    script = npm.members(real(AXE), ["package/axe.min.js"])["package/axe.min.js"].decode()
    size = {"width": 1100, "height": 900}
    visit = Guest(browser, server.url, color_scheme=scheme, viewport=size, bypass_csp=True)
    visit.page.evaluate(script)
    found = [visit.page.evaluate("axe.run()")]
    visit.enter_token()
    visit.give(("ship.png", drawings["ship.png"]))
    found.append(visit.page.evaluate("axe.run()"))
    visit.hand_over(("broken.png", b"no image"))
    visit.page.get_by_role("alert").wait_for()
    found.append(visit.page.evaluate("axe.run()"))
    assert [[(one["id"], one["nodes"][0]["html"]) for one in each["violations"]] for each in found] == [[], [], []]
    assert all(len(each["passes"]) > 5 for each in found), [len(each["passes"]) for each in found]
    visit.context.close()


@pytest.mark.slow
def test_choose_paste_and_history(visit, drawings, tmp_path):
    page = visit.page
    (tmp_path / "dog.png").write_bytes(drawings["dog.png"])
    page.get_by_label("Choose an image").set_input_files(str(tmp_path / "dog.png"))
    visit.answered("dog.png")
    visit.give(("cat.png", drawings["cat.png"]), kind="paste")
    visit.give(("bird.png", drawings["bird.png"]), ("frog.png", drawings["frog.png"]))
    assert [one.get_attribute("title") for one in page.locator("#gallery button").all()] == [
        "frog.png",
        "bird.png",
        "cat.png",
        "dog.png",
    ]
    page.locator("#gallery button").last.click()
    assert page.locator("#status").text_content().startswith("dog.png: dog")
    assert page.evaluate("document.activeElement.id") == "result-title"
    page.get_by_role("button", name="Clear").click()
    assert not page.locator("#history").is_visible()


@pytest.mark.slow
def test_another_model(visit, drawings):
    visit.give(("ship.png", drawings["ship.png"]))
    visit.page.get_by_role("combobox", name="Model").select_option("sky")
    visit.page.wait_for_function("() => document.querySelectorAll('#classes li').length === 2")
    assert visit.text("title") == "sky"
    assert visit.text("label") in ("day", "night")


def test_a_text_is_shown_with_its_characters(visit, tmp_path):
    reader = vitral.load(write_reader(tmp_path / "reader.safetensors"), precision="fp32")
    draw("bbb").save(tmp_path / "bbb.png")
    data = (tmp_path / "bbb.png").read_bytes()
    visit.page.get_by_label("Model").select_option("reader")
    assert "6 characters and other tokens" in visit.text("about")
    visit.give(("bbb.png", data))
    wanted = reader(data)
    assert wanted.text
    assert visit.text("label") == wanted.text
    assert visit.text("confidence") == percent(wanted.confidence)
    assert visit.text("classes-title") == "Characters"
    rows = [row.inner_text().split("\n")[:2] for row in visit.page.locator("#classes li").all()]
    assert rows == [[character, percent(probability)] for character, probability in wanted.characters]
    overlay = visit.page.locator("#overlay")
    first = overlay.get_attribute("src")
    assert f"Attention for {wanted.text[0]}, by cross-attention" in visit.text("caption")
    buttons = visit.page.locator("#classes button")
    buttons.nth(1).click()
    assert overlay.get_attribute("src") != first
    assert [one.get_attribute("aria-pressed") for one in buttons.all()] == [
        str(place == 1).lower() for place in range(len(wanted.text))
    ]


def test_what_is_no_image_is_explained(browser, server, drawings):
    visit = Guest(browser, server.url)
    visit.enter_token()
    visit.hand_over(("half.png", drawings["cat.png"][:300]))
    visit.page.get_by_role("alert").wait_for()
    assert "An image cannot be read" in visit.text("problem")
    assert "half.png" in visit.text("problem")
    visit.context.close()


def test_a_refused_file_takes_the_place_of_the_last_answer(browser, server, drawings):
    visit = Guest(browser, server.url)
    visit.enter_token()
    visit.give(("ship.png", drawings["ship.png"]))
    assert visit.page.locator("#answer").is_visible()
    visit.hand_over(("notes.txt", b"no image"))
    visit.page.get_by_role("alert").wait_for()
    assert "notes.txt" in visit.text("problem") + visit.text("status")
    assert not visit.page.locator("#answer").is_visible()
    visit.page.locator("#gallery button").first.click()
    assert visit.page.locator("#answer").is_visible()
    visit.context.close()


def test_classes_are_listed_and_a_method_is_recommended(visit, predictor, drawings):
    names = visit.page.locator("#names")
    assert visit.text("names-title") == f"{len(predictor.classes)} classes"
    names.locator("summary").click()
    assert visit.text("names-list") == ", ".join(predictor.classes)
    assert visit.page.locator("#method option").first.inner_text() == "recommended"
    assert visit.page.locator("#method optgroup option").count() > 5
    visit.give(("ship.png", drawings["ship.png"]))
    assert visit.text("legend").split("\n") == ["evidence for it", "evidence against it"]
    visit.page.get_by_role("combobox", name="Explanation").select_option(label="attention rollout")
    visit.page.wait_for_function("() => document.getElementById('legend').hidden")


@pytest.mark.parametrize(
    ("size", "resize", "share"),
    [
        ((60, 30), {"resize": "stretch"}, (1, 1)),
        ((60, 30), {"resize": "letterbox"}, (1, 2)),
        ((60, 30), {"resize": "crop", "crop_fraction": 0.8}, (0.4, 0.8)),
        ((60, 30), {"resize": "crop", "crop_fraction": 0.8, "resize_size": [48, 48]}, (1 / 3, 2 / 3)),
        ((60, 30), {"resize": "native"}, (1, 1)),
    ],
)
def test_a_map_lies_over_what_the_network_saw(visit, size, resize, share):
    """As `Preprocessing.geometry` cuts it, to a pixel: share of height and of width."""
    facts = {"image_size": [32, 32], "resize_size": None, **resize}
    code = "async ([size, facts]) => (await import('./page.js')).region(size, facts).share"
    assert visit.page.evaluate(code, [list(size), facts]) == pytest.approx(share)


@pytest.mark.parametrize(("classes", "probability"), [(2, 0.75), (4, 0.625), (10, 0.55), (1000, 0.5005)])
def test_a_class_is_unsure_if_it_is_closer_to_chance_than_to_certainty(visit, classes, probability):
    code = "async (classes) => (await import('./page.js')).sure(classes)"
    assert visit.page.evaluate(code, classes) == pytest.approx(probability)


def test_an_unsure_class_is_marked(visit, predictor):
    rng = np.random.default_rng(0)
    candidates = [np.full((64, 64, 3), level, np.uint8) for level in (0, 90, 128, 200, 255)]
    candidates += [rng.integers(0, 255, (64, 64, 3), np.uint8) for _ in range(5)]
    found = min(candidates, key=lambda pixels: predictor(pixels).confidence)
    confidence = predictor(found).confidence
    assert confidence < 0.5, "the network is sure of each of these images"
    file = io.BytesIO()
    Image.fromarray(found).save(file, "PNG")
    visit.give(("gray.png", file.getvalue()))
    assert visit.text("confidence") == f"{percent(confidence)}, unsure"


@pytest.mark.slow
def test_a_file_that_is_too_large_is_not_sent(visit):
    visit.page.evaluate("""() => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(40 << 20)], "large.png", { type: "image/png" }));
      document.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer }));
    }""")
    visit.page.get_by_role("alert").wait_for()
    assert "large.png has 40 MiB; the limit is 32 MiB" in visit.text("problem")


@pytest.mark.slow
def test_by_keyboard_alone(visit, drawings):
    page = visit.page
    visit.give(("ship.png", drawings["ship.png"]))
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "result-title"
    page.locator(".skip").focus()
    reached = []
    for _ in range(15):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    for wanted in ("file", "model", "method", "opacity"):
        assert wanted in reached
    assert any(one.startswith("ship") for one in reached)
    tree = page.locator("body").aria_snapshot()
    assert page.get_by_role("status").text_content().startswith("ship.png: ship, 92.5")
    for wanted in ('heading "demo"', 'slider "Explanation"', 'combobox "Model"', "heat map"):
        assert wanted in tree, tree


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_it_fits_every_screen(browser, server, drawings, width, scheme, tmp_path):
    size = {"width": width, "height": HEIGHTS[width]}
    visit = Guest(browser, server.url, viewport=size, color_scheme=scheme)
    visit.enter_token()
    visit.give(*((f"{name}.png", drawings[f"{name}.png"]) for name in ("cat", "truck", "ship")))
    visit.fits(width)
    visit.screenshot(f"page-{width}-{scheme}", tmp_path)
    assert visit.complaints == []
    visit.context.close()
