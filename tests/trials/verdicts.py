"""The rules that make a verdict of what a command did: good, poor or bad.

bad: a promised command fails, an error without a message, lost data, no end within the limit, a
wrong result without a word, processes left behind. poor: late, a traceback, more than 15 lines, a
message that lacks the key or what to do, silence about something harmless. good: anything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

MAX_LINES = 15
ERROR = re.compile(
    r"^(?:\S+: )?(?:\[rank \d+\] )?error: |^plan_sync: (?:--?\w|\w+=|\w+ layout: )", re.MULTILINE
)
# What a message must say besides the key or the file: something to do. Deliberately generous in its
# words, for the wording belongs to the package; a bare "invalid value" does not pass.
REMEDY = re.compile(
    r"\b(give|set|choose|correct|lower|raise|write|remove|drop|install|save|copy|use|did you mean|"
    r"quote|start|stop|delete|free|check|add|name|pull|fetch|convert|merge|download|upgrade|update|"
    r"must|should|one of|there are|see|make|divisor|needs?|pass|wait|try|repair|load|leave|keep|"
    r"increase|end|kill|put|login|log in|mount|spell|pick|split|restore|reinstall|allows?|"
    r"type|mend|fix|here it is|shows|is it up)\b",
    re.IGNORECASE,
)
BUILT = {
    "policy": re.compile(r"^policy: layers|NUMA binding|built: policy|built: engine", re.MULTILINE),
    "engine": re.compile(r"NUMA binding|built: engine|^step \d+/", re.MULTILINE),
}


@dataclass(frozen=True)
class Outcome:
    """What a case did. ``code`` None: it was ended at its limit. ``text``: both streams, in order.
    ``wrong`` and ``unclear``: what the case's own look at its files found (bad, poor). ``left``:
    processes and shared memory that outlived it."""

    code: int | None
    text: str
    seconds: float
    wrong: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def noting(self, wrong: Sequence[str] = (), unclear: Sequence[str] = ()) -> Outcome:
        """The same with more findings."""
        return replace(self, wrong=(*self.wrong, *wrong), unclear=(*self.unclear, *unclear))


@dataclass(frozen=True)
class Refused:
    """The command ends with one clear message, before expensive work.

    Args:
        says: regular expressions (any case) that the message must hold: key, file, value.
        harm: what going on would be: True a wrong result or a broken promise (bad), False harmless
            (poor).
        before: the message comes before this is built: ``policy``, ``engine``, or "" for any time.
        within_s: and within so many seconds.
        codes: exit codes that may be.
        fault: a fault of machine or program, whose traceback may stand (within the lines).
        max_lines: what the message may have.
    """

    says: tuple[str, ...]
    harm: bool = True
    before: str = "policy"
    within_s: float = 30.0
    codes: tuple[int, ...] = (1,)
    fault: bool = False
    max_lines: int = MAX_LINES


@dataclass(frozen=True)
class Ends:
    """The command runs to its end with exit code 0.

    Args:
        says: what must stand on the screen besides; ``harm`` True: its lack is bad, else poor.
    """

    says: tuple[str, ...] = ()
    harm: bool = False
    codes: tuple[int, ...] = (0,)
    within_s: float = float("inf")


@dataclass(frozen=True)
class Dies:
    """Something outside ends the command (a signal, a full disk): it says so and leaves nothing.

    Args:
        says: what must stand on the screen, torchrun's closing box included.
        consequences: what must not: the errors of survivors are not causes.
        fault: a traceback of ours may stand.
    """

    says: tuple[str, ...] = ()
    consequences: tuple[str, ...] = (
        "GLHF",
        "Connection reset by peer",
        "Connection closed by peer",
    )
    codes: tuple[int, ...] = (1,)
    within_s: float = 120.0
    max_lines: int = MAX_LINES
    fault: bool = False


Expected = Refused | Ends | Dies
WEIGHT = {"good": 0, "poor": 1, "bad": 2}


@dataclass(frozen=True)
class Verdict:
    """``name`` is good, poor or bad; ``reasons`` say why, worst first (empty when good)."""

    name: str
    reasons: tuple[str, ...] = field(default=())


def judge(expected: Sequence[Expected], outcome: Outcome) -> Verdict:
    """The best verdict over the outcomes that are allowed.

    Example: a rate of 1e30 may be refused, or trained on with a warning:
    ``judge([Refused(("optim.learning_rate",)), Ends(says=("not finite",))], outcome)``.
    """
    everywhere = [("bad", reason) for reason in outcome.wrong]
    everywhere += [("bad", f"left behind: {what}") for what in outcome.left]
    everywhere += [("poor", reason) for reason in outcome.unclear]
    if outcome.code is None:
        everywhere.append(("bad", f"no end within the limit ({outcome.seconds:.0f} s)"))
        return _verdict(everywhere)
    found = [_verdict([*everywhere, *_against(one, outcome)]) for one in expected]
    return min(found, key=lambda verdict: WEIGHT[verdict.name])


def _verdict(found: Sequence[tuple[str, str]]) -> Verdict:
    ordered = sorted(found, key=lambda item: -WEIGHT[item[0]])
    if not ordered:
        return Verdict("good")
    return Verdict(ordered[0][0], tuple(reason for _, reason in ordered))


def _against(expected: Expected, outcome: Outcome) -> list[tuple[str, str]]:
    if isinstance(expected, Ends):
        return _not_ended(expected, outcome)
    if isinstance(expected, Dies):
        return _not_died(expected, outcome)
    return _not_refused(expected, outcome)


def _not_ended(expected: Ends, outcome: Outcome) -> list[tuple[str, str]]:
    if outcome.code not in expected.codes:
        return [
            (
                "bad",
                f"should work, ended with exit code {outcome.code}: {first_words(outcome.text)}",
            )
        ]
    kind = "bad" if expected.harm else "poor"
    missing = [pattern for pattern in expected.says if not _search(pattern, outcome.text)]
    found = [(kind, f"not said: {pattern}") for pattern in missing]
    if outcome.seconds > expected.within_s:
        found.append(("poor", f"slow: {outcome.seconds:.0f} s of {expected.within_s:.0f} s"))
    if "Traceback (most recent" in without_torchrun(outcome.text):
        found.append(("poor", "a traceback although it ended well"))
    return found


def _not_died(expected: Dies, outcome: Outcome) -> list[tuple[str, str]]:
    if outcome.code == 0 and 0 not in expected.codes:
        return [("bad", "exit code 0 although it was ended from outside")]
    found = [] if outcome.code in expected.codes else [("poor", f"exit code {outcome.code}")]
    missing = [pattern for pattern in expected.says if not _search(pattern, outcome.text)]
    found += [
        ("bad" if len(missing) == len(expected.says) else "poor", f"not said: {pattern}")
        for pattern in missing
    ]
    said = message(outcome.text)
    found += [
        ("poor", f"a consequence is shown: {word}")
        for word in expected.consequences
        if word in said
    ]
    if "Traceback (most recent" in said and not expected.fault:
        found.append(("poor", "traceback"))
    lines = [line for line in said.splitlines() if line.strip()]
    if len(lines) > expected.max_lines:
        found.append(("poor", f"{len(lines)} lines"))
    if outcome.seconds > expected.within_s:
        found.append(("poor", f"slow: {outcome.seconds:.0f} s"))
    return found


def _not_refused(expected: Refused, outcome: Outcome) -> list[tuple[str, str]]:
    if outcome.code == 0 and 0 not in expected.codes:
        kind = "bad" if expected.harm else "poor"
        return [(kind, "went on without a word, exit code 0")]
    said = message(outcome.text)
    if not ERROR.search(without_torchrun(outcome.text)):
        return [("bad", f"no message (no line 'error: ...'), exit code {outcome.code}")]
    found = []
    if outcome.code not in expected.codes:
        found.append(("poor", f"exit code {outcome.code}"))
    if "Traceback (most recent" in without_torchrun(outcome.text) and not expected.fault:
        found.append(("poor", "traceback"))
    lines = [line for line in said.splitlines() if line.strip()]
    if len(lines) > expected.max_lines:
        found.append(("poor", f"{len(lines)} lines"))
    if len(ERROR.findall(without_torchrun(outcome.text))) > 1:
        found.append(("poor", "more than one message"))
    found += [
        ("poor", f"unclear: no /{pattern}/")
        for pattern in expected.says
        if not _search(pattern, said)
    ]
    if not REMEDY.search(said):
        found.append(("poor", "unclear: nothing to do is named"))
    if expected.before and BUILT[expected.before].search(outcome.text):
        found.append(("poor", f"late: after the build ({expected.before})"))
    elif outcome.seconds > expected.within_s:
        found.append(("poor", f"late: {outcome.seconds:.0f} s"))
    return found


def _search(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE | re.DOTALL) is not None


LAUNCHER_LOG = re.compile(r"^(\[?rank\d+\]?:)?\[?[WEIF]\d{4} \d\d:\d\d:\d\d")
RULER = re.compile(r"^={20,}$")


def without_torchrun(text: str) -> str:
    """``text`` without what torchrun itself writes: its log lines, its traceback, its closing box.
    Warnings of torch's C++ parts in the same log format go too."""
    kept: list[str] = []
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.startswith("Traceback (most recent"):
            end = _traceback_end(lines, index)
            block = "\n".join(lines[index:end])
            if "torch/distributed/elastic" not in block and "torch/distributed/run.py" not in block:
                kept += lines[index:end]
            index = end
        elif RULER.match(line):
            index = _box_end(lines, index)
        elif LAUNCHER_LOG.match(line):
            index += 1
        else:
            kept.append(line)
            index += 1
    return "\n".join(kept)


