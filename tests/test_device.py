"""Device, precision and seeds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vitral import containers, device, system
from vitral.containers import cores
from vitral.device import choose, derive_seed, seed_everything, seeded
from vitral.errors import UsageError
from vitral.system import memory_bytes


@pytest.mark.parametrize(("flags", "said"), [({"avx2"}, "slower than fp32"), ({"bf16"}, ""), ((), "")])
def test_bf16_that_is_slow_says_so(monkeypatch, flags, said):
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags))
    machine = choose("cpu", "bf16")
    assert said in machine.caution
    assert bool(machine.caution) == bool(said)
    assert machine.reason == "requested" + f"; {machine.caution}" * bool(said)


def test_the_requested_precision_is_chosen(monkeypatch):
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"bf16"}))
    for precision in ("fp32", "bf16"):
        machine = choose("cpu", precision, dim=8)
        assert (machine.device.type, machine.precision, machine.reason) == ("cpu", precision, "requested")


@pytest.mark.parametrize(
    ("flags", "dim", "precision"),
    [({"avx512_bf16"}, 64, "bf16"), ({"amx_bf16"}, None, "bf16"), ({"avx2"}, 64, "fp32"), ({"avx512_bf16"}, 8, "fp32")],
)
def test_auto_takes_bf16_only_where_it_gains(monkeypatch, flags, dim, precision):
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags))
    machine = choose("cpu", "auto", dim=dim)
    assert machine.precision == precision
    assert machine.reason != "requested"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cpu", "fp16"), "100 times slower"),
        (("cpu", "double"), "unknown precision 'double'"),
        (("gpu", "auto"), "unknown device 'gpu'"),
        (("cuda:77", "auto"), "no device 'cuda:77' on this machine"),
        (("meta", "auto"), "no device 'meta'"),
    ],
)
def test_refusals_say_what_to_type(arguments, said):
    with pytest.raises(UsageError, match=said) as caught:
        choose(*arguments)
    assert "try: --" in str(caught.value)


ZEN = "fma avx2 avx512f avx512bw avx512dq avx512vl avx512cd avx_vnni avx512_vnni avx512_bf16"
XEON = f"{ZEN} amx_tile amx_int8 amx_bf16 avx512_fp16"


@pytest.mark.parametrize(
    ("flags", "capability", "limit", "has", "lacks"),
    [
        (ZEN, "AVX512", "", ZEN, ""),
        (XEON, "AVX512", "ALL", XEON, ""),
        (XEON, "AVX512", "DEFAULT", XEON, ""),
        (ZEN, "AVX2", "", "avx2 fma", "avx512f avx512_bf16 avx512_vnni"),
        (XEON, "AVX2", "", "avx2 fma", "amx_bf16 amx_tile"),
        (ZEN, "DEFAULT", "", "", "avx2 avx512f"),
        (ZEN, "AVX512", "AVX2", "avx2", "avx512f avx512_bf16"),
        (ZEN, "AVX512", "avx512_core", "avx512f", "avx512_vnni avx512_bf16"),
        (ZEN, "AVX512", "AVX512_CORE_VNNI", "avx512_vnni", "avx512_bf16"),
        (XEON, "AVX512", "AVX512_CORE_BF16", "avx512_bf16", "amx_bf16 amx_int8 avx512_fp16"),
        (XEON, "AVX512", "AVX512_CORE_AMX", "avx512_bf16 amx_bf16", ""),
    ],
)
def test_instructions_are_those_that_torch_and_onednn_may_use(monkeypatch, flags, capability, limit, has, lacks):
    monkeypatch.setattr(system, "cpu_line", lambda *_: flags)
    monkeypatch.setattr(system.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    found = system.cpu_flags.__wrapped__()
    assert {*has.split()} <= found
    assert not found & {*lacks.split()}
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit or "ALL")  # the library's former name
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert system.cpu_flags.__wrapped__() == found


def test_a_limited_cpu_trains_in_fp32():
    """The limits are read once a process, as by the libraries."""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    code = (
        "from vitral import device, kernels, system\n"
        "from vitral.kernels import cpu_library, dense\n"
        "machine = device.choose('cpu', dim=64)\n"
        "assert machine.precision == 'fp32', machine\n"
        "assert not (cpu_library.is_supported() or system.has_avx512() or dense._mkl_is_slow())\n"
        "print(machine.reason)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **limits}, check=True, capture_output=True, text=True
    )
    bf16 = {"avx512_bf16", "amx_bf16"} & {*system.cpu_line("flags").split()}
    assert ("excludes the CPU's bf16" if bf16 else "has no bf16") in ended.stdout


def test_autocast_is_bf16_only_where_chosen():
    x = torch.ones(2, 2)
    with choose("cpu", "bf16").autocast():
        assert (x @ x).dtype == torch.bfloat16
    with choose("cpu", "fp32").autocast():
        assert (x @ x).dtype == torch.float32


def test_seeds_are_a_function_of_every_part():
    parts = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 1), (-1,), (2**32 - 2,)]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(3, 4) == derive_seed(3, 4)


def test_seeded_leaves_the_outer_generator_alone():
    seed_everything(5)
    expected = torch.rand(2)
    seed_everything(5)
    first = torch.rand(1)
    with seeded(1, 2, 3):
        inner = torch.rand(3)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    with seeded(1, 2, 3):
        assert torch.equal(torch.rand(3), inner)


def test_the_machine_is_described():
    assert "1 thread" in choose("cpu").name
    assert cores() >= 1
    assert memory_bytes() > 1 << 28


def test_the_limit_of_a_container_is_the_memory_there_is(monkeypatch, tmp_path):
    whole = memory_bytes()
    for text, expected in (("max\n", whole), (f"{5 << 20}\n", 5 << 20), (f"{1 << 62}\n", whole)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(containers, "_GROUPS", tmp_path)
        assert memory_bytes() == expected


def a_busy_machine(monkeypatch, others: float, own: float = 2.0, there: int = 2, threads: int = 2) -> system.HostLoad:
    """A machine on which so many cores were busy in the two seconds since the object was made."""
    told = iter([(10.0, 100.0, 5.0), (12.0, 100.0 + 2 * others + own, 5.0 + own)])
    monkeypatch.setattr(system, "_work", lambda: next(told))
    monkeypatch.setattr(system, "cores", lambda: there)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    return system.HostLoad()


def test_cpu_contention_is_reported_with_a_hint(monkeypatch):
    told = system.cpu_contention(a_busy_machine(monkeypatch, others=1.0)) or ""
    assert "keep 1.0 of 2 cores busy" in told
    assert "OMP_NUM_THREADS=1 " in told
    assert "OMP_NUM_THREADS=6 " in (system.cpu_contention(a_busy_machine(monkeypatch, 2.4, there=8, threads=8)) or "")
    assert "OMP_NUM_THREADS=5 " in (system.cpu_contention(a_busy_machine(monkeypatch, 2.5, there=8, threads=6)) or "")
    assert "OMP_NUM_THREADS=1 " in (system.cpu_contention(a_busy_machine(monkeypatch, 2.0)) or ""), "never none at all"


@pytest.mark.parametrize(
    ("others", "there", "threads"), [(0.3, 2, 2), (0.0, 2, 2), (1.0, 2, 1), (1.0, 8, 4), (2.0, 16, 8)]
)
def test_without_contention_nothing_is_reported(monkeypatch, others, there, threads):
    assert system.cpu_contention(a_busy_machine(monkeypatch, others, there=there, threads=threads)) is None


def test_the_work_of_others_is_that_of_our_cores_without_our_own(monkeypatch, tmp_path):
    """Ticks of a hundredth of a second; waiting for a disk does not count as load, time stolen by the host does."""
    stat, clock, own = tmp_path / "stat", [50.0], [1.0]
    monkeypatch.setattr(system, "_STAT", stat)
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    monkeypatch.setattr(system.os, "sysconf", lambda _: 100, raising=False)
    monkeypatch.setattr(system.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(system.time, "process_time", lambda: own[0])
    head = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 5000 0 0 0 0 0 0 0 0 0\n"
    stat.write_text(head + "cpu1 100 1 10 7 7 1 1 1 50 0\ncpu3 0 0 0 500 0 0 0 0 0 0\ncpu11 7 7 7 7 7 7 7 7 7 7\n")
    others = system.HostLoad()
    assert others.cores() is None, "no time has passed"
    clock[0], own[0] = 52.0, 2.5  # two seconds: 350 ticks of work, 150 of them ours
    stat.write_text(head + "cpu1 300 1 10 99 99 1 1 1 90 0\ncpu3 100 0 0 600 0 0 10 40 0 0\n")
    assert others.cores() == pytest.approx(1.0)
    monkeypatch.setattr(system, "_STAT", tmp_path / "none")
    assert others.cores() is None
    assert system.cpu_contention(system.HostLoad()) is None
