"""The turns of a run's responses: asks their environments, in worker processes, what follows."""

import hashlib
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from megatron_rl.config.schema import Config
from megatron_rl.config.sections import EnvironmentConfig
from megatron_rl.engine.call_formats import CallFormat
from megatron_rl.engine.sampling import eos_token_ids
from megatron_rl.errors import concerning
from megatron_rl.plugins import loaded
from megatron_rl.rewards.build import as_task
from megatron_rl.rewards.workers.pool import WorkerPool
from megatron_rl.rollouts.environments.answers import (
    FOLDER,
    RecordedAnswers,
    Reply,
    answer_key,
)
from megatron_rl.rollouts.environments.base import EnvironmentSettings, environment_class
from megatron_rl.rollouts.environments.outcomes import Outcome, turns_of
from megatron_rl.rollouts.environments.rendering import MessageRendering
from megatron_rl.rollouts.environments.worker import EpisodeSetup
from megatron_rl.rollouts.reward_thread import BatchThread
from megatron_rl.types import APPENDED, Completion, Prompt, Score

logger = logging.getLogger(__name__)

ENDS = ("done", "stop", "tokens", "turns", "seconds", "problem")


class Waiting(NamedTuple):
    """A response that has ended a turn.

    Attributes:
        key: Key under which ``Turns.take`` returns its outcome.
        step: Training step; None: for nothing that a resumed run repeats.
        whole: The whole response so far.
        most_tokens: Tokens that the whole response may have.
        began: When its first turn began, by ``time.monotonic``.
    """

    key: Hashable
    step: int | None
    prompt: Prompt
    response: int
    whole: Completion
    most_tokens: int
    began: float


