"""Responses of several turns, token for token: what is sampled stays, what is appended is rendered
once, and the engine's logprobs belong to what the policy will read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl import plugins
from megatron_rl.config.schema import Config
from megatron_rl.protocols import NOTHING
from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.values import score
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.environments import turns
from megatron_rl.rollouts.environments.base import Done, EnvironmentSettings, environment_class
from megatron_rl.rollouts.environments.outcomes import appended, turns_of
from megatron_rl.rollouts.environments.turns import Turns, turns_of_run
from megatron_rl.rollouts.rows.exchange import on_main
from megatron_rl.rollouts.rows.experience import Responses, experience_of
from megatron_rl.rollouts.store import saved_score
from megatron_rl.types import APPENDED, Completion, Prompt, Sampling, Score, VersionSpan
from tests.engines import Answering
from tests.launch import REPO
from tests.unit.config.made_configs import config
from tests.unit.data.toy import character_tokenizer
from tests.unit.trainer.runs import DISPLAY, WORLD

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}@{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCRIPT = {  # what the model says in each turn, by the number of the response
    0: ("four",),
    1: ("5", "four"),
    2: ("5", "6", "four"),
    3: ("5", "6", "7", "8"),
    4: ("5", "so long " * 10),
}
STOPS = (";", "#")  # with which a turn ends, without the end of a message
PLUGIN = REPO / "examples/plugins/second_try.py"
SETTINGS = EnvironmentSettings("second_try", (), 1.0, 1 << 30, 2000, "bubblewrap")


def logprob(prefix: Sequence[int], token: int) -> float:
    """What an engine might say, of all that it has read."""
    return -((sum((place + 1) * each for place, each in enumerate(prefix)) + token) % 97) / 97


class Talking(Answering):
    """Says ``SCRIPT``, turn by turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.seeds: list[int | None] = []
        self._tokenizer = tokenizer

    def submit(
        self,
        prompt: Prompt,
        responses: Sequence[int],
        sampling: Sampling,
        so_far: Mapping[int, Sequence[int]] = NOTHING,
    ) -> list[int]:
        ids = []
        end = self._tokenizer.eos_token_id
        for number in responses:
            read = list(so_far.get(number, ()))
            # A turn of the model, then one of the user: two ends for each that is over.
            turn = read.count(end) // 2
            text = SCRIPT[number][turn]
            said = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            said += [end] * (text[-1] not in STOPS)
            room = sampling.max_response_tokens - len(read)
            is_cut = len(said) > room
            said = said[:room]
            whole = [*prompt.token_ids, *read]
            logprobs = [logprob([*whole, *said[:at]], each) for at, each in enumerate(said)]
            ids.append(len(self.begun))
            self.begun.append((prompt.uid, number))
            self.seeds.append(sampling.seed)
            self._open.append((ids[-1], Completion(said, logprobs, is_cut, 3)))
        return ids


