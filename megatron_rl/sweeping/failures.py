"""A short reason for the failure of a run of a sweep."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

_LAST_LINES = 5
_LAST_BYTES = 1 << 14


@dataclass(frozen=True)
class Failure:
    """The exit code of a run, lines that say why, and the file with all of its output, if any."""

    code: int
    lines: list[str]
    log: Path | None

    @property
    def code_text(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        number = -self.code  # as subprocess has it: -9 is death by signal 9
        names = {known.value: known.name for known in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}"  # not all have a name here

    def __str__(self) -> str:
        """One line; of a list of problems the first.

        Example: the lines ``error: config:`` and ``  - seed = x: no number`` make
        ``exit code 1: error: config: seed = x: no number (run/console.log)``.
        """
        text = ": ".join([self.code_text, *self.lines[:1]])
        if text.endswith(":") and len(self.lines) > 1:
            text += f" {self.lines[1].strip().removeprefix('- ')}"
        return f"{text} ({self.log})" if self.log else text


def failure_of(code: int, error_file: Path, log: Path | None) -> Failure:
    """A run that ended with ``code``.

    Its reason is the message of the rank that failed first, which torchrun leaves in
    ``error_file``; where there is none (torchrun itself was killed), the end of the output.
    """
    text = ""
    try:
        content = json.loads(error_file.read_text(encoding="utf-8"))["message"]
        # torch writes {"message": {"message": text, ...}}, or a text in place of the inner object.
        text = content["message"] if isinstance(content, dict) else content
    except (OSError, ValueError, KeyError, TypeError):
        if log is not None and log.is_file():
            # The end alone: a log may hold days. What is cut within a character is replaced.
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _LAST_BYTES))
                end = file.read().decode("utf-8", "replace")
            text = "\n".join([line for line in end.splitlines() if line.strip()][-_LAST_LINES:])
    return Failure(code, [line for line in str(text).splitlines() if line.strip()], log)