class Turns:
    """Decides what becomes of a response whose turn has ended; one object a process.

    Every rank decides alike which responses wait, and what becomes of the others. ``give`` and
    ``take`` are for the rank that asks the environment, whose workers start at the first call.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        settings: EnvironmentSettings,
        has_tools: bool,
        call_format: CallFormat | None = None,
    ) -> None:
        """Raises ValueError where the environment or the model's chat template is unsuitable."""
        self.config: EnvironmentConfig = config.env
        self.environment = environment_class(settings.name)
        self.has_tools = has_tools
        self._format = call_format
        roles = ("tool",) if has_tools else ("user",)
        self._rendering = MessageRendering(tokenizer, roles, config.model.path)
        # They end a response. None: no text ends a turn, and partial rollouts may pause anywhere.
        self._ends = eos_token_ids(Path(config.model.path)) if config.rollout.stop else None
        self._tokenizer = tokenizer
        self._on_problem = config.reward.on_problem
        self._seed = config.seed
        self._pool = WorkerPool(
            EpisodeSetup(loaded(), settings),
            limit=("env.timeout_s", self.config.timeout_s),
            num_workers=self.config.num_workers,
            step_timeout_s=self.config.step_timeout_s,
        )
        self._num_problems = 0
        self._spent_s = 0.0  # of env.step_timeout_s
        self._thread = BatchThread(self._outcomes, "turns")
        # As many steps as a run may go back to a checkpoint, or many.
        checkpoint = config.checkpoint
        num_steps = (checkpoint.every_steps or 100) * (checkpoint.keep + 1)
        self._recorded = RecordedAnswers(Path(config.run_dir) / FOLDER, num_steps)

    def asks(self, whole: Completion) -> bool:
        """Whether the environment is to be asked: the model has ended its message, or a text of
        ``rollout.stop`` has, behind any token."""
        ids = whole.token_ids
        if not ids or whole.truncated or whole.spans[-1].version == APPENDED:
            return False
        if ids[-1] == self._rendering.end_token_id:
            return True
        return self._ends is not None and ids[-1] not in self._ends

    def give(self, waiting: Waiting) -> None:
        self._thread.add(waiting)

    def take(self) -> list[tuple[Hashable, Outcome]]:
        """What has been answered. Raises what the workers raise, and as ``_failed``."""
        return self._thread.take()

    def forget(self) -> None:
        """A generation has ended: drops what is not answered."""
        self._thread.forget()
        self.begin_step()

    def begin_step(self) -> None:
        """Starts ``env.step_timeout_s`` anew."""
        self._spent_s = 0.0

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Sets what the thread is to call when some are answered. Call it before ``give``."""
        self._thread = BatchThread(self._outcomes, "turns", wake=wake)

    def ended(self, whole: Completion) -> Outcome:
        """Outcome of a response that was cut, or ended with a token that ends no message."""
        return self._over(whole, "tokens" if whole.truncated else "stop")

    def _outcomes(self, waiting: list[Waiting]) -> list[tuple[Hashable, Outcome]]:
        """In the thread."""
        replies: dict[Hashable, Reply] = {}
        asked = []
        for one in waiting:
            turns = [self._text(ids) for ids in turns_of(one.whole)]
            seed = episode_seed(self._seed, one.prompt.uid, one.response)
            key = answer_key(one.prompt.uid, seed, turns)
            known = {} if one.step is None else self._recorded.of_step(one.step)
            if key in known:
                replies[one.key] = known[key]
            else:
                item = as_task(one.prompt, lambda prompt: prompt.text), seed, turns
                asked.append((one, key, item))
        answered = self._replies([item for _, _, item in asked]) if asked else []
        for (one, key, _), reply in zip(asked, answered, strict=True):
            replies[one.key] = reply
            if one.step is not None:
                self._recorded.add(one.step, key, reply)
        return [(one.key, self._outcome(one, replies[one.key])) for one in waiting]

    def _replies(self, items: list[Any]) -> list[dict[str, Any]]:
        """What the workers say, within what is left of ``env.step_timeout_s``."""
        left_s = self.config.step_timeout_s - self._spent_s
        if left_s <= 0:
            key = f"env.step_timeout_s = {self.config.step_timeout_s:g} s"
            return [{"problem": f"{key} was used up before its turn"} for _ in items]
        began_s = time.monotonic()
        replies = self._pool.judge(items, left_s)
        self._spent_s += time.monotonic() - began_s
        return replies

    def _outcome(self, waiting: Waiting, reply: dict[str, Any]) -> Outcome:
        whole = waiting.whole
        if reply.get("problem") is not None:
            return self._over(whole, "problem", self._failed(waiting.prompt, reply["problem"]))
        if "done" in reply:
            return self._over(whole, "done", _score(reply["done"]))
        tokens = self._rendering.tokens(reply["messages"])
        if whole.token_ids[-1] != self._rendering.end_token_id:  # a text of rollout.stop
            tokens.insert(0, self._rendering.end_token_id)
        if len(turns_of(whole)) >= self.config.max_turns:
            return self._over(whole, "turns")
        # At least one more token has to be sampled after them.
        if len(whole.token_ids) + len(tokens) >= waiting.most_tokens:
            return self._over(whole, "tokens")
        most_s = self.config.max_seconds
        if most_s is not None and time.monotonic() > waiting.began + most_s:
            return self._over(whole, "seconds")
        return Outcome(tokens)

    def _over(self, whole: Completion, why: str, score: Score | None = None) -> Outcome:
        if score is None and self.environment.gives_reward:
            score = Score(0.0, correct=False)
        turns = turns_of(whole)
        num_calls = sum(self.environment.num_calls(self._text(ids)) for ids in turns)
        facts = {"turns": float(len(turns)), "tool_calls": float(num_calls)}
        facts |= {f"ended_by/{end}": float(end == why) for end in ENDS}
        return Outcome((), why in ("tokens", "turns", "seconds"), score, facts)

    def _failed(self, prompt: Prompt, problem: str) -> Score:
        """``reward.on_problem`` for an environment that gave no answer.

        Raises:
            ValueError: it is stop.
        """
        if self._on_problem == "stop":
            raise ValueError(
                f"reward.on_problem = stop: the environment of {prompt.uid} failed: {problem};"
                " correct it or its limits, or set reward.on_problem=exclude"
            )
        if not self._num_problems:
            logger.warning(
                "the environment of a response to %s failed: %s (logged once; see"
                " reward/excluded_share)",
                prompt.uid,
                problem,
            )
        self._num_problems += 1
        if self._on_problem == "exclude":
            return Score(0.0, False, problem=problem)
        return Score(0.0, False, {"accuracy": 0.0, "verifier_problem": 1.0})

    def _text(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        if self._format is not None:
            end = ids[-1:] == [self._rendering.end_token_id]
            said = self._format(str(self._tokenizer.decode(ids[:-1] if end else ids)))
            if said is not None:
                return said
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _score(done: dict[str, Any]) -> Score | None:
    if not done:
        return None
    accuracy = done["accuracy"]
    return Score(done["reward"], accuracy == 1, {"accuracy": accuracy, **done["parts"]})


def episode_seed(seed: int, prompt_uid: str, response: int) -> int:
    """Seed of the environment of one response (62 bits)."""
    text = f"environment/{seed}/{prompt_uid}/{response}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def turns_of_run(config: Config, tokenizer: PreTrainedTokenizerBase) -> Turns | None:
    """Call this before the prompts are read: from then on ``tokenizer`` shows the tools wherever it
    renders messages. None: a response has one turn.

    Raises:
        ValueError: there is no such environment, tool or parser, it does not work on this machine,
            a tool lacks the docstring that the model is shown, or the chat template is unsuitable.
    """
    if not config.env.has_turns:
        return None
    env = config.env
    settings = EnvironmentSettings(
        env.name,
        env.tools,
        env.timeout_s,
        int(env.memory_gib * 2**30),
        env.max_message_characters,
        config.reward.sandbox,
        env.servers,
        env.corpus or "",
        env.agent,
        env.max_turns,
    )
    data = config.data
    if env.agent is not None and (data.system_prompt or data.prompt_prefix or data.prompt_suffix):
        raise ValueError(
            "env.agent: data.system_prompt, data.prompt_prefix and data.prompt_suffix would change"
            " the prompt that the agent has asked; leave them empty"
        )
    if not config.data.apply_chat_template:
        raise ValueError(
            f"env.name = {env.name}: with data.apply_chat_template = false no message has an end;"
            " set it to true, or env=single"
        )
    environment = environment_class(env.name)
    problem = environment.refusal(settings)
    if problem is not None:
        raise ValueError(f"env.tools: {problem}")
    functions = environment.functions(settings)
    schemas = _show_tools(tokenizer, functions) if functions else []
    written = env.tool_parser
    call_format = None if written is None else CallFormat(written, tokenizer, schemas)
    return Turns(config, tokenizer, settings, bool(functions), call_format)


def needs_reward(turns: Turns | None) -> bool:
    """Whether the reward of the run judges responses."""
    return turns is None or not turns.environment.gives_reward


def _show_tools(tokenizer: PreTrainedTokenizerBase, functions: Sequence[Any]) -> list[Any]:
    """Their schemas. ``functions``: as of ``Environment.functions``."""
    if "tools" not in str(tokenizer.chat_template):
        logger.warning(
            "env.tools: the chat template of the model shows no tools (as that of Qwen2.5-VL);"
            " describe them in data.system_prompt, or give the model a template that shows them"
        )
    schemas: list[Any] = []
    for function in functions:
        remedy = "give its arguments type hints, and a docstring with a line for each below Args:"
        with concerning(f"env.tools: {function} has no schema", remedy):
            is_schema = isinstance(function, Mapping)
            schemas.append(function if is_schema else get_json_schema(function))
    with_tools = partial(tokenizer.apply_chat_template, tools=schemas)
    setattr(tokenizer, "apply_chat_template", with_tools)  # noqa: B010 (a method for mypy)
    return schemas
