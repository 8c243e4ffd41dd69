"""Make the tasks and the starting model of the claims, in less than a minute on a CPU.

    python examples/claims/lab/make.py --out DIR

Writes DIR/train.jsonl, DIR/eval.jsonl and DIR/model, a Hugging Face directory: a Qwen3-shaped model
of 0.46 million parameters, random at first, warmed up by supervised steps on demonstrations of
mixed quality (tasks.py). Held-out prompts are not among them.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples.claims.lab import tasks
from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.runtime.launch import exit_process, reported, start
from megatron_rl.types import Prompt
from tools.make_toy_model import (
    MAX_PROMPT_TOKENS,
    build_policy,
    make_model,
    make_tokenizer,
    warm_up,
)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=600, help="supervised steps")
    parser.add_argument("--batch", type=int, default=64, help="demonstrations a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--thinking", action="store_true", help="demonstrations have dots before the answer"
    )
    parser.add_argument(
        "--exact", action="store_true", help="the lab that decides: 384 held-out prompts, and `gap`"
    )
    return parser.parse_args()


def shown(prompt: Prompt, rng: random.Random) -> str:
    """A demonstration, right or wrong."""
    return tasks.demonstration(prompt.data_source, prompt.extra["right"], rng)


def thought_about(prompt: Prompt, rng: random.Random) -> str:
    """The same with dots before it."""
    return tasks.thought_about(shown(prompt, rng), rng)


def formatted(prompt: Prompt, rng: random.Random) -> str:
    """The same, mostly with a full stop."""
    return tasks.stopped(shown(prompt, rng), rng)


def make(options: argparse.Namespace) -> None:
    start()
    options.out.mkdir(parents=True, exist_ok=True)
    held_out = tasks.HELD_OUT_EXACT if options.exact else tasks.HELD_OUT
    tasks.write(options.out, held_out)
    path = options.out / "model"
    make_tokenizer(tasks.prompts(held_out)).save_pretrained(path)
    make_model(load_tokenizer(path), options).save_pretrained(path)
    settings = compose("config", ["parallel=single", "precision=fp32"])
    files = {name: str(options.out / f"{name}.jsonl") for name in ("train", "eval")}
    data = validate(DataConfig, {**settings["data"], **files}, "data")
    tokenizer = load_tokenizer(path)
    prompts = load_prompts(files["train"], data, tokenizer, MAX_PROMPT_TOKENS)
    policy = build_policy(path, settings, options)
    options.right = 0.0  # every demonstration comes from the function given
    demonstration = thought_about if options.thinking else formatted if options.exact else shown
    loss = warm_up(policy, prompts, tokenizer, options, demonstration)
    policy.export(path)
    print(f"{path}: {options.steps} supervised steps, loss {loss:.3f} nats a token", flush=True)


def main() -> None:
    disable_progress_bar()
    with reported():
        make(arguments())
    exit_process(0)


if __name__ == "__main__":
    main()
