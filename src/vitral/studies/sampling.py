"""Draw trials and stop hopeless ones, by Optuna (an extra).

The values of a trial are a function of its number and of the results before it: a search that was killed goes on with
the trials that an uninterrupted one would have had.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitral.errors import MissingExtraError
from vitral.studies.spans import Span
from vitral.studies.study import Study

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

STARTUP = 10
"""Most trials that are drawn at random, before their results guide the others."""
UNPRUNED = 4
"""Trials that run to their end before any is stopped."""
_DRAWS = 60
"""Draws until one is no repetition of an earlier trial; after the first tenth they are random."""


@dataclass(frozen=True)
class Past:
    """An ended trial, as the sampler sees it."""

    factors: Mapping[str, Any]
    accuracy: float | None
    """Validation accuracy of its best epoch; None for one that was stopped or diverged."""
    curve: Mapping[int, float]
    """Step of the comparison → validation accuracy."""


def check_installed() -> None:
    """Raise `MissingExtraError` without Optuna."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError(
            "searching needs Optuna, which is not installed", why=str(error), hint="pip install 'vitral[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def propose(study: Study, past: Sequence[Past]) -> dict[str, object]:
    """Return the varied options of the next trial: `study.first` for the first one, then by a Parzen estimator (TPE,
    Bergstra et al. 2011) of the results. Repetitions are avoided where possible.
    """
    number = len(past)
    if number == 0 and study.first:
        return dict(study.first)
    earlier = [dict(one.factors) for one in past]
    factors: dict[str, object] = {}
    for draw in range(_DRAWS):
        search = _open(study, past, _DRAWS * number + draw, guided=draw < _DRAWS // 10)
        factors = _decoded(study, search.ask(_space(study)).params)
        if factors not in earlier:
            break
    return factors


def is_hopeless(study: Study, past: Sequence[Past], curve: Mapping[int, float]) -> bool:
    """True if the best value of this curve is below the median of the ended trials at its last step.

    Optuna's median rule, which begins after `UNPRUNED` trials have run to their end.
    """
    done = [one for one in past if one.accuracy is not None]
    if not curve or not done:
        return False
    search = _open(study, past)
    search.enqueue_trial(_encoded(study, done[0].factors))  # its values play no part in the rule
    trial = search.ask(_space(study))
    for step, value in sorted(curve.items()):
        trial.report(value, step)
    return trial.should_prune()


def step_of(epoch: int, epochs: int, by_epoch: bool) -> int:
    """Return the step at which trials are compared after an epoch, counted from 1: the epoch, or the tenth of training
    if trials have different numbers of epochs.
    """
    return epoch if by_epoch else math.floor(10 * epoch / max(epochs, epoch))


def median_at(past: Sequence[Past], step: int) -> float | None:
    """Median accuracy of the trials that ran to their end, at a step; None if none has that step."""
    values = [one.curve[step] for one in past if one.accuracy is not None and step in one.curve]
    return statistics.median(values) if values else None


def _open(study: Study, past: Sequence[Past], seed: int = 0, guided: bool = True) -> optuna.Study:
    """Return Optuna's study with these trials, by which its sampler is `guided` or not."""
    import optuna

    check_installed()
    startup = min(STARTUP, max(3, study.trials // 3))
    search = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup if guided else len(past) + 1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED, n_warmup_steps=0),
    )
    states, space = optuna.trial.TrialState, _space(study)
    for one in past:
        done = one.accuracy is not None
        search.add_trial(
            optuna.trial.create_trial(
                state=states.COMPLETE if done else states.PRUNED,
                value=one.accuracy if done else None,
                params=_encoded(study, one.factors),
                distributions=space,
                intermediate_values=dict(one.curve),
            )
        )
    return search


def _space(study: Study) -> dict[str, BaseDistribution]:
    """Return the distribution of each option; a list is drawn by its indices, since values may be sizes."""
    from optuna import distributions

    def of(values: tuple[object, ...] | Span) -> BaseDistribution:
        if not isinstance(values, Span):
            return distributions.CategoricalDistribution(tuple(range(len(values))))
        if values.whole:
            return distributions.IntDistribution(int(values.low), int(values.high), log=values.log)
        return distributions.FloatDistribution(values.low, values.high, log=values.log)

    return {name: of(values) for name, values in study.vary.items()}


def _encoded(study: Study, factors: Mapping[str, object]) -> dict[str, object]:
    return {
        name: factors[name] if isinstance(values, Span) else values.index(factors[name])
        for name, values in study.vary.items()
    }


def _decoded(study: Study, drawn: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: values.rounded(drawn[name]) if isinstance(values, Span) else values[drawn[name]]
        for name, values in study.vary.items()
    }
