"""The answer is the expected text, letter for letter, but for white space around it."""

from megatron_rl.rewards.base import Task, Verdict, Verifier
from megatron_rl.rewards.registry import register_verifier


@register_verifier("exact")
class ExactVerifier(Verifier):
    in_process = True
    reads_prompt = False

    def verify(self, task: Task, answer: str) -> Verdict:
        text = answer.strip()
        return Verdict(float(text == task.answer.strip()), extracted=text)