class NotAsked:
    def score(
        self, prompts: Sequence[Prompt], texts: list[str], cut: Sequence[bool]
    ) -> list[Score]:
        assert not texts, "the environment gives the reward"
        return []


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(TEMPLATE)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", [])
    plugins.load_plugins([str(PLUGIN)])


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment without workers, which take seconds to start."""
    monkeypatch.setattr(Turns, "_replies", lambda self, items: [replied(*each) for each in items])
    monkeypatch.setattr(turns, "WorkerPool", lambda *_, **__: object())


def replied(task: Task, seed: int, texts: Sequence[str]) -> dict[str, Any]:
    environment = environment_class("second_try")(SETTINGS)
    environment.start(task, seed)
    said = [environment.step(text, seed) for text in texts][-1]
    if isinstance(said, Done):
        return {"done": score({"reward": said.reward, **said.parts})}
    return {"messages": [{"role": "user", "content": said}]}


def settings(*more: str) -> Config:
    return config("precision=fp32", "rollout=vllm_cpu", "env.name=second_try", *more)


def made(tokenizer: PreTrainedTokenizerFast, *more: str) -> Turns:
    found = turns_of_run(settings(*more), tokenizer)
    assert found is not None
    return found


def sampled(
    tokenizer: PreTrainedTokenizerFast, *more: str, limit: int = 90
) -> tuple[Responses, Talking]:
    """Of one prompt, those of ``SCRIPT``; and the engine that said them."""
    ids = tokenizer("<user>two + two@<assistant>", add_special_tokens=False)["input_ids"]
    engine = Talking(tokenizer)
    sampler = LaunchSampler(
        engine, NotAsked(), tokenizer.decode, WORLD, DISPLAY, made(tokenizer, *more)
    )
    prompt = Prompt("p1", tuple(ids), "four", "toy")
    return sampler.run([prompt], Sampling(len(SCRIPT), limit, seed=5), "test"), engine


def problems(responses: Responses) -> list[str]:
    """What the policy would be trained on and should not: of each token that counts as sampled,
    another logprob than the engine had for it behind what the policy reads before it."""
    found = []
    tokens = responses.tokens
    for row, prompt in enumerate(responses.prompts):
        (ids,), (logprobs,), (flags,) = (
            tokens.take([row]).views(name) for name in ("token_ids", "sampler_logprobs", "sampled")
        )
        for at, is_sampled in enumerate(flags):
            right = logprob([*prompt.token_ids, *ids[:at].tolist()], int(ids[at]))
            if is_sampled and abs(right - logprobs[at]) > 1e-6:
                found.append(f"row {row}, token {at}")
    return found


@pytest.mark.usefixtures("registered")
def test_three_turns_token_for_token(tokenizer: PreTrainedTokenizerFast) -> None:
    responses, engine = sampled(tokenizer)
    assert problems(responses) == []
    assert len(set(engine.seeds)) == 3, "one for each turn"
    everything = on_main(responses, range(5), tokenizer.decode, WORLD)
    assert everything is not None
    assert [one.completion.num_sampled for one in everything] == [5, 7, 9, 6, 58]
    assert everything[1].completion.spans == ((3, 2), (APPENDED, 34), (3, 39))
    first, second = "<user>Wrong. 2 left.@<assistant>", "<user>Wrong. 1 left.@<assistant>"
    assert [one.text for one in everything] == [
        "four@",
        f"5@{first}four@",
        f"5@{first}6@{second}four@",
        f"5@{first}6@{second}7@",
        f"5@{first}{'so long ' * 7}",
    ]
    assert everything[1].passages == [(True, "5@"), (False, first), (True, "four@")]
    flags = [flags.tolist() for flags in responses.tokens.views("sampled")]
    assert flags[2] == [True] * 2 + [False] * 32 + [True] * 2 + [False] * 32 + [True] * 5
    assert responses.num_appended is not None
    assert responses.num_appended.tolist() == [0, 32, 64, 64, 32]
    assert responses.sampled_lengths.tolist() == [5, 7, 9, 6, 58]
    assert experience_of(responses).loss_tokens.tolist() == [5, 7, 9, 6, 58]
    assert [score.reward for score in responses.scores] == pytest.approx([1, 1 / 2, 1 / 3, 0, 0])
    assert [score.environment["turns"] for score in responses.scores] == [1, 2, 3, 3, 2]
    ends = [
        next(end for end, is_so in score.environment.items() if end[:5] == "ended" and is_so)
        for score in responses.scores
    ]
    assert ends == ["ended_by/done"] * 4 + ["ended_by/tokens"]
    assert responses.truncated.tolist() == [False] * 4 + [True]


@pytest.mark.usefixtures("registered", "in_this_process")
def test_a_text_of_rollout_stop_ends_a_turn(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the message is appended, as its template has it; an end token of the model that
    ends no message ends the response."""
    monkeypatch.setitem(SCRIPT, 1, ("5;", "four"))
    monkeypatch.setitem(SCRIPT, 2, ("5", "6;", "four"))
    monkeypatch.setitem(SCRIPT, 3, ("5", "6#"))
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("#")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    more = ("rollout.stop=[';']", f"model.path={tmp_path}")
    responses, _ = sampled(tokenizer, *more)
    assert problems(responses) == []
    everything = on_main(responses, range(5), tokenizer.decode, WORLD)
    assert everything is not None
    first, second = "<user>Wrong. 2 left.@<assistant>", "<user>Wrong. 1 left.@<assistant>"
    texts = [f"5;@{first}four@", f"5@{first}6;@{second}four@", f"5@{first}6#"]
    assert [one.text for one in everything[1:4]] == texts
    flags = responses.tokens.views("sampled")[1].tolist()
    assert flags == [True] * 2 + [False] * 33 + [True] * 5
    assert [score.reward for score in responses.scores[1:4]] == pytest.approx([1 / 2, 1 / 3, 0])
    found = [score.environment for score in responses.scores[1:4]]
    assert [one["ended_by/done"] for one in found] == [1, 1, 0] and found[2]["ended_by/stop"] == 1
    assert not responses.truncated[1:4].any()


@pytest.mark.usefixtures("registered")
def test_a_pause_within_a_turn_ends_none(tokenizer: PreTrainedTokenizerFast) -> None:
    """As of a partial rollout, which has no rollout.stop."""
    paused = Completion((5, 6), (0.0, 0.0), False, 3)
    assert not made(tokenizer).asks(paused)
    assert made(tokenizer, "rollout.stop=[';']").asks(paused)


def shifted(completion: Completion, tokens: Sequence[int]) -> Completion:
    """Planted: the last token that was sampled counts as appended, the last appended as sampled."""
    whole = appended(completion, tokens)
    *before, last, end = whole.spans
    moved = [VersionSpan(last.version, last.end - 1), VersionSpan(APPENDED, end.end - 1)]
    return Completion(
        whole.token_ids,
        whole.sampler_logprobs,
        False,
        whole.weight_version,
        (*before, *moved, VersionSpan(last.version, end.end)),
    )


