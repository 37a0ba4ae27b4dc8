"""The page of `vitral label --export` in a real browser: teach, measure, save, open again, and the same answers in
Python.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_site import encoded, hosted, variants

import projects
import vitral
from browser import PATIENCE, Visit, chromium, require_chromium
from images import scene
from npmpackages import AXE, real
from running import as_json
from vitral.evaluation import probe
from vitral.evaluation.intervals import proportion_interval
from vitral.export import npm
from vitral.export.teach import export_teaching
from vitral.export.web import PACKAGE
from vitral.labeling.insight import _temperature, tempered
from vitral.weights.load import read
from vitral.weights.read.source import open_source

require_chromium()

pytestmark = pytest.mark.slow

COLORS = {"red": (210, 60, 50), "green": (60, 170, 70), "blue": (60, 80, 200)}


def png(label: str, seed: int, share: float = 0.45) -> bytes:
    """A photograph of nothing in the color of its class."""
    plain = Image.new("RGB", (96, 72), COLORS[label])
    return encoded(Image.blend(scene(seed), plain, share), "PNG")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teach") / "site"
    export_teaching(folder, runtime=real(PACKAGE))
    return folder


@pytest.fixture(scope="module")
def url(site):
    with hosted(site) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with chromium("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as running:
        yield running


@pytest.fixture
def visit(browser, url):
    visit = Visit(browser, url, viewport={"width": 1280, "height": 900}, accept_downloads=True)
    ready(visit)
    yield visit
    visit.check()
    visit.context.close()


def ready(visit: Visit) -> None:
    visit.page.wait_for_function("() => /^(Ready|Your last)/.test(document.getElementById('status').textContent)")


def add_class(visit: Visit, name: str) -> None:
    visit.page.get_by_label("New class").fill(name)
    visit.page.get_by_role("button", name="Add class").click()


def add_images(visit: Visit, label: str, images: Mapping[str, bytes]) -> None:
    files = [{"name": name, "mimeType": "image/png", "buffer": data} for name, data in images.items()]
    visit.page.get_by_label(f"Add images to {label}", exact=True).set_input_files(files)
    visit.page.wait_for_function(
        "([count, label]) => document.getElementById('status').textContent.startsWith(`${count} image`) "
        "&& document.getElementById('status').textContent.endsWith(`added to ${label}.`)",
        arg=[len(images), label],
    )


def fitted(visit: Visit) -> None:
    """Wait until the last change is fitted."""
    visit.page.wait_for_timeout(50)
    visit.page.wait_for_function("() => document.body.dataset.fitting !== 'true'")


def teach(visit: Visit, count: int = 16, labels: tuple[str, ...] = ("red", "blue")) -> None:
    for number, label in enumerate(labels):
        add_class(visit, label)
        add_images(visit, label, {f"{label} {i}.png": png(label, 100 * number + i) for i in range(count)})
    fitted(visit)


def saved(visit: Visit, folder: Path, name: str = "taught.safetensors") -> Path:
    with visit.page.expect_download() as download:
        visit.page.get_by_role("button", name="Save project").click()
    download.value.save_as(folder / name)
    return folder / name


def asked(visit: Visit, name: str, data: bytes) -> dict[str, float]:
    """Try an image; return its probabilities by class, as the page computed them."""
    page = visit.page
    page.get_by_label("Choose an image").set_input_files({"name": name, "mimeType": "image/png", "buffer": data})
    page.wait_for_function("(name) => document.getElementById('try-image').alt === name", arg=name)
    page.wait_for_function("() => document.querySelectorAll('#try-shares li').length > 0")
    rows = page.locator("#try-shares li").evaluate_all(
        "(rows) => rows.map((row) => [row.children[0].textContent, Number(row.children[1].value)])"
    )
    return dict(rows)


def largest(found: dict[str, float], wanted: vitral.Prediction) -> float:
    return max(abs(found[name] - share) for name, share in wanted.top(len(found)))


class TestTaught:
    def test_a_project_answers_in_python_as_on_the_page(self, visit, tmp_path, capsys):
        teach(visit)
        file = saved(visit, tmp_path)
        predictor = vitral.load(file, device="cpu", precision="fp32")
        assert predictor.classes == ("red", "blue")
        images = {f"new {label}.png": png(label, 900 + n, 0.3) for n, label in enumerate(COLORS)}
        images |= {name: data for name, data in variants().items() if name.endswith((".png", ".bmp"))}
        for name, data in images.items():
            assert largest(asked(visit, name, data), predictor(data)) < 1e-4, name
        (tmp_path / "new").mkdir()
        for name, data in images.items():
            (tmp_path / "new" / name).write_bytes(data)
        rows = as_json(capsys, "predict", str(file), str(tmp_path / "new"), "--device", "cpu")["predictions"]
        for row in rows:
            name = Path(row["image"]).name
            found = asked(visit, f"again {name}", images[name])
            assert max(abs(found[one["class"]] - one["probability"]) for one in row["top"]) < 1e-4, name

    def test_training_starts_from_a_saved_project(self, visit, tmp_path):
        teach(visit)
        file = saved(visit, tmp_path)
        for label in ("red", "blue"):
            (tmp_path / "photos" / label).mkdir(parents=True)
            for number in range(6):
                (tmp_path / "photos" / label / f"{number}.png").write_bytes(png(label, 700 + number))
        run = vitral.train(
            str(tmp_path / "photos"),
            init=str(file),
            out=str(tmp_path / "run"),
            quiet=True,
            device="cpu",
            precision="fp32",
            epochs=1,
            lr=0.0,
            batch_size=4,
            probe=False,
            val_fraction=0.2,
            ema=0.0,
            crop="none",
            augment="none",
            flip=False,
            optimizer="adamw",
        )
        before, after = (read(one).weights for one in (file, run.folder))
        assert set(before.classes) == set(after.classes)
        rows = [after.classes.index(name) for name in before.classes]
        heads = [one.state["head.weight"].numpy() for one in (before, after)]
        np.testing.assert_array_equal(heads[1][rows], heads[0])

    def test_other_formats_are_answered_alike(self, visit, tmp_path):
        """A browser may round the colors of an image with a profile differently."""
        teach(visit)
        predictor = vitral.load(saved(visit, tmp_path), device="cpu", precision="fp32")
        for name, data in variants().items():
            if name.endswith((".jpg", ".webp", ".gif")):
                close = 1e-3 if name == "profile.jpg" else 1e-4
                assert largest(asked(visit, name, data), predictor(data)) < close, name

    def test_the_saved_features_are_those_of_python(self, visit, tmp_path):
        teach(visit, count=4)
        tensors = open_source(saved(visit, tmp_path)).tensors
        images = [png(label, 100 * n + i) for n, label in enumerate(("red", "blue")) for i in range(4)]
        wanted = vitral.load("backbone", device="cpu", precision="fp32").embed(images)
        np.testing.assert_allclose(tensors["features"].numpy(), wanted, atol=1e-4 * np.abs(wanted).max())
        assert tensors["labels"].tolist() == [0] * 4 + [1] * 4
        ends = [0, *tensors["thumbnail_ends"].tolist()]
        sizes = [
            Image.open(io.BytesIO(bytes(tensors["thumbnails"][first:last].tolist()))).size
            for first, last in itertools.pairwise(ends)
        ]
        assert sizes == [(96, 72)] * 8

    def test_thumbnails_are_left_out_on_request(self, visit, tmp_path):
        teach(visit, count=4)
        visit.page.get_by_label("Keep small copies").uncheck()
        assert "thumbnails" not in open_source(saved(visit, tmp_path)).tensors

    def test_the_accuracy_is_stated_from_30_images_on(self, visit):
        teach(visit, count=14)
        assert "too few to say how accurate it is" in visit.text("measure-text")
        add_images(visit, "red", {f"more {i}.png": png("red", 400 + i) for i in range(3)})
        fitted(visit)
        text = visit.text("measure-text")
        assert "too few" not in text
        assert "of 31 images, each predicted from the others" in text
        table = visit.page.locator("#measure-table td").all_inner_texts()
        assert sum(int(one) for one in table if one.isdigit()) == 31

    def test_a_copy_counts_once(self, visit, tmp_path):
        teach(visit, count=4)
        add_images(visit, "red", {"copy.png": png("red", 0)})
        assert visit.page.locator(".card .count").all_inner_texts() == ["4 images", "4 images"]
        add_images(visit, "blue", {"copy.png": png("red", 0)})
        groups = open_source(saved(visit, tmp_path)).tensors["groups"].tolist()
        assert len(groups) == 9
        assert groups[-1] == groups[0]

    def test_near_duplicates_have_one_group(self, visit, tmp_path):
        add_class(visit, "red")
        whole = Image.open(io.BytesIO(png("red", 1, 0.1))).resize((320, 240))
        other = Image.open(io.BytesIO(png("red", 2, 0.1))).resize((320, 240))
        images = {
            "whole.png": encoded(whole, "PNG"),
            "other.png": encoded(other, "PNG"),
            "small.png": encoded(whole.resize((200, 150)), "PNG"),
            "mirrored.png": encoded(whole.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "PNG"),
            "cropped.png": encoded(whole.crop((10, 8, 310, 232)), "PNG"),
        }
        add_images(visit, "red", images)
        add_class(visit, "blue")
        groups = open_source(saved(visit, tmp_path)).tensors["groups"].tolist()
        assert len(set(groups)) == 2
        assert [one == groups[0] for one in groups] == [True, False, True, True, True]


class TestKept:
    def test_a_closed_tab_loses_nothing(self, visit):
        teach(visit, count=4)
        visit.page.wait_for_timeout(1500)
        visit.page.reload()
        visit.page.wait_for_function(
            "() => document.getElementById('status').textContent.startsWith('Your last project')"
        )
        assert visit.page.locator(".card .count").all_inner_texts() == ["4 images", "4 images"]
        fitted(visit)
        assert "of 8 images" in visit.text("measure-text")
        visit.page.get_by_role("button", name="Start over").click()
        assert visit.page.locator(".card").count() == 0
        visit.page.get_by_role("button", name="Undo").click()
        assert visit.page.locator(".card").count() == 2

    def test_a_project_opens_in_another_browser_with_the_same_answers(self, visit, browser, url, tmp_path):
        teach(visit)
        before = asked(visit, "new.png", png("red", 901, 0.2))
        file = saved(visit, tmp_path)
        other = Visit(browser, url)
        ready(other)
        other.page.get_by_label("Open project").set_input_files(str(file))
        other.page.wait_for_function("() => document.getElementById('status').textContent.includes('is open')")
        fitted(other)
        assert other.text("measure-text") == visit.text("measure-text")
        assert other.page.locator(".images img").count() == 32
        assert asked(other, "new.png", png("red", 901, 0.2)) == pytest.approx(before, abs=1e-6)
        other.check()
        other.context.close()

    def test_it_works_after_the_network_was_cut(self, browser, site, tmp_path):
        with hosted(site) as address:
            visit = Visit(browser, address, accept_downloads=True)
            ready(visit)
            visit.page.wait_for_load_state("networkidle")
        visit.context.set_offline(True)
        teach(visit, count=4)
        assert vitral.load(saved(visit, tmp_path)).classes == ("red", "blue")
        visit.check()
        visit.context.close()

    @pytest.mark.parametrize("change", ["cut", "model", "labels", "nan", "classes", "text", "names"])
    def test_a_damaged_or_foreign_project_is_refused(self, visit, tmp_path, change):
        header, tensors = projects.parts()
        if change == "model":
            header["weights"] = "sha256:" + "0" * 64
        elif change == "labels":
            tensors["labels"][2] = 5
        elif change == "nan":
            tensors["features"][3, 3] = np.nan
        elif change == "classes":
            header["classes"] = ["a", "a"]
        elif change == "names":
            header["names"] = ["a"]
        file = projects.write(tmp_path / "p.safetensors", header, tensors)
        if change == "cut":
            file.write_bytes(file.read_bytes()[:-9])
        elif change == "text":
            file.write_text("hello, this is no project")
        visit.page.get_by_label("Open project").set_input_files(str(file))
        visit.page.get_by_role("alert").wait_for()
        assert "This project cannot be opened" in visit.text("problem")
        assert visit.page.locator(".card").count() == 0

    def test_names_are_text_and_never_markup(self, visit, tmp_path):
        name = "<img src=x onerror=alert(1)>"
        header, tensors = projects.parts(classes=(name, "night"))
        header["names"] = [name] * 6
        file = projects.write(tmp_path / "p.safetensors", header, tensors)
        visit.page.get_by_label("Open project").set_input_files(str(file))
        visit.page.wait_for_function("() => document.getElementById('status').textContent.includes('is open')")
        fitted(visit)
        assert visit.page.locator("img[src='x']").count() == 0
        assert visit.page.get_by_label("Name of class 1").input_value() == name


class TestPage:
    def test_classes_are_renamed_removed_and_undone(self, visit):
        teach(visit, count=3)
        page = visit.page
        page.get_by_label("Name of class 1").fill("crimson")
        page.keyboard.press("Tab")
        page.get_by_label("Add images to crimson").wait_for(state="attached")
        page.locator(".images button").first.click()
        page.locator("#image-label").select_option(label="blue")
        assert page.locator(".card .count").all_inner_texts() == ["2 images", "4 images"]
        page.get_by_role("button", name="Remove class crimson").click()
        assert page.locator(".card .count").all_inner_texts() == ["4 images"]
        for _ in range(2):
            page.get_by_role("button", name="Undo").click()
        assert page.locator(".card .count").all_inner_texts() == ["3 images", "3 images"]
        add_class(visit, "blue")
        page.get_by_role("alert").wait_for()
        assert "There is a class blue already" in visit.text("problem")

    def test_what_is_no_image_is_named(self, visit):
        add_class(visit, "red")
        files = [("a.png", png("red", 1)), ("half.png", png("red", 2)[:300])]
        visit.page.get_by_label("Add images to red").set_input_files(
            [{"name": name, "mimeType": "image/png", "buffer": data} for name, data in files]
        )
        visit.page.get_by_role("alert").wait_for()
        assert "half.png: this browser cannot read it" in visit.text("problem")
        assert visit.page.locator(".card .count").all_inner_texts() == ["1 image"]

    def test_images_are_dropped_on_a_class(self, visit):
        add_class(visit, "red")
        visit.page.evaluate(
            """async (content) => {
              const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
              const transfer = new DataTransfer();
              transfer.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
              const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
              document.querySelector(".card").dispatchEvent(event);
            }""",
            base64.b64encode(png("red", 5)).decode(),
        )
        visit.page.get_by_role("button", name="dropped.png").wait_for()

    def test_the_camera_teaches_and_is_answered(self, visit):
        teach(visit, count=3)
        page = visit.page
        page.get_by_role("button", name="Camera for red").click()
        for number in (1, 2):
            page.get_by_role("button", name="Take photo").click()
            page.wait_for_function(
                f"() => document.getElementById('camera-note').textContent.startsWith('{number} photo')"
            )
        page.get_by_role("button", name="Done").click()
        page.wait_for_function("() => document.getElementById('camera-view').srcObject === null")
        assert page.locator(".card .count").first.inner_text() in ("4 images", "5 images"), "equal photos count once"
        page.get_by_role("button", name="Use the camera").click()
        page.wait_for_function("() => /^(red|blue) \\d+%$/.test(document.getElementById('try-label').textContent)")
        page.get_by_role("button", name="Stop the camera").click()
        assert page.evaluate("document.getElementById('try-view').srcObject") is None

    def test_the_policy_holds(self, visit):
        policy = visit.page.locator("meta[http-equiv]").get_attribute("content")
        assert "unsafe-inline" not in policy
        assert "connect-src 'self'" in policy

    @pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")])
    def test_it_fits_the_screen_and_axe_finds_nothing(self, browser, url, width, scheme, tmp_path):
        script = npm.members(real(AXE), ["package/axe.min.js"])["package/axe.min.js"].decode()
        size = {"width": width, "height": 900}
        visit = Visit(browser, url, viewport=size, color_scheme=scheme, bypass_csp=True)
        ready(visit)
        visit.page.evaluate(script)
        found = [visit.page.evaluate("axe.run()")]
        teach(visit, count=16, labels=("red", "green", "blue"))
        asked(visit, "new.png", png("green", 777))
        found.append(visit.page.evaluate("axe.run()"))
        visit.screenshot(f"teach-{width}-{scheme}", tmp_path)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        visit.page.locator(".images button").first.click()
        found.append(visit.page.evaluate("axe.run()"))
        assert [[(one["id"], one["nodes"][0]["html"]) for one in each["violations"]] for each in found] == [[], [], []]
        visit.context.close()

    def test_opened_as_a_file_it_states_what_it_needs(self, browser, site):
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto((site / "index.html").as_uri())
        assert page.locator("#about").inner_text().startswith("This page does not work as a file")
        page.close()

    def test_a_network_that_computes_something_else_is_not_used(self, browser, site, tmp_path):
        other = tmp_path / "other"
        other.mkdir()
        for path in site.iterdir():
            (other / path.name).symlink_to(path)
        facts = json.loads((site / "model.json").read_text())
        facts["check"][0] += 0.1 * max(map(abs, facts["check"]))
        (other / "model.json").unlink()
        (other / "model.json").write_text(json.dumps(facts))
        with hosted(other) as address:
            visit = Visit(browser, address)
            visit.page.get_by_role("alert").wait_for()
            assert "it computes something else than the network that was exported" in visit.text("problem")
            visit.context.close()


FIT = """
async ([data, width, labels, folds, classes, strength]) => {
  const { discriminant, logitsOf, mixed, outOfFold, regression, standardized } = await import("./probe.js");
  const { rows } = standardized({ data: Float64Array.from(data), count: labels.length, width });
  const found = outOfFold(rows, labels, classes, folds);
  const one = regression(rows, labels, classes, strength);
  const other = discriminant(rows, labels, classes);
  const list = (linear) => [...logitsOf(rows, linear)];
  const both = list(mixed(one, other));
  return { regressed: list(one), both, crossed: [...found.logits], strength: found.strength };
}
"""


def softmax(logits: Any, classes: int) -> np.ndarray:
    values = np.asarray(logits).reshape(-1, classes)
    values = np.exp(values - values.max(1, keepdims=True))
    return values / values.sum(1, keepdims=True)


def converged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scikit-learn find the optimum: by default it stops where a gradient is below 1e-4."""
    from sklearn.linear_model import LogisticRegression

    original = LogisticRegression.fit

    def exact(self: Any, x: Any, y: Any) -> Any:
        self.tol, self.max_iter = 1e-9, 20_000
        return original(self, x, y)

    monkeypatch.setattr(LogisticRegression, "fit", exact)


