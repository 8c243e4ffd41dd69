"""Sampling hooks that remember right responses: what they want by hand, which rows come of it, and
that a checkpoint holds what they know."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoints.safe_load import load_plain
from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.reading import Data
from megatron_rl.hooks import Ask, Resample, SamplingHook, ScoredGroup
from megatron_rl.hooks.replay import Ar3po, Exgrpo
from megatron_rl.hooks.sampling import Ampo
from megatron_rl.reporting.metrics import metric
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.demonstrations import DEMONSTRATED, Demonstrations
from megatron_rl.rollouts.hooks.resampling import Resampling, right_responses
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.trainer.build import build_demonstrations
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.types import GUIDES, Completion, Prompt, Sampling
from tests.rollout_sources import rollouts_of, training_job
from tests.unit.rollouts.test_sampling_hooks import PROMPTS, RightOnes, Telling, group, tokens
from tests.unit.trainer.fakes import prompts
from tests.unit.trainer.runs import DISPLAY, WORLD, bandit_config, build_bandit, rows, timeless

NO_ENCODER = Demonstrations(lambda text: [])


def response(*ids: int) -> Completion:
    return Completion(ids, [-0.25] * len(ids), False, DEMONSTRATED)


def stored(hook: SamplingHook) -> Any:
    """Its state, as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(hook.state(), file)
    return load_plain(io.BytesIO(file.getvalue()), "a hook")


def test_the_stages_of_ar3po_by_hand() -> None:
    """Two a stage: the prompt without a right response has 2, 4 and 6 of them."""
    hook = Ar3po(stages=3)
    assert hook.resample(1, 0, [group(0, 0, 2), group(1, 1, 2)]).asks == [Ask(PROMPTS[0], 2, 0)]
    assert hook.resample(1, 1, [group(0, 0, 4), group(1, 1, 2)]).asks == [Ask(PROMPTS[0], 2, 0)]
    last = [group(0, 0, 6), group(1, 1, 2)]
    none = {"sampled_per_group_mean": 4, "unsolved_groups": 1, "reused_responses": 0}
    assert hook.resample(1, 2, last) == Resample([], None, {**none, "remembered_prompts": 0})
    hook.remember([(replace(PROMPTS[0], uid="p0#2"), response(4, 5))])
    reuse = hook.resample(2, 2, last)
    assert reuse.asks == [Ask(PROMPTS[0], 1, 0, [response(4, 5)], replaces=1)]
    assert reuse.metrics == {**none, "reused_responses": 1, "remembered_prompts": 1}
    assert hook.resample(2, 3, last) == Resample(), "whatever the verifier said of it"
    solved = hook.resample(3, 0, [group(1, 2, 2), group(2, 1, 2)])
    assert not solved.asks and solved.metrics["unsolved_groups"] == 0


def test_what_is_remembered_is_different_and_bounded() -> None:
    hook = Ar3po(stages=1, per_prompt=2)
    hook.remember([(PROMPTS[0], response(each)) for each in (1, 2, 2, 1, 3)])
    assert hook.known == {"p0": [response(2), response(3)]}
    drawn = [hook.resample(step, 0, [group(0, 0)]).asks[0].given[0] for step in range(64)]
    assert 16 < drawn.count(response(3)) < 48, "any of them"


def test_the_draw_of_exgrpo_by_hand() -> None:
    """Of groups of 8: weights 1 at 4 right, e^-1/2 at 3, e^-9/2 at 7; at deviation 2 the second is
    e^-1/8. Prompts of one number are alike."""

    def hook(**knobs: float) -> Exgrpo:
        made = Exgrpo(**knobs)
        made.num_right = {"a": 4, "b": 4, "c": 3, "d": 7, "gone": 4}
        made.known = {uid: [response(1)] for uid in "abcd"}
        return made

    for knobs, low in (({}, math.exp(-1 / 2)), ({"deviation": 2.0}, math.exp(-1 / 8))):
        far = math.exp(-9 / 2) if not knobs else math.exp(-9 / 8)
        drawn = [hook(**knobs).draw(step, 8, 1, set())[0] for step in range(1000)]
        shares = [drawn.count(uid) / 1000 for uid in "abcd"]
        total = 1 + low + far
        expected = [0.5 / total, 0.5 / total, low / total, far / total]
        assert shares == pytest.approx(expected, abs=0.05)
    assert sorted(hook().draw(1, 8, 9, {"b"})) == ["a", "c", "d"], "none twice"
    assert len(hook().draw(1, 8, 2, set())) == 2
    # Weights that are 0 in themselves.
    assert sorted(hook(deviation=0.01).draw(1, 8, 4, set())) == ["a", "b", "c", "d"]


