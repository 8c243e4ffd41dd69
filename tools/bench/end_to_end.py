"""Seconds per GRPO step and response tokens per second of whole training steps: this trainer beside
TRL's GRPOTrainer.

    python -m venv trl_env && trl_env/bin/pip install torch==2.13.0 trl==1.16.0
    python tools/bench/end_to_end.py --model TOY --trl-python trl_env/bin/python --steps 25
    python tools/make_toy_model.py --out UNTRAINED --steps 1  # it seldom ends a response
    python tools/bench/end_to_end.py --model UNTRAINED --max-response-tokens 64 \\
        --trl-python trl_env/bin/python --steps 15

Same model, prompts, responses per prompt, optimizer steps per rollout, sampling and number of
processes on both sides; the KL coefficient is 0 (TRL's default), no evaluation, no checkpoint. The
two take turns, so that a change of the machine's load meets both. The first ``--warmup`` steps of a
turn do not count. TRL generates with transformers.

Shares: the operations of matrix products that an update needs (6 for each parameter of a matrix and
token, a prompt once for all its responses) or generation (2), over its seconds, the cores, and the
rate of one product of 1,024 rows and columns, which is measured first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import Watch, description, spread

PROMPTS_PER_STEP, RESPONSES_PER_PROMPT = 32, 8
NUM_PROCESSES = 2
TRL = "TRL GRPOTrainer, DDP 2"
LAYOUTS = {
    "tensor parallel 2": ["parallel=tp2", "rollout.tensor=2"],
    "data parallel 2": ["parallel=single", "rollout.tensor=1"],
}


def torchrun(python: str, *words: str) -> list[str]:
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={NUM_PROCESSES}",
        *words,
    ]


def run(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}")


def ours(
    model: Path, layout: list[str], steps: int, response_tokens: int, folder: Path
) -> list[dict[str, float]]:
    settings = [
        "experiment=quickstart_cpu",
        f"model.path={model}",
        f"run_dir={folder}",
        f"trainer.num_steps={steps}",
        *layout,
        "method.kl.coef=0",
        f"batch.prompts_per_step={PROMPTS_PER_STEP}",
        f"batch.prompts_per_minibatch={PROMPTS_PER_STEP}",
        f"batch.responses_per_prompt={RESPONSES_PER_PROMPT}",
        f"rollout.max_response_tokens={response_tokens}",
        "evaluation.every_steps=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "checkpoint.export_at_end=false",
        "checkpoint.every_steps=0",
        "logging.trackers=[]",
        "logging.console=false",
    ]
    run(torchrun(sys.executable, "-m", "megatron_rl.train", *settings))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    phases = ("rollout", "logprob", "update", "sync")
    return [
        {
            "seconds": row["time/step_s"],
            "tokens": row["rollout/response_tokens_mean"] * row["rollout/num_responses"],
        }
        | {phase: row[f"time/{phase}_s"] for phase in phases}
        for row in rows
    ]


def trl(
    python: str, model: Path, steps: int, response_tokens: int, folder: Path
) -> list[dict[str, float]]:
    folder.mkdir()
    sizes = ["--steps", str(steps), "--max-response-tokens", str(response_tokens)]
    run(torchrun(python, __file__, "--model", str(model), "--inside-trl", str(folder), *sizes))
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def product_rate() -> float:
    """Operations a second of a float32 product on one core, the median of 15."""
    import torch

    torch.set_num_threads(1)
    size = 1024
    factor = torch.rand(size, size)
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        factor @ factor
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / spread(seconds).median


def product_parameters(model: Path) -> int:
    """Of the matrices that every token is multiplied by: without an embedding that is not the head
    too."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if "lm_head.weight" in shapes:
        del shapes["model.embed_tokens.weight"]
    return sum(rows * columns for rows, columns in (s for s in shapes.values() if len(s) == 2))


def shares(
    name: str, steps: list[dict[str, float]], operations: float, prompt_tokens: float
) -> str:
    """``operations``: of a token's products, over those of a second on all cores."""
    found = []
    for phase, passes in (("update", 3), ("rollout", 1)):
        seconds = spread([step[phase] for step in steps]).median
        of_product = [
            passes * operations * (step["tokens"] + prompt_tokens) / step[phase] for step in steps
        ]
        found.append(f"{phase} {seconds:.3f} s, {spread(of_product).median:.0%}")
    return f"{name}: {'; '.join(found)} of the rate of a float32 product"


