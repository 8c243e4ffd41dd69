"""What a method needs of the prompts is looked at before anything is built."""

from __future__ import annotations

import pytest

from megatron_rl.loss import load_method
from megatron_rl.trainer.objective import check_visual_entropy
from megatron_rl.types import Prompt


def prompt(uid: str, **extra: float) -> Prompt:
    return Prompt(uid, (1,), "1", "toy", extra)


def test_a_prompt_without_the_visual_entropy_that_the_method_needs_is_named():
    prompts = [prompt("p:1", visual_entropy=0.5), prompt("p:2")]
    with pytest.raises(
        ValueError, match=r"prompt p:2: .*tools/visual_entropy\.py.*method=durian_reasoning"
    ):
        check_visual_entropy(prompts, load_method("durian"))
    check_visual_entropy(prompts[:1], load_method("durian"))
    check_visual_entropy(prompts, load_method("durian_reasoning"))
    check_visual_entropy(prompts, load_method("grpo"))
