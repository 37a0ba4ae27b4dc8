"""`vitral serve`."""

from __future__ import annotations

from typing import Annotated, Literal

from vitral.cli.options import Device, Engine, Help, Precision
from vitral.cli.output import print_predictor_notes, say
from vitral.errors import UsageError


def serve(
    runs: Annotated[tuple[str, ...], Help("run folders or weights files; NAME=RUN gives one a name", "RUN …")] = (),
    *,
    right: Annotated[
        float | None,
        Help(
            'answer "not sure" for doubtful images, so that this fraction of the other answers is correct, such as 0.95'
        ),
    ] = None,
    example: Annotated[str | None, Help("image that the page offers to try; every visitor can see it")] = None,
    host: Annotated[
        str, Help("address to listen on; a token is required if other machines can reach it")
    ] = "127.0.0.1",
    port: Annotated[int, Help("port to listen on; 0 chooses a free one")] = 8000,
    token_file: Annotated[str | None, Help("file of access tokens, one per line; or set VITRAL_TOKEN")] = None,
    no_auth: Annotated[bool, Help("serve to other machines without a token")] = False,
    batch_size: Annotated[int, Help("largest number of images per forward pass")] = 16,
    batch_wait: Annotated[float, Help("milliseconds that a batch waits for images that are still being decoded")] = 2.0,
    queue: Annotated[int, Help("largest number of waiting images per model; beyond it, requests get status 503")] = 256,
    timeout: Annotated[float, Help("seconds after which a request gets status 504")] = 30.0,
    grace: Annotated[float, Help("seconds to finish open requests after SIGTERM")] = 30.0,
    max_body: Annotated[int, Help("largest request, in MiB")] = 32,
    max_images: Annotated[int, Help("largest number of images per request")] = 32,
    max_pixels: Annotated[int, Help("largest image, in megapixels")] = 50,
    max_passes: Annotated[int, Help("largest number of forward passes to explain an image")] = 128,
    log_format: Annotated[Literal["text", "json"], Help("format of the request log")] = "text",
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
) -> int:
    """Serve predictions over HTTP, with a page for the browser."""
    from vitral.serving.extra import check_installed

    if not runs:
        raise UsageError("no model to serve", hint="vitral serve RUN …")
    check_installed()
    from vitral.data.images.example import example as example_image
    from vitral.serving.application import build
    from vitral.serving.auth import Access, check_binding, is_loopback, read_tokens
    from vitral.serving.limits import Limits
    from vitral.serving.logs import configure
    from vitral.serving.models import named
    from vitral.serving.server import address, bind, serve_on
    from vitral.serving.service import Service

    limits = Limits(
        body=max_body << 20,
        images=max_images,
        pixels=max_pixels * 1_000_000,
        timeout=timeout,
        queue=queue,
        batch_size=batch_size,
        batch_wait=batch_wait / 1000,
        passes=max_passes,
    )
    if not 0 <= port <= 65535:  # the system takes the rest of a division
        raise UsageError(f"--port is from 0 to 65535, not {port}", hint="--port 8000, or --port 0 for any free port")
    if not grace > 0:
        raise UsageError(f"--grace must be above 0, not {grace:g}", hint="--grace 30")
    sources, tokens = named(runs), read_tokens(token_file)
    check_binding(host, tokens, no_auth=no_auth)
    access = Access(tokens, local=is_loopback(host) and not no_auth)
    options: dict[str, object] = {"device": device, "precision": precision, "engine": engine}
    with bind(host, port) as bound:
        shown = f"Serving  {address(bound)} (API: {address(bound)}/docs; Ctrl-C ends)"
        service = Service(sources, access, limits, options, example_image(example) if example else b"", right)
        configure(log_format)
        for model in service.models.values():
            print_predictor_notes(model.predictor)
            outputs = f"{len(model.predictor.classes)} {model.predictor.output.noun}, version {model.version}"
            machine = f"{model.predictor.engine} in {model.predictor.machine.precision}"
            say(f"Model    {model.name}, {outputs}, {machine}")
            if sure := model.to_json()["sure"]:
                say(f"Answers  {sure}")
        return serve_on(bound, service, build(service), grace=grace, started=lambda: say(shown))
