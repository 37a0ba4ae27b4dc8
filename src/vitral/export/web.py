"""web: a folder of static files, a page that runs the network in the visitor's browser.

    index.html, page.css, page.js, …     the page of `vitral serve`, with a worker in place of the server
    model.onnx                           logits, and the evidence for a class, of one image
    model.json, preprocessing.json       name, classes, sizes, colors of the overlay, probabilities of a test image
    example.png                          an image to try, if one was given
    runtime/                             ONNX Runtime Web: for WebGPU, and for WebAssembly

The page decodes an image, resizes it in whole numbers to the bytes of training (`web/resize.js`), and runs the graph.
At the start it computes a test image: a driver that computes something else than the exported network is not used.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitral import web
from vitral.atomic import write_text
from vitral.errors import UsageError
from vitral.explanation.drawing import style
from vitral.explanation.methods.method import Method, grid_of
from vitral.export import npm
from vitral.export.explained import PREDICTED, method_of, traced_with_map
from vitral.export.graph import check_exact
from vitral.export.onnx import FILE, LARGEST, converted, packages, session_for
from vitral.export.target import Job, Precision, Runtime, exportable, traced

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

PACKAGE = npm.Package(
    "onnxruntime-web",
    "1.30.0",
    "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    33106585,
)
RUNTIME = (
    "ort.wasm.bundle.min.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.bundle.min.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)
"""Files of the package: the first two for WebAssembly, the others for WebGPU. A visitor loads two of them."""

_SERVE = "--to onnx, and vitral serve for a page"
_NAMES_ANY = "It names one of these classes for any image, also for one that shows none of them."

CSP = web.policy({"script-src": "'self' 'wasm-unsafe-eval'", "worker-src": "'self'"})
"""Policy of the page: its own files, and WebAssembly."""


class WebTarget:
    """A static page with the network, for browsers."""

    name, title = "web", "web page"
    precisions: tuple[Precision, ...] = ("fp32",)
    preprocesses = False
    distances = True
    opening = "python -m http.server --directory '{folder}'"

    def check_installed(self) -> None:
        """Raise `MissingExtraError` if onnx, onnxscript or onnxruntime is missing."""
        packages()

    def write(self, job: Job, folder: Path) -> dict[str, str]:
        """Write the page, the graph and the runtime."""
        check_exact(job.preprocessing, hint=_SERVE)
        archive = runtime_archive(job.runtime)
        versions = write_graph(job, folder)
        write_runtime(archive, folder / "runtime")
        for path, asset in web.BROWSER.items():
            write_text(folder / path, web.text(asset))
        if job.example:
            (folder / web.EXAMPLE).write_bytes(job.example)
        offered = web.EXAMPLE if job.example else ""
        page = web.page(title=f"{job.name} · vitral", served=False, csp=CSP, example=offered)
        write_text(folder / "index.html", page)
        write_text(folder / "model.json", json.dumps(_described(job), separators=(",", ":")) + "\n")
        return {**versions, PACKAGE.name: PACKAGE.version}

    def load(self, folder: Path) -> Runtime:
        """Load the graph in ONNX Runtime on the CPU, whose kernels the browser's WebAssembly has, too."""
        session, name = session_for(folder / FILE)
        run = with_map(session)

        def logits(images: np.ndarray) -> np.ndarray:
            return np.concatenate([run(one[None], PREDICTED)[0] for one in images])

        return Runtime(name, logits)


def runtime_archive(file: str | Path | None) -> Path:
    """The archive of ONNX Runtime Web: `file`, otherwise from the cache or the registry; errors as `npm.archive`."""
    return npm.archive(PACKAGE, file)


def write_runtime(archive: Path, folder: Path) -> None:
    """Write ONNX Runtime Web, from its archive, with its license into a new folder."""
    folder.mkdir()
    for path, content in npm.members(archive, [f"package/dist/{name}" for name in RUNTIME]).items():
        name = Path(path).name.replace(".mjs", ".js")  # many hosts send .mjs as a type that is no script
        (folder / name).write_bytes(content)
    write_text(folder / "LICENSE.txt", web.text("onnxruntime-license.txt").format(version=PACKAGE.version))