@pytest.mark.usefixtures("registered", "in_this_process")
@pytest.mark.parametrize(
    ("place", "bug"),
    [
        ("megatron_rl.rollouts.backends.replica.appended", shifted),
        # Planted: what is appended counts as sampled.
        ("megatron_rl.rollouts.rows.exchange.APPENDED", -99),
    ],
)
def test_a_wrong_mask_is_found(
    place: str,
    bug: object,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, bug)
    assert problems(sampled(tokenizer, "env.max_turns=2")[0])


@pytest.mark.usefixtures("registered", "in_this_process")
def test_a_token_that_was_encoded_again_is_found(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the engine is given other ids for the text of the turns before."""
    plain = Talking.submit

    def encoded_again(self: Talking, *asked: Any) -> list[int]:
        *rest, so_far = asked
        changed = {number: [ids[0] + 1, *ids[1:]] for number, ids in so_far.items()}
        return plain(self, *rest, changed)

    monkeypatch.setattr(Talking, "submit", encoded_again)
    assert problems(sampled(tokenizer)[0])


@pytest.mark.usefixtures("registered", "in_this_process")
@pytest.mark.parametrize(
    ("more", "limit", "lengths", "end"),
    [
        (("env.max_turns=2",), 90, [5, 39, 36, 36, 90], "turns"),
        # What is appended, and one token more, must fit.
        ((), 34, [5, 2, 2, 2, 2], "tokens"),
        (("env.max_seconds=1e-9",), 90, [5, 2, 2, 2, 2], "seconds"),
    ],
)
def test_limits_end_a_response_as_truncated(
    more: Sequence[str],
    limit: int,
    lengths: list[int],
    end: str,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    responses, _ = sampled(tokenizer, *more, limit=limit)
    assert responses.lengths.tolist() == lengths
    assert problems(responses) == []
    (third, fourth) = responses.scores[2:4]
    assert third.environment[f"ended_by/{end}"] == fourth.environment[f"ended_by/{end}"] == 1
    assert responses.truncated.tolist()[2:] == [True] * 3
    assert third.reward == 0 and third.problem is None


@pytest.mark.usefixtures("registered", "in_this_process")
@pytest.mark.parametrize("on_problem", ["exclude", "zero", "stop"])
def test_an_environment_that_fails_excludes_its_response(
    on_problem: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCRIPT, 1, ("x" * 30,))
    monkeypatch.setattr(Turns, "_replies", lambda self, items: [failing(item) for item in items])
    more = f"reward.on_problem={on_problem}"
    if on_problem == "stop":
        with pytest.raises(ValueError, match="environment of p1 failed: RuntimeError: broken"):
            sampled(tokenizer, more)
        return
    responses, _ = sampled(tokenizer, more)
    failed = [score.problem for score in responses.scores]
    assert (
        failed == [None, "RuntimeError: broken" if on_problem == "exclude" else None] + [None] * 3
    )
    assert responses.scores[1].environment["ended_by/problem"] == 1
    assert responses.scores[1].parts.get("verifier_problem", 0) == (on_problem == "zero")


def failing(item: tuple[Task, int, Sequence[str]]) -> dict[str, Any]:
    """What a worker says of a response that is over, or of one that broke it."""
    return {"problem": "RuntimeError: broken"} if item[2][0][0] == "x" else {"done": {}}


@pytest.mark.usefixtures("registered")
def test_what_is_wrong_is_found_before_prompts_are_read(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assert turns_of_run(config(), tokenizer) is None
    for more, words in {
        "env.name=second_tri": "no such environment.*second_try",
        "data.apply_chat_template=false": "data.apply_chat_template = false",
    }.items():
        with pytest.raises(ValueError, match=words):
            turns_of_run(settings(more), tokenizer)
    (tmp_path / "no_hints.py").write_text("def plain(x):\n    return x\n")
    with pytest.raises(ValueError, match=r"env\.tools: .*plain.* has no schema"):
        turns_of_run(config("env=tools", f"env.tools=[{tmp_path}/no_hints.py:plain]"), tokenizer)


def test_the_model_is_shown_its_tools(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    assert turns_of_run(config("env=tools"), character_tokenizer(TEMPLATE)) is not None
    assert "shows no tools" in caplog.text
    caplog.clear()
    shows = "{% for t in tools %}[{{ t.function.name }}: {{ t.function.parameters.required }}]"
    tokenizer.chat_template = shows + "{% endfor %}" + TEMPLATE
    assert turns_of_run(config("env=tools"), tokenizer) is not None
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    assert text == "[calculator: ['expression']]<user>1@" and not caplog.text


def test_turns_of_a_score_are_not_in_its_checkpoint_where_there_is_one_turn() -> None:
    assert "environment" not in saved_score(Score(1.0, True))
    found = saved_score(Score(1.0, True, environment={"turns": 2.0}))
    assert Score(**found).environment == {"turns": 2.0}


def test_turns_end_where_something_was_appended() -> None:
    one = Completion((1, 2), (0.0, 0.0), False, 0)
    assert [list(turn) for turn in turns_of(appended(one, (3,)))] == [[1, 2], []]
