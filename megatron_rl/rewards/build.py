"""The reward of a run: a weighted sum of accuracy and format.

Accuracy is given by a verifier or the user's function, format by a regular expression.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import megatron_rl.rewards.builtin  # noqa: F401 (registers the package's own verifiers)
from megatron_rl.config.schema import RewardConfig
from megatron_rl.config.sections import num_groups
from megatron_rl.errors import first_few
from megatron_rl.plugins import loaded
from megatron_rl.rewards.base import Options, Task, Verdict, Verifier
from megatron_rl.rewards.function import FunctionCaller
from megatron_rl.rewards.registry import verifier_class, verifier_of_source
from megatron_rl.rewards.workers.messages import WorkerSetup, reason
from megatron_rl.rewards.workers.pool import WorkerPool
from megatron_rl.types import Prompt, Score

logger = logging.getLogger(__name__)

# Of a response: accuracy, reward, parts, format, problem, extracted.
_Judged = dict[str, Any]

_CHOICES = (
    "set reward.verifier=number (the answer is a number), math (LaTeX, \\boxed), exact (the same"
    " text), or give rows a data_source that is known (gsm8k, math, aime, ...,"
    " reasoning_gym:<task>)"
)


def _listed(sources: Sequence[str]) -> str:
    """``data source 'a'``, ``data sources 'a', 'b', ...``."""
    noun = "data source" if len(sources) == 1 else "data sources"
    shown = first_few([repr(source) for source in sources], 5, "...")
    return f"{noun} {', '.join(shown)}"


class WeightedReward:
    """The reward of a run: accuracy_weight * accuracy + format_weight * format.

    ``accuracy`` is the verifier's; ``format`` is 1 when the whole response matches
    ``format_pattern``. A response is scored by its text alone, truncated or not: penalties for
    length belong to the method. With ``reward.function`` its reward replaces accuracy in the sum.

    Only verifiers that are marked ``in_process`` parse responses in this process; everything else
    happens in the workers of ``rewards.workers``, within their limits.

    Attributes:
        problems: counts of the reasons why responses could not be scored.
    """

    def __init__(
        self, config: RewardConfig, prompt_text: Callable[[Prompt], str] | None = None
    ) -> None:
        self.problems: Counter[str] = Counter()
        self._config = config
        self._prompt_text = prompt_text
        self._options = Options(
            partial_credit=config.partial_credit,
            timeout_s=config.timeout_s,
            memory_bytes=int(config.memory_gib * 2**30),
            sandbox=config.sandbox,
        )
        self._verifiers: dict[str, Verifier] = {}
        self._pool: WorkerPool | None = None
        self._function: FunctionCaller | None = None
        if config.function is not None or config.server is not None:
            limit_s = config.function_timeout_s
            chosen = {"function": config.function, "server": config.server}
            setup = replace(self._setup(()), server_limit_s=limit_s, **chosen)
            self._function = FunctionCaller(setup, timeout_s=limit_s, num_tries=config.num_tries)
            self._function.pool.start()

    def _pools(self) -> list[WorkerPool]:
        of_function = None if self._function is None else self._function.pool
        return [pool for pool in (self._pool, of_function) if pool is not None]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Checks the prompts of a run before any work, and starts the workers they need.

        Waits for the import of the user's function; the workers start in the background.

        Raises:
            ValueError: these prompts cannot be verified: no verifier is known for a data source, a
                task is refused, an answer is bad; or ``reward.function`` cannot be imported.
        """
        if self._function is not None:
            self._function.pool.wait_until_ready()
            self._start_pool(())
            return
        names = {source: self._name(source) for source in {each.data_source for each in prompts}}
        problems = []
        unknown = sorted(source for source, name in names.items() if name is None)
        if unknown:
            problems.append(f"no verifier is known for {_listed(unknown)}; {_CHOICES}")
        for name in sorted(filter(None, set(names.values()))):
            chosen = [prompt for prompt in prompts if names[prompt.data_source] == name]
            problems += self._verifier(name).check([as_task(prompt) for prompt in chosen])
        if problems:
            shown = first_few(problems, 10, "... {} more")
            raise ValueError("\n  - ".join([f"reward.verifier = {self._config.verifier}:", *shown]))
        self._start_pool(self._verifiers)

    def close(self) -> None:
        """Ends the workers; they also end with this process."""
        for pool in self._pools():
            pool.close()

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        """One score a response; ``prompts[i]`` is the prompt of ``responses[i]``.

        ``Score.parts``: accuracy, format (where there is a pattern), verifier_problem (1 where a
        response could not be judged, with ``on_problem=zero``), verifier_tries (with ``num_tries``
        above 1) and those of the user's function.

        Raises:
            ValueError: the user's function failed in several calls in a row; or a response could
                not be judged, with ``on_problem=stop``.
            RuntimeError: the workers cannot be started.
        """
        assert len(prompts) == len(responses) == len(truncated)
        # One task a prompt, not one a response: pickle then writes its fields once a request.
        distinct = {id(prompt): self._task(prompt) for prompt in prompts}
        tasks = [distinct[id(prompt)] for prompt in prompts]
        judged: list[_Judged] = [{} for _ in tasks]
        left: Sequence[int] = range(len(tasks))
        for number in range(1, self._config.num_tries + 1):
            if number > 2:  # the second is at once: a worker that was lost has been replaced
                time.sleep(2 ** (number - 3))
            by = self._by_verifiers if self._function is None else self._by_function
            found = by([tasks[row] for row in left], [responses[row] for row in left])
            for row, values in zip(left, found, strict=True):
                judged[row] = values
                if self._config.num_tries > 1:
                    tries = {"verifier_tries": float(number)}
                    values["parts"] = {**values.get("parts", {}), **tries}
            left = [row for row in left if judged[row]["problem"] is not None]
            if not left:
                break
        return [self._score(task, values) for task, values in zip(tasks, judged, strict=True)]

    def _by_verifiers(self, tasks: Sequence[Task], responses: Sequence[str]) -> list[_Judged]:
        names = [self._name(task.data_source) for task in tasks]
        assert None not in names, "prompts were not checked"
        judged: list[_Judged] = [{} for _ in tasks]
        remote = []  # rows for the workers
        for row, (name, task) in enumerate(zip(names, tasks, strict=True)):
            if not self._is_local(str(name)):
                remote.append(row)
                continue
            try:
                verdict = self._verifier(str(name)).verify(task, responses[row])
            except Exception as error:  # noqa: BLE001 - as in a worker: the reason is kept
                verdict = Verdict(0.0, reason(error))
            judged[row] = asdict(verdict)
        if remote:
            pool = self._start_pool({str(names[row]) for row in remote})
            assert pool is not None
            replies = pool.judge([(names[row], tasks[row], responses[row]) for row in remote])
            for row, reply in zip(remote, replies, strict=True):
                judged[row] = reply
        return judged

    def _by_function(self, tasks: Sequence[Task], responses: Sequence[str]) -> list[_Judged]:
        assert self._function is not None
        # A response with a problem has no other key.
        wrong: _Judged = {"reward": 0.0, "accuracy": 0.0, "parts": {}, "problem": None}
        judged = [wrong | scored for scored in self._function(tasks, responses)]
        if self._config.format_pattern is not None:
            pool = self._start_pool(())
            assert pool is not None
            pairs = zip(tasks, responses, strict=True)
            replies = pool.judge([(None, task, response) for task, response in pairs])
            for values, reply in zip(judged, replies, strict=True):
                values["format"] = reply["format"]
                values["problem"] = values["problem"] or reply["problem"]
        return judged

    def _score(self, task: Task, judged: _Judged) -> Score:
        problem = judged["problem"]
        accuracy = judged["accuracy"]
        if not 0 <= accuracy <= 1:  # of a plug-in, which may also give NaN
            problem = problem or f"accuracy {accuracy} is not within [0, 1]"
            accuracy = 0.0
        parts = {"accuracy": accuracy, **judged.get("parts", {})}
        if self._config.on_problem == "zero":
            parts["verifier_problem"] = float(problem is not None)
        reward = self._config.accuracy_weight * judged.get("reward", accuracy)
        if self._function is not None:
            parts["function"] = judged["reward"]
        if self._config.format_pattern is not None:
            parts["format"] = judged["format"]
            reward += self._config.format_weight * parts["format"]
        if problem is not None:
            self._note(task, problem)
        excluded = problem if self._config.on_problem == "exclude" else None
        return Score(reward, accuracy == 1, parts, judged.get("extracted"), excluded)

    def _note(self, task: Task, problem: str) -> None:
        """Counts a problem by data source and class; the first of each is logged.

        Raises:
            ValueError: ``reward.on_problem`` is stop.
        """
        if self._config.on_problem == "stop":
            raise ValueError(
                f"reward.on_problem = stop: a response to {task.uid} could not be judged:"
                f" {problem}; correct the verifier or its limits, or set reward.on_problem=exclude"
            )
        reason_class = f"{task.data_source}: {problem.partition(':')[0]}"
        if reason_class not in self.problems:
            excludes = self._config.on_problem == "exclude"
            logger.warning(
                "a response to %s could not be judged and %s: %s (logged once; see %s)",
                task.uid,
                "is left out" if excludes else "counts as wrong",
                problem,
                "reward/excluded_share" if excludes else "reward/part/verifier_problem",
            )
        self.problems[reason_class] += 1

    def _task(self, prompt: Prompt) -> Task:
        name = self._name(prompt.data_source)
        if self._function is None and (name is None or not self._verifier(name).reads_prompt):
            return as_task(prompt)  # to decode a prompt takes longer than most verdicts
        return as_task(prompt, self._prompt_text)

    def _name(self, data_source: str) -> str | None:
        """The verifier of its prompts; None where ``auto`` knows none."""
        if self._config.verifier != "auto":
            return self._config.verifier
        return verifier_of_source(data_source)

    def _verifier(self, name: str) -> Verifier:
        if name not in self._verifiers:
            self._verifiers[name] = verifier_class(name)(self._options)
        return self._verifiers[name]

    def _is_local(self, name: str) -> bool:
        """Whether a verifier runs in this process; the user's patterns never do."""
        patterns = {self._config.answer_pattern, self._config.format_pattern}
        return self._verifier(name).in_process and patterns == {None}

    def _start_pool(self, names: Iterable[str]) -> WorkerPool | None:
        """The workers for these verifiers and all that were needed before.

        None where everything runs in this process.
        """
        needed = {name for name in names if not self._is_local(name)}
        format_only = self._function is not None and self._config.format_pattern is not None
        setup = None if self._pool is None else self._pool.setup
        started = set(setup.verifiers) if isinstance(setup, WorkerSetup) else set()
        # Workers have what they were forked with: for one verifier more all are replaced.
        if self._pool is not None and not needed <= started:
            self._pool.close()
            self._pool = None
        if self._pool is None and (needed or format_only):
            setup = self._setup(tuple(sorted(needed | started)))
            self._pool = WorkerPool(
                setup,
                limit=("reward.timeout_s", self._config.timeout_s),
                num_workers=self._config.num_workers,
                step_timeout_s=self._config.step_timeout_s,
            )
            self._pool.start()
        return self._pool

    def _setup(self, verifiers: tuple[str, ...]) -> WorkerSetup:
        return WorkerSetup(
            plugins=loaded(),
            verifiers=verifiers,
            options=self._options,
            answer_pattern=self._config.answer_pattern,
            format_pattern=self._config.format_pattern,
        )


