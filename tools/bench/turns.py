"""Seconds of a generation whose responses have several turns, beside one whose responses have as
many sampled tokens in one turn: what a turn costs.

    torchrun --standalone --nproc-per-node 2 tools/bench/turns.py --model MODEL experiment=tools_cpu

MODEL is a HF directory, such as the export of examples/tools_cpu; words behind it are overrides.
Held-out prompts are answered once each, without rewards and without a policy. The two take turns;
in one turn a response is as long as the tokens that the other sampled for the same prompt, whatever
it says. The first repeat does not count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from machine import Watch, description, spread

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.evaluation.evaluation import build_engine
from megatron_rl.evaluation.evaluation_source import Weights
from megatron_rl.evaluation.sample import NoReward
from megatron_rl.plugins import add_plugin_option, load_plugins
from megatron_rl.rollouts.backends.launch import LaunchBackend
from megatron_rl.rollouts.dispatcher import StepSummary
from megatron_rl.rollouts.environments.turns import turns_of_run
from megatron_rl.rollouts.jobs import GenerationJob, answers_to
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.rollouts.sampling import SamplingPlan, evaluation_sampling, stop_token_ids
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import exit_process, reported, start
from megatron_rl.types import APPENDED, Prompt, Sampling, num_appended


@dataclass
class LengthPlan(SamplingPlan):
    """Responses whose lengths are known beforehand, by the uid of the prompt."""

    lengths: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, step: int, prompt: Prompt, version: int, turn: int = 0) -> Sampling:
        most = self.lengths[prompt.uid]
        return replace(self.plain, max_response_tokens=most, stop_token_ids=())


def without_end(model: Path) -> Path:
    """The same model, whose engine ends a response at no token but those it is asked to."""
    folder = Path(tempfile.mkdtemp(prefix="turns."))
    for file in model.iterdir():
        if file.name == "config.json":
            values = json.loads(file.read_text(encoding="utf-8"))
            (folder / file.name).write_text(json.dumps({**values, "eos_token_id": None}))
        elif file.name != "generation_config.json":
            (folder / file.name).symlink_to(file.resolve())
    return folder


def timed(backend: LaunchBackend, job: GenerationJob) -> tuple[float, StepSummary]:
    """Collective."""
    began_s = time.perf_counter()
    summary = backend.answers(job, "measured", Clock()).summary
    return time.perf_counter() - began_s, summary


def main(options: argparse.Namespace) -> None:
    watch = Watch()
    world = start()
    load_plugins(options.plugin)
    model = world.from_main(lambda: without_end(options.model))
    words = [f"model.path={model}", f"rollout.tensor={world.size}", *options.overrides]
    config = validate(Config, compose("config", words), "the settings")
    tokenizer = load_tokenizer(model)
    turns = turns_of_run(config, tokenizer)
    limit = config.rollout.max_prompt_tokens
    prompts = load_prompts(config.data.eval, config.data, tokenizer, limit)[: options.prompts]
    display = Display(shown=False)
    engine = build_engine(config, Weights(0, model), None, world, display)
    rewards = RewardThread(NoReward(), text_of(tokenizer))
    backend = LaunchBackend(engine, rewards, world, display)
    sampling = evaluation_sampling(config, stop_token_ids(tokenizer.eos_token_id))
    seconds: list[tuple[float, float]] = []
    for repeat in range(options.repeats + 1):
        of_repeat = replace(sampling, num_responses=1, seed=repeat)
        backend.turns = turns
        with_turns, summary = timed(backend, answers_to(prompts, of_repeat))
        spans = [answer.spans for answer in summary.answers]
        sampled = [each[-1].end - num_appended(each) for each in spans]
        lengths = {each.uid: length for each, length in zip(prompts, sampled, strict=True)}
        job = replace(answers_to(prompts, of_repeat), plan=LengthPlan(of_repeat, lengths=lengths))
        backend.turns = None
        without, other = timed(backend, job)
        assert [answer.spans[-1].end for answer in other.answers] == sampled
        seconds.append((with_turns, without))
    world.from_main(lambda: shutil.rmtree(model))
    later = sum(span.version == APPENDED for each in spans for span in each)
    if world.is_main:
        of_several, of_one = (spread(list(each)) for each in zip(*seconds[1:], strict=True))
        more = spread([1000 * (first - second) / max(1, later) for first, second in seconds[1:]])
        print(f"{description()}; {watch.load()}.")
        print(
            f"{len(prompts)} responses, {len(prompts) + later} turns, {sum(sampled)} sampled"
            f" tokens: {of_several.text(3)} s, in one turn {of_one.text(3)} s, {more.text()} ms"
            " more for each further turn",
            flush=True,
        )


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a HF directory")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    add_plugin_option(parser)
    with reported():
        main(parser.parse_intermixed_args())
    exit_process(0)
