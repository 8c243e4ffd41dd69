"""Make a small Qwen2.5-VL that can do a little of the tasks of tools/make_vision_tasks.py, for runs
on a CPU. Nothing is downloaded.

    python tools/make_toy_vision_model.py --tasks TASKS --out DIR

Under torchrun several processes share the steps. Writes a Hugging Face directory as the published
ones: config, safetensors, tokenizer, chat template and image processor. The weights are random at
first and then warmed up as those of tools/make_toy_model.py, on TASKS/demonstrations.parquet; a
wrong demonstration has the next answer of its task: two dots for one, zero for nine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.rows import read_rows
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.runtime.launch import start
from megatron_rl.types import Prompt
from tools.make_toy_model import SPECIAL, build_policy, make_tokenizer, run, warm_up

SEEING = (
    *SPECIAL,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_PROMPT_TOKENS = 64
PATCH = 14
MERGE = 2


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", type=Path, required=True, help="of tools/make_vision_tasks.py")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write; must not exist"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tower-hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300, help="supervised steps")
    parser.add_argument("--batch", type=int, default=64, help="demonstrations a step")
    parser.add_argument("--right", type=float, default=0.45, help="share of right demonstrations")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def write_untrained(
    path: Path, questions: list[str], options: argparse.Namespace, wordings: Sequence[str] = ()
) -> None:
    """A directory with random weights. ``wordings``: texts of one token each."""
    make_tokenizer(questions, SEEING, CHAT_TEMPLATE, wordings).save_pretrained(path)
    tokenizer = load_tokenizer(path)
    torch.manual_seed(options.seed)
    model = Qwen2_5_VLForConditionalGeneration(model_config(tokenizer, options))
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            if parameter.ndim > 1:
                # Features that carry the image from the start.
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    model.float().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(image_processor()))
    end = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (path / "generation_config.json").write_text(json.dumps(end))


def model_config(
    tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> Qwen2_5_VLConfig:
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_sliding_window=False,
        # Pairs of a head's 32 numbers that turn by time, row and column.
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    )
    tower = dict(
        depth=2,
        hidden_size=options.tower_hidden,
        intermediate_size=2 * options.tower_hidden,
        num_heads=2,
        out_hidden_size=options.hidden,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        temporal_patch_size=2,
        # Attention over windows in the first block, over the whole image in the second.
        window_size=2 * PATCH * MERGE,
        fullatt_block_indexes=[1],
    )
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    image, video, begin, end = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names)
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        dtype="float32",
    )


def image_processor() -> dict[str, object]:
    """That of the published models, with smaller limits."""
    token = (PATCH * MERGE) ** 2
    return dict(
        image_processor_type="Qwen2VLImageProcessor",
        processor_class="Qwen2_5_VLProcessor",
        image_mean=[0.48145466, 0.4578275, 0.40821073],
        image_std=[0.26862954, 0.26130258, 0.27577711],
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=MERGE,
        min_pixels=4 * token,
        max_pixels=64 * token,
    )


def make(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    world = start()
    demonstrations = options.tasks / "demonstrations.parquet"
    overrides = ["data=easy_r1", f"data.train={demonstrations}", "data.eval=none"]
    settings = compose(
        "config",
        [*overrides, "rollout=vllm_cpu", "precision=fp32", "model.make_vocab_divisible_by=32"],
    )
    path = options.out

    def write() -> None:
        if path.exists():
            raise ValueError(f"--out {path}: exists; give a new directory")
        write_untrained(path, [row["problem"] for _, row in read_rows(demonstrations)], options)

    world.from_main(write)
    tokenizer = load_tokenizer(path)
    data = validate(DataConfig, settings["data"], "data")
    vision = VisionProcessor(path)
    prompts = load_prompts(str(demonstrations), data, tokenizer, MAX_PROMPT_TOKENS, vision)
    answers: dict[str, set[str]] = defaultdict(set)
    for prompt in prompts:
        answers[prompt.data_source].add(prompt.answer)

    def wrong(prompt: Prompt, rng: random.Random) -> str:
        order = sorted(answers[prompt.data_source])
        return order[(order.index(prompt.answer) + 1) % len(order)]

    policy = build_policy(path, settings, options, vision)
    loss = warm_up(policy, prompts, tokenizer, options, wrong)
    policy.export(path)
    if world.is_main:
        print(
            f"{path}: {len(tokenizer)} tokens; {options.steps} supervised steps, loss {loss:.3f};"
            f" {time.perf_counter() - begin:.0f} s in all",
            flush=True,
        )
    world.barrier()


if __name__ == "__main__":
    run(make, arguments())
