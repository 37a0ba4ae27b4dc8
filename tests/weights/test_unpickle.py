"""PyTorch's pickles are read to the bit in a sandbox, and their code never runs."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile
import numpy as np
import pytest
import torch

from vitral.errors import WeightsError
from vitral.weights.read import sandbox, unpickle
from vitral.weights.read.safetensors_mmap import read_safetensors
from vitral.weights.read.source import open_source
from vitral.weights.read.unpickle import STAND_INS, UNWANTED, WRAPPERS, read_pickle
from vitral.weights.read.zip_entries import list_entries

needs_sandbox = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in sandbox.MACHINES, reason="tests the sandbox of Linux"
)


def deit() -> dict[str, object]:
    """Checkpoint as DeiT and MAE save it: weights, the state of the optimizer, the options of the run."""
    torch.manual_seed(0)
    tied = torch.randn(3, 4)
    model = OrderedDict(
        {
            "cls_token": torch.nn.Parameter(torch.randn(1, 1, 4)),
            "blocks.0.attn.qkv.weight": torch.randn(12, 4),
            "head.weight": tied,
            "head_dist.weight": tied,
            "half": torch.randn(3).half(),
            "turned": torch.randn(5, 3).t(),
            "flag": torch.tensor([True, False, True]),
            "bf": torch.randn(3).bfloat16(),
            "part": torch.randn(9)[2:5],
            "count": torch.tensor(3),
            "nothing": torch.zeros(0, 4),
            "turning": torch.randn(3, dtype=torch.complex64),
        }
    )
    options = argparse.Namespace(lr=1e-3, model="deit_tiny", out=pathlib.PurePosixPath("/tmp"), best=np.float64(0.5))
    optimizer = {"state": {0: {"step": 1, "exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 0.1}]}
    return {"model": model, "optimizer": optimizer, "epoch": 299, "args": options}


DEIT_NOTES = ("unwrapped 'model'", "left out: 'optimizer' (1 tensor), 'epoch', 'args'")


def same(read: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(read) == list(expected) and all(
        read[name].dtype == tensor.dtype and read[name].shape == tensor.shape and bool((read[name] == tensor).all())
        for name, tensor in expected.items()
    )


Outcome = tuple[dict[str, torch.Tensor], tuple[str, ...]] | WeightsError


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Results of the real reader for some files; each waits seconds for torch, so all run in parallel."""
    folder = tmp_path_factory.mktemp("pickles")
    torch.save(deit(), folder / "deit.pth.tar")
    torch.save(deit(), folder / "legacy.pth", _use_new_zipfile_serialization=False)
    evil = hostile.hostile_pickles(folder, folder / "proof")["posix.system"]

    def read(path: Path) -> Outcome:
        try:
            source = open_source(path)
        except WeightsError as error:
            return error
        return source.tensors, source.notes

    if platform.system() not in ("Linux", "Darwin"):
        pytest.skip("no sandbox on this system")
    paths = [folder / "deit.pth.tar", folder / "legacy.pth", evil]
    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(("deit", "legacy", "evil"), pool.map(read, paths), strict=True))
    assert not (folder / "proof").exists()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deit", "legacy"])
def test_equal_to_the_bit(outcomes, name):
    assert not isinstance(outcomes[name], WeightsError), outcomes[name]
    tensors, notes = outcomes[name]
    assert same(tensors, deit()["model"])
    assert notes == DEIT_NOTES


@pytest.mark.slow
def test_code_is_refused_in_one_line(outcomes):
    said = str(outcomes["evil"]).splitlines()
    assert said[0] == "refused to open a pickle"
    assert said[2] == "  why: it needs posix.system, which is not a weight and may run code"
    assert "convert it to safetensors" in said[3]
    assert len(said) == 4


# ---- the sandbox, tested from inside

