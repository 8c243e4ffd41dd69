"""What engines and servers are asked follows from step, prompt and version, whatever hooks learn
meanwhile."""

from __future__ import annotations

from megatron_rl.hooks import ScoredGroup
from megatron_rl.hooks.sampling import Erpo
from megatron_rl.rollouts.hooks.resampling import Resampling
from megatron_rl.rollouts.sampling import SamplingPlan, sampling_seed
from megatron_rl.types import Prompt, Sampling, Score

PLAIN = Sampling(4, 16, temperature=1.0)
PROMPTS = [Prompt(uid, (1,), "a", "letters") for uid in ("easy", "hard")]


def judged(prompt: Prompt, num_correct: int) -> ScoredGroup:
    return ScoredGroup(prompt, [Score(1.0, number < num_correct) for number in range(4)])


def hooked(staleness: int) -> tuple[SamplingPlan, Resampling]:
    hooks = Resampling({"erpo": Erpo(increase=0.25, highest=1.4)}, PROMPTS)
    return SamplingPlan(PLAIN, 3, hooks=hooks, staleness=staleness), hooks


def test_seed_and_limit_are_those_of_the_step() -> None:
    plan = SamplingPlan(PLAIN, 3, response_limit=lambda step: 4 * step)
    plan.published(0)
    found = [plan(step, PROMPTS[0], 0) for step in (1, 5)]
    assert [one.seed for one in found] == [sampling_seed(3, 1), sampling_seed(3, 5)]
    assert [one.max_response_tokens for one in found] == [4, 20]
    assert plan.hooks.state() == {}


def test_a_temperature_is_that_of_the_moment_when_the_weights_were_published() -> None:
    plan, hooks = hooked(staleness=1)
    plan.published(0)
    hooks.hooks["erpo"].resample(1, 0, [judged(PROMPTS[0], 4), judged(PROMPTS[1], 1)])
    assert plan(2, PROMPTS[0], 0).temperature == 1.0, "version 0 knows of no verdict"
    plan.published(1)
    hooks.hooks["erpo"].resample(2, 0, [judged(PROMPTS[0], 4)])
    plan.published(2)
    hot = [plan(4, PROMPTS[0], version).temperature for version in (1, 2)]
    assert hot == [1.25, 1.4]
    assert plan(4, PROMPTS[1], 2).temperature == 1.0
    assert plan(4, PROMPTS[0], 2).seed == sampling_seed(3, 4)


def test_groups_that_dynamic_sampling_refused_warm_their_prompts_too() -> None:
    plan, hooks = hooked(staleness=0)
    hooks.hooks["erpo"].observe(1, [judged(PROMPTS[0], 4)])
    hooks.hooks["erpo"].resample(1, 0, [judged(PROMPTS[1], 1)])
    plan.published(1)
    assert [plan(2, prompt, 1).temperature for prompt in PROMPTS] == [1.25, 1.0]


def test_a_run_that_resumes_samples_as_the_one_before() -> None:
    before, hooks = hooked(staleness=1)
    hooks.hooks["erpo"].resample(1, 0, [judged(PROMPTS[0], 4)])
    after, _ = hooked(staleness=1)
    after.hooks.restore(before.hooks.state())
    for each in (before, after):
        each.published(1)
        assert each(2, PROMPTS[0], 1).temperature == 1.25
