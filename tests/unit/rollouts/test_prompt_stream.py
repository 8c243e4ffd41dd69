"""Prompts by number: those of a loader that takes a step at a time, also after a resume."""

import pytest

from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.scheduling.end_of_step import Admission
from megatron_rl.types import Prompt
from tests.unit.trainer.fakes import prompts

PROMPTS = prompts(5)


def loader() -> PromptLoader:
    return PromptLoader(PROMPTS, seed=3, shuffle=True)


def asked(stream: PromptStream, step: int, number: int) -> Prompt:
    """Of a run whose steps take seven prompts."""
    admission = Admission(step, (), lambda place: 7 * step + place)
    return stream.prompt(number, stream.visit(number, admission))


def test_steps_are_those_of_a_loader_with_its_distinct_uids():
    plain = loader()
    steps = [plain.take(7) for _ in range(4)]  # more than an epoch: some come twice
    stream = PromptStream(loader())
    found = [asked(stream, number // 7, number) for number in reversed(range(28))]
    assert found[::-1] == [prompt for step in steps for prompt in step]
    assert any("#2" in prompt.uid for prompt in found)


def test_a_prompt_that_is_open_already_gets_a_uid_that_no_other_has():
    """Three prompts without shuffling; four are open, then five, of which two are from before."""
    stream = PromptStream(PromptLoader(prompts(3), seed=1, shuffle=False))

    def uids(admission: Admission, *groups: int) -> list[str]:
        return [stream.prompt(one, stream.visit(one, admission)).uid for one in groups]

    assert uids(Admission(0, (), range(9).__getitem__), 3, 0, 1, 2) == ["p0#2", "p0", "p1", "p2"]
    second = Admission(1, (2, 3), range(4, 9).__getitem__)
    assert uids(second, 2, 3, 4, 5) == ["p2", "p0#2", "p1", "p2#2"]
    stream.forget(1, below=3)
    third = Admission(2, (3, 4, 5), range(6, 9).__getitem__)
    assert uids(third, 6) == ["p0"], "the second one alone is open"
    other = PromptStream(PromptLoader(prompts(3), seed=1, shuffle=False))
    other.restore(stream.state())
    assert other.visit(6, third) == 1 and other.visit(3) == 2


def test_a_restored_stream_continues_with_what_may_still_be_asked_for():
    stream = PromptStream(loader())
    expected = [stream.prompt(number) for number in range(20)]
    stream.forget(0, below=6)
    other = PromptStream(loader())
    other.restore(stream.state())
    assert [other.prompt(number) for number in range(6, 20)] == expected[6:]
    assert other.state() == stream.state()
    with pytest.raises(ValueError, match="taken with prompts"):
        PromptStream(PromptLoader(PROMPTS[:4], seed=3, shuffle=True)).restore(stream.state())


def test_a_stream_that_gave_nothing_begins_at_the_beginning():
    stream = PromptStream(loader())
    other = PromptStream(loader())
    other.restore(stream.state())
    assert other.prompt(0) == stream.prompt(0)
