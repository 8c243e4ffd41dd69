"""The response limit grows by stages of the run, for every source; evaluation has the longest."""

from __future__ import annotations

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.rollouts.rollouts import evaluation_sampling, rollout_sampling
from megatron_rl.rollouts.server_sampling import ServerSampling
from megatron_rl.types import Prompt
from tests.unit.trainer.runs import bandit_config, build_bandit

STAGES = (
    "rollout.max_response_tokens=8",
    "rollout.response_stages=[{from_step: 1, max_response_tokens: 4}, {from_step: 3,"
    " max_response_tokens: 8}]",
)


def test_a_step_samples_up_to_its_limit(tmp_path, monkeypatch) -> None:
    trainer = build_bandit(tmp_path, *STAGES, method="campo")
    rollouts = trainer.source.rollouts
    config = bandit_config(tmp_path / "run", STAGES)
    object.__setattr__(rollouts, "response_limit", config.rollout.response_limit)
    asked: list[int] = []
    engine = trainer.source.engine
    plain = engine.submit

    def submit(prompt, responses, sampling, so_far):
        asked.append(sampling.max_response_tokens)
        return plain(prompt, responses, sampling, so_far)

    monkeypatch.setattr(engine, "submit", submit)
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    for step, limit in ((1, 4), (2, 4), (3, 8)):
        rollouts.collect(step)
        assert set(asked) == {limit}
        asked.clear()


def test_servers_are_asked_for_the_same(tmp_path) -> None:
    """Their steps are counted from 0."""
    config = bandit_config(tmp_path, STAGES)
    sampling = ServerSampling(config, rollout_sampling(config, ()), None)
    prompt = Prompt("p", (1,), "a", "letters")
    limits = [sampling(step, prompt, version=0).max_response_tokens for step in range(4)]
    assert limits == [4, 4, 8, 8]
    assert evaluation_sampling(config, ()).max_response_tokens == 8


def test_without_stages_the_limit_is_one(tmp_path) -> None:
    config = validate(
        Config, compose("config", ["model.path=m", "data.train=t", "data.eval=e"]), "test"
    )
    assert {config.rollout.response_limit(step) for step in (1, 1000)} == {3072}