def test_the_steps_of_exgrpo_by_hand() -> None:
    hook = Exgrpo(share=0.5, start=0.35)

    def step(number: int, *groups: ScoredGroup, found: tuple = ()) -> Resample:
        wanted = hook.resample(number, 0, groups)
        if not wanted.asks:
            hook.remember(found)
        return wanted

    kept = {"replayed_groups": 0, "remembered_prompts": 0, "retired_prompts": 0}
    right = ((PROMPTS[0], response(1)), (PROMPTS[1], response(1)))
    # 1 and then 2 of 8 are right, so nothing begins; then 3 of 8, after which it has.
    for number, num_right in ((1, 1), (2, 2), (3, 3)):
        assert not hook.begun
        assert step(number, group(0, 0), group(1, num_right), found=right).metrics == kept
    assert hook.begun and not hook.known, "what was right before is not remembered"
    found = (
        right[0],
        (PROMPTS[1], response(2)),
        (PROMPTS[2], response(3)),
        (PROMPTS[0], response(9)),
    )
    fourth = step(4, group(0, 2), group(1, 4), group(2, 0), found=found)
    assert not fourth.asks and hook.num_right == {"p0": 2} and hook.retired == {"p1"}
    assert hook.known == {"p0": [response(1), response(9)]}
    # Two groups may be replayed beside two; one prompt is known. Two given, and one of four fewer.
    wanted = step(5, group(3, 1), group(4, 0))
    assert wanted.asks == [Ask(PROMPTS[0], 5, given=[response(1), response(9)])]
    assert not step(5, group(0, 1), group(4, 0)).asks, "it is in the step"
    # Of the given two one counts: 1 + 1 of 4.
    hook.resample(6, 0, [group(3, 1), group(4, 0)])
    after = hook.resample(6, 1, [group(3, 1), group(4, 0), group(0, 3, 5)])
    assert not after.asks and after.keep is None and after.metrics["replayed_groups"] == 1
    assert hook.num_right == {"p0": 2, "p3": 1}
    hook.remember([(PROMPTS[3], response(5))])
    other = Exgrpo(share=0.5, start=0.35)
    other.restore(stored(hook), PROMPTS)
    for each in (hook, other):
        # p0 and p3, in any order; all five of p0 are right, which retires it.
        asks = each.resample(7, 0, [group(5, 0), group(6, 0)]).asks
        assert sorted(ask.prompt.uid for ask in asks) == ["p0", "p3"]
        of_asks = [group(0, 5, 5) if ask.prompt.uid == "p0" else group(3, 1) for ask in asks]
        each.resample(7, 1, [group(5, 0), group(6, 0), *of_asks])
        each.remember([(PROMPTS[0], response(8))])
        assert set(each.known) == {"p3"} and each.retired == {"p0", "p1"}
    assert torch.equal(*[torch.tensor(each.num_right["p3"]) for each in (hook, other)])


def rollouts(
    reward: RightOnes, num_kept: int = 0, stream: Sequence[Prompt] = PROMPTS, **hooks: SamplingHook
) -> Rollouts:
    """Four of eight prompts a step, two responses each, numbered from 1."""
    sampler = LaunchSampler(Telling(), reward, lambda ids: " ".join(map(str, ids)), WORLD, DISPLAY)
    job = training_job(
        PromptLoader(stream, seed=1, shuffle=False),
        Sampling(2, 4, top_k=num_kept, with_kept=num_kept > 0),
        seed=1,
        prompts_per_step=4,
        hooks=Resampling(hooks, PROMPTS),
        demonstrations=NO_ENCODER,
    )
    return rollouts_of(sampler, job)


