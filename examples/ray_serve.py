"""Serve under Ray Serve, which spreads replicas over many machines.

    pip install 'vitral[serve]' 'ray[serve]'
    python examples/ray_serve.py runs/photos

Each replica loads its models and collects its own batches. Ray accepts connections, balances, scales and ends replicas.
The limit of headers and the number of connections are Ray's; everything else is as under `vitral serve`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.applications import Starlette

from vitral.serving.limits import Limits


def application(
    models: str | Mapping[str, str],
    limits: Limits | None = None,
    deployment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return the application that `ray.serve.run` starts, with the models, limits and options of `vitral.serving.app`.

    Every machine must find the models under the same references. `deployment` are options of `ray.serve.deployment`,
    such as `num_replicas` or `autoscaling_config`. A replica takes as many requests at a time as its queue has places:
    with Ray's own default, 5, no batch would fill.
    """
    bounds = limits or Limits()

    def build() -> Starlette:
        from vitral.serving import app

        return app(models, limits=bounds, **options)

    chosen = {"name": "vitral", "max_ongoing_requests": bounds.queue, **(deployment or {})}
    return serve.deployment(**chosen)(serve.ingress(build)()).bind()


if __name__ == "__main__":
    serve.run(application(sys.argv[1]), blocking=True)
