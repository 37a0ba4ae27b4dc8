"""Objects at the Python prompt and in notebooks: a line, and a table of the same facts."""

from __future__ import annotations

from collections.abc import Mapping

import vitral
from vitral.console import Described
from vitral.workflows.planning.plan import plan_run


def test_results_are_a_line_and_a_table(trained):
    data = vitral.load_data("digits")
    measured = vitral.evaluate(trained.folder)
    (heatmap,) = vitral.explain(trained.predictor, [data["test"].image(0)])
    for one, facts in [
        (data, ["DataSet(digits, 10 classes, train: 1,437 images, test: 360 images)"]),
        (trained, [str(trained.folder), trained.result["model"], f"test: Accuracy {measured.accuracy:.2%}"]),
        (measured, [f"{measured.images:,} images", measured.headline()]),
        (vitral.summarize("S/16"), ["S/16", "22,050,664 parameters"]),
        (vitral.inspect(trained.folder), ["layers", "patches"]),
        (heatmap, [heatmap.title, heatmap.method]),
        (data["test"], ["Split(360 images)"]),
    ]:
        assert all(fact in repr(one) for fact in facts), repr(one)
        assert len(repr(one)) < 300
        if isinstance(one, Described):
            assert all(value.replace("'", "&#x27;") in one._repr_html_() for value in one.described().values())


def test_a_plan_is_a_table_of_reasons(trained):
    plan = plan_run({"data": trained.result["data"], "device": "cpu"}).plan
    page = plan._repr_html_()
    assert all(choice.name in page for choice in plan.choices)
    assert page.count("<tr>") == len(plan.choices)


def test_names_are_text_and_nothing_else():
    class Named(Described):
        def described(self) -> Mapping[str, str]:
            return {"name": "<script>\x1b[2J"}

    assert repr(Named()) == "Named(<script>\\x1b[2J)"
    assert Named()._repr_html_() == (
        "<table><caption>Named</caption><tbody><tr><td>name</td><td>&lt;script&gt;\\x1b[2J</td></tr></tbody></table>"
    )