def write_prompts(model: Path, file: Path) -> float:
    """The quickstart's training prompts as text, for the other side; their mean tokens."""
    from megatron_rl.config.load import compose, validate
    from megatron_rl.config.schema import Config
    from megatron_rl.data.prompts import load_prompts
    from megatron_rl.data.tokenizer import load_tokenizer

    config = validate(
        Config,
        compose("config", ["experiment=quickstart_cpu", f"model.path={model}"]),
        "the benchmark",
    )
    tokenizer = load_tokenizer(str(model))
    prompts = load_prompts(
        config.data.train, config.data, tokenizer, config.rollout.max_prompt_tokens
    )
    rows = [
        {"prompt": tokenizer.decode(list(prompt.token_ids)), "answer": prompt.answer}
        for prompt in prompts
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(len(prompt.token_ids) for prompt in prompts) / len(prompts)


def inside_trl(model: Path, folder: Path, steps: int, response_tokens: int) -> None:
    """Runs in TRL's environment, on each of its two processes."""
    os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (folder.parent / "prompts.jsonl").read_text().splitlines()]
    tokens: list[int] = []
    times = [time.perf_counter()]

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [
            float(text.strip() == right) for text, right in zip(completions, answer, strict=True)
        ]

    class Stopwatch(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.perf_counter())

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        learning_rate=2e-4,
        beta=0.0,
        temperature=1.0,
        per_device_train_batch_size=PROMPTS_PER_STEP * RESPONSES_PER_PROMPT // 2,
        num_generations=RESPONSES_PER_PROMPT,
        max_completion_length=response_tokens,
        report_to=[],
        save_strategy="no",
        logging_steps=steps,
        disable_tqdm=True,
        seed=1,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[Stopwatch()],
    )
    trainer.train()
    if os.environ["RANK"] == "0":
        steps_taken = [
            {"seconds": b - a, "tokens": 2 * count}
            for a, b, count in zip(times, times[1:], tokens, strict=False)
        ]
        (folder / "steps.jsonl").write_text(
            "".join(json.dumps(step) + "\n" for step in steps_taken)
        )
    trainer.accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)  # the teardown of its threads aborts now and then


def summary(name: str, steps: list[dict[str, float]]) -> str:
    seconds = spread([step["seconds"] for step in steps])
    rate = spread([step["tokens"] / step["seconds"] for step in steps]).median
    engines = [
        sum(step[phase] for phase in ("rollout", "logprob", "update", "sync")) / step["seconds"]
        for step in steps
        if "sync" in step
    ]
    share = f"{spread(engines).median:.0%}" if engines else "-"
    tokens = sum(step["tokens"] for step in steps) / len(steps)
    quartiles = f"{seconds.low:.3f}-{seconds.high:.3f}"
    return (
        f"| {name} | {seconds.median:.3f} | {quartiles} | {rate:.0f} | {tokens:.0f} | {share} |"
        f" {len(steps)} |"
    )


def factors(turns: dict[str, list[list[dict[str, float]]]]) -> list[str]:
    """How many times as fast as TRL: the ratio of the medians of each turn, and over all turns."""
    medians = {
        name: [spread([step["seconds"] for step in steps]).median for steps in found]
        for name, found in turns.items()
    }
    lines = []
    for name, ours in medians.items():
        if name == TRL or TRL not in medians:
            continue
        each = [theirs / own for own, theirs in zip(ours, medians[TRL], strict=True)]
        lines.append(
            f"{name}: {spread(each).text()} times as fast as TRL, median (quartiles) of {len(each)}"
            " turns"
        )
    return lines


def main() -> None:
    options = parsed()
    if options.inside_trl:
        inside_trl(options.model, options.inside_trl, options.steps, options.max_response_tokens)
        return
    watch = Watch()
    rate = product_rate()
    turns, prompt_tokens = measured(options)
    print(f"{description()}; {watch.load()}.\n")
    print(
        "| trainer | median s/step | quartiles | response tokens/s | tokens/step |"
        " generation+forward+update+sync | steps |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, steps_of_turns in turns.items():
        print(summary(name, [step for steps in steps_of_turns for step in steps]))
    print("", *factors(turns), sep="\n")
    parameters = product_parameters(options.model)
    print(f"{parameters:,} parameters in products; {rate / 1e9:.1f} GFLOP/s a core")
    operations = 2 * parameters / (NUM_PROCESSES * rate)
    for name, steps_of_turns in turns.items():
        if name != TRL:
            steps = [step for steps in steps_of_turns for step in steps]
            print(shares(name, steps, operations, prompt_tokens * PROMPTS_PER_STEP))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    wrote = "what tools/make_toy_model.py wrote"
    parser.add_argument("--model", type=Path, required=True, help=wrote)
    left_out = "interpreter with trl; left out: only this trainer is measured"
    parser.add_argument("--trl-python", help=left_out)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--max-response-tokens", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--inside-trl", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside_trl:
        return options
    steps, warmup = options.steps, options.warmup
    if steps <= warmup:
        parser.error(f"--steps {steps}: more than the {warmup} of --warmup, which do not count")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no config.json there; give {wrote}")
    return options


def measured(
    options: argparse.Namespace,
) -> tuple[dict[str, list[list[dict[str, float]]]], float]:
    """The steps of each trainer, a list for each turn, without those of the warm-up; and the mean
    tokens of a prompt."""
    turns: dict[str, list[list[dict[str, float]]]] = {}
    limits = (options.steps, options.max_response_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        prompt_tokens = write_prompts(options.model, Path(scratch) / "prompts.jsonl")
        for turn in range(options.turns):
            for name, layout in LAYOUTS.items():
                folder = Path(scratch) / f"{turn}-{name[:4]}"
                steps = ours(options.model, layout, *limits, folder)
                turns.setdefault(f"megatron_rl, {name}", []).append(steps[options.warmup :])
            if options.trl_python:
                folder = Path(scratch) / f"{turn}-trl"
                steps = trl(options.trl_python, options.model, *limits, folder)
                turns.setdefault(TRL, []).append(steps[options.warmup :])
    return turns, prompt_tokens


if __name__ == "__main__":
    main()
