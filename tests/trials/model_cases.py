"""Model directories: of other kinds, cut, spoiled, and good ones in other forms."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trials.makers import model_case, warm_case
from tests.trials.material import edit_json, write_model
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Refused

POINTER = "version https:" + "//git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 988097824\n"
PATH = r"model\.path|config\.json"


def settings(**values: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", **values)


def text_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def tokenizer_settings(**values: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", **values)


def bytes_of(content: bytes, name: str = "model.safetensors") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def no_file(*names: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return spoil


def template(text: str | None) -> Callable[[Path], object]:
    """The chat template lives in a file of its own, or in tokenizer_config.json."""

    def spoil(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        edit_json(folder / "tokenizer_config.json", chat_template=... if text is None else text)

    return spoil


def configs() -> list[Case]:
    """config.json that says nothing, or something else."""
    return [
        model_case("mod_no_config", "no config.json", no_file("config.json"), Refused((PATH, r"config\.json"))),
        model_case("mod_bad_json", "config.json is no JSON", text_config('{"a": 1,, "b": 2}'), Refused((r"config\.json",))),
        model_case("mod_empty_json", "config.json is {}", text_config("{}"), Refused((r"config\.json", "architectures|model_type|num_"))),
        model_case("mod_json_list", "config.json is a list", text_config("[1, 2]"), Refused((r"config\.json",))),
        model_case(
            "mod_json_binary",
            "config.json is binary",
            lambda folder: (folder / "config.json").write_bytes(bytes(range(256))),
            Refused((r"config\.json",)),
        ),
        model_case(
            "mod_no_heads", "no number of heads", settings(num_attention_heads=...), Refused((r"config\.json", "num_attention_heads"))
        ),
        model_case(
            "mod_heads_str", "heads as a text", settings(num_attention_heads="2"), Refused((r"config\.json", "num_attention_heads"))
        ),
        model_case("mod_heads0", "no heads", settings(num_attention_heads=0), Refused((r"config\.json", "num_attention_heads"))),
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
        model_case("mod_layers_neg", "-2 layers", settings(num_hidden_layers=-2), Refused((r"config\.json", "num_hidden_layers"))),
        model_case("mod_layers0", "no layers", settings(num_hidden_layers=0), Refused((r"config\.json", "num_hidden_layers"))),
        model_case(
            "mod_layers_more", "more layers than weights", settings(num_hidden_layers=3), Refused(("missing", "layers"), before="engine")
        ),
        model_case(
            "mod_layers_less", "fewer layers than weights", settings(num_hidden_layers=1), Refused(("unknown", "layers"), before="engine")
        ),
        model_case(
            "mod_hidden", "another hidden size", settings(hidden_size=128), Refused((r"model|config\.json|embed", "128"), before="engine")
        ),
        model_case("mod_vocab_small", "a vocabulary below the weights", settings(vocab_size=100), Refused(("vocab",), before="engine")),
        model_case("mod_vocab_tokens", "token ids beyond the vocabulary", small_vocabulary, Refused(("vocab|token id",), before="engine")),
        model_case("mod_theta_str", "rope_theta as a text", rope_text, Refused((r"config\.json|rope",), before="engine")),
    ]


def architectures() -> list[Case]:
    """Models of other kinds."""
    return [
        model_case(
            "mod_arch_gpt2",
            "GPT-2",
            text_config('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_head": 2, "n_layer": 2}'),
            Refused(("GPT2LMHeadModel", "support")),
        ),
        model_case(
            "mod_arch_vl",
            "Qwen2.5-VL",
            text_config('{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "text_config": {}}'),
            Refused(("Qwen2_5_VL", "support")),
        ),
        model_case(
            "mod_arch_gemma", "Gemma 2", settings(architectures=["Gemma2ForCausalLM"], model_type="gemma2"), Refused(("Gemma2", "support"))
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
        model_case("mod_gelu", "GELU", settings(hidden_act="gelu"), Refused(("hidden_act|gelu",), before="engine")),
        model_case("mod_bias", "attention bias without the tensors", settings(attention_bias=True), Refused(("bias",), before="engine")),
        model_case("mod_head_dim16", "heads of 16 on the CPU engine", heads_of_16, Refused(("head_dim",))),
    ]


def rope_text(folder: Path) -> None:
    """Older files have ``rope_theta`` at the top, newer ones inside ``rope_parameters``."""
    edit_json(folder / "config.json", rope_theta="big", rope_parameters={"rope_theta": "big", "rope_type": "default"})


def small_vocabulary(folder: Path) -> None:
    """The model knows 200 tokens, its tokenizer more."""
    shutil.rmtree(folder)
    write_model(folder, "llama", vocab_size=200)


def heads_of_16(folder: Path) -> None:
    shutil.rmtree(folder)
    write_model(folder, "llama", head_dim=16, num_attention_heads=4, num_key_value_heads=4)


def tokenizers() -> list[Case]:
    """Tokenizers that are missing, damaged, or speak otherwise."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    raises = "{{ raise_exception('only users may speak') }}"
    return [
        model_case("mod_no_tokenizer", "no tokenizer", no_file(*names), Refused(("tokenizer", PATH))),
        model_case(
            "mod_bad_tokenizer", "a cut tokenizer.json", lambda folder: cut_text(folder / "tokenizer.json"), Refused(("tokenizer",))
        ),
        model_case(
            "mod_tokenizer_list",
            "tokenizer.json is a list",
            lambda folder: (folder / "tokenizer.json").write_text("[]"),
            Refused(("tokenizer",)),
        ),
        model_case(
            "mod_tokenizer_class",
            "a tokenizer class nobody knows",
            tokenizer_settings(tokenizer_class="FooTokenizer"),
            Refused(("tokenizer",)),
            Ends(),
        ),
        model_case(
            "mod_remote_code",
            "code of its own",
            tokenizer_settings(auto_map={"AutoTokenizer": ["x.Y", None]}, tokenizer_class="FooTokenizer"),
            Refused(("tokenizer",)),
            Ends(),
        ),
        model_case("mod_no_template", "no chat template", template(None), Refused(("chat.template", "apply_chat_template"))),
        model_case("mod_no_eos", "no end token", tokenizer_settings(eos_token=None), Refused(("eos",))),
        model_case(
            "mod_bad_template",
            "a template that does not parse",
            template("{% for m in messages %}{{ m"),
            Refused(("chat.template", "row|model")),
        ),
        model_case("mod_template_raises", "a template that refuses", template(raises), Refused(("only users may speak", "chat.template"))),
        model_case(
            "mod_template_undefined",
            "a template of unknown names",
            template("{{ messages[0].nothing.more }}"),
            Refused(("chat.template", "row|model")),
        ),
        model_case(
            "mod_template_deaf",
            "a template that leaves the prompt out",
            template("hello"),
            Refused(("prompt|template",), harm=False),
            Ends(("same|identical|duplicate",)),
        ),
        model_case(
            "mod_template_loop",
            "a template that asks for the system's files",
            template("{{ ''.__class__.__mro__ }}"),
            Refused(("chat.template",)),
        ),
    ]