@pytest.mark.parametrize(("count", "classes", "width"), [(40, 2, 32), (60, 3, 128), (300, 5, 128)])
@pytest.mark.parametrize("strength", [0.001, 1.0])
def test_the_page_fits_the_probe_of_python(visit, monkeypatch, count, classes, width, strength):
    rng = np.random.default_rng(count)
    labels = np.arange(count) % classes
    features = rng.normal(size=(count, width)) + 0.9 * np.eye(classes, width)[labels] + 3
    folds = rng.integers(0, 5, count)
    found = visit.page.evaluate(
        FIT, [features.ravel().tolist(), width, labels.tolist(), folds.tolist(), classes, strength]
    )
    converged(monkeypatch)
    scale = probe.Scale.of(features)
    rows = scale(features)
    regressed = probe.probabilities_of(rows, probe.regression(rows, labels, classes, strength))
    both = probe.fitted(rows, labels, classes, strength, scale)(features)
    crossed, chosen = probe.out_of_fold(rows, labels, classes, folds, ready=True)
    crossed = probe.mixed(crossed, probe.discriminant(rows, labels, classes, folds, ready=True))
    np.testing.assert_allclose(softmax(found["regressed"], classes), regressed, atol=1e-4)
    np.testing.assert_allclose(softmax(found["both"], classes), both, atol=1e-4)
    assert found["strength"] == chosen
    np.testing.assert_allclose(softmax(found["crossed"], classes), crossed, atol=1e-4)


