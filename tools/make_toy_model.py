"""Make a small Qwen3-shaped model that can do a little of three generated tasks, for runs on a CPU.
Nothing is downloaded.

    python tools/make_toy_model.py --out DIR                                          # one process
    torchrun --standalone --nproc-per-node 2 tools/make_toy_model.py --out DIR  # two, data parallel

Writes a Hugging Face directory: config, safetensors, tokenizer with a chat template. The weights
are random at first and then warmed up by supervised steps through the policy that is trained later
(megatron-core): the loss -sum(logprobs) / tokens on demonstrations of mixed quality. Only a share
of them is right (``--right``), as in the texts a language model learns from; the rest shows the
slip of its task, always the same one: a sum with a zero too many, a word spelled forward, the
letters of a palindrome as they were listed. The model learns both, so it knows more than it shows,
and reinforcement learning has something to bring out. A palindrome has several right answers, and
demonstrations show each as often. They never hold a held-out prompt of the experiment.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from reasoning_gym.factory import get_score_answer_fn
from tokenizers import Regex, Tokenizer, models
from tokenizers.decoders import Fuse
from tokenizers.pre_tokenizers import Split
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.data_names import GENERATED
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
)
from megatron_rl.data.prompts import load_prompts, without_overlap
from megatron_rl.data.reasoning_gym_tasks import load_tasks
from megatron_rl.data.rows import Problems
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.settings import PolicySettings
from megatron_rl.protocols import ImageProcessor
from megatron_rl.runtime.launch import exit_process, reported, start
from megatron_rl.types import Prompt

TASKS = (
    "reasoning_gym:chain_sum?min_terms=2&max_terms=3&max_digits=1&size=8000&seed=3"
    "+spell_backward?max_word_len=5&size=4000&seed=3"
    "+palindrome_generation?min_length=3&max_length=5&size=4000&seed=3"
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
)  # padding, start of a message, its end (which ends a response)
WORD = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]|\s"
PALINDROMES = "reasoning_gym:palindrome_generation"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_PROMPT_TOKENS = 64
TOKENS_PER_MICROBATCH = 4096
WARMUP_STEPS = 20


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write; must not exist"
    )
    parser.add_argument("--tasks", default=TASKS, help="reasoning_gym spec of the demonstrations")
    parser.add_argument(
        "--experiment",
        default="quickstart_cpu",
        help="experiment whose data settings and held-out prompts count",
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1200, help="supervised steps")
    parser.add_argument("--batch", type=int, default=64, help="demonstrations a step")
    parser.add_argument("--right", type=float, default=0.3, help="share of right demonstrations")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_tokenizer(
    questions: list[str],
    special: Sequence[str] = SPECIAL,
    template: str = CHAT_TEMPLATE,
    wordings: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """One token for each printable character, for each of ``wordings``, and for each word that a
    quarter of the questions share; every other word, such as one to be spelled, is cut into
    characters."""
    counts = Counter(word for question in questions for word in set(re.findall(WORD, question)))
    shared = sorted(
        word for word, count in counts.items() if len(word) > 1 and 4 * count >= len(questions)
    )
    tokens = [*special, *map(chr, range(32, 127)), "\n", "user", "assistant", *shared]
    core = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[],
            ignore_merges=True,
        )
    )
    core.pre_tokenizer = Split(Regex(WORD), "isolated")
    core.decoder = Fuse()
    core.add_special_tokens(list(special))
    core.add_tokens(list(wordings))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=special[0],
        eos_token=special[2],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def task_wordings(tasks: str) -> list[str]:
    """What all questions of a task begin with, of each task of the reasoning_gym spec.

    A token for it keeps prompts short: what the model reads is mostly what differs.
    """
    questions: dict[str, list[str]] = defaultdict(list)
    for draft in load_tasks(tasks, Problems(tasks)):
        questions[draft.data_source].append(draft.prompt)
    # Common characters, though it is named for paths.
    return [os.path.commonprefix(texts).rstrip() for texts in questions.values()]  # noqa: RUF071


def make_model(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> Qwen3ForCausalLM:
    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def write_untrained(
    options: argparse.Namespace, wordings: Sequence[str], template: str = CHAT_TEMPLATE
) -> None:
    """Tokenizer and random weights, in ``options.out``. Raises ValueError where it is there."""
    path = options.out
    if path.exists():
        raise ValueError(f"--out {path}: exists; give a new directory")
    make_tokenizer([], template=template, wordings=wordings).save_pretrained(path)
    make_model(load_tokenizer(path), options).save_pretrained(path)


def correct(prompt: Prompt, rng: random.Random) -> str:
    """A right answer; of a palindrome's half every order is right, and as likely as any other."""
    if prompt.data_source != PALINDROMES:
        return prompt.answer
    half = len(prompt.answer) // 2
    start = "".join(rng.sample(prompt.answer[:half], half))
    middle = prompt.answer[half : len(prompt.answer) - half]
    return start + middle + start[::-1]


def slip(prompt: Prompt, rng: random.Random) -> str:
    """The wrong answer that the task invites, always the same one."""
    if prompt.data_source == PALINDROMES:
        return "".join(prompt.extra["metadata"]["letters"])
    if re.fullmatch(r"-?\d+", prompt.answer):
        return prompt.answer + "0"
    return prompt.answer[::-1]


