"""A tokenizer of single characters and default data settings."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import DataConfig

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
    columns = {
        "prompt": "prompt",
        "answer": "answer",
        "images": "auto",
        "choices": None,
        "categories": (),
        "data_source": "data_source",
        "extra": None,
        **changes.pop("columns", {}),
    }
    values = {
        "train": "-",
        "train_weights": None,
        "eval": "-",
        "columns": columns,
        "system_prompt": None,
        "prompt_prefix": "",
        "prompt_suffix": "",
        "answer_after": None,
        "show_choices": True,
        "images_first": False,
        "min_pixels": None,
        "max_pixels": None,
        "apply_chat_template": True,
        "template_date": None,
        "on_long_prompt": "error",
        "drop_eval_overlap": True,
        "shuffle": True,
        **changes,
    }
    return DataConfig(**values)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)
