"""Mathematical equality of answers, judged by math-verify in processes of their own.

The library stops endless simplifications with a signal, which only the main thread of a process can use, and a huge power blocks even
that. So each comparison runs in a worker process that is killed when it overruns. A worker is a plain child with pipes rather
than a ``multiprocessing`` one: those import the parent's main module again, which is the trainer with both engines.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from megatron_rl.rewards.verdict import Verdict
from megatron_rl.types import Prompt

START_TIMEOUT_S = 120.0
GRACE_S = 1.0  # the worker's own timer is the first to act


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete ``\boxed{...}``, braces matched; None without one. ``\boxed{1} no, \boxed{\frac{1}{2}}`` gives
    ``\frac{1}{2}``: an answer that is corrected counts as corrected, and a list of guesses counts as its last."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        depth = 0
        for position in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : position]
        start = text.rfind(r"\boxed{", 0, start)
    return None


class MathVerifier:
    r"""Accuracy 1 when the answer equals the expected one as mathematics: ``\frac{1}{2}``, ``0.5`` and ``1/2`` are equal.

    Decisions: where the answer has ``\boxed``, only the last complete one is read; without, what math-verify finds last. ``50\%`` is not
    ``0.5``. What cannot be parsed is wrong. An expected answer that cannot be parsed, a time-out and an exhausted memory
    are wrong with a reason.
    """

    def __init__(self, *, timeout_s: float, num_workers: int) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("reward.verifier = math needs the package math-verify; pip install 'math-verify[antlr4-9-3]'")
        self._timeout_s, self._num_workers = timeout_s, num_workers
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def check(self, prompts: Sequence[Prompt]) -> list[str]:
        return []

    def verify(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Verdict]:
        if self._threads is None:  # nothing starts before the first answer
            self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="math_answers")
            for _ in range(self._num_workers):
                self._idle.put(_Worker(self._timeout_s))
        pairs = [(prompt.answer, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        return list(self._threads.map(self._one, pairs))

    def _one(self, pair: tuple[str, str]) -> Verdict:
        expected, answer = pair
        boxed = last_boxed(answer)
        worker = self._idle.get()
        try:
            return worker.compare(expected, answer if boxed is None else rf"\boxed{{{boxed}}}")
        finally:
            self._idle.put(worker)


class _Worker:
    """One child process, started on use and again after it was killed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def compare(self, expected: str, answer: str) -> Verdict:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([expected, answer]).encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(process, self._timeout_s + GRACE_S)
        except BrokenPipeError:
            line = b""
        if not line:
            self._kill(process)
            return Verdict(0.0, f"no verdict of math-verify within reward.timeout_s = {self._timeout_s:g} s, or its process died")
        reply = json.loads(line)
        return Verdict(reply["accuracy"], reply["problem"])

    def _start(self) -> subprocess.Popen[bytes]:
        package_parent = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rewards.math_worker", str(self._timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        weakref.finalize(self, process.kill)
        self._buffer = b""
        if not self._read_line(process, START_TIMEOUT_S):
            self._kill(process)
            raise RuntimeError(f"the math worker did not start (exit code {process.returncode}); its error is above")
        self._process = process
        return process

    def _read_line(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        """One line of the child, or nothing when it is silent for ``timeout_s`` or has ended."""
        assert process.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([process.stdout], [], [], timeout_s)[0]:
                return b""
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        self._process = None
