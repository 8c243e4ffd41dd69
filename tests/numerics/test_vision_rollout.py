"""A real engine with images, beside transformers: tests/numerics/seeing_engine_worker.py."""

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import verdict

WORKER = Path(__file__).parent / "seeing_engine_worker.py"
CASES = (
    "sampled_logprobs_are_those_of_transformers",
    "image_tokens_in_a_response_are_words",
    "a_response_goes_on_behind_its_images_and_tokens",
    "scores_of_prompts_with_images",
    "refused",
    "another_processor_is_noticed",
    "a_gathered_sync_leaves_nothing_of_the_old_tower",
    "a_planned_sync_leaves_nothing_of_the_old_tower",
    "an_engine_without_files_sees_after_a_sync",
    "the_logprob_check_sees_a_stale_tower",
)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    return launch(WORKER, nproc=1, args=[folder], timeout=280).stdout


@pytest.mark.parametrize("case", CASES)
def test_images_in_the_engine(output, case):
    assert not verdict(output, case)
