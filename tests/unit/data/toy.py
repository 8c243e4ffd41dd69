"""A tokenizer of single characters and default data settings."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.load import compose
from megatron_rl.config.schema import DataConfig

DEFAULT = compose("data/default")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    vocab = {
        token: index
        for index, token in enumerate(
            ["@", *map(chr, range(32, 64)), *map(chr, range(65, 127)), "\n"]
        )
    }
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="@")
    fast.chat_template = template
    return fast


def data_config(**changes) -> DataConfig:
    """conf/data/default.yaml, with named columns of data_source and no extra."""
    own = {"categories": (), "data_source": "data_source", "extra": None}
    columns = DEFAULT["columns"] | own | changes.pop("columns", {})
    ratios = {"hint_ratios": tuple(DEFAULT["hint_ratios"])}
    return DataConfig(
        **DEFAULT | ratios | {"train": "-", "eval": "-", "columns": columns} | changes
    )


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)
