"""Inputs that several cases share: tiny models of four families, data files, a run with
checkpoints.
Made once for a launch of the program; a case that changes one works on a copy."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.toy import overrides as toy_overrides
from tests.e2e.toy import write_data as write_letters
from tests.e2e.toy import write_model as write_toy

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "what is the sum of one and two and three? the answer is 42. 0 1 2 3 4 5 6 7 8 9 + - = #### "


class Material:
    """Paths below one folder; each is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.RLock()

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """``folder/name``; ``make`` writes it, aside, once."""
        path = self.folder / name
        with self._lock:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                aside = path.with_name(f"aside-{path.name}")
                make(aside)
                aside.rename(path)
        return path

    def model(self, family: str) -> Path:
        """A HF directory: ``toy`` (letters), ``llama``, ``qwen2`` or ``mixtral`` (any text)."""
        if family == "toy":
            return self.made("toy/model", write_toy)
        return self.made(f"models/{family}", lambda path: write_model(path, family))

    def letters(self) -> Path:
        """The folder of the toy: ``model`` and ``data.jsonl``."""
        self.model("toy")
        self.made("toy/data.jsonl", write_letters)
        return self.folder / "toy"

    def rows(self, count: int = 12) -> Path:
        """A plain file of {prompt, answer, data_source, extra}."""
        return self.made(f"rows{count}.jsonl", lambda path: write_rows(path, plain_rows(count)))

    def copy_of(self, family: str, target: Path) -> Path:
        """A model directory to be spoiled."""
        return Path(shutil.copytree(self.model(family), target))


def plain_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Sums: {"prompt": "1 + 2 =", "answer": "3", "data_source": "sums", "extra": {}}."""
    numbers = range(first, first + count)
    return [
        {"prompt": f"{n} + {n + 1} =", "answer": str(2 * n + 1), "data_source": "sums", "extra": {}}
        for n in numbers
    ]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """One JSON object a line; a text stands as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def write_tokenizer(path: Path, **more: Any) -> int:
    """A byte-level BPE of about 400 tokens with a chat template; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", **more
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return len(fast)


def write_model(path: Path, family: str, seed: int = 0, **sizes: Any) -> Path:
    """Two layers, hidden 64, random weights in float32."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    classes: Mapping[str, Any] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "mixtral": (MixtralConfig, MixtralForCausalLM),
    }
    tokens = write_tokenizer(path)
    values = {
        "vocab_size": -(-tokens // 8) * 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if family == "mixtral":
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    torch.manual_seed(seed)
    config_class, model_class = classes[family]
    model = model_class(config_class(**(values | sizes)))
    model.float().save_pretrained(path)
    return path


def edit_json(path: Path, **values: Any) -> Path:
    """Sets keys of a JSON file; ``None`` writes null, ``...`` removes the key."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for key, value in values.items():
        if value is ...:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Reads ``model.safetensors``, lets ``change`` edit the tensors by name, writes it back."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def toy(material: Material, run_dir: Path, *more: str) -> list[str]:
    """One step of the letters on two ranks, TP2 on both sides."""
    return toy_overrides(material.letters(), run_dir, "trainer.num_steps=1", *more)


def toy_alone(material: Material, run_dir: Path, *more: str) -> list[str]:
    """The same on a world of one."""
    return toy(material, run_dir, "parallel=single", "rollout.tensor=1", *more)


def small(model: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    """One step of a model that reads any text, on a world of one."""
    return [
        "parallel=single",
        "precision=fp32",
        "rollout=vllm_cpu",
        "rollout.tensor=1",
        f"model.path={model}",
        "model.make_vocab_divisible_by=8",
        f"data.train={data}",
        f"data.eval={data}",
        "data.drop_eval_overlap=false",
        "reward.verifier=exact",
        "trainer.num_steps=1",
        "batch.prompts_per_step=4",
        "batch.responses_per_prompt=4",
        "batch.prompts_per_minibatch=4",
        "batch.tokens_per_microbatch=1024",
        "rollout.max_prompt_tokens=96",
        "rollout.max_response_tokens=4",
        "rollout.kv_cache_gib=0.03125",
        "evaluation.every_steps=0",
        "evaluation.at_start=false",
        "evaluation.num_prompts=4",
        "logging.trackers=[]",
        f"run_dir={run_dir}",
        *more,
    ]