def test_a_right_response_takes_the_place_of_a_wrong_one() -> None:
    """Step 1: one of each two is right. Step 2: none of 9 to 16, nor of the second stage's 17 to
    24, and nothing is known of these prompts. Step 3: p0's 25, 26 and then 33, 34 are wrong."""
    reward = RightOnes(1, 3, 5, 7, 28, 30, 32)
    whole = rollouts(reward, ar3po=Ar3po())
    first, second, third = (whole.collect(step) for step in (1, 2, 3))
    assert first.hook_metrics["hook/ar3po/unsolved_groups"] == 0
    assert second.hook_metrics["hook/ar3po/sampled_per_group_mean"] == 4
    assert second.hook_metrics["hook/ar3po/reused_responses"] == 0
    assert all(metric(key) for key in third.hook_metrics)
    responses = third.responses
    assert [ids[3] for ids in tokens(third)] == [25, 26, 33, 1, 27, 28, 29, 30, 31, 32]
    assert third.group_ids.tolist() == [0] * 4 + [1] * 2 + [2] * 2 + [3] * 2
    assert third.correct.tolist() == [number in (3, 5, 7, 9) for number in range(10)]
    assert responses.is_demonstration.tolist() == [row == 3 for row in range(10)]
    assert third.dropped_tokens == 4 and not responses.prompts[3].extra
    assert (responses.tokens.columns["sampler_logprobs"] == -0.5).all(), "as it was sampled"
    found = right_responses(responses, lambda mine: [mine])
    new = [(prompt.uid, one.token_ids[3]) for prompt, one in found]
    assert new == [("p1", 28), ("p2", 30), ("p3", 32)], "what was given is none"
    # The same again of a run that continues.
    parts = rollouts(reward, ar3po=Ar3po())
    for step in (1, 2):
        parts.collect(step)
    again = rollouts(RightOnes(1, 4, 6, 8), ar3po=Ar3po())
    again.restore(parts.state())
    # Its engine counts anew: 1 and 2 are wrong for p0 but for the response that it remembers.
    found = [ids[3] for ids in tokens(again.collect(3))]
    assert found[:2] == [1, 2] and 1 not in found[2:]


def test_guides_take_the_place_of_the_last_wrong_ones() -> None:
    """Of 1 to 8 the third is right, so that of p0, p1, p2 and p3 the second group is left alone."""
    guides = [response(3, 7, 7, 40), response(3, 7, 7, 41)]
    bring = [replace(each, extra={GUIDES: guides}) for each in PROMPTS]
    found = rollouts(RightOnes(3, 41), stream=bring, ampo=Ampo(replaces=1)).collect(1)
    assert [ids[3] for ids in tokens(found)] == [1, 40, 41, 3, 4, 5, 40, 41, 7, 40, 41]
    assert found.group_ids.tolist() == [0] * 3 + [1] * 2 + [2] * 3 + [3] * 3
    given = [row in (1, 2, 6, 7, 9, 10) for row in range(11)]
    assert found.responses.is_demonstration.tolist() == given
    assert found.correct.tolist() == [row in (2, 3, 7, 10) for row in range(11)]
    assert found.hook_metrics["hook/ampo/guided_groups"] == 3


def test_what_the_sampler_kept_is_remembered_too() -> None:
    hook = Ar3po(stages=1)
    rollouts(RightOnes(1), num_kept=2, ar3po=hook).collect(1)
    assert [list(one.kept or ()) for one in hook.known.pop("p0")] == [[-1] * 8]
    kept = Completion((4, 5), (-0.5, -0.25), False, DEMONSTRATED, kept=(4, 9, 5, -1))
    hook.remember([(PROMPTS[0], kept)])
    other = Ar3po(stages=1)
    other.restore(stored(hook), PROMPTS)
    (ask,) = other.resample(1, 0, [group(0, 0)]).asks
    assert ask.given == [kept] and ask.given[0].spans == kept.spans