INSIDE = """
import json, os, pickle, sys
sys.path.insert(0, {folder!r})
import ctypes, fcntl, socket, subprocess, threading, resource, mmap
import torch, sandbox
request = json.loads(sys.argv[1])
out = open(request["out"], "w")
before = open(request["own"], "wb")
sandbox.enter_sandbox(2**20, 2**28, 60)

def outcome(call):
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return "done"

def errno_of(number, *arguments):
    ctypes.set_errno(0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    return ctypes.get_errno()

def in_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(outcome(socket.socket)))
    thread.start(); thread.join()
    raise ValueError() if found == ["PermissionError"] else SystemError(found)

proof, victim = request["proof"], request["victim"]
tried = {{
    "socket": outcome(lambda: socket.socket()),
    "socketpair": outcome(lambda: socket.socketpair()),
    "system": outcome(lambda: 1 / (os.system("touch " + proof) == 0)),
    "subprocess": outcome(lambda: subprocess.run(["/bin/true"])),
    "fork": outcome(os.fork),
    "exec": outcome(lambda: os.execv("/bin/true", ["true"])),
    "new file": outcome(lambda: open(proof, "w")),
    "append": outcome(lambda: open(victim, "a")),
    "read and write": outcome(lambda: os.open(victim, os.O_RDWR)),
    "remove": outcome(lambda: os.remove(victim)),
    "rename": outcome(lambda: os.rename(victim, proof)),
    "link": outcome(lambda: os.symlink(victim, proof)),
    "folder": outcome(lambda: os.mkdir(proof)),
    "mode": outcome(lambda: os.chmod(victim, 0)),
    "time": outcome(lambda: os.utime(victim, (0, 0))),
    "cut": outcome(lambda: os.truncate(victim, 0)),
    "kill": outcome(lambda: os.kill(os.getppid(), 0)),
    "limit": outcome(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))),
    "terminal": outcome(lambda: fcntl.ioctl(0, 0x5412, b"x")),
    "memory": outcome(lambda: bytearray(2**29)),
    "too long a file": outcome(lambda: (before.write(bytes(2**21)), before.flush())),
    "pickle": outcome(lambda: pickle.load(open(request["evil"], "rb"))),
    "a thread": outcome(in_thread),
    "read": outcome(lambda: open(victim).read()),
    "io_uring": errno_of(425, 1, 0), "clone3": errno_of(435, 0, 0), "openat2": errno_of(437, 0, 0, 0, 0),
    "x32": errno_of(0x40000000 + 41, 2, 1, 0),
}}
json.dump(tried, out)
"""


