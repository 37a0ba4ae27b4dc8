"""Sentences on the differences of a study, which its figures bear out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vitral.studies.results import Group, Results, listed
from vitral.studies.seeds import SeedDifference, paired_difference
from vitral.studies.study import Expectation, shown
from vitral.weights.read.references import BACKBONE
from vitral.wording import count


def conclusions(results: Results) -> list[str]:
    """Return the sentences, the answer to the study's question first."""
    if not any(group.done for group in results.groups):
        return ["No run is finished."]
    sentences = [*_verdict(results), *_one_seed(results)]
    for of_kind in SENTENCES[results.study.kind]:
        sentences += of_kind(results)
    sentences += _limits(results)
    return list(dict.fromkeys(sentences))


def _verdict(results: Results) -> Iterator[str]:
    """Say whether the claim of the study is borne out, contradicted, or neither."""
    expected = [(one, _found(results, one)) for one in results.study.expects]
    if not expected:
        return
    claimed = [(one, found) for one, found in expected if found and found.claimed]
    against = [found for one, found in claimed if one.relation != ">" or found.first != one.first]
    open_ = [one for one, found in expected if one.relation == ">" and not (found and found.claimed)]
    if against:
        yield "The claim is contradicted here."
    elif open_:
        yield "The claim is neither borne out nor contradicted here."
    elif all(one.relation == "=" for one, _ in expected):
        yield "The claim is not contradicted here. That no difference is seen does not prove that there is none."
    else:
        yield "The claim is borne out here."
    for found in against:
        where = results.study.design.addition(found.where)
        yield f"Contrary to it, {found.first} is more accurate than {found.second}{where}."


def _found(results: Results, expected: Expectation) -> SeedDifference | None:
    """The difference that an expectation is about; None if it has not been measured."""
    where = None if expected.where is None else results.study.design.in_words(expected.where)
    return next(
        (
            one
            for one in results.differences
            if {one.first, one.second} == {expected.first, expected.second} and where in (None, one.where)
        ),
        None,
    )


def _one_seed(results: Results) -> Iterator[str]:
    if results.study.seeds == 1 and not results.study.design.searches:
        yield (
            "Each recipe was trained with one seed. Runs that differ only in their seed differ in accuracy, too, by an "
            "amount that one seed does not show: no difference is claimed."
        )


def _points(one: SeedDifference) -> str:
    return f"{_signed(one.difference)} points ({_signed(one.interval[0])} to {_signed(one.interval[1])})"


