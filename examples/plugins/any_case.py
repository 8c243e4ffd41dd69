"""A verifier: equal when case and white space are left out. The page: verifier.md."""

from megatron_rl.rewards import Task, register_verifier


def folded(text: str) -> str:
    """Example: ``" K l i M"`` gives ``"klim"``."""
    return "".join(text.split()).casefold()


@register_verifier("any_case", sources=r"words/.*")
def any_case(task: Task, answer: str) -> float:
    """1 where the two texts have the same letters in the same order, else 0."""
    return float(folded(answer) == folded(task.answer))