@pytest.mark.slow
@needs_sandbox
def test_nothing_gets_out(tmp_path):
    """Python code that is free to do what it likes inside, with a real pickle that calls os.system."""
    folder = str(Path(sandbox.__file__).parent)
    names = {name: str(tmp_path / name) for name in ("out", "own", "proof", "victim")}
    Path(names["victim"]).write_text("whole")
    evil = hostile.hostile_pickles(tmp_path, Path(names["proof"]))["posix.system "]
    code, request = INSIDE.format(folder=folder), json.dumps({**names, "evil": str(evil)})
    done = subprocess.run([sys.executable, "-c", code, request], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    tried = json.loads(Path(names["out"]).read_text())
    assert {name: tried.pop(name) for name in ("io_uring", "clone3", "openat2", "x32")} == dict.fromkeys(
        ("io_uring", "clone3", "openat2", "x32"), 38
    )  # ENOSYS
    assert tried.pop("memory") == "MemoryError"
    assert tried.pop("too long a file") == "OSError"
    assert tried.pop("a thread") == "ValueError", "threads may be, and are shut in too"
    assert tried.pop("read") == "done"
    assert tried.pop("system") == "ZeroDivisionError"
    assert tried.pop("limit") in ("PermissionError", "ValueError")
    assert tried.pop("pickle") == "done", "os.system returned, having started nothing"
    assert tried == dict.fromkeys(tried, "PermissionError")
    assert not Path(names["proof"]).exists()
    assert Path(names["victim"]).read_text() == "whole"


@needs_sandbox
@pytest.mark.parametrize(("machine", "header"), [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", None)])
def test_numbers_of_system_calls(machine, header):
    """Held against the headers of the C library."""
    path = Path("/usr/include") / (header or "asm-generic/unistd.h")
    if not path.exists():
        pytest.skip(f"no {path}")
    numbers = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", path.read_text())}
    column, _ = sandbox.MACHINES[machine]
    for name, pair in {**sandbox.DENIED, **sandbox.CONDITIONAL, "seccomp": sandbox.SECCOMP}.items():
        assert pair[column] == numbers.get(name), name
        assert (pair[column] or 0) < sandbox.FIRST_UNKNOWN


@pytest.mark.parametrize("machine", sorted(sandbox.MACHINES))
def test_the_filter_decides(machine):
    """The program, run by an interpreter of classic BPF written here, for machines that are not at hand too."""
    column, audit = sandbox.MACHINES[machine]
    program = sandbox.filter_program(machine, own=77)

    def decide(number: int, *arguments: int, architecture: int = audit) -> int:
        data = struct.pack("<iIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
        at, loaded = 0, 0
        while True:
            code, then, otherwise, k = struct.unpack_from("HBBI", program, 8 * at)
            at += 1
            if code == 0x20:
                (loaded,) = struct.unpack_from("<I", data, k)
            elif code == 0x06:
                return k
            else:
                truth = {0x15: loaded == k, 0x35: loaded >= k, 0x45: bool(loaded & k)}[code]
                at += then if truth else otherwise

    allow, refuse, missing, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    for name, pair in sandbox.DENIED.items():
        if pair[column] is not None:
            assert decide(pair[column]) == refuse, name
    call = {name: pair[column] for name, pair in sandbox.CONDITIONAL.items()}
    assert [decide(n) for n in (424, 435, 10_000, 0x40000029)] == [missing] * 4
    assert decide(call["openat"], architecture=0x40000003) == kill
    readable, writable = (0, os.O_CLOEXEC), (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_WRONLY | 0x400)
    assert [decide(call["openat"], 0, 0, flags) for flags in readable] == [allow] * 2
    assert [decide(call["openat"], 0, 0, flags) for flags in writable] == [refuse] * 5
    if call["open"] is not None:
        assert (decide(call["open"], 0, 0), decide(call["open"], 0, os.O_RDWR)) == (allow, refuse)
    assert (decide(call["clone"], 0x10F00), decide(call["clone"], 17)) == (allow, refuse)
    assert (decide(call["tgkill"], 77), decide(call["tgkill"], 1)) == (allow, refuse)
    limits = [decide(call["prlimit64"], 0, 7, new) for new in (0, 1, 1 << 32)]
    assert limits == [allow, refuse, refuse]
    asked = {command: decide(call["ioctl"], 0, command) for command in (0x5401, 0x5413, 0x541B, 0x5451, 0x5412, 0x2285)}
    assert list(asked.values()) == [allow] * 4 + [refuse] * 2
    assert {decide(number) for number in {"x86_64": (0, 1, 9, 12), "aarch64": (62, 63, 64, 222)}[machine]} == {allow}


# ---- what torch, and the way through the tree, refuse

BATCH = """
import json, sys, warnings, io
sys.path.insert(0, {folder!r})
import torch, sandbox
warnings.simplefilter("ignore")
request, said = json.loads(sys.argv[1]), {{}}
out = open(request["out"], "w")
sandbox.enter_sandbox(2**26, 2**30, 60)
for name, path in request["paths"].items():
    try:
        tree = sandbox.load(path, request["mapped"][name], request["stand_ins"])
        tree, _ = sandbox.choose(tree, request["wrappers"], request["unwanted"])
        sandbox.write(io.BytesIO(), sandbox.flatten(tree)[0], 2**20)
        said[name] = "done"
    except sandbox.RefusedError as error:
        said[name] = str(error)
    except Exception as error:
        said[name] = f"{{type(error).__name__}}: {{error}}"
json.dump(said, out)
"""


@needs_sandbox
def test_hostile_pickles_are_refused(tmp_path):
    """All in one process, as torch takes seconds to import; `test_code_is_refused_in_one_line` goes the whole way."""
    paths = {said: str(path) for said, path in hostile.hostile_pickles(tmp_path, tmp_path / "proof").items()}
    is_zip = {said: Path(path).read_bytes()[:2] == b"PK" for said, path in paths.items()}
    request = {"paths": paths, "mapped": is_zip, "out": str(tmp_path / "out"), "stand_ins": STAND_INS}
    request |= {"wrappers": WRAPPERS, "unwanted": UNWANTED}
    code = BATCH.format(folder=str(Path(sandbox.__file__).parent))
    subprocess.run([sys.executable, "-c", code, json.dumps(request)], check=True, timeout=60)
    told = json.loads((tmp_path / "out").read_text())
    assert list(told) == list(paths)
    for said, message in told.items():
        error = unpickle._explained(tmp_path, message)
        assert said.strip() in str(error), (said, message)
        assert len(str(error).splitlines()) == 4
        assert "add_safe_globals" not in str(error)
        assert "weights_only" not in str(error)
    assert not (tmp_path / "proof").exists()


def test_what_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    good = tmp_path / "good.pth"
    torch.save({"a": torch.ones(3)}, good)
    script = tmp_path / "script.pt"
    code = {"x/data.pkl": b"", "x/constants.pkl": b"", "x/code/__torch__.py": b"def f(): pass"}
    files: dict[str, Callable[[], Path]] = {
        "TorchScript archive is a program": lambda: hostile.zipped(script, code),
        "there is no data.pkl": lambda: hostile.zipped(tmp_path / "1.pth", {"x/data.txt": b""}),
        "is compressed, which torch.save never does": lambda: hostile.zipped(
            tmp_path / "2.pth", {"x/data.pkl": b"abc"}, 8
        ),
        "would lie outside": lambda: hostile.zipped(tmp_path / "3.pth", {"x/data.pkl": b"", "../../x": b""}),
        "a zip bomb": lambda: hostile.zipped(tmp_path / "4.pth", {"x/data.pkl": b"", "x/data/0": bytes(2**24)}, 8),
        "occurs twice": lambda: hostile.patched(
            hostile.zipped(tmp_path / "5.pth", {"x/data.pkl": b"", "y/data.pkl": b""}), b"y/data", b"x/data"
        ),
    }
    for said, make in files.items():
        with pytest.raises(WeightsError, match=said) as caught:
            read_pickle(make())
        assert len(str(caught.value).splitlines()) <= 5
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(WeightsError, match=r"there is no sandbox(.|\n)*convert it to safetensors elsewhere"):
        read_pickle(good)


def test_a_flipped_bit_is_found_and_missing_checksums_are_allowed(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.ones(300), "b": torch.zeros(5)}, path)
    whole = path.read_bytes()
    entry = max(list_entries(path), key=lambda one: one.size)
    at = entry.offset + 40
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    with pytest.raises(WeightsError, match="do not have the checksum"):
        read_pickle(path)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(300)}, path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_pickle(path)[0]["a"].sum() == 300


@pytest.mark.slow
def test_a_failing_reader_is_reported(tmp_path, monkeypatch):
    """A reader that dies, hangs or reports nonsense."""
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pth")
    script = tmp_path / "sandbox.py"
    monkeypatch.setattr(unpickle, "__file__", str(tmp_path / "unpickle.py"))
    report = "import json, sys; r = json.loads(sys.argv[1]); open(r['report'], 'w').write({!r})"
    endings = {
        "ended with code 3: oh dear": "import sys; sys.stderr.write('\\x1b[31moh\\n\\noh dear'); sys.exit(3)",
        "ended with code -9": "import os; os.kill(os.getpid(), 9)",
        "ended with code 0": report.format("[" * 10_000),
        "more memory than its size": report.format(json.dumps({"error": "RuntimeError: can't allocate memory"})),
        r"why:  \[31mred line": report.format(json.dumps({"error": "\x1b[31mred\nline"})),
        "no such file|No such file": report.format(json.dumps({"notes": []})),
        "longer than 1 s": "import time; time.sleep(30)",
    }
    for said, code in endings.items():
        script.write_text(code)
        with pytest.raises(WeightsError, match=said) as caught:
            read_pickle(tmp_path / "x.pth", seconds=1 if "1 s" in said else 20)
        assert len(str(caught.value).splitlines()) <= 4
        assert "\x1b" not in str(caught.value)


def test_the_reader_sees_no_secrets(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pth")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(unpickle, "__file__", str(tmp_path / "unpickle.py"))
    (tmp_path / "sandbox.py").write_text(f"import os; open({str(tmp_path / 'env')!r}, 'w').write(str(os.environ))")
    with pytest.raises(WeightsError):
        read_pickle(tmp_path / "x.pth")
    assert "secret" not in (tmp_path / "env").read_text()
    assert "PATH" in (tmp_path / "env").read_text()


# ---- the way through what a training saves


@pytest.mark.parametrize(
    ("tree", "names", "notes"),
    [
        ({"a": 1, "model": 2}, ["a", "model"], []),
        ({"model": {"a": 1}}, ["a"], ["unwrapped 'model'"]),
        ({"model": {"a": 1}, "model_ema": {"b": 2}}, ["b"], ["unwrapped 'model_ema'", "left out: 'model' (1 tensor)"]),
        ({"model": {"a": 1}, "model_ema": None}, ["a"], ["unwrapped 'model'", "left out: 'model_ema'"]),
        (
            {"student": {"a": 1}, "teacher": {"b": 2, "c": 3}, "epoch": "x"},
            ["b", "c"],
            ["unwrapped 'teacher'", "left out: 'student' (1 tensor), 'epoch'"],
        ),
        ({"model": {"teacher": {"x": {"y": 1}}}}, ["x.y"], ["unwrapped 'model'", "unwrapped 'teacher'"]),
        (
            {"parts": {"a": 1, "n": None}, "optimizer": {"s": 2}, "args": 3},
            ["parts.a", "args"],
            ["left out: 'optimizer' (1 tensor)", "left out, not tensors: 'parts.n'"],
        ),
        ({"list": [1, (2,)], 7: 3}, ["list.0", "list.1.0", "7"], []),
    ],
)
def test_unwrapping(tree, names, notes):
    """Numbers stand for tensors."""

    def grown(value: object) -> object:
        if isinstance(value, dict):
            return {key: grown(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(grown, value))
        return torch.full((2,), value) if isinstance(value, int) else value

    kept, unwrapped = sandbox.choose(grown(tree), WRAPPERS, UNWANTED)
    tensors, more = sandbox.flatten(kept)
    assert list(tensors) == names
    assert [note for note, _ in unwrapped + more] == notes
    assert all(left_out == note.startswith("left out") for note, left_out in unwrapped + more)


def test_averages_come_before_what_they_average():
    order = {name: i for i, name in enumerate(WRAPPERS)}
    assert max(order["model_ema"], order["state_dict_ema"], order["teacher"]) < min(order["model"], order["state_dict"])
    assert order["student"] == len(WRAPPERS) - 1
    assert not set(WRAPPERS) & set(UNWANTED)


def test_a_pickle_that_holds_itself():
    loop: dict[str, object] = {"a": torch.ones(1)}
    loop["again"] = loop
    with pytest.raises(sandbox.RefusedError, match="nested more than"):
        sandbox.choose(loop, WRAPPERS, UNWANTED)


def test_what_is_written_is_safetensors(tmp_path):
    tensors = {"odd": torch.tensor([True] * 3), "b": torch.randn(2, 3).t(), "s": torch.tensor(1.5, dtype=torch.float64)}
    tensors["conjugate"] = torch.randn(2, dtype=torch.complex64).conj()
    tensors, _ = sandbox.flatten(tensors)
    with open(tmp_path / "x", "wb") as file:
        sandbox.write(file, tensors, 100)
    read, _ = read_safetensors(tmp_path / "x")
    assert same(read, tensors)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in read.values())
    with open(tmp_path / "x", "wb") as file, pytest.raises(sandbox.RefusedError, match="out of proportion"):
        sandbox.write(file, tensors, 50)


def test_a_stand_in_keeps_nothing():
    stand_in = sandbox.StandIn(1, 2)
    stand_in.__setstate__({"a": 1})
    assert vars(stand_in) == {}
