"""A picture of held-out prompts with images: the answers before and after a run, beside the right
one. For models of the Qwen2.5-VL family, through transformers, greedily.

    python tools/draw_answers.py RUN

RUN is the folder of a run that has an export. Writes RUN/answers.png.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import torch
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.load import validate
from megatron_rl.config.schema import Config
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.run.start import values_of_run
from megatron_rl.types import Prompt

PROMPTS_PER_SOURCE = 3
TITLE_CHARACTERS = 40


@torch.no_grad()
def answers(
    path: Path,
    prompts: list[Prompt],
    vision: VisionProcessor,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> list[str]:
    """Greedy answers of the model in a directory."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        asked = torch.tensor([prompt.token_ids])
        made = model.generate(
            input_ids=asked,
            attention_mask=torch.ones_like(asked),
            mm_token_type_ids=(asked == vision.image_token_id).int(),
            pixel_values=torch.cat([vision.pixels(image) for image in prompt.images]),
            image_grid_thw=torch.tensor([vision.grid(image) for image in prompt.images]),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        texts.append(tokenizer.decode(made[0, asked.shape[1] :], skip_special_tokens=True))
    return texts


def chosen(prompts: list[Prompt]) -> list[Prompt]:
    """The first prompts with images of every source."""
    by_source: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        if prompt.images:
            by_source[prompt.data_source].append(prompt)
    return [prompt for group in by_source.values() for prompt in group[:PROMPTS_PER_SOURCE]]


def draw(prompts: list[Prompt], before: list[str], after: list[str], file: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = PROMPTS_PER_SOURCE
    rows = -(-len(prompts) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.2 * columns, 2.2 * rows), squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for axis, prompt, first, last in zip(axes.flat, prompts, before, after, strict=False):
        images = [image.rgb() for image in prompt.images]
        left = 0
        for image in images:
            axis.imshow(image, extent=(left, left + image.width, 0, image.height))
            left += image.width + 6
        axis.set_xlim(0, left)
        axis.set_ylim(0, max(image.height for image in images))
        color = "green" if last.strip() == prompt.answer else "red"
        said = f"before: {first[:TITLE_CHARACTERS]}   after: {last[:TITLE_CHARACTERS]}"
        axis.set_title(f"{prompt.data_source}: {prompt.answer}\n{said}", fontsize=9, color=color)
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def main() -> None:
    disable_progress_bar()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    config = validate(Config, values_of_run(run), str(run / "config.json"))
    path = Path(config.model.path)
    tokenizer = load_tokenizer(path)
    vision = VisionProcessor(path, config.data.min_pixels, config.data.max_pixels)
    limit = config.rollout.max_prompt_tokens
    prompts = chosen(load_prompts(config.data.eval, config.data, tokenizer, limit, vision))
    before, after = (
        answers(model, prompts, vision, tokenizer, config.rollout.max_response_tokens)
        for model in (path, run / "export")
    )
    draw(prompts, before, after, run / "answers.png")
    right = [
        sum(text.strip() == prompt.answer for text, prompt in zip(texts, prompts, strict=True))
        for texts in (before, after)
    ]
    print(f"{run / 'answers.png'}: {right[0]} of {len(prompts)} right before, {right[1]} after")


if __name__ == "__main__":
    main()