def as_task(prompt: Prompt, prompt_text: Callable[[Prompt], str] | None = None) -> Task:
    """What verifiers, functions and environments are shown of a prompt."""
    return Task(
        uid=prompt.uid,
        answer=prompt.answer,
        data_source=prompt.data_source,
        extra=prompt.extra,
        text="" if prompt_text is None else prompt_text(prompt),
    )


def build_reward(
    config: RewardConfig, prompt_text: Callable[[Prompt], str] | None = None
) -> WeightedReward:
    """The reward ``config`` describes.

    Args:
        prompt_text: the text of a prompt, shown to verifiers and functions as ``Task.text``; None
            leaves it empty.

    Raises:
        ValueError: an unknown verifier, a pattern that is not a regular expression or lacks its
            group, a format weight without a pattern, keys that exclude each other.
    """
    if config.format_pattern is not None:
        num_groups("reward.format_pattern", config.format_pattern)
    answer = config.answer_pattern
    if answer is not None and num_groups("reward.answer_pattern", answer) == 0:
        raise ValueError(
            f"reward.answer_pattern = {config.answer_pattern!r}: has no group; put brackets around"
            " the answer"
        )
    if config.format_weight != 0 and config.format_pattern is None:
        raise ValueError(
            f"reward.format_weight = {config.format_weight}: there is no reward.format_pattern; "
            "give one, or a weight of 0"
        )
    if config.verifier != "auto":
        verifier_class(config.verifier)
    _check_place_of_verifier(config)
    return WeightedReward(config, prompt_text)


def _check_place_of_verifier(config: RewardConfig) -> None:
    """A function or a server takes the place of a verifier, and is given whole responses."""
    if config.function is None and config.server is None:
        return
    key = f"reward.function = {config.function}"
    if config.server is not None:
        if config.function is not None:
            raise ValueError(f"{key}: there is reward.server as well; remove one of them")
        key = f"reward.server.url = {config.server.url}"
    if config.verifier != "auto":
        raise ValueError(
            f"{key}: takes the place of reward.verifier = {config.verifier}; remove one of them"
        )
    if config.answer_pattern is not None:
        raise ValueError(
            f"{key}: is given whole responses; remove reward.answer_pattern and cut them there"
        )
