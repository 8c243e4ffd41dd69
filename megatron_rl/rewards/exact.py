"""The answer is the expected text, letter for letter, but for white space around it."""

from __future__ import annotations

from megatron_rl.rewards.base import Task, Verdict, Verifier
from megatron_rl.rewards.registry import register_verifier


def _is_exact(answer: str, expected: str) -> bool:
    """Whether the two texts are equal after removing white space at both ends."""
    return answer.strip() == expected.strip()


@register_verifier("exact")
class ExactVerifier(Verifier):
    in_process = True
    reads_prompt = False

    def verify(self, task: Task, answer: str) -> Verdict:
        return Verdict(float(_is_exact(answer, task.answer)), extracted=answer.strip())
