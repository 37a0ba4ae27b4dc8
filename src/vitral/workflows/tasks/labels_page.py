"""Sections of a report about several labels an image."""

from __future__ import annotations

import numpy as np

from vitral.data import Split
from vitral.evaluation.labels import LabelsEvaluation
from vitral.evaluation.metrics import GROUPED
from vitral.evaluation.page_numbers import percent
from vitral.evaluation.sections import Example, Grid, Headline, Section
from vitral.inference.outputs.labels import Labels
from vitral.wording import count

_MOST_TOGETHER = 20  # labels in a table of pairs
_PAIRS = 12
_WORST = 24


def headline(measured: LabelsEvaluation) -> Headline:
    low, high = measured.exact_match_interval
    alike = f" {GROUPED.capitalize()}." if measured.widened else ""
    note = (
        f"Mean average precision over {count(sum(one.images > 0 for one in measured.per_label), 'label')} on "
        f"{measured.counted()}. Macro F1 {percent(measured.macro_f1)}, micro F1 "
        f"{percent(measured.micro_f1)}, accuracy (Jaccard) {percent(measured.jaccard)}, exact sets "
        f"{percent(measured.exact_match)} (95% interval {percent(low)} to {percent(high)}).{alike}"
    )
    return Headline("mAP", percent(measured.mean_average_precision), note)


def sections(measured: LabelsEvaluation, values: np.ndarray, images: Split, output: Labels) -> list[Section]:
    """Return scores of each label, labels that go together, and the images with the largest loss."""
    return [_scores(measured), _together(measured), _worst(values, images, output)]


def _scores(measured: LabelsEvaluation) -> Section:
    ranked = sorted(measured.per_label, key=lambda one: (one.images == 0, one.f1, one.name))
    rows = [
        [
            one.name,
            percent(one.f1),
            "—" if one.average_precision is None else percent(one.average_precision),
            percent(one.precision),
            percent(one.recall),
            f"{one.images:,}",
            f"{one.predicted:,}",
            f"{one.threshold:.3f}",
        ]
        for one in ranked
    ]
    headings = ("label", "F1", "AP", "precision", "recall", "images", "predicted", "threshold")
    note = (
        "AP: average precision of the ranking of images by probability. Precision, recall and F1 are at the threshold, "
        f"which has the best F1 on the validation images. {count(measured.unlabeled, 'image')} without any label."
    )
    return Section("labels", "Labels", note, [Grid("Sorted by F1, worst first", headings, rows)])


def _together(measured: LabelsEvaluation) -> Section:
    """Tables of pairs: the share of the images of a row's label that have the column's, true and predicted."""
    order = np.argsort(-np.diag(measured.together), kind="stable")[:_MOST_TOGETHER]
    names = [measured.classes[k] for k in order]
    grids = []
    for caption, counts in (("True", measured.together), ("Predicted", measured.together_predicted)):
        share = counts / np.maximum(np.diag(counts), 1)[:, None]
        kept = share[np.ix_(order, order)] * (1 - np.eye(len(order)))
        rows = [
            [name, *("" if i == j else percent(kept[i, j], 0) for j in range(len(order)))]
            for i, name in enumerate(names)
        ]
        grids.append(Grid(caption, ["label", *names], rows, (0.7 * kept**0.5).tolist()))
    if pairs := _pairs(measured):
        grids.append(Grid("Pairs with the largest difference", ("labels", "true", "predicted"), pairs))
    note = "Fraction of the images with the label of a row that also have the label of a column"
    more = f"; the {len(order)} most frequent labels" if len(measured.classes) > len(order) else ""
    return Section("together", "Labels together", f"{note}{more}.", grids)


def _pairs(measured: LabelsEvaluation) -> list[list[str]]:
    """Return the pairs of labels whose true and predicted numbers of images differ most."""
    difference = np.triu(np.abs(measured.together_predicted - measured.together), 1)
    order = np.argsort(-difference, axis=None, kind="stable")[:_PAIRS]
    places = [divmod(int(one), len(difference)) for one in order]
    return [
        [
            f"{measured.classes[i]} + {measured.classes[j]}",
            f"{measured.together[i, j]:,}",
            f"{measured.together_predicted[i, j]:,}",
        ]
        for i, j in places
        if difference[i, j]
    ]


def _worst(values: np.ndarray, images: Split, output: Labels) -> Section:
    """The images with the largest loss among those whose set of labels is wrong."""
    true = images.labels.astype(bool)
    found = values.astype(np.float64) >= np.array(output.thresholds)
    loss = -np.log(np.clip(np.where(true, values, 1 - values), 1e-12, 1)).mean(1)
    wrong = np.flatnonzero((true != found).any(1))
    examples = [
        Example(
            images.image(int(i), 3),
            f"true: {_listed(output, true[i])}; missed: {_listed(output, true[i] & ~found[i])}; "
            f"wrong: {_listed(output, found[i] & ~true[i])}",
            images.names[int(i)],
        )
        for i in wrong[np.argsort(-loss[wrong], kind="stable")][:_WORST]
    ]
    note = "Check these for missing and wrong labels." if examples else "None: every set of labels is exact."
    return Section("mistakes", "Errors with the largest loss", note, examples=examples)


def _listed(output: Labels, which: np.ndarray) -> str:
    return ", ".join(name for name, has in zip(output.names, which, strict=True) if has) or "none"
