"""Fixtures shared by several parts: real data, if present, and small folders of images."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from PIL import Image

import running
import vitral
from images import MakeImages, noise
from running import TINY, rotated
from vitral.folders import cache_folder
from vitral.spoken import shell
from vitral.workflows.running import execute

# Networks this small lose many times more to waiting for a second thread than it does for them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # a plan would ask the hub for published weights
KERNELS = cache_folder("kernels")
# Packages that tests fetch are kept in the cache of whoever runs them.
os.environ.setdefault("VITRAL_TESTS_CACHE", os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser()))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="vitral-tests-")  # features that are kept
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.environ["XDG_CACHE_HOME"] + "/hypothesis"
with contextlib.suppress(OSError):  # compiled kernels stay in the user's cache: else each process compiles its own
    KERNELS.mkdir(parents=True, exist_ok=True)
    cache_folder("kernels").parent.mkdir()
    cache_folder("kernels").symlink_to(KERNELS)
torch.set_num_threads(1)
# Autograd looks for devices at the first backward of a process. After torch.compile it finds one, starts its threads,
# and no process forked later may go backward, as children of tests do. Before it, it finds none.
torch.ones(1, requires_grad=True).sum().backward()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a job in the background of a script; Ctrl-C is tested
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; a closed terminal is tested
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


REAL = ("distributed", "serving")
"""Folders whose tests start ranks or servers; so do tests with a browser."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in REAL or "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
    if (commit := os.environ.get("VITRAL_ROTATE")) and (left_out := rotated(items, commit)):
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """After the slowest tests, list the files whose tests take longest together."""
    if not (most := config.getoption("durations")):
        return
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest {most} files")
    for name, total in seconds.most_common(most):
        terminalreporter.write_line(f"{total:.0f}s {name}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    running.may_fork = item.get_closest_marker("real") is not None


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Networks that a test draws without a word of seeds are the same each time it runs."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def words_of_the_shell(request: pytest.FixtureRequest) -> Iterator[None]:
    """Messages are quoted as the command line prints them, `--lr`, except in tests marked `python`."""
    marked = request.node.get_closest_marker("python")
    with contextlib.nullcontext() if marked else shell():
        yield


@pytest.fixture(autouse=True)
def no_report(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs write an empty report, since one takes longer than they do, except in tests marked `report`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("report") is None:
            patch.setattr(execute, "_report", lambda running, *parts: running.folder.report.touch())
        yield


@pytest.fixture(autouse=True)
def same_surroundings() -> Iterator[None]:
    """A test leaves environment variables, working directory and torch's global settings as they were."""
    before = _surroundings()
    yield
    after = _surroundings()
    changed = {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}
    assert not changed, f"the test changed {changed}"


def _surroundings() -> dict[str, object]:
    set_by_libraries = ("PYTEST_CURRENT_TEST", "KMP_", "_TORCHINDUCTOR_", "TORCHINDUCTOR_", "TRITON_", "RAY_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(set_by_libraries)},
        "working directory": os.getcwd(),
        "torch threads": torch.get_num_threads(),
        "torch dtype": torch.get_default_dtype(),
        "torch gradients": torch.is_grad_enabled(),
        "torch deterministic": torch.are_deterministic_algorithms_enabled(),
    }


ENDING_WITH_US = "resource_tracker", "_inductor/compile_worker"
"""Python's and torch's own child processes, which end with their parent."""


@pytest.fixture(scope="session", autouse=True)
def no_company() -> Iterator[None]:
    """A process of tests ends without child processes, and without threads that would keep it."""
    yield
    tasks = Path("/proc/self/task").glob("*/children") if Path("/proc/self/task").is_dir() else ()
    children = {pid: Path("/proc", pid, "cmdline") for task in tasks for pid in task.read_text().split()}
    words = {pid: file.read_bytes().replace(b"\0", b" ").decode() for pid, file in children.items() if file.exists()}
    left = {pid: word for pid, word in words.items() if not any(own in word for own in ENDING_WITH_US)}
    assert not left, f"child processes are left: {left}"
    gc.collect()  # generators that nobody finished have threads
    until, threads = time.monotonic() + 10, [threading.main_thread()]
    while threads and time.monotonic() < until:
        threads = [each for each in threading.enumerate() if not each.daemon and not _ends_by_itself(each)]
        time.sleep(0.1 * bool(threads))
    assert not threads, f"threads are left: {threads}"


def _ends_by_itself(thread: threading.Thread) -> bool:
    """True for the main thread, and for those of pools, which Python ends."""
    return thread is threading.main_thread() or thread.name.startswith("ThreadPoolExecutor")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; the test is skipped if there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data in {folder} (mnist/, cifar10.tar, hymenoptera.tar)")
    return folder


@pytest.fixture
def make_images(tmp_path: Path) -> MakeImages:
    """make_images({"train/cat": 3, "train/dog": 2}, size=(H, W), extension=".png") -> the folder that holds them.

    Every image is different: random pixels, the same for the same folder contents.
    """

    def make(
        counts: Mapping[str, int], name: str = "photos", size: tuple[int, int] = (8, 10), extension: str = ".png"
    ) -> Path:
        root, seed = tmp_path / name, 0
        for folder, count in counts.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.fromarray(noise(seed, size)).save(root / folder / f"{number}{extension}")
                seed += 1
        return root

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> vitral.TrainedRun:
    """A finished run on gray images of 8 × 10: light ones are "day", dark ones "night". Do not modify it."""
    root = tmp_path_factory.mktemp("trained")
    for label, level in (("day", 215), ("night", 40)):
        for split, count in (("train", 12), ("val", 4), ("test", 6)):
            folder = root / "sky" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = level + noise(number + count, (8, 10), 1) // 8
                Image.fromarray(pixels).save(folder / f"{number}.png")
    options = {**TINY, "epochs": 6, "image_size": (8, 12), "lr": 1e-2, "warmup": 0.5}
    return vitral.train(str(root / "sky"), out=str(root / "runs/sky"), quiet=True, **options)
