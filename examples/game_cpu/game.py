"""An environment of several turns: guess a number by hints. The page: README.md."""

from megatron_rl.rewards import Task
from megatron_rl.rollouts.environments.base import Done, Environment, register_environment

LARGEST = 8
MOST_GUESSES = 4


@register_environment("guess")
class Guess(Environment):
    """Who names the number, from 1 to 8, within four guesses has reward 1."""

    gives_reward = True

    def start(self, task: Task, seed: int) -> None:
        self.number = int(task.answer)
        self.num_guesses = 0

    def step(self, text: str, seed: int) -> str | Done:
        self.num_guesses += 1
        guess = text.strip()
        if guess == str(self.number):
            return Done(1.0, {"guesses": self.num_guesses})
        if self.num_guesses == MOST_GUESSES:
            return Done(0.0, {"guesses": self.num_guesses})
        if not guess.isdecimal():
            return "a number"
        return "higher" if int(guess) < self.number else "lower"
