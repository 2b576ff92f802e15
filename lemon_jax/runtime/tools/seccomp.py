"""The system calls a sandboxed program may make, as a classic BPF filter.

An allow list: what is not named fails with EPERM. A program that computes an answer needs memory,
threads, clocks and files opened for reading; it needs no socket, no child process, no signal to
anybody, no file of its own. Numbers come from the kernel's unistd headers (x86_64 and the generic
table that aarch64 uses); the filter layout from Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable

# name: (x86_64, aarch64); None where the machine has no such call
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "nanosleep": (35, 101), "getpid": (39, 172),
    "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17), "readlink": (89, None),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178),
    "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "set_robust_list": (273, 99), "dup3": (292, 24), "getrandom": (318, 278),
    "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
_OPEN, _OPENAT, _CLONE, _CLONE3 = (2, None), (257, 56), (56, 220), (435, 435)
_IOCTL, _FCNTL, _PRLIMIT64 = (16, 29), (72, 25), (302, 261)

_ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*

_WRITING = 0x3 | 0x40 | 0x200  # O_WRONLY | O_RDWR, O_CREAT, O_TRUNC
_CLONE_THREAD = 0x00010000
_IOCTLS = (0x5401, 0x5451)  # TCGETS (isatty), FIOCLEX
_FCNTLS = (0, 1, 2, 3, 1030)  # dup, get/set close-on-exec, get flags; not F_SETOWN, which aims signals
_EPERM, _ENOSYS = 1, 38

_LD, _JEQ, _JSET, _RET = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jt, jf, k)


def _argument(index: int) -> bytes:
    # struct seccomp_data: nr, arch, instruction pointer, then six 64-bit arguments; the low word is
    # enough because each argument tested here is an int in the kernel's own signature.
    return _op(_LD, 16 + 8 * index)


def _block(nr: int | None, body: Iterable[bytes]) -> bytes:
    """`body` runs for call `nr` alone and must return on every path."""
    if nr is None:
        return b""
    code = b"".join(body)
    return _op(_JEQ, nr, 0, len(code) // 8) + code


def _one_of(nr: int | None, argument: int, values: Iterable[int]) -> bytes:
    tests = (_op(_JEQ, value, 0, 1) + _op(_RET, _ALLOW) for value in values)
    return _block(nr, [_argument(argument), *tests, _op(_RET, _ERRNO | _EPERM)])


def build_filter(machine: str | None = None) -> bytes:
    """The filter for `machine` (default: this one), 8 bytes an instruction; empty if it is unknown."""
    machine = machine or platform.machine()
    if machine not in _ARCH:
        return b""
    column, arch = _ARCH[machine]
    allow, deny = _op(_RET, _ALLOW), _op(_RET, _ERRNO | _EPERM)
    parts = [
        _op(_LD, 4) + _op(_JEQ, arch, 1, 0) + _op(_RET, _KILL),  # 32-bit calls have other numbers
        _op(_LD, 0),
        *(_block(numbers[column], [allow]) for numbers in _CALLS.values()),
        # Reading only: a set bit among _WRITING refuses.
        _block(_OPENAT[column], [_argument(2), _op(_JSET, _WRITING, 1, 0), allow, deny]),
        _block(_OPEN[column], [_argument(1), _op(_JSET, _WRITING, 1, 0), allow, deny]),
        # Threads, but no processes. clone3 hides its flags behind a pointer; on ENOSYS libc uses clone.
        _block(_CLONE[column], [_argument(0), _op(_JSET, _CLONE_THREAD, 0, 1), allow, deny]),
        _block(_CLONE3[column], [_op(_RET, _ERRNO | _ENOSYS)]),
        _one_of(_IOCTL[column], 1, _IOCTLS),
        _one_of(_FCNTL[column], 1, _FCNTLS),
        _one_of(_PRLIMIT64[column], 0, (0,)),  # its own limits, which are hard already
        deny,
    ]
    return b"".join(parts)
