"""Which weights and settings a sample takes, and how answers are shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.evaluation.evaluation_source import Weights
from megatron_rl.evaluation.sample import find_sample, shown
from megatron_rl.rollouts.rows.experience import Passage, Response
from megatron_rl.types import Completion, Prompt, Score


def checkpoint(folder, step):
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"info": {}, "files": {}}))
    return path


def test_a_run_gives_its_newest_checkpoint_else_its_export_and_its_settings(run):
    source = find_sample(run, [], 2)
    assert source.weights == (Weights(0, run / "export"),)
    assert source.config.model.path == str(run / "export")
    assert source.config.rollout.max_prompt_tokens == 7
    assert source.config.data.prompt_suffix == " think"
    assert source.config.rollout.tensor == 2
    checkpoint(run, 10)
    newest = checkpoint(run, 20)
    source = find_sample(run, ["rollout.max_prompt_tokens=9"], 1)
    assert source.weights == (Weights(20, newest),) and source.weights[0].is_checkpoint
    assert source.config.rollout.max_prompt_tokens == 9


def test_a_run_may_be_asked_another_data_set(run):
    found = find_sample(run, ["data=mathvista", "data.eval=testmini.parquet"], 1).config.data
    assert found.columns.prompt == "query" and found.eval == "testmini.parquet"
    assert found.train == ()


def test_one_checkpoint_and_an_export_are_taken_with_the_settings_of_their_run(run):
    older = checkpoint(run, 10)
    checkpoint(run, 20)
    assert find_sample(older, [], 1).weights == (Weights(10, older),)
    exported = find_sample(run / "export", [], 1)
    assert exported.weights == (Weights(0, run / "export"),)
    assert exported.config.data.prompt_suffix == " think"


def test_a_run_that_is_older_than_some_keys_has_their_defaults(run, caplog):
    saved = json.loads((run / "config.json").read_text())
    del saved["reward"]["server"], saved["reward"]["num_tries"], saved["profile"]
    (run / "config.json").write_text(json.dumps(saved))
    reward = find_sample(run, ["reward.timeout_s=7.0"], 1).config.reward
    assert (reward.server, reward.num_tries, reward.timeout_s) == (None, 1, 7)
    assert "older than these keys" in caplog.text and "reward.server = null" in caplog.text
    del saved["data"]["eval"]
    (run / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"1 problem .*\n.*data\.eval: no value"):
        find_sample(run, [], 1)


def test_several_answers_are_not_greedy_unless_told(run):
    several = "evaluation.responses_per_prompt=2"
    assert find_sample(run, [], 1).config.evaluation.temperature == 0
    assert find_sample(run, [several], 1).config.evaluation.temperature == 1
    told = find_sample(run, [several, "evaluation.temperature=0.0"], 1)
    assert told.config.evaluation.temperature == 0


def test_a_model_of_its_own_gets_the_defaults_within_its_positions(run):
    source = find_sample(run.parent / "model", ["rollout.dtype=float32"], 1)
    rollout = source.config.rollout
    assert rollout.max_prompt_tokens + rollout.max_response_tokens == 512


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no such folder; give a HF directory"),
        ("empty", "neither a checkpoint nor a HF directory"),
        ("stray/step_000001", "outside of its run's folder, so its model is not known"),
    ],
)
def test_what_is_no_source_says_so(run, name, message):
    (run.parent / "empty").mkdir()
    checkpoint(run.parent / "stray", 1)
    (run.parent / "stray" / "checkpoints" / "step_000001").rename(
        run.parent / "stray" / "step_000001"
    )
    with pytest.raises(ValueError, match=message):
        find_sample(run.parent / name, [], 1)


def test_a_checkpoint_that_is_not_what_was_written_is_refused(run):
    path = checkpoint(run, 10)
    (path / "shard").write_bytes(b"1234")
    files = {"shard": {"bytes": 4, "xxh3": "0"}}
    (path / "manifest.json").write_text(json.dumps({"info": {}, "files": files}))
    for source in (run, path):
        with pytest.raises(ValueError, match="shard is not what was written"):
            find_sample(source, [], 1)


@pytest.mark.parametrize(
    "wrong",
    [
        "evaluation.responses_per_prompt=0",
        "evaluation.num_prompts=-1",
        "evaluation.temperature=-1.0",
        "rollout.max_response_tokens=0",
    ],
)
def test_options_out_of_range_are_refused(run, wrong):
    key = wrong.partition("=")[0].replace(".", r"\.")
    with pytest.raises(ConfigError, match=key):
        find_sample(run, [wrong], 1)


def test_wrong_overrides_name_the_key(run):
    with pytest.raises(
        ConfigError, match=r"rollout\.dtyp: unknown key; did you mean rollout\.dtype"
    ):
        find_sample(run, ["rollout.dtyp=float32"], 1)
    with pytest.raises(ConfigError, match="rollout is a section here"):
        find_sample(run, ["rollout=vllm_cpu"], 1)
    with pytest.raises(ConfigError, match="not an override"):
        find_sample(run, ["rollout.dtype"], 1)


def response(text: str, *, correct: bool, truncated: bool = False) -> Response:
    prompt = Prompt("p:1", (1, 2), "7", "s", text="What is\n3 + 4?\n")
    return Response(
        prompt,
        Completion((1, 2, 3), (0.0, 0.0, 0.0), truncated, 0),
        text,
        Score(float(correct), correct),
        [Passage(True, text)],
    )


def test_turns_and_what_was_appended_stand_apart():
    passages = [Passage(True, "call"), Passage(False, "12"), Passage(True, "7")]
    lines = shown([[replace(response("", correct=True), passages=passages)]], scored=True)
    assert lines.splitlines()[3:6] == ["answer:    call", "appended:  12", "answer:    7"]


def test_prompt_answers_and_verdicts_stand_below_each_other():
    group = [response("7", correct=True), response("8\nno, 9", correct=False, truncated=True)]
    assert shown([group], scored=True).splitlines() == [
        "[1/1] p:1",
        "prompt:    What is",
        "           3 + 4?",
        "answer:    7",
        "           (3 tokens) correct, reward 1",
        "answer:    8",
        "           no, 9",
        "           (3 tokens, cut at the limit) wrong, reward 0",
        "expected:  7",
        "",
        "1 of 2 answers are correct",
    ]
    unjudged = replace(group[0], score=Score(0.0, False, problem="its worker died"))
    lines = shown([[*group, unjudged]], scored=True).splitlines()
    assert "           (3 tokens) no verdict: its worker died" in lines
    assert lines[-1] == "1 of 2 answers are correct; 1 more have no verdict"
    assert shown([group[:1]], scored=False).splitlines()[3:] == [
        "answer:    7",
        "           (3 tokens)",
    ]
