"""Serve under Ray Serve, which spreads replicas over many machines: `serve.run(application("runs/photos"))`.

Each replica loads its models and collects its own batches. Ray accepts connections, balances, scales and ends replicas.
The limit of headers and the number of connections are Ray's; everything else is as under `vitral serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitral.errors import MissingExtraError
from vitral.serving.extra import check_installed

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from vitral.serving.limits import Limits


def application(
    models: str | Path | Mapping[str, str | Path],
    *,
    tokens: tuple[str, ...] = (),
    limits: Limits | None = None,
    deployment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return the application that `ray.serve.run` starts, with the models, tokens, limits and options of
    `vitral.serving.app`. Every machine must find the models under the same references.

    `deployment` are options of `ray.serve.deployment`, such as `num_replicas` or `autoscaling_config`. By default a
    replica takes as many requests at a time as its queue has places: with Ray's own default, 5, no batch would fill.

    Raises `MissingExtraError` if Ray Serve or a package of `vitral[serve]` is not installed. Errors of loading a model
    are those of the replica, in Ray's log.
    """
    check_installed()
    if find_spec("ray") is None:
        hint = "pip install 'vitral[serve,ray]'"
        raise MissingExtraError("Ray Serve is not installed", why="ray", hint=hint)
    from ray import serve

    from vitral.serving.limits import Limits

    bounds = limits or Limits()

    def build() -> Starlette:
        from vitral.serving import app

        return app(models, tokens=tokens, limits=bounds, **options)

    chosen = {"name": "vitral", "max_ongoing_requests": bounds.queue, **(deployment or {})}
    return serve.deployment(**chosen)(serve.ingress(build)()).bind()