def _signed(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def _at_each(results: Results) -> Iterator[str]:
    """Compare the networks at each amount of data, or length of training."""
    if results.study.seeds == 1:
        return
    for where in dict.fromkeys(one.where for one in results.differences):
        here = [one for one in results.differences if one.where == where]
        claimed = [one for one in here if one.claimed]
        start = results.study.design.start_of(where)
        for one in claimed:
            yield f"{start} {one.first} is more accurate than {one.second} by {_points(one)}."
        if not claimed:
            names = list(dict.fromkeys(name for one in here for name in (one.first, one.second)))
            yield f"{start} no difference can be claimed between {listed(names)}."
        elif len(claimed) < len(here):
            rest = [f"{one.first} and {one.second}" for one in here if not one.claimed]
            yield f"{start} no difference can be claimed between {', or '.join(rest)}."


def _crossings(results: Results) -> Iterator[str]:
    """Name pairs whose order changes with the amount of data, if both orders can be claimed."""
    claimed = [one for one in results.differences if one.claimed]
    reported = set[tuple[str, str]]()
    for k, one in enumerate(claimed):
        for other in reversed(claimed[k + 1 :]):
            if (one.first, one.second) == (other.second, other.first) and (one.first, one.second) not in reported:
                reported.add((one.first, one.second))
                yield (
                    f"The order changes: {one.first} is ahead of {one.second} with {one.where}, and behind it with "
                    f"{other.where}."
                )


def _gains(results: Results) -> Iterator[str]:
    """Measure each network's gain from the smallest to the largest amount of data."""
    fractions = sorted(results.study.fractions)
    if len(fractions) < 2:
        return
    for name in dict.fromkeys(group.label(("fraction",)) for group in results.groups):
        ends = [_group(results, name, fraction) for fraction in (fractions[-1], fractions[0])]
        by_seed = [{one.cell.seed: one.accuracy or 0.0 for one in group.done} for group in ends if group]
        if len(by_seed) < 2 or not (seeds := sorted(by_seed[0].keys() & by_seed[1].keys())):
            continue
        more, less = ([each[seed] for seed in seeds] for each in by_seed)
        gain = paired_difference("", name, name, more, less, results.groups_of_images)
        interval = _points(gain) if len(seeds) > 1 else f"{_signed(gain.difference)} points, with one seed"
        if len(seeds) > 1 and gain.interval[0] <= 0 <= gain.interval[1]:
            interval += "; no difference can be claimed"
        levels = " to ".join(f"{100 * sum(one) / len(one):.1f}%" for one in (less, more))
        start, end = (results.study.design.in_words(fractions[place]) for place in (0, -1))
        yield f"From {start} to {end} {name} goes from {levels}: {interval}."


def _group(results: Results, name: str, fraction: float) -> Group | None:
    return next(
        (g for g in results.groups if g.factors["fraction"] == fraction and g.label(("fraction",)) == name), None
    )


def _front(results: Results) -> Iterator[str]:
    for cost, title in (("flops", "FLOPs"), ("seconds", "seconds")):
        front = results.front(cost)
        names = [
            f"{group.label(('epochs',))} for {results.study.design.in_words(group.factors['epochs'])}"
            for group in front
        ]
        if names:
            yield f"By mean accuracy, the Pareto front over {title} of training is {listed(names)}."


def _best(results: Results) -> Iterator[str]:
    """Name the best combination, and for each pair of values of an option if a difference can be claimed."""
    ranked = sorted((g for g in results.groups if g.accuracy), key=lambda g: -g.accuracy.value)  # type: ignore[union-attr]
    if not ranked or ranked[0].accuracy is None:
        return
    best = ranked[0].label()
    yield f"The highest mean accuracy is {100 * ranked[0].accuracy.value:.1f}%, with {best}."
    if results.study.seeds == 1:
        return
    for one in results.differences:
        over = f", {one.where}" if one.where else ""
        if one.claimed:
            yield f"{one.first} is more accurate than {one.second} by {_points(one)}{over}."
        else:
            yield f"Between {one.first} and {one.second} no difference can be claimed{over}."


def _of_search(results: Results) -> Iterator[str]:
    """Name the winner, its figure on images that chose nothing, and the plan's own."""
    best, study = results.best, results.study
    if best is None:
        yield "No trial ran to its end."
        return
    first = next((one for one in results.outcomes if study.first and one.done), None)
    reached = f"{100 * (best.accuracy or 0):.2f}%"
    values = ", ".join(f"{name} {shown(value)}" for name, value in best.cell.factors.items())
    yield f"The highest validation accuracy is {reached}, of {best.cell.name}: {values}."
    if first is not None and first is not best:
        yield f"The plan's own values, {first.cell.name}, reach {100 * (first.accuracy or 0):.2f}%."
    elif first is not None:
        yield "Those are the plan's own values: no other trial is better."
    if best.test is None:
        yield (
            f"The data have no test part. The best of {len(results.outcomes)} trials and its best epoch were chosen on "
            "the validation images, so this accuracy is too high. Only new images can show by how much."
        )
        return
    low, high = best.test.accuracy_interval
    against = ""
    if first is not None and first is not best and first.test:
        against = f", the plan's own values {100 * first.test.accuracy:.2f}%"
    yield (
        f"On the {best.test.counted('test image')}, which were not used for any choice, it reaches "
        f"{100 * best.test.accuracy:.2f}% ({100 * low:.1f}% to {100 * high:.1f}%){against}."
    )


def _of_time(results: Results) -> Iterator[str]:
    begun, trials = len(results.outcomes), results.study.trials
    if begun < trials and results.finished:
        yield f"The time was up after {count(begun, 'trial')} of {trials}."
    elif not results.finished:
        yield f"{sum(one.ended for one in results.outcomes)} of {count(trials, 'trial')} are finished."


FROM_NOTHING = (
    "Every run starts from random weights, because the built-in weights fit only one network. "
    f"To use other weights for all runs, such as the built-in ones, add --set init={BACKBONE}."
)


def _limits(results: Results) -> Iterator[str]:
    """State what the figures leave open."""
    if results.study.start:
        yield FROM_NOTHING
    failed = [one for one in results.outcomes if one.status == "failed"]
    if failed:
        names = listed([one.cell.name for one in failed])
        yield f"{count(len(failed), 'run')} diverged and {'is' if len(failed) == 1 else 'are'} left out: {names}."
    if pruned := [one for one in results.outcomes if one.status == "pruned"]:
        is_ = "was" if len(pruned) == 1 else "were"
        yield f"{count(len(pruned), 'trial')} {is_} stopped early, below the median of those that ran to their end."
    if results.study.design.searches:
        yield from _of_time(results)
        return
    if weak := [one.cell.name for one in results.outcomes if one.at_chance]:
        first = [*weak[:4], *([f"{len(weak) - 4} more"] if len(weak) > 4 else [])]
        yield (
            f"{count(len(weak), 'run')} {'is' if len(weak) == 1 else 'are'} not above chance, the share of the largest "
            f"class: too short, or too few images. No difference is claimed of {listed(first)}."
        )
    left = sum(one.status in ("open", "begun") for one in results.outcomes)
    if left:
        yield f"{count(left, 'run')} of {len(results.outcomes)} {'is' if left == 1 else 'are'} not finished."
    sizes = sorted({one.batch_size for one in results.outcomes if one.batch_size is not None})
    if len(sizes) > 1 and not {"batch_size", "accumulate"} & set(results.study.factors):
        yield (
            f"The batch size is not the same in all runs: {listed([str(one) for one in sizes])} images, as planned for "
            f"each. A part of a difference may come from it; --set batch_size={sizes[0]} keeps it equal."
        )
    if results.split == "val":
        yield (
            f"The {results.counted('held-out image')} also chose the best epoch of each run, so that all accuracies "
            "are slightly too high."
        )


SENTENCES: dict[str, tuple[Callable[[Results], Iterator[str]], ...]] = {
    "data": (_at_each, _crossings, _gains),
    "compute": (_at_each, _front),
    "options": (_best,),
    "search": (_of_search,),
}
"""Kind of a study → the sentences of its own, in their order."""
