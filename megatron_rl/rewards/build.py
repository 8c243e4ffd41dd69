"""The reward of a run: accuracy by a verifier or a function of the user's own, format by a regular
expression, weighted."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import megatron_rl.rewards.builtin  # noqa: F401 (registers the package's own verifiers)
from megatron_rl.config.schema import RewardConfig
from megatron_rl.plugins import loaded
from megatron_rl.rewards.function import FunctionCaller
from megatron_rl.rewards.messages import Setup, reason
from megatron_rl.rewards.pool import WorkerPool
from megatron_rl.rewards.registry import verifier_class, verifier_of_source
from megatron_rl.rewards.verdict import Options, Task, Verifier
from megatron_rl.types import Prompt, Score

LOGGER = logging.getLogger(__name__)
Judged = dict[str, Any]  # what is known of a response: accuracy, reward, parts, format, problem

CHOICES = (
    "set reward.verifier=number (the answer is a number), math (LaTeX, \\boxed), exact (the same "
    "text), or give rows a data_source that is known (gsm8k, math, aime, ..., reasoning_gym:<task>)"
)


def _listed(sources: Sequence[str]) -> str:
    """``data source 'a'``, ``data sources 'a', 'b', ...``."""
    names = ", ".join(map(repr, sources[:5])) + (", ..." if len(sources) > 5 else "")
    return f"data source{'s' * (len(sources) > 1)} {names}"


class WeightedReward:
    """reward = accuracy_weight * accuracy + format_weight * format.

    ``accuracy`` is the verifier's; ``format`` is 1 when the whole response matches
    ``format_pattern``. A response is judged by its text alone, truncated or not: penalties for
    length belong to the method. With ``reward.function`` its reward takes the place of accuracy in
    the sum. ``problems`` counts why responses could not be judged.

    Nothing of a response is parsed in this process but by verifiers that are marked ``in_process``;
    everything else happens in the workers of ``rewards.pool``, within their limits.
    """

    def __init__(
        self, config: RewardConfig, prompt_text: Callable[[Prompt], str] | None = None
    ) -> None:
        self.problems: Counter[str] = Counter()
        self._config, self._prompt_text = config, prompt_text
        self._options = Options(
            partial_credit=config.partial_credit,
            timeout_s=config.timeout_s,
            memory_bytes=int(config.memory_gib * 2**30),
            sandbox=config.sandbox,
        )
        self._verifiers: dict[str, Verifier] = {}
        self._pool: WorkerPool | None = None
        self._function: FunctionCaller | None = None
        if config.function is not None:
            self._function = FunctionCaller(
                self._setup(function=config.function), timeout_s=config.function_timeout_s
            )
            self._function.start()

    @property
    def restarts(self) -> int:
        """Workers that were killed or died and were replaced, since the start."""
        return sum(part.restarts for part in (self._pool, self._function) if part is not None)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """To call before any work. Starts the workers these prompts need, and waits for the user's
        function alone.

        Raises:
            ValueError: these prompts cannot be verified: a data source no verifier is known for, a
                refused task, a bad answer; or the function of ``reward.function`` cannot be
                imported.
        """
        if self._function is not None:
            self._function.wait_until_ready()
            self._start_pool(())
            return
        names = {prompt.data_source: self._name(prompt) for prompt in prompts}
        unknown = sorted(source for source, name in names.items() if name is None)
        found = [f"no verifier is known for {_listed(unknown)}; {CHOICES}"] if unknown else []
        for name in sorted({name for name in names.values() if name is not None}):
            found += self._verifier(name).check(
                [as_task(prompt) for prompt in prompts if names[prompt.data_source] == name]
            )
        if found:
            more = f"\n  ... {len(found) - 10} more" if len(found) > 10 else ""
            raise ValueError(
                f"reward.verifier = {self._config.verifier}:\n  - "
                + "\n  - ".join(found[:10])
                + more
            )
        self._start_pool(self._verifiers)

    def close(self) -> None:
        """Ends the workers; they also end with this process."""
        for part in (self._pool, self._function):
            if part is not None:
                part.close()

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        """One score a response; ``prompts[i]`` is the prompt of ``responses[i]``. ``parts``:
        accuracy, format (where there is a pattern), verifier_problem (1 where it could not be
        judged) and those of the user's function.

        Raises:
            ValueError: the user's function failed in several calls in a row.
            RuntimeError: the workers cannot be started.
        """
        assert len(prompts) == len(responses) == len(truncated)
        if not responses:
            return []
        # One object a prompt: a request then holds its fields once.
        distinct = {id(prompt): self._task(prompt) for prompt in prompts}
        tasks = [distinct[id(prompt)] for prompt in prompts]
        if self._function is not None:
            judged = self._by_function(tasks, responses)
        else:
            judged = self._by_verifiers(prompts, tasks, responses)
        return [self._score(task, one) for task, one in zip(tasks, judged, strict=True)]

    def _by_verifiers(
        self, prompts: Sequence[Prompt], tasks: Sequence[Task], responses: Sequence[str]
    ) -> list[Judged]:
        names = [self._name(prompt) for prompt in prompts]
        assert None not in names, "prompts were not checked"
        judged: list[Judged] = [{} for _ in tasks]
        remote = []
        for row, (name, task) in enumerate(zip(names, tasks, strict=True)):
            if self._is_local(str(name)):
                judged[row] = self._judge_here(self._verifier(str(name)), task, responses[row])
            else:
                remote.append(row)
        if remote:
            pool = self._start_pool({str(names[row]) for row in remote})
            assert pool is not None
            replies = pool.judge([(names[row], tasks[row], responses[row]) for row in remote])
            for row, reply in zip(remote, replies, strict=True):
                judged[row] = reply
        return judged

    def _judge_here(self, verifier: Verifier, task: Task, response: str) -> Judged:
        try:
            verdict = verifier.verify(task, response)
        except Exception as error:  # noqa: BLE001 - as in a worker: the reason is kept
            return {"accuracy": 0.0, "problem": reason(error)}
        return {"accuracy": verdict.accuracy, "problem": verdict.problem}

    def _by_function(self, tasks: Sequence[Task], responses: Sequence[str]) -> list[Judged]:
        assert self._function is not None
        judged = []
        for scored in self._function(tasks, responses):
            wrong = {"reward": 0.0, "accuracy": 0.0, "parts": {}, "problem": scored.get("problem")}
            judged.append(wrong | scored)
        if self._config.format_pattern is not None:
            pool = self._start_pool(())
            assert pool is not None
            replies = pool.judge(
                [(None, task, response) for task, response in zip(tasks, responses, strict=True)]
            )
            for one, reply in zip(judged, replies, strict=True):
                one["format"] = reply["format"]
                one["problem"] = one["problem"] or reply["problem"]
        return judged

    def _score(self, task: Task, judged: Judged) -> Score:
        problem, accuracy = judged["problem"], judged["accuracy"]
        parts = {
            "accuracy": accuracy,
            "verifier_problem": float(problem is not None),
            **judged.get("parts", {}),
        }
        reward = self._config.accuracy_weight * judged.get("reward", accuracy)
        if self._function is not None:
            parts["function"] = judged["reward"]
        if self._config.format_pattern is not None:
            parts["format"] = judged["format"]
            reward += self._config.format_weight * parts["format"]
        if problem is not None:
            self._note(task, problem)
        return Score(reward=reward, correct=accuracy == 1, parts=parts)

    def _note(self, task: Task, problem: str) -> None:
        kind = f"{task.data_source}: {problem.partition(':')[0]}"
        if kind not in self.problems:
            LOGGER.warning(
                "a response to %s could not be judged and counts as wrong: %s "
                "(said once; see reward/part/verifier_problem)",
                task.uid,
                problem,
            )
        self.problems[kind] += 1

    def _task(self, prompt: Prompt) -> Task:
        name = self._name(prompt)
        shown = self._function is not None or (
            name is not None and self._verifier(name).reads_prompt
        )
        return as_task(prompt, self._prompt_text if shown else None)

    def _name(self, prompt: Prompt) -> str | None:
        if self._config.verifier != "auto":
            return self._config.verifier
        return verifier_of_source(prompt.data_source)

    def _verifier(self, name: str) -> Verifier:
        if name not in self._verifiers:
            self._verifiers[name] = verifier_class(name)(self._options)
        return self._verifiers[name]

    def _is_local(self, name: str) -> bool:
        patterns = (
            self._config.answer_pattern is not None or self._config.format_pattern is not None
        )
        return self._verifier(name).in_process and not patterns

    def _start_pool(self, names: Iterable[str]) -> WorkerPool | None:
        """The workers, where some of these verifiers or a pattern needs them; with all verifiers
        that are known to be needed."""
        wanted = {name for name in names if not self._is_local(name)}
        format_only = self._function is not None and self._config.format_pattern is not None
        known = set() if self._pool is None else set(self._pool.verifiers)
        if self._pool is not None and not wanted <= known:
            self._pool.close()
            self._pool = None
        if self._pool is None and (wanted or format_only):
            setup = self._setup(verifiers=tuple(sorted(wanted | known)))
            self._pool = WorkerPool(
                setup,
                num_workers=self._config.num_workers,
                step_timeout_s=self._config.step_timeout_s,
            )
            self._pool.start()
        return self._pool

    def _setup(self, *, verifiers: tuple[str, ...] = (), function: str | None = None) -> Setup:
        config = self._config
        return Setup(
            loaded(),
            verifiers,
            self._options,
            config.answer_pattern,
            config.format_pattern,
            function,
        )


def as_task(prompt: Prompt, text: Callable[[Prompt], str] | None = None) -> Task:
    return Task(
        prompt.uid,
        prompt.answer,
        prompt.data_source,
        prompt.extra,
        "" if text is None else text(prompt),
    )


def build_reward(
    config: RewardConfig, prompt_text: Callable[[Prompt], str] | None = None
) -> WeightedReward:
    """The reward ``config`` describes.

    Args:
        prompt_text: the text of a prompt, shown to verifiers and functions as ``Task.text``; None
        leaves it empty.

    Raises:
        ValueError: an unknown verifier, a pattern that is no regular expression or lacks its group,
            a format weight without a pattern, keys that exclude each other.
    """
    for key, pattern in (
        ("format_pattern", config.format_pattern),
        ("answer_pattern", config.answer_pattern),
    ):
        if pattern is None:
            continue
        try:
            groups = re.compile(pattern, re.DOTALL).groups
        except re.error as error:
            raise ValueError(
                f"reward.{key} = {pattern!r}: not a regular expression ({error}); correct it"
            ) from error
        if key == "answer_pattern" and groups == 0:
            raise ValueError(
                f"reward.{key} = {pattern!r}: has no group; put brackets around the answer"
            )
    if config.format_weight != 0 and config.format_pattern is None:
        raise ValueError(
            f"reward.format_weight = {config.format_weight}: there is no reward.format_pattern; "
            "give one, or a weight of 0"
        )
    if config.verifier != "auto":
        verifier_class(config.verifier)
    if config.function is not None and config.verifier != "auto":
        raise ValueError(
            f"reward.function = {config.function}: takes the place of reward.verifier = "
            f"{config.verifier}; remove one of them"
        )
    if config.function is not None and config.answer_pattern is not None:
        raise ValueError(
            f"reward.function = {config.function}: is given whole responses; remove "
            "reward.answer_pattern and cut them there"
        )
    return WeightedReward(config, prompt_text)