def cut_text(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def at(name: str, title: str, find: Callable[[Place], str], *expected: Refused | Ends) -> Case:
    """model.path as ``find`` says; the data are plain sums."""
    return warm_case(name, title, lambda place: (Path(find(place)), place.material.rows()), *expected, group="model")


def adapter(place: Place) -> str:
    folder = place.folder / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)


def linked(place: Place) -> str:
    (place.folder / "link").symlink_to(place.material.model("llama"))
    return str(place.folder / "link")


def looped(place: Place) -> str:
    (place.folder / "loop").symlink_to(place.folder / "loop")
    return str(place.folder / "loop")


def gguf(place: Place) -> str:
    (place.folder / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    return str(place.folder / "model.gguf")


def paths() -> list[Case]:
    return [
        at("mod_no_folder", "no such folder", lambda place: str(place.folder / "nowhere"), Refused((r"model\.path", "nowhere"))),
        at("mod_hub_name", "a name of the hub", lambda place: "Qwen/Qwen2.5-0.5B", Refused((r"model\.path", "Qwen/Qwen2.5-0.5B"))),
        at(
            "mod_empty",
            "an empty folder",
            lambda place: str(place.material.made("empty", Path.mkdir)),
            Refused((r"model\.path", r"config\.json")),
        ),
        at("mod_gguf", "a GGUF file", gguf, Refused((r"model\.path", "gguf|folder"))),
        at("mod_adapter", "a LoRA adapter", adapter, Refused((r"model\.path", "adapter|LoRA"))),
        at("mod_loop", "a link to itself", looped, Refused((r"model\.path",))),
        at("mod_link", "a link", linked, Ends()),
        at("mod_slash", "a slash at the end", lambda place: f"{place.material.model('llama')}/", Ends()),
    ]


def cases() -> list[Case]:
    return [*configs(), *config_sizes(), *architectures(), *tokenizers(), *paths()]
