"""What is kept of each step of a free run: read back as it was written, within its limit; and the
way from kept weights to a step."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.checkpoints import directory
from megatron_rl.config.load import validate
from megatron_rl.config.schema import Config
from megatron_rl.rollouts.rows.exchange import token_rows, token_versions
from megatron_rl.rollouts.rows.experience import Experience, Responses, experience_of
from megatron_rl.rollouts.step_record import FOLDER, StepRecord, record_path
from megatron_rl.types import Completion, Score, VersionSpan
from tests.unit.trainer.fakes import prompts
from tools.replay.read_record import read_step
from tools.replay.recorded_run import ReplayedRun, find_route

PROMPTS = {prompt.uid: prompt for prompt in prompts(3)}
UIDS = list(PROMPTS)[:2]


def experience(length: int = 3) -> Experience:
    """Two groups of two responses; the second response was sampled by weights 4, then 6."""
    ids = range(length)
    logprobs = [-0.1 * (number + 1) for number in ids]
    mixed = (VersionSpan(4, 1), VersionSpan(6, length))
    completions = [
        Completion(ids, logprobs, False, 5),
        Completion(ids, logprobs, True, 4, mixed),
        Completion(ids[:2], logprobs[:2], False, 5),
        Completion(ids, logprobs, False, 6),
    ]
    tokens = token_rows(range(4), completions)
    tokens.columns["weight_versions"] = token_versions(completions)
    asked = [PROMPTS[uid] for uid in UIDS for _ in range(2)]
    responses = Responses(
        prompts=asked,
        group_ids=np.array([0, 0, 1, 1]),
        lengths=np.array([len(one.token_ids) for one in completions]),
        truncated=np.array([one.truncated for one in completions]),
        weight_versions=np.array([one.weight_version for one in completions]),
        scores=[Score(0.1 * row, row % 2 == 0, {"accuracy": 1 / 3}) for row in range(4)],
        tokens=tokens,
        holders=np.zeros(4, dtype=np.int64),
    )
    return replace(experience_of(responses), source_metrics={"source/servers": 2.0})


@pytest.fixture
def config(run: Path) -> Config:
    values = json.loads((run / "config.json").read_text())
    return validate(Config, {key: values[key] for key in Config.model_fields}, "the test")


def test_a_step_is_read_as_it_was_written(run, config):
    written = experience()
    StepRecord(config, 2).write(7, written, [48, 50])
    recorded = read_step(run / FOLDER, 7)
    assert (recorded.step, recorded.groups) == (7, [48, 50])
    assert (recorded.uids, recorded.world_size) == (UIDS, 2)
    assert validate(Config, dict(recorded.values), "the record") == config
    read = recorded.experience(PROMPTS.__getitem__, is_main=True)
    for name in ("prompts", "scores"):
        assert getattr(read.responses, name) == getattr(written.responses, name)
    for name in ("group_ids", "lengths", "truncated", "weight_versions", "holders"):
        there = getattr(written.responses, name)
        assert np.array_equal(getattr(read.responses, name), there)
        assert getattr(read.responses, name).dtype == there.dtype
    for name, values in written.responses.tokens.columns.items():
        assert np.array_equal(read.responses.tokens.columns[name], values)
        assert read.responses.tokens.columns[name].dtype == values.dtype
    assert recorded.token_versions.tolist() == [5, 5, 5, 4, 6, 6, 5, 5, 6, 6, 6]
    assert read.rewards.equal(written.rewards) and read.correct.equal(written.correct)
    assert read.source_metrics == {"source/servers": 2.0}
    other = recorded.experience(PROMPTS.__getitem__, is_main=False)
    assert len(other.responses) == 4 and not len(other.responses.tokens.rows)


def test_it_takes_8_bytes_a_token(run, config):
    record = StepRecord(config, 2)
    sizes = []
    for step, length in ((1, 10_000), (2, 30_000)):
        record.write(step, experience(length), [0, 1])
        sizes.append(record_path(run / FOLDER, step).stat().st_size)
    assert abs(sizes[1] - sizes[0] - 8 * 3 * 20_000) < 100
    assert sizes[0] - 8 * (3 * 10_000 + 2) < 20_000, "the configuration, and little more"


def test_the_oldest_steps_go_when_the_record_is_full(run, config):
    StepRecord(config, 2).write(1, experience(100), [0, 1])
    size = record_path(run / FOLDER, 1).stat().st_size
    source = config.source.model_copy(update={"record_gib": 2.5 * size / 2**30})
    record = StepRecord(config.model_copy(update={"source": source}), 2)
    for step in range(2, 6):
        record.write(step, experience(100), [0, 1])
    assert sorted(path.name for path in (run / FOLDER).iterdir()) == [
        "step_000004.safetensors",
        "step_000005.safetensors",
    ]
    record.write(6, experience(1000), [0, 1])
    assert [path.name for path in (run / FOLDER).iterdir()] == ["step_000006.safetensors"]


def test_steps_that_are_repeated_leave_the_record(run, config):
    first = StepRecord(config, 2)
    for step in range(1, 6):
        first.write(step, experience(), [0, 1])
    second = StepRecord(config, 2)
    second.write(3, experience(), [0, 1])
    assert len(list((run / FOLDER).iterdir())) == 3


@pytest.fixture
def recorded(run: Path, config: Config) -> Path:
    """Checkpoints of steps 2 and 4, a record of 2 to 6."""
    record = StepRecord(config, 2)
    for step in range(2, 7):
        record.write(step, experience(), [0, 1])
    for step in (2, 4):
        path = directory.step_path(run / "checkpoints", step)
        (directory.begin(path) / "weights").write_text("there")
        directory.finish(path, {})
    return run


def test_the_way_to_a_step_begins_with_the_newest_weights_before_it(recorded):
    ways = {step: find_route(recorded, step).after for step in (3, 4, 5, 6)}
    assert ways == {3: 2, 4: 2, 5: 4, 6: 4}
    route = find_route(recorded, 6, after=2)
    assert route.checkpoint == recorded / "checkpoints" / "step_000002" and route.world_size == 2
    shutil.rmtree(recorded / "checkpoints" / "step_000004")
    assert find_route(recorded, 6).after == 2
    record_path(recorded / FOLDER, 5).unlink()
    with pytest.raises(ValueError, match="has steps 2, 3, 4, 6, and all from a checkpoint on"):
        find_route(recorded, 6)


def test_a_step_comes_again_with_its_place_in_the_run(recorded, config):
    """Masks of images follow from the step, some weights from how far the run is."""

    class Scored(Exception):
        pass

    def score(given: Experience) -> Experience:
        raise Scored(given.step, given.progress)

    steps = object.__new__(ReplayedRun)  # without its policy
    steps._route = find_route(recorded, 3)
    steps._config = config
    steps._world = SimpleNamespace(is_main=True)
    steps._prompts = PROMPTS
    steps._learner = SimpleNamespace(score=score)
    with pytest.raises(Scored) as found:
        steps.step(3)
    assert found.value.args == (3, 3 / config.trainer.num_steps)


@pytest.mark.parametrize(
    ("step", "after", "words"),
    [
        (9, None, r"--step 9: the record of .* has steps 2, 3, 4, 5, 6"),
        (2, None, r"--step 2: .*all from a checkpoint on.*weights of steps 0, 2, 4"),
        (5, 3, r"--after 3: .* no whole checkpoint of that step; it has 0, 2, 4"),
        (3, 4, r"--step 3: .*and --after 4 was asked for"),
    ],
)
def test_a_step_without_a_way_to_it_is_refused(recorded, step, after, words):
    with pytest.raises(ValueError, match=words):
        find_route(recorded, step, after)


def test_runs_without_a_record_and_damaged_ones_are_told(run, recorded, tmp_path):
    with pytest.raises(ValueError, match="no folder of a run"):
        find_route(tmp_path, 1)
    path = record_path(recorded / FOLDER, 3)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=re.escape(f"{path}: is damaged")):
        find_route(recorded, 3)
    shutil.rmtree(recorded / FOLDER)
    with pytest.raises(ValueError, match=r"not recorded.*source\.schedule=free"):
        find_route(recorded, 3)