def test_a_class_without_images_is_never_predicted(visit):
    rng = np.random.default_rng(0)
    labels = np.arange(30) % 2
    features = rng.normal(size=(30, 8)) + np.eye(2, 8)[labels]
    data = [features.ravel().tolist(), 8, (2 * labels).tolist(), (np.arange(30) // 2 % 5).tolist(), 4, 0.1]
    shares = softmax(visit.page.evaluate(FIT, data)["both"], 4)
    assert shares[:, [1, 3]].max() < 1e-6


MEASURE = """
async ([right, groups, logits, labels, classes, numbers]) => {
  const { proportionInterval, temperatureOf } = await import("./figures.js");
  const temperature = temperatureOf(Float64Array.from(logits), labels, groups, classes, numbers);
  return [proportionInterval(right, groups), temperature];
}
"""


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("sharp", [0.5, 6.0])
def test_the_page_measures_as_python_does(visit, size, sharp):
    rng = np.random.default_rng(7)
    count, classes = 180, 3
    labels, groups = rng.integers(0, classes, count), np.arange(count) // size
    logits = sharp * (rng.normal(size=(count, classes)) + 1.2 * np.eye(classes)[labels])
    right = logits.argmax(1) == labels
    given = [right.tolist(), groups.tolist(), logits.ravel().tolist(), labels.tolist(), classes, list(range(count))]
    interval, temperature = visit.page.evaluate(MEASURE, given)
    assert interval == pytest.approx(proportion_interval(right, groups), abs=1e-9)
    shares = softmax(logits, classes)
    wanted = _temperature(shares, labels, groups)
    assert temperature == pytest.approx(wanted, rel=1e-3)
    np.testing.assert_allclose(softmax(logits / temperature, classes), tempered(shares, wanted), atol=1e-3)
