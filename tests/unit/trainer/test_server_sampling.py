"""What servers are asked follows from step, prompt and version, whatever hooks learn meanwhile."""

from __future__ import annotations

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.rollouts.resampling import Resampling, ScoredGroup
from megatron_rl.rollouts.rollouts import sampling_seed
from megatron_rl.rollouts.sampling_hooks import erpo
from megatron_rl.rollouts.server_sampling import ServerSampling
from megatron_rl.types import Prompt, Sampling, Score

PLAIN = Sampling(4, 16, temperature=1.0)
PROMPTS = [Prompt(uid, (1,), "a", "letters") for uid in ("easy", "hard")]


def config(*overrides: str) -> Config:
    paths = ["model.path=/m", "data.train=/a", "data.eval=/b", "source=servers", "seed=3"]
    return validate(Config, compose("config", [*paths, *overrides]), "the test")


def judged(prompt: Prompt, num_correct: int) -> ScoredGroup:
    return ScoredGroup(prompt, [Score(1.0, number < num_correct) for number in range(4)])


def hooked(staleness: int) -> tuple[ServerSampling, Resampling]:
    hooks = Resampling({"erpo": erpo(increase=0.25, highest=1.4)}, PLAIN, PROMPTS)
    return ServerSampling(config(f"source.staleness={staleness}"), PLAIN, hooks), hooks


def test_the_seed_is_that_of_the_step() -> None:
    sampling = ServerSampling(config(), PLAIN, None)
    sampling.published(0)
    found = [sampling(step, PROMPTS[0], 0) for step in (0, 4)]
    assert [one.seed for one in found] == [sampling_seed(3, 1), sampling_seed(3, 5)]
    assert sampling.state() == {}


def test_a_temperature_is_that_of_the_moment_when_the_weights_were_published() -> None:
    sampling, hooks = hooked(staleness=1)
    sampling.published(0)
    hooks.hooks["erpo"].resample(1, 0, [judged(PROMPTS[0], 4), judged(PROMPTS[1], 1)])
    assert sampling(1, PROMPTS[0], 0).temperature == 1.0, "version 0 knows of no verdict"
    sampling.published(1)
    hooks.hooks["erpo"].resample(2, 0, [judged(PROMPTS[0], 4)])
    sampling.published(2)
    hot = [sampling(3, PROMPTS[0], version).temperature for version in (1, 2)]
    assert hot == [1.25, 1.4]
    assert sampling(3, PROMPTS[1], 2).temperature == 1.0
    assert sampling(3, PROMPTS[0], 2).seed == sampling_seed(3, 4)


def test_a_run_that_goes_on_samples_as_the_one_before() -> None:
    before, hooks = hooked(staleness=1)
    hooks.hooks["erpo"].resample(1, 0, [judged(PROMPTS[0], 4)])
    after, _ = hooked(staleness=1)
    after.restore(before.state())
    for each in (before, after):
        each.published(1)
        assert each(2, PROMPTS[0], 1).temperature == 1.25
