"""Sandbox process that opens a pickle: no network, no other programs, no files but the two it has open already.

`vitral.weights.read.unpickle` runs this file as a script, which imports nothing of vitral. torch's restricted unpickler
(`weights_only=True`) is the first wall. It was bypassed before (CVE-2025-32434, CVE-2026-24747), so this is the second:
on Linux a seccomp filter (seccomp(2), kernel 3.17), on macOS the profile of `sandbox-exec` around this process.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch
from torch import Tensor

# Numbers of x86-64 (asm/unistd_64.h) and of arm64 (asm-generic/unistd.h), None where there is no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # the network
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242),
    "bind": (49, 200), "listen": (50, 201), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243), "setsockopt": (54, 208),
    "shutdown": (48, 210),
    # other programs and processes
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "kill": (62, 129),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "unshare": (272, 97),
    "setns": (308, 268), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "bpf": (321, 280),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "setrlimit": (160, 164),
    "personality": (135, 92), "memfd_create": (319, 279), "io_setup": (206, 0), "io_submit": (209, 2),
    # changes to files by name
    "creat": (85, None), "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "unlink": (87, None),
    "unlinkat": (263, 35), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "mknod": (133, None),
    "mknodat": (259, 33), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "open_by_handle_at": (304, 265),
    # memory and queues shared with other processes
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # the system: a container often runs as root
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "acct": (163, 89), "quotactl": (179, 60), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "syslog": (103, 116),
    "fanotify_init": (300, 262), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "vhangup": (153, 58),
}  # fmt: skip
CONDITIONAL = {
    "open": (2, None),
    "openat": (257, 56),
    "clone": (56, 220),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "ioctl": (16, 29),
}
"""Calls allowed or refused by their arguments."""
SECCOMP = (317, 277)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine → index into the pairs above, and AUDIT_ARCH (linux/audit.h)."""
FIRST_UNKNOWN = 424
"""First number that is the same everywhere and newer than Linux 5.0: io_uring, clone3, openat2, the mount calls and
later ones. All return "no such call", for which the C library and Python have fallbacks."""

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
MOST_LEAVES = 1_000_000
DEEPEST = 32

Path = tuple[str, ...]


class RefusedError(Exception):
    """The file cannot be read here; the message is for the user."""


# ---- the sandbox


def enter_sandbox(writable: int, memory: int, seconds: int) -> None:
    """Restrict this process, irrevocably.

    No file grows beyond `writable` bytes, memory grows by at most `memory` bytes (Linux), and CPU time is limited to
    `seconds`. Raises `RefusedError` if the system has no sandbox, or if the sandbox does not hold.
    """
    for limit, most in ((resource.RLIMIT_FSIZE, writable), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, and can be reported
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        _install_filter()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))  # sends nothing
    except PermissionError:
        return
    except OSError as error:
        raise RefusedError(f"the sandbox of this process cannot be tested: {error}") from error
    raise RefusedError("the sandbox of this process does not hold: it can reach the network")


def _install_filter() -> None:
    """Install the seccomp filter for every thread of this process."""
    if platform.machine() not in MACHINES or sys.maxsize < 2**32:
        raise RefusedError(f"no filter of system calls is known for {platform.machine()}")
    column, _ = MACHINES[platform.machine()]
    program = filter_program(platform.machine(), os.getpid())
    held = ctypes.create_string_buffer(program, len(program))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, die_with_parent = 38, 1
    sock_fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    arguments = ctypes.c_long(SECCOMP[column]), ctypes.c_ulong(1), ctypes.c_ulong(1)  # set the filter, on all threads
    libc.prctl(die_with_parent, signal.SIGKILL, 0, 0, 0)
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.syscall(*arguments, ctypes.c_char_p(sock_fprog)):
        raise RefusedError(f"the system refuses a filter of system calls: {os.strerror(ctypes.get_errno())}")


