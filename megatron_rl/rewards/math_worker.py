"""The process that compares mathematical answers: ``[expected, answer]`` lines of JSON in, ``{accuracy, problem}`` lines out."""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from types import FrameType

from math_verify import parse, verify

MEMORY_BYTES = 4 << 30


class OutOfTime(BaseException):
    """Not an Exception: the library catches those."""


def compare(expected: str, answer: str) -> dict[str, float | str | None]:
    """Accuracy 1.0 when the two are equal as mathematics, with the reason when they could not be compared."""
    marked = expected.count("$") > 1 or "\\boxed" in expected  # a single $ is a currency
    gold = parse(expected if marked else f"${expected.replace('$', '')}$", parsing_timeout=None)
    if not gold:
        return {"accuracy": 0.0, "problem": f"the expected answer {expected!r} cannot be parsed"}
    found = parse(answer, parsing_timeout=None)
    return {"accuracy": float(verify(gold, found, timeout_seconds=None)), "problem": None}


def stop(signum: int, frame: FrameType | None) -> None:
    raise OutOfTime


def main(timeout_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, stop)
    logging.disable(logging.WARNING)  # the library warns that its own time-outs are off
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        expected, answer = json.loads(line)
        try:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            reply = compare(expected, answer)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except OutOfTime:
            reply = {"accuracy": 0.0, "problem": f"no verdict of math-verify within reward.timeout_s = {timeout_s:g} s"}
        except MemoryError:
            signal.setitimer(signal.ITIMER_REAL, 0)
            reply = {"accuracy": 0.0, "problem": f"math-verify wanted more than {MEMORY_BYTES >> 30} GiB"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
