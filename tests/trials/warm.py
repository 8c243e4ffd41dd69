"""A process that has imported the engines once and forks for each case, so that a case costs the
seconds of its own work. The fork happens before any process group or engine exists; the child does
everything and ends by ``os._exit``.

Server (``python -m tests.trials.warm``): reads one JSON request a line, ``{"id", "argv" or "score",
"log", "cwd", "env"}``; writes ``{"id", "pid"}`` when the child runs and ``{"id", "code"}`` when it
ended.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Queue
from typing import Any


def serve(answers: int) -> None:
    """Runs until standard input closes. ``answers``: file descriptor for the JSON answers; what the
    libraries print at import goes to standard output and is nobody's answer."""
    import megatron_rl.planning.at_start
    import megatron_rl.policy.hardware
    import megatron_rl.train
    import megatron_rl.trainer.build  # noqa: F401

    running: dict[int, str] = {}
    _say(answers, {"id": "ready"})
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _child(request, answers)
                running[pid] = request["id"]
                _say(answers, {"id": request["id"], "pid": pid})
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            _say(answers, {"id": running.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _say(answers: int, message: Mapping[str, Any]) -> None:
    os.write(answers, (json.dumps(message) + "\n").encode())


def _child(request: Mapping[str, Any], answers: int) -> None:
    """Never returns."""
    os.setsid()
    os.close(answers)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    code = 99  # main leaves by itself; whoever comes back here did not
    try:
        if "score" in request:
            from tests.trials.direct import score

            code = score(request["score"])
        else:
            from megatron_rl.train import main

            _note_builds()
            code = main(request["argv"]) or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:  # noqa: BLE001 (shown as Python shows it, then the process ends)
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _note_builds() -> None:
    """A line of our own when policy and engine begin to be built: the texts of the package may
    change."""
    from megatron_rl.engine.engine import VllmEngine
    from megatron_rl.policy.megatron_policy import MegatronPolicy

    for name, part in (("policy", MegatronPolicy), ("engine", VllmEngine)):
        original = part.__init__

        def noting(
            self: Any, *args: Any, _name: str = name, _original: Any = original, **knobs: Any
        ) -> None:
            print(f"built: {_name}", flush=True)
            _original(self, *args, **knobs)

        part.__init__ = noting


class WarmServer:
    """The client side: ``run`` may be called from several threads."""

    def __init__(self, env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self._answers, child_side = os.pipe()
        self._errors = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trials.warm", str(child_side)],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            pass_fds=(child_side,),
        )
        os.close(child_side)
        self._lock = threading.Lock()
        self._waiting: dict[str, Queue[dict[str, Any]]] = {"ready": Queue()}
        threading.Thread(target=self._read, daemon=True).start()
        self._answer("ready", 300)

    def begin(self, request: Mapping[str, Any]) -> int:
        """Sends the request; returns the process id of its child, which leads a session."""
        name = request["id"]
        with self._lock:
            self._waiting[name] = Queue()
            assert self._process.stdin is not None
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        return int(self._answer(name, 60)["pid"])

    def wait(self, name: str, limit_s: float) -> int | None:
        """The exit code of the child (negative: by a signal); None when it runs on at the limit."""
        deadline = time.monotonic() + limit_s
        try:
            return int(self._answer(name, max(0.0, deadline - time.monotonic()))["code"])
        except TimeoutError:
            return None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._errors.close()

    def _answer(self, name: str, limit_s: float) -> dict[str, Any]:
        from queue import Empty

        try:
            answer = self._waiting[name].get(timeout=limit_s)
        except Empty:
            raise TimeoutError(f"no answer on {name} within {limit_s} s") from None
        assert answer is not None
        if "died" in answer:
            raise RuntimeError(f"the warm server ended: see {self._errors.name}")
        return answer

    def _read(self) -> None:
        with os.fdopen(self._answers) as lines:
            for line in lines:
                answer = json.loads(line)
                self._waiting[answer["id"]].put(answer)
        for queue in self._waiting.values():
            queue.put({"died": True})


def argv_of(overrides: Sequence[object]) -> list[str]:
    return [str(override) for override in overrides]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
