"""The input and output of a verifier, and its base class.

Nothing here imports torch: these classes are used in worker processes, which must start quickly.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """The part of a prompt that a verifier or a reward function sees.

    Example: ``Task("train:7", answer="12", data_source="chain_sum", extra={}, text="5 + 7 =")``.
    """

    uid: str
    answer: str  # the expected one
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""  # the prompt as the model reads it, chat template included


# Of an extracted answer; it travels with every score.
_LONGEST_EXTRACTED = 128


@dataclass(frozen=True)
class Verdict:
    """Accuracy of one answer, in [0, 1].

    Example: ``Verdict(1.0, extracted="7")``; ``Verdict(0.0, "ValueError: not a number")``.

    Attributes:
        problem: why the verifier could not judge (``reward.on_problem`` says what follows);
            accuracy is then 0. An answer that it cannot read is wrong, and no problem.
        extracted: the answer in a form in which equal answers are equal texts: the vote of a
            response in maj@n. "": the response has no answer and does not vote. None: verifiers
            that name no answer (programs), and no maj@n. Of a text longer than
            ``_LONGEST_EXTRACTED`` characters the end is replaced by a digest of the whole.
    """

    accuracy: float
    problem: str | None = None
    extracted: str | None = None

    def __post_init__(self) -> None:
        text = self.extracted
        if text is not None and len(text) > _LONGEST_EXTRACTED:
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            kept = _LONGEST_EXTRACTED - len(digest) - len("...")
            object.__setattr__(self, "extracted", f"{text[:kept]}...{digest}")


@dataclass(frozen=True)
class Options:
    """The keys of ``reward`` that a verifier may read.

    Example: ``Options(partial_credit=False, timeout_s=5.0, memory_bytes=4 << 30,
    sandbox="bubblewrap")``.
    """

    partial_credit: bool
    timeout_s: float
    memory_bytes: int
    sandbox: str


class Verifier:
    """One way to judge answers. Subclasses must define ``verify`` alone.

    ``verify`` runs in a worker process that is killed when it overruns ``reward.timeout_s``, so it
    may do anything with a text but must not keep state from one answer to the next.
    """

    # Runs in the trainer: it needs no import, and takes at most linear time in the answer.
    in_process = False
    # Reads ``Task.text``, for which the prompt must be decoded.
    reads_prompt = True
    # Starts processes of its own, which the kernel denies to other verifiers.
    starts_processes = False

    def __init__(self, options: Options) -> None:
        self.options = options

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """One sentence for everything that makes these tasks impossible to verify.

        Runs once, in the trainer, before the engines are built.
        """
        return []

    def prepare(self) -> None:
        """Runs once in the worker before the first answer, for imports that take long."""

    def verify(self, task: Task, answer: str) -> Verdict:
        """The verdict on ``answer``, which was cut out of the response. Deterministic."""
        raise NotImplementedError
