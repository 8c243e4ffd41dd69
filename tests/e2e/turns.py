"""The letters of toy.py over several turns, with an environment of its own that fails at times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.data.tokenizer import load_tokenizer
from tests.e2e.toy import overrides, write_data, write_model

BOUND = 1e-5  # nats of one token; both sides compute in float32
# The end of an answer is its end token, and a question mark is the header of the next one.
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{{ '<eos>' if m['role'] == 'assistant' else '?' }}{% endfor %}"
)
PLUGIN = '''
import time
from pathlib import Path

from megatron_rl.rollouts.environments.base import Done, Environment, register_environment

@register_environment("letters")
class Letters(Environment):
    """Says the letters again, the first as often as there were turns; the last letter counts."""

    def start(self, task, seed):
        self.turns = 0

    def step(self, text, seed):
        self.turns += 1
        self.hang()
        if "h" in text and seed % 16 == 0:
            raise RuntimeError("an h too many")
        return Done() if self.turns == 5 else "a" * self.turns + text[:3]

    def hang(self):
        """In the call of all of this start whose number is in the file hang_at."""
        place = Path(__file__).parent
        if (place / "hang_at").exists():
            with (place / "calls").open("a") as calls:
                calls.write(".")
                number = calls.tell()
            if number >= int((place / "hang_at").read_text()):
                (place / "hangs").touch()
                time.sleep(60)
'''
# Asks three times, and knows nothing of this package.
AGENT = """
import json, os, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(3):
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"messages": messages}).encode()
    answer = json.load(urllib.request.urlopen(urllib.request.Request(address, body)))
    text = answer["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text}]
    messages += [{"role": "user", "content": "a" + text[:3]}]
"""
SETTINGS = (
    "rollout.max_prompt_tokens=8",
    "rollout.max_response_tokens=48",
    "batch.responses_per_prompt=4",
    "batch.prompts_per_minibatch=8",
    "reward.answer_pattern='(.)$'",
    "reward.max_excluded_share=0.5",
    f"mismatch_limits.abort_above={BOUND}",
)


def write_turns(folder: Path, write: Callable[[Path], None] = write_model) -> Path:
    """Model (by ``write``), data and plug-in."""
    write(folder / "model")
    tokenizer = load_tokenizer(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    write_data(folder / "data.jsonl")
    (folder / "letters.py").write_text(PLUGIN)
    return folder


def words_of_turns(folder: Path, run_dir: Path, *more: str) -> list[str]:
    """The words behind ``megatron_rl.train``."""
    letters = ["--plugin", str(folder / "letters.py")]
    return [*letters, *overrides(folder, run_dir, "env.name=letters", *SETTINGS, *more)]
