"""Greedy answers to a few held-out prompts, before and after a run, through transformers.

    python tools/before_after.py RUN
    python tools/before_after.py RUN --plugin MY_ENVIRONMENT.py

RUN is the folder of a run that has an export. The verifier of the prompt decides what is right.
With an environment the whole conversation is shown, and the last turn is judged, unless the
environment gives the reward. Prompts with images (Qwen2.5-VL family) are drawn too, to
RUN/answers.png.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import validate
from megatron_rl.config.schema import Config, DataConfig, RewardConfig
from megatron_rl.data.multimodal.vision import VisionProcessor, vision_of
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.evaluation.sample import NoReward
from megatron_rl.plugins import add_plugin_option, load_plugins
from megatron_rl.rewards.build import build_reward
from megatron_rl.rollouts.environments.outcomes import Outcome, appended, last_turn
from megatron_rl.rollouts.environments.turns import Turns, Waiting, needs_reward, turns_of_run
from megatron_rl.rollouts.sampling import stop_token_ids
from megatron_rl.rollouts.store import joined
from megatron_rl.run.start import values_of_run
from megatron_rl.types import Completion, Prompt, Score

NUM_PROMPTS = 5
NUM_DRAWN = (4, 3)  # rows and columns of prompts with images
SHOWN_CHARACTERS = 100  # the end of a prompt, where toy tasks have what differs
MARKUP = re.compile(r"<\|[^|]*\|>(system|user|assistant)?")


def chosen(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first prompt of every data source, then the second ones, and so on."""
    by_source: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_source[prompt.data_source].append(prompt)
    rounds = itertools.zip_longest(*by_source.values())
    in_turn = [prompt for row in rounds for prompt in row if prompt is not None]
    return in_turn[:count]


def answers(
    path: Path,
    prompts: list[Prompt],
    max_tokens: int,
    turns: Turns | None,
    vision: VisionProcessor | None,
) -> list[tuple[Completion, Score | None]]:
    """Of the model in a directory, with the scores of an environment that gives them. ``turns``: of
    the run, None where a response has one."""
    kind = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        whole = continued(model, prompt, None, max_tokens, vision)
        score = None
        while turns is not None:
            waiting = Waiting(0, None, prompt, 0, whole, max_tokens, time.monotonic())
            outcome = answered(turns, waiting) if turns.asks(whole) else turns.ended(whole)
            if outcome.is_over:
                score = outcome.score
                break
            so_far = appended(whole, outcome.tokens)
            whole = continued(model, prompt, so_far, max_tokens, vision)
        found.append((whole, score))
    return found


@torch.no_grad()
def continued(
    model: PreTrainedModel,
    prompt: Prompt,
    so_far: Completion | None,
    max_tokens: int,
    vision: VisionProcessor | None,
) -> Completion:
    """``so_far`` with what the model says behind it."""
    there = [] if so_far is None else list(so_far.token_ids)
    asked = torch.tensor([[*prompt.token_ids, *there]])
    seen = {}
    if vision is not None and prompt.images:
        seen = {
            "mm_token_type_ids": (asked == vision.image_token_id).int(),
            "pixel_values": torch.cat([vision.pixels(image) for image in prompt.images]),
            "image_grid_thw": torch.tensor([vision.grid(image) for image in prompt.images]),
        }
    made = model.generate(
        input_ids=asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=max_tokens - len(there),
        do_sample=False,
        **seen,
    )
    new = made[0, asked.shape[1] :].tolist()
    is_cut = new[-1] not in stop_token_ids(model.generation_config.eos_token_id)
    # Nothing reads the logprobs.
    return joined(so_far, Completion(new, [0.0] * len(new), is_cut, 0))


def answered(turns: Turns, waiting: Waiting) -> Outcome:
    """What the environment makes of a turn."""
    turns.give(waiting)
    while not (told := turns.take()):
        time.sleep(0.01)
    ((_, outcome),) = told
    return outcome


def draw(prompts: list[Prompt], before: list[str], after: list[str], file: Path) -> None:
    """Green: right after the run."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, columns = NUM_DRAWN
    size = (3.2 * columns, 2.2 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, prompt, first, last in zip(axes.T.flat, prompts, before, after, strict=False):
        images = [image.rgb() for image in prompt.images]
        left = 0
        for image in images:
            axis.imshow(image, extent=(left, left + image.width, 0, image.height))
            left += image.width + 6
        axis.set_xlim(0, left)
        axis.set_ylim(0, max(image.height for image in images))
        color = "green" if last.endswith("(right)") else "red"
        title = f"{prompt.data_source}: {prompt.answer}\nbefore: {first}\nafter: {last}"
        axis.set_title(title, fontsize=9, color=color)
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    print(f"wrote {file}")


def main() -> None:
    disable_progress_bar()
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path)
    add_plugin_option(parser)
    options = parser.parse_args()
    load_plugins(options.plugin)
    run = options.run
    values = json.loads((run / "config.json").read_text(encoding="utf-8"))
    # Not the whole configuration: its method may be of a plug-in.
    data = validate(DataConfig, values["data"], "data")
    model, rollout = Path(values["model"]["path"]), values["rollout"]
    tokenizer = load_tokenizer(model)
    turns = None
    if values["env"]["name"] != "single":
        turns = turns_of_run(validate(Config, values_of_run(run), "the settings"), tokenizer)
    decode = text_of(tokenizer)
    vision = vision_of(values["model"]["path"], data)
    held_out = load_prompts(data.eval, data, tokenizer, rollout["max_prompt_tokens"], vision)
    prompts = chosen(held_out, NUM_PROMPTS if vision is None else math.prod(NUM_DRAWN))
    # Wrong is also what an environment that gives the reward has not ended.
    reward: Any = NoReward()
    if needs_reward(turns):
        reward = build_reward(validate(RewardConfig, values["reward"], "reward"))
        reward.check(prompts)
    columns = []
    for path in (model, run / "export"):
        found = answers(path, prompts, rollout["max_response_tokens"], turns, vision)
        judged = [decode(last_turn(whole)) for whole, _ in found]
        scores = reward.score(prompts, judged, [False] * len(judged))
        told = [score or other for (_, score), other in zip(found, scores, strict=True)]
        right = ["right" if score.correct else "wrong" for score in told]
        texts = [" ".join(decode(whole.token_ids).split()) for whole, _ in found]
        columns.append([f"{text} ({word})" for text, word in zip(texts, right, strict=True)])
    if needs_reward(turns):
        reward.close()
    print("held-out prompts, answered greedily before and after:")
    for prompt, before, after in zip(prompts, *columns, strict=True):
        text = " ".join(MARKUP.sub(" ", prompt.text).split())
        cut = (
            text
            if len(text) <= SHOWN_CHARACTERS
            else f"... {text[-SHOWN_CHARACTERS:].partition(' ')[2]}"
        )
        print(f"  {cut}\n    {before:20} -> {after}")
    if vision is not None:
        draw(prompts, *columns, run / "answers.png")


if __name__ == "__main__":
    main()
