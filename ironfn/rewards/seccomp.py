"""Write the filter of system calls that a sandbox runs under: a program of the kernel's own small machine.

Denied is what namespaces and resource limits do not bound: memory that belongs to no process (System V, memfd),
sockets of families that know no namespace (vsock), and what only tools for the system need. Formats and numbers:
Linux' `seccomp(2)`, `linux/filter.h`, `asm/unistd_64.h` and `asm-generic/unistd.h`.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from types import MappingProxyType

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE = 0, 4  # where struct seccomp_data has them

MACHINES: Mapping[str, int] = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})
DENIED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "shmget": (29, 194),
        "shmat": (30, 196),
        "semget": (64, 190),
        "msgget": (68, 186),
        "mq_open": (240, 180),
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
        "socket": (41, 198),
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "unshare": (272, 97),
        "setns": (308, 268),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "fsopen": (430, 430),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "mount_setattr": (442, 442),
        "open_by_handle_at": (304, 265),
        "name_to_handle_at": (303, 264),
        "keyctl": (250, 219),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "io_uring_setup": (425, 425),
        "fanotify_init": (300, 262),
        "personality": (135, 92),
        "syslog": (103, 116),
        "acct": (163, 89),
        "quotactl": (179, 60),
        "swapon": (167, 224),
        "reboot": (169, 142),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "adjtimex": (159, 171),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
    }
)
"""Each call that is denied, with its number on x86_64 and on aarch64."""


def program(machine: str) -> bytes:
    """Return the filter for a machine as `platform.machine` names it. ValueError for one without numbers here.

    Denied calls fail with EPERM; calls of another machine's form (32 bits, x32) end the process.
    """
    if machine not in MACHINES:
        raise ValueError(f"code cannot be run safely on {machine}; use {' or '.join(MACHINES)}")
    numbers = [pair[list(MACHINES).index(machine)] for pair in DENIED.values()]
    count = len(numbers)
    # A jump counts the steps that it leaps over. After the checks stand: allow, refuse, kill.
    checks = [(_EQUAL, count - at, 0, number) for at, number in enumerate(numbers)]
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, count + 2, 0, 0x40000000),
        *checks,
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _KILL),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