def bandit(folder: Path, method: str, *overrides: str, run: str = "run") -> Trainer:
    """Four of 16 prompts a step; one of four tokens is right."""
    given = {"train": prompts(16), "demonstrations": NO_ENCODER, "run": run}
    return build_bandit(folder, *overrides, method=method, **given)


def test_exgrpo_trains_one_of_the_responses_that_are_given(tmp_path: Path) -> None:
    hook = ("rollout_hooks.exgrpo.start=0.0", "rollout_hooks.exgrpo.share=0.6")
    trainer = bandit(tmp_path, "exgrpo", *hook)
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    num_given = []
    for step in (1, 2, 3):
        experience = trainer.source.next(step)
        with trainer.source.training():
            experience = trainer.learner.score(experience)
            metrics = trainer.learner.update(step, experience)
        trainer.source.publish(step)
        given = torch.from_numpy(experience.responses.is_demonstration)
        credit = experience.credit
        assert credit is not None
        for which in range(experience.responses.num_groups):
            of_group = experience.group_ids == which
            num_given.append(int((of_group & given).sum()))
            assert int((of_group & credit.keep).sum()) == 8, "one given and 7 sampled, or 8 sampled"
            assert int((of_group & given & credit.keep).sum()) == min(1, num_given[-1])
            assert abs(float(credit.advantages[of_group].sum())) < 1e-5
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["mismatch/logprob_abs_diff_max"] < 1e-6, "of what was sampled in the step"
    assert max(num_given) > 1 and len(num_given) > 12


def test_the_method_has_to_know_what_is_given(tmp_path: Path) -> None:
    """Prompts need not carry any response then, but those that do are looked at."""
    config = bandit_config(tmp_path, ["rollout_hooks.ar3po.stages=3"])
    tokenizer = Mock(spec=PreTrainedTokenizerBase, eos_token_id=1)

    def built(method: str, given: Any = None) -> tuple[Data, Demonstrations | None]:
        extra = {} if given is None else {"given_responses": given}
        data = Data((), (), [replace(PROMPTS[0], extra=extra)])
        return build_demonstrations(config, load_method(method), data, tokenizer, WORLD)

    for method in ("ar3po", "exgrpo"):
        assert built(method)[1] is not None
        data, _ = built(method, [[5, 1]])
        assert data.train_prompts[0].extra == {"given_responses": [[5, 1]]}
    with pytest.raises(ValueError, match=r"rollout_hooks\.ar3po: .* method = grpo .* choose one"):
        built("grpo")
    with pytest.raises(ValueError, match=r"extra\.given_responses = 'a'; give a list"):
        built("ar3po", "a")
    config = bandit_config(tmp_path, ["rollout_hooks.ampo={}"])
    (prompt,) = built("ampo", [[5, 1]])[0].train_prompts
    assert [list(each.token_ids) for each in prompt.extra[GUIDES]] == [[5, 1]] and len(
        prompt.extra
    ) == 1
    with pytest.raises(ValueError, match=r"rollout_hooks\.ampo: .* method = dr_grpo .* choose one"):
        built("dr_grpo", [[5, 1]])
    with pytest.raises(ValueError, match=r"no prompt has extra\.given_responses"):
        built("ampo")


@pytest.mark.parametrize("method", ["ar3po", "exgrpo"])
def test_a_run_continues_with_what_it_knows(tmp_path: Path, method: str) -> None:
    knobs = {"ar3po": "stages=2", "exgrpo": "start=0.0"}
    few = ("batch.responses_per_prompt=2", f"rollout_hooks.{method}.{knobs[method]}")

    def trained(run: str, num_steps: int) -> list[dict]:
        trainer = bandit(tmp_path, method, *few, f"trainer.num_steps={num_steps}", run=run)
        trainer.run()
        return [
            {key: value for key, value in timeless(row).items() if not key.startswith("eval/")}
            for row in rows(trainer)
        ]

    whole = trained("whole", 10)
    used = {"ar3po": "reused_responses", "exgrpo": "replayed_groups"}
    assert sum(row.get(f"hook/{method}/{used[method]}", 0) for row in whole[6:]) > 0
    trained("parts", 5)
    assert trained("parts", 10) == whole
