"""Prompts by number: those of a loader that takes a step at a time, also after a resume."""

from dataclasses import replace

import pytest

from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.prompt_stream import OpenGroup, PromptStream
from megatron_rl.types import Completion, Score, VersionSpan
from tests.unit.trainer.fakes import prompts

PROMPTS = prompts(5)


def loader() -> PromptLoader:
    return PromptLoader(PROMPTS, seed=3, shuffle=True)


def test_steps_are_those_of_a_loader_with_its_distinct_uids():
    plain = loader()
    steps = [plain.take(7) for _ in range(4)]  # more than an epoch: some come twice
    stream = PromptStream(loader())
    asked = [stream.of_step(7 * (number // 7), number) for number in reversed(range(28))]
    assert asked[::-1] == [prompt for step in steps for prompt in step]
    assert any("#2" in prompt.uid for prompt in asked)


def test_a_restored_stream_goes_on_with_what_may_still_be_asked_for():
    stream = PromptStream(loader())
    expected = [stream.of_step(number, number) for number in range(20)]
    stream.forget_below(6)
    other = PromptStream(loader())
    other.restore(stream.state())
    assert [other.of_step(number, number) for number in range(6, 20)] == expected[6:]
    assert other.state() == stream.state()
    with pytest.raises(ValueError, match="taken with prompts"):
        PromptStream(PromptLoader(PROMPTS[:4], seed=3, shuffle=True)).restore(stream.state())


def test_a_stream_that_gave_nothing_begins_at_the_beginning():
    stream = PromptStream(loader())
    other = PromptStream(loader())
    other.restore(stream.state())
    assert other.of_step(0, 0) == stream.of_step(0, 0)


@pytest.mark.parametrize(
    "scores", [None, [Score(1.5, True, {"accuracy": 1.0}, "7"), Score(0.0, False)]]
)
def test_a_group_comes_back_bit_for_bit(scores):
    spans = (VersionSpan(3, 1), VersionSpan(4, 2))
    completions = {
        1: Completion((5, 6), (-0.1, -1e-30), True, 3, spans),
        0: Completion((), (), False, 4),
    }
    group = OpenGroup(PROMPTS[0], 6, completions, scores)
    back = OpenGroup.restored(PROMPTS[0], 6, group.state())
    assert back == replace(group) and back.in_order() == [completions[0], completions[1]]
