"""An environment: who is wrong is told so, and may try again. The page: environment.md."""

from megatron_rl.rewards import Task
from megatron_rl.rollouts.environments.base import Done, Environment, register_environment

MOST_TRIES = 3


@register_environment("second_try")
class SecondTry(Environment):
    """A right answer is worth 1 at once, 1/2 at the second try and 1/3 at the third."""

    gives_reward = True

    def start(self, task: Task, seed: int) -> None:
        self.answer = task.answer
        self.tries = 0

    def step(self, text: str, seed: int) -> str | Done:
        self.tries += 1
        if text.strip() == self.answer:
            return Done(1 / self.tries, {"tries": self.tries})
        if self.tries == MOST_TRIES:
            return Done(0.0, {"tries": self.tries})
        return f"Wrong. {MOST_TRIES - self.tries} left."
