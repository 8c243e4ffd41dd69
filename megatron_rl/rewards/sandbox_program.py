"""Runs inside the sandbox: reads a program from stdin, gives up its rights, and runs it.

Its source is handed to ``python -I -S -c``, so it imports the standard library alone. The first
line is JSON: ``{"program", "memory_bytes", "cpu_s", "input"}``. With ``input`` (a text) the program
runs as a script that reads it and writes to stdout. Without, it is imported, and then each further
line ``{"nonce", "statement"}`` or ``{"nonce", "expression"}`` is executed in its namespace and
answered by ``{"nonce", "done"}`` or ``{"nonce", "value"}``; no answer means that it failed.

What confines the program: limits of the kernel, and a filter of system calls (x86-64 and ARM64). It
may start threads, but not start processes or other programs, nor signal, trace or limit another
process, nor open a socket, nor leave its process group.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

FILE_BYTES = 16 << 20
OPEN_FILES = 64
MAX_VALUE_CHARACTERS = 200_000
# Options of prctl, and the mode of seccomp that takes a filter.
NO_NEW_PRIVS = 38
SET_SECCOMP = 22
FILTER = 2
SET_PDEATHSIG = 1
# Errors that a refused call returns.
EPERM = 1
ENOSYS = 38
# What a filter returns, and the operations it is made of (linux/seccomp.h, linux/bpf_common.h).
ALLOW = 0x7FFF0000
REFUSE = 0x00050000
LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_SET = 0x45
JUMP_ABOVE = 0x35
RETURN = 0x06
# The flag of clone that makes a thread, and the bit of system calls of the x32 interface.
CLONE_THREAD = 0x10000
X32 = 0x40000000
# Offsets in the kernel's description of a call.
NUMBER = 0
ARCHITECTURE = 4
FIRST_ARGUMENT = 16


def _numbers(text):
    return tuple(map(int, text.split()))


# System calls by machine: those that are always refused, then those whose first argument decides.
CALLS = {
    "x86_64": {
        "audit": 0xC000003E,
        # fork vfork execve execveat kill tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal
        # pidfd_open ptrace process_vm_readv process_vm_writev socket setpgid setsid unshare setns
        # mount umount2 pivot_root chroot bpf userfaultfd perf_event_open add_key request_key keyctl
        # io_uring_setup
        "refused": _numbers(
            "57 58 59 322 62 200 129 297 424 434 101 310 311 41 109 112 272 308 165 166 155 "
            "161 321 323 298 248 249 250 425"
        ),
        "clone": 56,
        "clone3": 435,
        "tgkill": 234,
        "prlimit64": 302,
        "prctl": 157,
    },
    "aarch64": {
        "audit": 0xC00000B7,
        "refused": _numbers(
            "221 281 129 130 138 240 424 434 117 270 271 198 154 157 97 268 40 39 41 51 280 "
            "282 241 217 218 219 425"
        ),
        "clone": 220,
        "clone3": 435,
        "tgkill": 131,
        "prlimit64": 261,
        "prctl": 167,
    },
}


def system_call_filter(calls, own_pid):
    """The seccomp filter: a list of (operation, jump if true, jump if false, value).

    Jumps are relative to the next step: (0, 1) skips one step when the comparison fails.
    """

    def refuse(error):
        return (RETURN, 0, 0, REFUSE | error)

    allow = (RETURN, 0, 0, ALLOW)

    def by_first_argument(call, test):
        """Of ``call``, the step after ``test`` allows and the one after that refuses.

        A call with another number jumps over the four steps behind, to the next rule. Of this call
        the argument takes the place of the number, which is not needed again: both ways end.
        """
        first_argument = (LOAD, 0, 0, FIRST_ARGUMENT)
        return [(JUMP_EQUAL, 0, 4, calls[call]), first_argument, test, allow, refuse(EPERM)]

    steps = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, calls["audit"]), refuse(EPERM)]
    # On x86-64 a number with this bit is the same call by another door.
    steps += [(LOAD, 0, 0, NUMBER), (JUMP_ABOVE, 0, 1, X32), refuse(EPERM)]
    for number in calls["refused"]:
        steps += [(JUMP_EQUAL, 0, 1, number), refuse(EPERM)]
    # The C library starts threads by clone3. Told that it does not exist, it takes clone, whose
    # flags are an argument that a filter can read.
    steps += [(JUMP_EQUAL, 0, 1, calls["clone3"]), refuse(ENOSYS)]
    steps += by_first_argument("clone", (JUMP_SET, 0, 1, CLONE_THREAD))
    steps += by_first_argument("tgkill", (JUMP_EQUAL, 0, 1, own_pid))
    steps += by_first_argument("prlimit64", (JUMP_EQUAL, 0, 1, 0))  # 0: the calling process
    # All options of prctl but the one that would let the program outlive its parent.
    steps += by_first_argument("prctl", (JUMP_EQUAL, 1, 0, SET_PDEATHSIG))
    return [*steps, allow]


def give_up_rights(memory_bytes, cpu_s):
    """Sets the limits and the filter for this process, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    calls = CALLS.get(platform.machine())
    if calls is None:
        limits[resource.RLIMIT_NPROC] = 0
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if calls is None:
        return
    steps = system_call_filter(calls, os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    # struct sock_fprog: the number of steps, padding, and a pointer to them.
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    )
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SET_SECCOMP, FILTER, program, 0, 0):
        os._exit(70)


def plain(value, types):
    """``value`` rebuilt from Python's own types, so that no equality of the program's counts."""
    kind, dictionary, others = types
    for base in others:
        if isinstance(value, base):
            return base(plain(item, types) for item in base.__iter__(value))
    if isinstance(value, dictionary):
        return {plain(key, types): plain(item, types) for key, item in dictionary.items(value)}
    if value is None or kind(value) in (bool, int, float, complex, str, bytes):
        return value
    for base in (int, float, str, bytes):
        if isinstance(value, base):
            # ``int(value)`` would call ``__int__`` of the program's class.
            if base is int:
                return int.__index__(value)
            return base.__new__(base, value)
    raise TypeError


def serve(names, requests, answers):
    """Executes requests in ``names``; an exception ends the process, which counts as failed."""
    # Local names: what a test calls may replace attributes of modules and builtins.
    types = (type, dict, (list, tuple, set, frozenset))
    dumps = json.dumps
    write = os.write
    evaluate = eval
    execute = exec
    show = repr
    for line in requests:
        request = json.loads(line)
        if "statement" in request:
            execute(compile(request["statement"], "<test>", "exec"), names)
            answer = {"nonce": request["nonce"], "done": True}
        else:
            value = evaluate(compile(request["expression"], "<test>", "eval"), names)
            text = show(plain(value, types))
            answer = {"nonce": request["nonce"], "value": text[:MAX_VALUE_CHARACTERS]}
        write(answers, dumps(answer).encode() + b"\n")


def main():
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    task = json.loads(requests.readline())
    sys.set_int_max_str_digits(100_000)
    if task["input"] is None:
        # The program gets /dev/null for stdin, stdout and stderr; only this code knows the channel
        # of answers.
        answers = os.dup(1)
        nothing = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        give_up_rights(task["memory_bytes"], task["cpu_s"])
        names = {"__name__": "solution"}
        exec(compile(task["program"], "<program>", "exec"), names)
        serve(names, requests, answers)
        return
    requests.close()
    stdin = os.memfd_create("stdin")
    with os.fdopen(os.dup(stdin), "wb") as file:
        file.write(task["input"].encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    give_up_rights(task["memory_bytes"], task["cpu_s"])
    exec(compile(task["program"], "<program>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
