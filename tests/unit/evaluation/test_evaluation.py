"""Evaluation alone: which weights, by which settings, asked in which portions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_rl import evaluate as program
from megatron_rl.config.cli.command_line import Root, root_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.evaluation.evaluation import EvaluationFolder, EvaluationRun
from megatron_rl.evaluation.evaluation_source import Weights, differences, find_evaluation
from megatron_rl.evaluation.evaluator import scored
from megatron_rl.reporting.evaluation import detailed_metrics
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.types import Sampling
from tests.unit.evaluation.test_sample import checkpoint
from tests.unit.trainer.fakes import BanditEngine, FirstTokenIsAnswer, prompts
from tests.unit.trainer.runs import DISPLAY, WORLD, words

SAMPLING = Sampling(num_responses=4, max_response_tokens=3, temperature=1.0, seed=5)


def test_a_model_needs_no_training_data():
    found = find_evaluation(["model.path=/m", "data.eval=e.jsonl", "seed=3"], None, None)
    assert found.weights == (Weights(0, Path("/m")),)
    assert found.out == Path("runs/evaluation")
    assert (found.config.data.train, found.config.seed) == ((), 3)
    assert found.config.rollout.dtype == "float32"  # the engine of a machine without a GPU
    chosen = find_evaluation(["model.path=/m", "data.eval=e", "rollout=vllm"], None, Path("/o"))
    assert (chosen.config.rollout.dtype, chosen.out) == ("bfloat16", Path("/o"))
    with pytest.raises(
        ConfigError, match=r"(?s)2 problems.*model\.path: no value.*data\.eval: no v"
    ):
        find_evaluation([], None, None)


def test_groups_of_a_folder_of_ones_own(tmp_path):
    mine = tmp_path / "experiment" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("# @package _global_\nseed: 7\n")
    words = ["model.path=/m", "data.eval=e", "experiment=mine"]
    options = program.arguments(["--config-dir", str(tmp_path), *words])
    found = find_evaluation(options.words, None, None, root_of(options))
    assert found.config.seed == 7


def test_a_run_gives_checkpoints_and_exports_by_step(run):
    model = run.parent / "model"
    saved = {step: checkpoint(run, step) for step in (10, 20)}
    exported = run / "exports" / "step_000015"
    exported.mkdir(parents=True)
    newest = find_evaluation([str(run)], None, None)
    assert newest.weights == (Weights(20, saved[20]),)
    assert newest.out == run / "evaluation"
    assert newest.config.data.prompt_suffix == " think"
    every = find_evaluation([str(run), "seed=9"], "all", Path("out"))
    assert [weights.step for weights in every.weights] == [0, 10, 15, 20]
    assert every.weights[0].path == model
    assert every.weights[2].path == exported
    assert (every.config.seed, every.out) == (9, Path("out"))
    some = find_evaluation([str(run)], "20,10,20", None)
    assert [weights.step for weights in some.weights] == [10, 20]
    assert [weights.is_checkpoint for weights in every.weights] == [False, True, False, True]


def test_what_cannot_be_evaluated_says_what_to_do(run):
    with pytest.raises(
        ValueError, match=r"neither checkpoints/ nor exports/ has a whole step; .*ex"
    ):
        find_evaluation([str(run)], None, None)
    checkpoint(run, 10)
    for steps, message in (
        ("10,30", r"--steps 10,30: .* no whole checkpoint or export of step 30; it has 0, 10"),
        ("newest", "--steps newest: give all, last, or numbers such as 20,40"),
    ):
        with pytest.raises(ValueError, match=message):
            find_evaluation([str(run)], steps, None)
    with pytest.raises(ValueError, match=r"no folder of a run .*or model\.path=DIR"):
        find_evaluation([str(run.parent / "model")], None, None)
    with pytest.raises(ValueError, match="one run at a time"):
        find_evaluation([str(run), "other"], None, None)
    with pytest.raises(ValueError, match="--steps all: is for checkpoints of a run"):
        find_evaluation(["model.path=/m", "data.eval=e"], "all", None)
    with pytest.raises(ValueError, match="has its own settings; leave --config-name and"):
        find_evaluation([str(run)], None, None, Root(config_dir=run))
    with pytest.raises(ConfigError, match=r"rollout\.dtyp: unknown key"):
        find_evaluation([str(run), "rollout.dtyp=float32"], None, None)


def test_a_damaged_checkpoint_is_passed_over(run, caplog):
    checkpoint(run, 10)
    manifest = {"info": {}, "files": {"weights": {"bytes": 1, "xxh3": "0"}}}
    (checkpoint(run, 20) / "manifest.json").write_text(json.dumps(manifest))
    assert find_evaluation([str(run)], "last", None).weights[0].step == 10
    assert "step_000020 is skipped: weights is missing" in caplog.text


def test_no_option_is_taken_for_one_of_torchruns():
    """Its parser looks at all words, and takes the beginning of an option for the option."""
    from torch.distributed.run import get_args_parser

    words = ["-m", "megatron_rl.evaluate", "RUN", "--steps", "all", "--out", "o"]
    words += ["--prompts-at-a-time", "2", "--plugin", "p.py", "seed=1"]
    rest = get_args_parser().parse_args(words).training_script_args
    options = program.arguments(rest)
    assert (options.words, options.steps, options.prompts_at_a_time) == (
        ["RUN", "seed=1"],
        "all",
        2,
    )
    with pytest.raises(SystemExit):
        program.arguments(["--prompts-at-a-time", "0"])


def record(*overrides: str, **more: object) -> Mapping[str, object]:
    values = compose("config", ["model.path=m", "data.train=[]", "data.eval=e", *overrides])
    config = validate(Config, values, "test")
    return {**config.model_dump(mode="json"), "plugins": {}, "prompts": "8:abc", **more}


@pytest.fixture
def folder(tmp_path):
    return EvaluationFolder(tmp_path / "out", (1, 4))


def test_settings_that_change_no_response_may_change(folder, tmp_path):
    weights = [Weights(20, tmp_path)]
    assert folder.prepare(record(), weights, "launch") == [set()]
    same = (
        "rollout.tensor=4",
        "evaluation.pass_at=[1,2]",
        "trainer.num_steps=7",
        "data.eval=other",
    )
    folder.prepare(record(*same), weights, "launch")
    for change, message in (
        (record("seed=2"), "seed = 1 there, 2 here"),
        (record("rollout.max_response_tokens=8"), "max_response_tokens = 3072 there, 8 here"),
        (record("evaluation.temperature=0.5"), "evaluation.temperature = 0.0 there, 0.5 here"),
        (record("reward.verifier=math"), "reward.verifier = auto there, math here"),
        (record(prompts="9:def"), "prompts = 8:abc there, 9:def here"),
        (record(plugins={"mine.py": "1"}), "plugins.mine.py = null there, 1 here"),
    ):
        with pytest.raises(
            ValueError, match=r"(?s)holds an evaluation with other settings.*--out"
        ) as e:
            folder.prepare(change, weights, "launch")
        assert message in str(e.value)
    assert differences(record(), record()) == []


def test_the_folder_of_a_run_is_no_place_for_an_evaluation(folder, tmp_path):
    folder.path.mkdir()
    (folder.path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds something else than an evaluation"):
        folder.prepare(record(), [Weights(20, tmp_path)], "launch")
    (folder.path / "config.json").write_text('{"run_dir": "runs/mine"}')
    with pytest.raises(ValueError, match="holds something else than an evaluation"):
        folder.prepare(record(), [Weights(20, tmp_path)], "launch")


def evaluation_run(folder: EvaluationFolder, portion: int | None, model: Path) -> EvaluationRun:
    """The bandit, as it was built: with the weights of its model."""
    engine = BanditEngine()
    engine.capacity = 3
    values = compose("config", [f"model.path={model}", "data.train=[]", "data.eval=e"])
    return EvaluationRun(
        config=validate(Config, values, "test"),
        sampling=SAMPLING,
        engine=engine,
        sampler=LaunchSampler(engine, FirstTokenIsAnswer(), words, WORLD, DISPLAY),
        folder=folder,
        prompts_at_a_time=portion,
        world=WORLD,
        display=DISPLAY,
    )


def test_portions_change_nothing_and_metrics_are_those_of_the_trainer(tmp_path):
    weights = Weights(0, tmp_path)
    found = []
    for portion in (None, 1, 3, 100):
        folder = EvaluationFolder(tmp_path / f"by {portion}", (1, 4))
        at_work = evaluation_run(folder, portion, tmp_path)
        at_work.ask(weights, prompts(8))
        found.append(pq.read_table(folder.file(weights).path))
        text = (folder.path / "metrics.jsonl").read_text("utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        # As an evaluation of a run asks: all at once.
        whole = at_work.sampler.run(prompts(8), SAMPLING, "test")
        assert rows == [{"step": 0, **detailed_metrics(scored(whole), (1, 4))}]
    assert all(table.equals(found[0]) for table in found)
    assert found[0].num_rows == 32
    assert found[0].column("number").to_pylist() == [0, 1, 2, 3] * 8


def test_after_a_kill_only_what_is_missing_is_asked(folder, tmp_path):
    weights = Weights(0, tmp_path)
    everything = EvaluationFolder(tmp_path / "whole", (1, 4))
    evaluation_run(everything, 3, tmp_path).ask(weights, prompts(8))
    killed = evaluation_run(folder, 3, tmp_path)
    sample = killed.sampler.run
    calls = []

    def run_twice(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample(*arguments)

    killed.sampler.run = run_twice
    with pytest.raises(KeyboardInterrupt):
        killed.ask(weights, prompts(8))
    (answered,) = folder.prepare(record(), [weights], "launch")
    assert answered == {f"p{number}" for number in range(6)}
    again = evaluation_run(folder, 3, tmp_path)
    again.ask(weights, prompts(8)[6:])
    assert {uid for uid, _ in again.engine.begun} == {"p6", "p7"}
    first, second = (pq.read_table(each.file(weights).path) for each in (everything, folder))
    assert first.equals(second)
    (answered,) = folder.prepare(record(), [weights], "launch")
    assert answered == {f"p{number}" for number in range(8)}
