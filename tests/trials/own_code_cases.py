"""Code of the user's: a method of a folder, plug-ins, a reward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.trials.makers import looked_at
from tests.trials.material import toy, toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected, Outcome, Refused

PLUGIN = '''
from torch import Tensor

from megatron_rl.loss import Evidence, register_estimator


@register_estimator("my_rewards")
def my_rewards(evidence: Evidence) -> Tensor:
    """The reward itself."""
    return evidence.rewards
'''
REWARD = """
def letters(tasks, responses):
    return [float(task.answer in response) for task, response in zip(tasks, responses)]
"""


def case(
    name: str, title: str, play: Callable[[Place], Outcome], *expected: Expected, how: str = "warm"
) -> Case:
    return Case(name, "journeys", title, play, tuple(expected), how, 150)


def with_file(
    name: str, content: str, words: Callable[[Path], Sequence[str]], *, torch: bool = False
) -> Callable[[Place], Outcome]:
    """A file of the user's and a run that names it."""

    def play(place: Place) -> Outcome:
        file = place.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        run_dir = place.folder / "run"
        if torch:
            return looked_at(place.torchrun(toy(place.material, run_dir, *words(file))), run_dir)
        return looked_at(place.warm(toy_alone(place.material, run_dir, *words(file))), run_dir)

    return play


METHOD = (
    "name: mine\nestimator: {name: zscore}\npolicy_loss: {name: ppo_clip}\naggregate: {name:"
    " token_mean}\nkl: {coef: 0.0}\n"
)


def plugins() -> list[Case]:
    """Methods and estimators of the user's."""
    mine = ["method.estimator={name: my_rewards}"]
    return [
        case(
            "jrn_config_dir",
            "a method from --config-dir",
            with_file(
                "conf/method/mine.yaml",
                METHOD,
                lambda file: ["--config-dir", str(file.parents[1]), "method=mine"],
            ),
            Ends(),
        ),
        case(
            "jrn_estimator",
            "an estimator from a plug-in",
            with_file("mine.py", PLUGIN, lambda file: ["--plugin", str(file), *mine], torch=True),
            Ends(),
            how="torchrun 2",
        ),
        case(
            "jrn_estimator_no_plugin",
            "the same without --plugin",
            with_file("mine.py", PLUGIN, lambda file: mine),
            Refused(("my_rewards", "plugin|zscore")),
        ),
        case(
            "jrn_plugin_broken",
            "a plug-in that raises at import",
            with_file("mine.py", "1 / 0\n", lambda file: ["--plugin", str(file)]),
            Refused(("mine.py", "ZeroDivisionError|division")),
        ),
    ]


def rewards() -> list[Case]:
    """Reward functions of the user's."""
    return [
        case(
            "jrn_reward",
            "a reward function of the user's",
            with_file(
                "mine.py",
                REWARD,
                lambda file: [
                    "reward.verifier=auto",
                    "reward.answer_pattern=null",
                    f"reward.function={file}:letters",
                ],
                torch=True,
            ),
            Ends(),
            how="torchrun 2",
        ),
        case(
            "jrn_reward_raises",
            "a reward function that always raises",
            with_file(
                "mine.py",
                "def f(tasks, responses):\n    raise RuntimeError('no judge')\n",
                lambda file: [
                    "reward.verifier=auto",
                    "reward.answer_pattern=null",
                    f"reward.function={file}:f",
                    "trainer.num_steps=5",
                ],
            ),
            Refused((r"reward\.function", "no judge"), before="", within_s=90),
            Ends(("no judge",)),
        ),
    ]


def cases() -> list[Case]:
    return [*plugins(), *rewards()]