def _traceback_end(lines: Sequence[str], start: int) -> int:
    """The line behind a traceback: indented frames, then the line that names the exception."""
    index = start + 1
    while index < len(lines) and (lines[index].startswith(" ") or not lines[index]):
        index += 1
    return min(index + 1, len(lines))


def _box_end(lines: Sequence[str], start: int) -> int:
    for index in range(start + 1, len(lines)):
        if RULER.match(lines[index]):
            return index + 1
    return len(lines)


def message(text: str) -> str:
    """The lines of the error: from the first ``error:`` or traceback to the end, without
    torchrun's own part. Notices before it (plan of the memory, progress) do not count."""
    lines = without_torchrun(text).splitlines()
    for index, line in enumerate(lines):
        if ERROR.match(line) or line.startswith("Traceback (most recent") or " ERROR " in line:
            return "\n".join(lines[index:])
    return ""


def first_words(text: str, characters: int = 160) -> str:
    """The first line of the message, or the last line where there is none."""
    lines = message(text).splitlines() or without_torchrun(text).splitlines()[-1:]
    errors = [line for line in lines if ERROR.match(line)]
    chosen = (errors or lines or [""])[0].strip()
    following = lines[lines.index(errors[0]) + 1 :] if errors else []
    if following and chosen.endswith(":"):
        chosen += " " + following[0].strip()
    return chosen[:characters]
