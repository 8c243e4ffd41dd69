"""Make a small Qwen3-shaped model that knows the rules of a game and seldom heeds its hints, and
the games, for runs on a CPU. Nothing is downloaded.

    python tools/make_toy_game_model.py --out DIR
    torchrun --standalone --nproc-per-node 2 tools/make_toy_game_model.py --out DIR

The game is that of examples/game_cpu/game.py. A share of the guesses that the model is shown
(``--right``) goes with all hints so far; the others say the last number again. DIR also holds
``games.jsonl`` and ``held_out.jsonl``; no prompt tells its number.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.game_cpu.game import LARGEST, Guess
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.rewards import Task
from megatron_rl.rollouts.environments.base import Done, EnvironmentSettings
from megatron_rl.rollouts.environments.rendering import MessageRendering
from megatron_rl.runtime.launch import start
from megatron_rl.types import Prompt
from tools.make_toy_model import MAX_PROMPT_TOKENS, run, write_untrained
from tools.make_toy_tools_model import Demonstration, parser_of_turns, taught

QUESTION = f"a number from 1 to {LARGEST}"
NUM_GAMES = {"games": 2000, "held_out": 128}
SETTINGS = EnvironmentSettings("guess", (), 1.0, 1 << 30, 2000, "bubblewrap")


def write_games(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(4000)]
    unique = iter(dict.fromkeys(names))
    for file, number in NUM_GAMES.items():
        games = [
            {"prompt": f"{next(unique)}: {QUESTION}", "answer": str(rng.randint(1, LARGEST))}
            for _ in range(number)
        ]
        text = "".join(json.dumps(game) + "\n" for game in games)
        (path / f"{file}.jsonl").write_text(text, encoding="ascii")


def turns(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    rendering: MessageRendering,
    rng: random.Random,
    right: float,
) -> list[Demonstration]:
    """The guesses of one game, each behind all that was said before."""
    game = Guess(SETTINGS)
    game.start(Task(prompt.uid, prompt.answer, prompt.data_source), 0)
    read = list(prompt.token_ids)
    low, high = 1, LARGEST
    guess: int | None = None
    found: list[Demonstration] = []
    while True:
        if guess is None or rng.random() < right:
            guess = rng.randint(low, high)
        ids = tokenizer(str(guess), add_special_tokens=False)["input_ids"]
        said = [*ids, rendering.end_token_id]
        found.append((tuple(read), said))
        hint = game.step(str(guess), 0)
        if isinstance(hint, Done):
            return found
        low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
        read += [*said, *rendering.tokens([{"role": "user", "content": hint}])]


def make(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    world = start()
    path = options.out
    settings = compose("config", ["experiment=game_cpu", "parallel=single", f"model.path={path}"])
    config = validate(Config, settings, "the configuration")

    def untrained() -> None:
        write_untrained(options, [f": {QUESTION}", "higher", "lower"])
        write_games(path, options.seed)

    world.from_main(untrained)
    tokenizer = load_tokenizer(path)
    rendering = MessageRendering(tokenizer, ("user",), str(path))
    prompts = load_prompts(config.data.train, config.data, tokenizer, MAX_PROMPT_TOKENS)
    steps = taught(
        options,
        settings,
        prompts,
        lambda prompt, rng: turns(prompt, tokenizer, rendering, rng, options.right),
    )
    world.from_main(lambda: write_games(path, options.seed))
    if world.is_main:
        seconds = time.perf_counter() - begin
        print(f"{path}: {steps}; {seconds:.0f} s")
    world.barrier()


if __name__ == "__main__":
    run(make, parser_of_turns(__doc__, steps=600, batch=24, right=0.25).parse_args())
