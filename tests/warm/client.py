"""Runs a command line of Python on the server of this folder, and stands for it.

    client.py SOCKET [-u] (script.py | -m module) [argument ...]

Only the standard library: it starts in 20 ms.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys

PR_SET_PDEATHSIG = 1
PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(path: str, argv: list[str]) -> None:
    # The child is not below whoever started this program: a torchrun that is killed takes its
    # ranks along by way of their clients.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is somebody to pass them to
    request = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(path)
        socket.send_fds(server, [struct.pack("!I", len(message))], [0, 1, 2])
        server.sendall(message)
        pid = answer(server)
        for number in PASSED_ON:
            signal.signal(number, lambda received, _: os.kill(pid, received))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = answer(server)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def answer(server: socket.socket) -> int:
    data = server.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        sys.exit("tests/warm: the server ended")
    return int(struct.unpack("!i", data)[0])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
