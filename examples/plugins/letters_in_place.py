"""A reward function: the share of letters that stand where they should.

The page: reward_function.md.
"""

from megatron_rl.rewards import Task


def judged(answer: str, response: str) -> dict[str, float]:
    """Example: ``klim`` and ``klam`` agree in three of four places: a reward of 0.75, accuracy
    0."""
    in_place = sum(wanted == found for wanted, found in zip(answer, response, strict=False))
    longest = max(len(answer), len(response), 1)
    return {"reward": in_place / longest, "accuracy": float(response == answer)}


def score(tasks: list[Task], responses: list[str]) -> list[dict[str, float]]:
    """Reward in [0, 1] by letter; a response is correct when it is the whole answer."""
    return [
        judged(task.answer, response.strip())
        for task, response in zip(tasks, responses, strict=True)
    ]