def filter_program(machine: str, own: int) -> bytes:
    """Build the filter in classic BPF, for a machine of `MACHINES` and the process `own`.

    It reads `struct seccomp_data`: the number of the call at byte 0, the machine at 4, 64-bit arguments from 16.
    """
    column, audit = MACHINES[machine]
    allow, refuse, kill = _end(0x7FFF0000), _end(0x00050000 | errno.EPERM), _end(0x80000000)
    program = [_load(4), _equal(audit, 1, 0), kill, _load(0)]
    program += [_at_least(FIRST_UNKNOWN, 0, 1), _end(0x00050000 | errno.ENOSYS)]
    for number in (numbers[column] for numbers in DENIED.values()):
        if number is not None:
            program += [_equal(number, 0, 1), refuse]
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    thread = 0x10000  # CLONE_THREAD
    # Terminal queries and close-on-exec; not, say, input to a terminal.
    known = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451, 0x541B)
    rules = {
        "open": [_argument(1), _any_bit(writing, 0, 1), refuse, allow],
        "openat": [_argument(2), _any_bit(writing, 0, 1), refuse, allow],
        "clone": [_argument(0), _any_bit(thread, 1, 0), refuse, allow],
        "tgkill": [_argument(0), _equal(own, 1, 0), refuse, allow],  # abort() signals its own thread
        # limits may be read, not set
        "prlimit64": [_argument(2), _equal(0, 0, 2), _argument(2, high=True), _equal(0, 1, 0), refuse, allow],
        "ioctl": [_argument(1), *(_equal(k, len(known) - i, 0) for i, k in enumerate(known)), refuse, allow],
    }
    for name, rule in rules.items():
        number = CONDITIONAL[name][column]
        if number is not None:
            program += [_equal(number, 0, len(rule)), *rule]
    return b"".join([*program, allow])


def _instruction(code: int, k: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, k)  # struct sock_filter of linux/filter.h


def _load(at: int) -> bytes:
    return _instruction(0x20, at)


def _argument(index: int, high: bool = False) -> bytes:
    return _load(16 + 8 * index + 4 * high)  # both machines are little-endian


def _equal(k: int, then: int, otherwise: int) -> bytes:
    return _instruction(0x15, k, then, otherwise)


def _at_least(k: int, then: int, otherwise: int) -> bytes:
    return _instruction(0x35, k, then, otherwise)


def _any_bit(k: int, then: int, otherwise: int) -> bytes:
    return _instruction(0x45, k, then, otherwise)


def _end(answer: int) -> bytes:
    return _instruction(0x06, answer)


# ---- the pickle


