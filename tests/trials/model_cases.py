"""Model directories: of other kinds, cut, spoiled, and good ones in other forms."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trials.makers import model_case
from tests.trials.material import edit_json, write_model
from tests.trials.place import Case
from tests.trials.verdicts import Ends, Refused

POINTER = (
    "version https:" + "//git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 988097824\n"
)
PATH = r"model\.path|config\.json"


def settings(**values: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", **values)


def text_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def bytes_of(content: bytes, name: str = "model.safetensors") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def no_file(*names: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return spoil


def config_files() -> list[Case]:
    """config.json that is none, or says nothing."""
    return [
        model_case(
            "mod_no_config",
            "no config.json",
            no_file("config.json"),
            Refused((PATH, r"config\.json")),
        ),
        model_case(
            "mod_bad_json",
            "config.json is no JSON",
            text_config('{"a": 1,, "b": 2}'),
            Refused((r"config\.json",)),
        ),
        model_case(
            "mod_empty_json",
            "config.json is {}",
            text_config("{}"),
            Refused((r"config\.json", "architectures|model_type|num_")),
        ),
        model_case(
            "mod_json_list",
            "config.json is a list",
            text_config("[1, 2]"),
            Refused((r"config\.json",)),
        ),
        model_case(
            "mod_json_binary",
            "config.json is binary",
            lambda folder: (folder / "config.json").write_bytes(bytes(range(256))),
            Refused((r"config\.json",)),
        ),
    ]


def heads() -> list[Case]:
    """Numbers of heads that are none."""
    return [
        model_case(
            "mod_no_heads",
            "no number of heads",
            settings(num_attention_heads=...),
            Refused((r"config\.json", "num_attention_heads")),
        ),
        model_case(
            "mod_heads_str",
            "heads as a text",
            settings(num_attention_heads="2"),
            Refused((r"config\.json", "num_attention_heads")),
        ),
        model_case(
            "mod_heads0",
            "no heads",
            settings(num_attention_heads=0),
            Refused((r"config\.json", "num_attention_heads")),
        ),
        model_case(
            "mod_kv_null",
            "key-value heads null",
            settings(num_key_value_heads=None),
            Ends(),
            Refused((r"config\.json", "num_key_value_heads")),
        ),
        model_case(
            "mod_kv_odd",
            "key-value heads that do not divide the heads",
            settings(num_key_value_heads=3),
            Refused(("num_key_value_heads|key-value|shape|size",), before="engine"),
        ),
    ]


def config_sizes() -> list[Case]:
    """Sizes that are none, or not those of the weights."""
    return [
        model_case(
            "mod_layers_neg",
            "-2 layers",
            settings(num_hidden_layers=-2),
            Refused((r"config\.json", "num_hidden_layers")),
        ),
        model_case(
            "mod_layers0",
            "no layers",
            settings(num_hidden_layers=0),
            Refused((r"config\.json", "num_hidden_layers")),
        ),
        model_case(
            "mod_layers_more",
            "more layers than weights",
            settings(num_hidden_layers=3),
            Refused(("missing", "layers"), before="engine"),
        ),
        model_case(
            "mod_layers_less",
            "fewer layers than weights",
            settings(num_hidden_layers=1),
            Refused(("unknown", "layers"), before="engine"),
        ),
        model_case(
            "mod_hidden",
            "another hidden size",
            settings(hidden_size=128),
            Refused((r"model|config\.json|embed", "128"), before="engine"),
        ),
        model_case(
            "mod_vocab_small",
            "a vocabulary below the weights",
            settings(vocab_size=100),
            Refused(("vocab",), before="engine"),
        ),
        model_case(
            "mod_vocab_tokens",
            "token ids beyond the vocabulary",
            small_vocabulary,
            Refused(("vocab|token id",), before="engine"),
        ),
        model_case(
            "mod_theta_str",
            "rope_theta as a text",
            rope_text,
            Refused((r"config\.json|rope",), before="engine"),
        ),
    ]


def architectures() -> list[Case]:
    """Models of other kinds."""
    return [
        model_case(
            "mod_arch_gpt2",
            "GPT-2",
            text_config(
                '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_head": 2,'
                ' "n_layer": 2}'
            ),
            Refused(("GPT2LMHeadModel", "support")),
        ),
        model_case(
            "mod_arch_vl",
            "Qwen2-VL",
            text_config(
                '{"architectures": ["Qwen2VLForConditionalGeneration"], "model_type":'
                ' "qwen2_vl", "text_config": {}}'
            ),
            Refused(("Qwen2VL", "support")),
        ),
        model_case(
            "mod_arch_gemma",
            "Gemma 2",
            settings(architectures=["Gemma2ForCausalLM"], model_type="gemma2"),
            Refused(("Gemma2", "support")),
        ),
        model_case(
            "mod_arch_none",
            "no architecture",
            settings(architectures=...),
            Refused((r"config\.json", "architectures"), before="engine"),
            Ends(),
        ),
        model_case(
            "mod_arch_unknown",
            "an architecture nobody knows",
            settings(architectures=["FooForCausalLM"]),
            Refused(("FooForCausalLM", "support")),
        ),
        model_case(
            "mod_quant_config",
            "GPTQ",
            settings(quantization_config={"quant_method": "gptq", "bits": 4}),
            Refused(("quantiz|quantis", "gptq")),
        ),
    ]


def layer_kinds() -> list[Case]:
    """Layers of other kinds."""
    return [
        model_case(
            "mod_yarn",
            "yarn",
            settings(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
            Refused(("rope|yarn", "support|yarn"), before="engine"),
            Ends(),
        ),
        model_case(
            "mod_sliding",
            "a sliding window",
            settings(sliding_window=16, use_sliding_window=True),
            Refused(("sliding",), before="engine"),
            family="qwen2",
        ),
        model_case(
            "mod_gelu",
            "GELU",
            settings(hidden_act="gelu"),
            Refused(("hidden_act|gelu",), before="engine"),
        ),
        model_case(
            "mod_bias",
            "attention bias without the tensors",
            settings(attention_bias=True),
            Refused(("bias",), before="engine"),
        ),
        model_case(
            "mod_head_dim16", "heads of 16 on the CPU engine", heads_of_16, Refused(("head_dim",))
        ),
    ]


def rope_text(folder: Path) -> None:
    """Older files have ``rope_theta`` at the top, newer ones inside ``rope_parameters``."""
    edit_json(
        folder / "config.json",
        rope_theta="big",
        rope_parameters={"rope_theta": "big", "rope_type": "default"},
    )


def small_vocabulary(folder: Path) -> None:
    """The model knows 200 tokens, its tokenizer more."""
    shutil.rmtree(folder)
    write_model(folder, "llama", vocab_size=200)


def heads_of_16(folder: Path) -> None:
    shutil.rmtree(folder)
    write_model(folder, "llama", head_dim=16, num_attention_heads=4, num_key_value_heads=4)


def cases() -> list[Case]:
    return [*config_files(), *heads(), *config_sizes(), *architectures(), *layer_kinds()]