def publishing(folder: Path) -> list[str]:
    """Return lines for people: how to open the page here and on a phone, and how to publish it."""
    address = _own_address()
    phone = f", or http://{address}:8000 on a phone in the same network" if address else ""
    target = shlex.quote(str(folder))
    return [
        f"Then open http://localhost:8000{phone}.",
        "On a phone the camera needs https. Each of these hosts gives the page an https address:",
        f"  npx surge {target}",
        f"  npx netlify-cli deploy --prod --no-build --dir {target}",
        f"  npx vercel deploy --prod {target}",
    ]


def _own_address() -> str | None:
    """Return the address of this machine in its network; None without one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation: a datagram socket only looks up the route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def write_graph(job: Job, folder: Path) -> dict[str, str]:
    """Write `model.onnx`: with the map of a class where the network has attention, otherwise only the logits."""
    if sum(one.numel() * one.element_size() for one in job.network.state_dict().values()) > LARGEST:
        why = "a page loads it in one piece of at most 2 GB"
        raise UsageError("this network is too large for a page", why=why, hint=_SERVE)
    onnx, runtime = packages()
    if method_of(job.network):
        program, outputs = traced_with_map(job), [job.output_name, "map"]
        outputs += ["distance"] if job.unknown and job.unknown.statistics else []
        graph = converted(job, program, [job.input_name, "target"], outputs, axes=())
    else:
        program = traced(job, exportable(job.network))
        graph = converted(job, program, [job.input_name], [job.output_name], axes=("batch",))
    graph.save(folder / FILE)
    return {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": runtime.__version__}


def with_map(session: InferenceSession) -> Callable[[np.ndarray, int], list[np.ndarray]]:
    """A function that runs the graph: one standardized image (1, C, H, W) and a class to logits (1, K), the map, and
    the distance (1,) if it detects unknown images.
    """
    target = len(session.get_inputs()) > 1

    def run(image: np.ndarray, of: int) -> list[np.ndarray]:
        more = {"target": np.array([of], np.float32)} if target else {}
        found: list[np.ndarray] = session.run(None, {"images": image, **more})
        return found

    return run


def _described(job: Job) -> dict[str, object]:
    """Return the content of `model.json`, which the page reads."""
    method = method_of(job.network)
    return {
        "name": job.name,
        "noun": "classes",  # a page is for nothing else
        "target": "",
        "parameters": sum(one.numel() for one in job.network.parameters()),
        "methods": [_method(method)] if method else [],
        "explanation": _explanation(job, method) if method else None,
        "temperature": job.temperature,
        **({"unknown": job.unknown.to_json()} if job.unknown else {}),
        **({"unknown_note": _NAMES_ANY} if job.names_any else {}),
        "check": _check(job),
    }


def _method(method: Method) -> dict[str, object]:
    known = {"name": method.name, "title": method.title, "passes": method.passes(0)}
    return {**known, "signed": method.signed, "note": method.note}


def _explanation(job: Job, method: Method) -> dict[str, object]:
    grid = grid_of(job.network, torch.empty(1, job.preprocessing.channels, *job.preprocessing.image_size))
    return {"method": method.name, "note": method.note, "grid": list(grid), "style": style(method.name)}


def check_image(job: Job) -> torch.Tensor:
    """Standardized image (1, C, H, W) that `decode.js` makes, too, to test a browser."""
    own = job.preprocessing
    numbers = np.arange(own.channels * own.image_size[0] * own.image_size[1], dtype=np.int64)
    pixels = ((numbers * numbers + 7 * numbers) % 251).astype(np.uint8).reshape(1, own.channels, *own.image_size)
    return own.standardize(torch.from_numpy(pixels))


@torch.inference_mode()
def _check(job: Job) -> list[float]:
    """Probabilities of the image that a browser is tested with."""
    logits = job.network(check_image(job))
    probabilities: list[float] = (logits.float() / job.temperature).softmax(1)[0].tolist()
    return probabilities


WEB = WebTarget()