def warm_up(
    policy: MegatronPolicy,
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    wrong: Callable[[Prompt, random.Random], str] = slip,
) -> float:
    """Supervised steps; returns the mean loss of the last ten in nats a token."""
    rng = random.Random(options.seed)
    recent: list[float] = []
    for _ in range(options.steps):
        chosen = rng.choices(prompts, k=options.batch)
        texts = [
            correct(prompt, rng) if rng.random() < options.right else wrong(prompt, rng)
            for prompt in chosen
        ]
        responses = [
            [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for text in texts
        ]
        batch = sequence_batch(
            [
                (prompt.token_ids, response)
                for prompt, response in zip(chosen, responses, strict=True)
            ],
            images=[prompt.images for prompt in chosen],
        )
        num_tokens = sum(map(len, responses))

        def loss(view: TokenView, num_tokens: int = num_tokens) -> LossOutput:
            return LossOutput(loss=-view.logprobs.sum() / num_tokens, metrics={})

        plan = policy.batching.plan(batch, range(len(chosen)))
        share = LocalBatch(batch, plan[policy.ranks.data_rank])
        recent = [*recent[-9:], policy.update(share, loss).loss]
    return sum(recent) / len(recent)


def build_policy(
    path: Path,
    settings: dict[str, Any],
    options: argparse.Namespace,
    image_processor: ImageProcessor | None = None,
) -> MegatronPolicy:
    """Every process holds the whole model: data parallel."""
    optim = {
        **settings["optim"],
        "learning_rate": options.learning_rate,
        "min_learning_rate": 0.1 * options.learning_rate,
        "schedule": "cosine",
        "warmup_steps": WARMUP_STEPS,
    }
    return MegatronPolicy(
        validate(ModelConfig, {**settings["model"], "path": str(path)}, "model"),
        validate(ParallelConfig, settings["parallel"], "parallel"),
        validate(PrecisionConfig, settings["precision"], "precision"),
        validate(OptimConfig, optim, "optim"),
        PolicySettings(
            temperature=1.0,
            keep_reference=False,
            total_optimizer_steps=options.steps,
            max_sequence_tokens=256,
            tokens_per_microbatch=TOKENS_PER_MICROBATCH,
            image_processor=image_processor,
        ),
    )


def is_right(prompt: Prompt, text: str) -> bool:
    """What the scorer of the prompt's task says."""
    return scorer(prompt.data_source)(text.strip(), dict(prompt.extra)) == 1


@cache
def scorer(source: str) -> Callable[[str, dict[str, Any]], float]:
    return get_score_answer_fn(source.removeprefix(GENERATED))


@torch.no_grad()
def accuracy(
    path: Path, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Share of right greedy answers of the written model under transformers, in all and by task."""
    model = Qwen3ForCausalLM.from_pretrained(path)
    width = max(len(prompt.token_ids) for prompt in prompts)
    padded = torch.full((len(prompts), width), tokenizer.pad_token_id)
    for row, prompt in enumerate(prompts):
        padded[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
    made = model.generate(
        padded,
        attention_mask=(padded != tokenizer.pad_token_id).long(),
        max_new_tokens=16,
        do_sample=False,
    )
    right = [
        is_right(prompt, text)
        for text, prompt in zip(tokenizer.batch_decode(made[:, width:], True), prompts, strict=True)
    ]
    found = {"all": sum(right) / len(right)}
    for source in sorted({prompt.data_source for prompt in prompts}):
        rows = [
            hit for hit, prompt in zip(right, prompts, strict=True) if prompt.data_source == source
        ]
        found[source] = sum(rows) / len(rows)
    return found


def make(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    world = start()
    settings = compose("config", [f"experiment={options.experiment}", "parallel=single"])
    data = validate(DataConfig, {**settings["data"], "train": options.tasks}, "data")
    path = options.out

    world.from_main(lambda: write_untrained(options, task_wordings(options.tasks)))
    tokenizer = load_tokenizer(path)
    held_out = load_prompts(data.eval, data, tokenizer, MAX_PROMPT_TOKENS)
    prompts = without_overlap(
        load_prompts(data.train, data, tokenizer, MAX_PROMPT_TOKENS), held_out
    )
    policy = build_policy(path, settings, options)
    loss = warm_up(policy, prompts, tokenizer, options)
    policy.export(path)
    if world.is_main:
        size = sum(weight.numel() for weight in Qwen3ForCausalLM.from_pretrained(path).parameters())
        by_task = ", ".join(
            f"{name} {value:.1%}" for name, value in accuracy(path, held_out, tokenizer).items()
        )
        print(
            f"{path}: {size} parameters, {len(tokenizer)} tokens; {options.steps} supervised steps,"
            f" loss {loss:.3f}"
        )
        print(
            f"held-out greedy accuracy on {len(held_out)} prompts: {by_task};"
            f" {time.perf_counter() - begin:.0f} s in all",
            flush=True,
        )
    world.barrier()


def run(make: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Makes a model on all processes of the launch and ends them."""
    disable_progress_bar()
    with reported():
        make(options)
    exit_process(0)


if __name__ == "__main__":
    run(make, arguments())
