"""The response limit grows by stages of the run, for every source; evaluation has the longest."""

from __future__ import annotations

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.rollouts.sampling import evaluation_sampling
from tests.unit.trainer.runs import bandit_config, build_bandit

STAGES = (
    "rollout.max_response_tokens=8",
    "rollout.response_stages=[{from_step: 1, max_response_tokens: 4}, {from_step: 3,"
    " max_response_tokens: 8}]",
)


def test_a_step_samples_up_to_its_limit(tmp_path, monkeypatch) -> None:
    trainer = build_bandit(tmp_path, *STAGES, method="campo")
    asked: list[int] = []
    engine = trainer.source.engines.colocation.engine
    plain = engine.submit

    def submit(prompt, responses, sampling, so_far):
        asked.append(sampling.max_response_tokens)
        return plain(prompt, responses, sampling, so_far)

    monkeypatch.setattr(engine, "submit", submit)
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    for step, limit in ((1, 4), (2, 4), (3, 8)):
        trainer.source.collect(step)
        assert set(asked) == {limit}
        asked.clear()


def test_an_evaluation_has_the_longest(tmp_path) -> None:
    config = bandit_config(tmp_path, STAGES)
    assert evaluation_sampling(config, ()).max_response_tokens == 8


def test_without_stages_the_limit_is_one(tmp_path) -> None:
    config = validate(
        Config, compose("config", ["model.path=m", "data.train=t", "data.eval=e"]), "test"
    )
    assert {config.rollout.response_limit(step) for step in (1, 1000)} == {3072}
