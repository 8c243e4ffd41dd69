"""Why a run of a sweep failed, as short as it can be said."""

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
    lines: tuple[str, ...]
    log: Path | None

    @property
    def code_text(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"killed by {signal.Signals(-self.code).name}"

    def __str__(self) -> str:
        """One line; of a list of problems the first."""
        why = "".join(f": {line}" for line in self.lines[:1])
        if why.endswith(":") and len(self.lines) > 1:
            why += f" {self.lines[1].strip().removeprefix('- ')}"
        place = f" ({self.log})" if self.log else ""
        return f"{self.code_text}{why}{place}"


def failure_of(code: int, error_file: Path, log: Path | None) -> Failure:
    """A run that ended with ``code``.

    Its reason is the message of the rank that failed first, which torchrun leaves in
    ``error_file``; where there is none (torchrun itself was killed), the end of the output.
    """
    return Failure(code, tuple(_message(error_file) or _end_of(log)), log)


def _message(error_file: Path) -> list[str]:
    if not error_file.is_file():
        return []
    try:
        content = json.loads(error_file.read_text(encoding="utf-8"))["message"]
    except (ValueError, KeyError, TypeError):
        return []
    text = content["message"] if isinstance(content, dict) and "message" in content else content
    return [line for line in str(text).splitlines() if line.strip()]


def _end_of(log: Path | None) -> list[str]:
    if log is None or not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        text = file.read().decode("utf-8", "replace")
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