class StandIn:
    """Placeholder for a harmless object that is not a weight, such as the options of a run: keeps and does nothing."""

    def __new__(cls, *args: object) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def load(path: str, mapped: bool, stand_ins: Iterable[str]) -> object:
    """Load the file by torch's restricted unpickler; objects of the classes `stand_ins` become `StandIn`."""
    with torch.serialization.safe_globals([(StandIn, name) for name in stand_ins]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def leaves(tree: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Walk all values that are no dict, list or tuple, with the keys leading to them, in order.

    A pickle can contain itself, or the same list a billion times: both raise `RefusedError`.
    """
    pending, count = [(path, tree)], 0
    while pending:
        path, value = pending.pop()
        count += 1
        if count > MOST_LEAVES or len(path) > DEEPEST:
            raise RefusedError(f"nested more than {DEEPEST} deep, or more than {MOST_LEAVES:,} entries")
        if isinstance(value, dict):
            inside = [((*path, _text(key)), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            inside = [((*path, str(index)), inner) for index, inner in enumerate(value)]
        else:
            yield path, value
            continue
        pending.extend(reversed(inside))


def _text(key: object) -> str:
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    if isinstance(key, str | int):
        return str(key)
    raise RefusedError(f"a key is a {type(key).__name__}; names are text")


Note = tuple[str, bool]
"""A note, and True if it is on what was left out."""


def tensors_in(tree: object) -> int:
    """Count the tensors at or below a value."""
    return sum(isinstance(leaf, Tensor) for _, leaf in leaves(tree))


def choose(tree: object, wrappers: Sequence[str], unwanted: Sequence[str]) -> tuple[object, list[Note]]:
    """Choose the weights in a saved checkpoint, with notes on unwrapped and omitted keys.

    `wrappers` are the keys that hold weights, the preferred first; `unwanted` those that hold none.
    """
    notes: list[Note] = []
    for _ in range(DEEPEST):
        if not isinstance(tree, dict):
            break
        inside = {key: tensors_in(value) if isinstance(value, dict) else 0 for key, value in tree.items()}
        key = next((key for key in wrappers if inside.get(key)), None)
        if key is None:
            omitted = [name for name in tree if name in unwanted and not isinstance(tree[name], Tensor)]
            notes += _left_out(tree, omitted)
            tree = {name: value for name, value in tree.items() if name not in omitted}
            break
        notes += [(f"unwrapped '{key}'", False), *_left_out(tree, [name for name in tree if name != key])]
        tree = tree[key]
    return tree, notes


def _left_out(tree: Mapping[object, object], names: Iterable[object]) -> list[Note]:
    listed = []
    for name in names:
        count = tensors_in(tree[name])
        tensors = "1 tensor" if count == 1 else f"{count} tensors"
        listed.append(f"'{_text(name)}' ({tensors})" if count else f"'{_text(name)}'")
    return [(f"left out: {_listed(listed)}", True)] if listed else []


def _listed(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def flatten(tree: object) -> tuple[dict[str, Tensor], list[Note]]:
    """Collect tensors under names joined by dots, with a note on everything else.

    Raises `RefusedError` for two tensors of one name, and for tensors that are not plain values in memory.
    """
    tensors: dict[str, Tensor] = {}
    others = []
    for path, value in leaves(tree):
        name = ".".join(path)
        if not isinstance(value, Tensor):
            others.append(f"'{name}'")
        elif not name:
            raise RefusedError("the file holds one tensor without a name")
        elif name in tensors:
            raise RefusedError(f"two tensors have the name '{name}'")
        else:
            tensors[name] = _plain(name, value)
    if not tensors:
        raise RefusedError("there are no tensors in this file")
    return tensors, [(f"left out, not tensors: {_listed(others)}", True)] if others else []


def _plain(name: str, value: Tensor) -> Tensor:
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise RefusedError(f"'{name}' is a {type(value).__name__}, a special kind of tensor")
    if value.is_quantized:
        raise RefusedError(f"'{name}' is quantized")
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise RefusedError(f"'{name}' is sparse, or has no values ({value.layout}, {value.device})")
    if value.dtype not in DTYPES:
        raise RefusedError(f"'{name}' has elements of type {value.dtype}")
    return value.detach().resolve_conj().resolve_neg()


def write(file: IO[bytes], tensors: Mapping[str, Tensor], most: int) -> None:
    """Write a safetensors file of at most `most` bytes into an open file, one tensor after another.

    Tied tensors are written twice. Wide elements come first in the file, so that each lies at a multiple of its width.
    """
    header: dict[str, object] = {}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    if sum(sizes.values()) > most:
        raise RefusedError(f"its tensors would take {sum(sizes.values()):,} bytes, out of proportion to the file")
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    ends = dict(zip(order, itertools.accumulate(sizes[name] for name in order), strict=True))
    for name, tensor in tensors.items():
        place = [ends[name] - sizes[name], ends[name]]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        file.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    file.flush()


def main(request: Mapping[str, Any]) -> None:
    """Read `path`, write `tensors` and `report`; the report is a JSON object with `notes` or with `error`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with open(request["report"], "wb") as report, open(request["tensors"], "wb") as file:
        try:
            enter_sandbox(request["writable"], request["memory"], request["seconds"])
            tree = load(request["path"], request["mapped"], request["stand_ins"])
            tree, notes = choose(tree, request["wrappers"], request["unwanted"])
            tensors, more = flatten(tree)
            write(file, tensors, request["most"])
            result: dict[str, object] = {"notes": notes + more}
        except RefusedError as error:
            result = {"error": str(error)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:4000]}
        report.write(json.dumps(result).encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
