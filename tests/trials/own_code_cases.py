"""Code of the user's: a method of a folder, plug-ins, a reward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.trials.makers import looked_at
from tests.trials.material import toy, toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected, Outcome, Refused

METHOD = """
name: mine
estimator: {name: zscore}
policy_loss: {name: ppo_clip}
aggregate: {name: token_mean}
kl: {coef: 0.0}
"""
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


def raises(tasks, responses):
    raise RuntimeError('no judge')
"""
BY_FUNCTION = ("reward.verifier=auto", "reward.answer_pattern=null")


def case(
    name: str,
    title: str,
    file: tuple[str, str],
    words: Callable[[Path], Sequence[str]],
    *expected: Expected,
    torchrun: bool = False,
) -> Case:
    """``file``: name and content of a file of the user's, which ``words`` of the run name."""

    def play(place: Place) -> Outcome:
        path = place.folder / file[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file[1])
        run_dir = place.folder / "run"
        if torchrun:
            return looked_at(place.torchrun(toy(place.material, run_dir, *words(path))), run_dir)
        return looked_at(place.train(toy_alone(place.material, run_dir, *words(path))), run_dir)

    return Case(name, "journeys", title, play, expected, "torchrun 2" if torchrun else "warm", 150)


def cases() -> list[Case]:
    reward = ("mine.py", REWARD)
    return [
        case(
            "jrn_config_dir",
            "a method from --config-dir",
            ("conf/method/mine.yaml", METHOD),
            lambda file: ["--config-dir", str(file.parents[1]), "method=mine"],
            Ends(),
        ),
        case(
            "jrn_estimator",
            "an estimator from a plug-in",
            ("mine.py", PLUGIN),
            lambda file: ["--plugin", str(file), "method.estimator={name: my_rewards}"],
            Ends(),
            torchrun=True,
        ),
        case(
            "jrn_reward",
            "a reward function of the user's",
            reward,
            lambda file: [*BY_FUNCTION, f"reward.function={file}:letters"],
            Ends(),
            torchrun=True,
        ),
        case(
            "jrn_reward_raises",
            "a reward function that always raises",
            reward,
            lambda file: [*BY_FUNCTION, f"reward.function={file}:raises", "trainer.num_steps=5"],
            Refused((r"reward\.function", "no judge"), before="", within_s=90),
            Ends(("no judge",)),
        ),
    ]
