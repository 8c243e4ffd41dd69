"""Model directories: of other kinds, cut, spoiled, and good ones in other forms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trials import looks
from tests.trials.makers import model_case, warm_case
from tests.trials.material import edit_json, edit_weights, write_model
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 988097824\n"
PATH = r"model\.path|config\.json"
WEIGHTS = r"model.*safetensors"


def settings(**values: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", **values)


def text_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def weights(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], object]:
    return lambda folder: edit_weights(folder, change)


def tokenizer_settings(**values: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", **values)


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
        model_case("mod_json_binary", "config.json is binary", lambda folder: (folder / "config.json").write_bytes(bytes(range(256))), Refused((r"config\.json",))),
        model_case("mod_no_heads", "no number of heads", settings(num_attention_heads=...), Refused((r"config\.json", "num_attention_heads"))),
        model_case("mod_heads_str", "heads as a text", settings(num_attention_heads="2"), Refused((r"config\.json", "num_attention_heads"))),
        model_case("mod_heads0", "no heads", settings(num_attention_heads=0), Refused((r"config\.json", "num_attention_heads"))),
        model_case("mod_kv_null", "key-value heads null", settings(num_key_value_heads=None), Ends(), Refused((r"config\.json", "num_key_value_heads"))),
        model_case("mod_kv_odd", "key-value heads that do not divide the heads", settings(num_key_value_heads=3), Refused(("num_key_value_heads|key-value|shape|size",), before="engine")),
        model_case("mod_layers_neg", "-2 layers", settings(num_hidden_layers=-2), Refused((r"config\.json", "num_hidden_layers"))),
        model_case("mod_layers0", "no layers", settings(num_hidden_layers=0), Refused((r"config\.json", "num_hidden_layers"))),
        model_case("mod_layers_more", "more layers than weights", settings(num_hidden_layers=3), Refused(("missing", "layers"), before="engine")),
        model_case("mod_layers_less", "fewer layers than weights", settings(num_hidden_layers=1), Refused(("unknown", "layers"), before="engine")),
        model_case("mod_hidden", "another hidden size", settings(hidden_size=128), Refused((r"model|config\.json|embed", "128"), before="engine")),
        model_case("mod_vocab_small", "a vocabulary below the weights", settings(vocab_size=100), Refused(("vocab",), before="engine")),
        model_case("mod_vocab_tokens", "token ids beyond the vocabulary", small_vocabulary, Refused(("vocab|token id",), before="engine")),
        model_case("mod_theta_str", "rope_theta as a text", rope_text, Refused((r"config\.json|rope",), before="engine")),
        model_case("mod_arch_gpt2", "GPT-2", text_config('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_head": 2, "n_layer": 2}'), Refused(("GPT2LMHeadModel", "support"))),
        model_case("mod_arch_vl", "Qwen2.5-VL", text_config('{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "text_config": {}}'), Refused(("Qwen2_5_VL", "support"))),
        model_case("mod_arch_gemma", "Gemma 2", settings(architectures=["Gemma2ForCausalLM"], model_type="gemma2"), Refused(("Gemma2", "support"))),
        model_case("mod_arch_none", "no architecture", settings(architectures=...), Refused((r"config\.json", "architectures"), before="engine"), Ends()),
        model_case("mod_arch_unknown", "an architecture nobody knows", settings(architectures=["FooForCausalLM"]), Refused(("FooForCausalLM", "support"))),
        model_case("mod_quant_config", "GPTQ", settings(quantization_config={"quant_method": "gptq", "bits": 4}), Refused(("quantiz|quantis", "gptq"))),
        model_case("mod_yarn", "yarn", settings(rope_scaling={"rope_type": "yarn", "factor": 4.0}), Refused(("rope|yarn", "support|yarn"), before="engine"), Ends()),
        model_case("mod_sliding", "a sliding window", settings(sliding_window=16, use_sliding_window=True), Refused(("sliding",), before="engine"), family="qwen2"),
        model_case("mod_gelu", "GELU", settings(hidden_act="gelu"), Refused(("hidden_act|gelu",), before="engine")),
        model_case("mod_bias", "attention bias without the tensors", settings(attention_bias=True), Refused(("bias",), before="engine")),
        model_case("mod_head_dim16", "heads of 16 on the CPU engine", heads_of_16, Refused(("head_dim",))),
    ]  # fmt: skip


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


def first_matrix(change: Callable[[Any], Any]) -> Callable[[Path], object]:
    name = "model.layers.1.mlp.down_proj.weight"
    return weights(lambda tensors: tensors.update({name: change(tensors[name])}))


def one_nan(tensor: Any) -> Any:
    tensor = tensor.clone()
    tensor[3] = float("nan")
    return tensor


def one_inf(tensor: Any) -> Any:
    tensor = tensor.clone()
    tensor[0, 0] = float("inf")
    return tensor


def to(name: str) -> Callable[[Any], Any]:
    def convert(tensor: Any) -> Any:
        import torch

        return tensor.to(getattr(torch, name))

    return convert


def all_to(name: str) -> Callable[[Path], object]:
    return weights(lambda tensors: tensors.update({key: to(name)(value) for key, value in tensors.items()}))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def sharded(folder: Path) -> dict[str, str]:
    """Two files and an index; returns the index's map."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    where = {}
    for number, half in enumerate(halves, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(half, file)
    _index(folder, where)
    return where


def _index(folder: Path, where: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def index_lies(folder: Path) -> None:
    where = sharded(folder)
    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    name = min(where)
    _index(folder, where | {name: other[where[name]]})


def pickled(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def other_head(folder: Path) -> None:
    """Said to be tied, with a head of its own that differs."""
    edit_json(folder / "config.json", tie_word_embeddings=True)


def equal_head(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))


def tied(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))


def bytes_of(content: bytes, name: str = "model.safetensors") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def tensors() -> list[Case]:
    """Weights that are cut, missing, not numbers."""
    finite = ("finite|nan|inf", "down_proj|layers")
    head = "lm_head.weight"
    return [
        model_case("mod_trunc_st", "a cut weight file", cut, Refused((WEIGHTS,), before="engine")),
        model_case("mod_zero_st", "a weight file of zeros", bytes_of(bytes(5000)), Refused((WEIGHTS,), before="engine")),
        model_case("mod_empty_st", "an empty weight file", bytes_of(b""), Refused((WEIGHTS,), before="engine")),
        model_case("mod_header_bomb", "a header of 2**60 bytes", bytes_of((2**60).to_bytes(8, "little") + bytes(100)), Refused((WEIGHTS,), before="engine")),
        model_case("mod_lfs_pointer", "a pointer of Git LFS", bytes_of(POINTER.encode()), Refused((WEIGHTS, "LFS"), before="engine")),
        model_case("mod_lfs_tokenizer", "a pointer for tokenizer.json", bytes_of(POINTER.encode(), "tokenizer.json"), Refused((r"tokenizer", "LFS"))),
        model_case("mod_index_lies", "an index that names the wrong file", index_lies, Refused((r"index\.json|" + WEIGHTS,), before="engine")),
        model_case("mod_index_missing", "an index that names no file", lambda folder: (sharded(folder), (folder / "model-00002-of-00002.safetensors").unlink()), Refused((r"model-00002",), before="engine")),
        model_case("mod_index_bad", "an index that is no JSON", lambda folder: (sharded(folder), (folder / "model.safetensors.index.json").write_text("{")), Refused((r"index\.json",), before="engine")),
        model_case("mod_missing", "a missing tensor", weights(lambda found: found.pop("model.norm.weight")), Refused(("missing", r"model\.norm\.weight"), before="engine")),
        model_case("mod_unknown", "an unknown tensor", weights(lambda found: found.update({"foo.weight": found["model.norm.weight"].clone()})), Refused(("unknown", r"foo\.weight"), before="engine")),
        model_case("mod_no_head", "not tied and no head", weights(lambda found: found.pop(head)), Refused((r"lm_head",), before="engine")),
        model_case("mod_shape", "a matrix of another shape", first_matrix(lambda tensor: tensor[:, :-8].contiguous()), Refused(("down_proj", "96|88"), before="engine")),
        model_case("mod_one_nan", "a row of NaN", first_matrix(one_nan), Refused(finite, before="engine")),
        model_case("mod_all_nan", "a matrix of NaN", first_matrix(lambda tensor: tensor * float("nan")), Refused(finite, before="engine")),
        model_case("mod_inf", "one infinite weight", first_matrix(one_inf), Refused(finite, before="engine")),
        model_case("mod_nan_norm", "a norm of NaN", weights(lambda found: found["model.norm.weight"].fill_(float("nan"))), Refused(("finite|nan",), before="engine")),
        model_case("mod_int8_tensor", "an int8 matrix", first_matrix(to("int8")), Refused(("down_proj", "int8|float|dtype"), before="engine")),
        model_case("mod_fp8_tensor", "an FP8 matrix without scales", first_matrix(to("float8_e4m3fn")), Refused(("down_proj", "float8|fp8|dtype|format"), before="engine")),
        model_case("mod_head_differs", "said to be tied, another head", other_head, Refused((r"lm_head", "tie"), before="engine")),
        model_case("mod_bin", "weights as .bin only", pickled, Refused(("safetensors",), before="engine")),
    ]  # fmt: skip


def tokenizers() -> list[Case]:
    """Tokenizers that are missing, damaged, or speak otherwise."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    raises = "{{ raise_exception('only users may speak') }}"
    return [
        model_case("mod_no_tokenizer", "no tokenizer", no_file(*names), Refused(("tokenizer", PATH))),
        model_case("mod_bad_tokenizer", "a cut tokenizer.json", lambda folder: cut_text(folder / "tokenizer.json"), Refused(("tokenizer",))),
        model_case("mod_tokenizer_list", "tokenizer.json is a list", lambda folder: (folder / "tokenizer.json").write_text("[]"), Refused(("tokenizer",))),
        model_case("mod_tokenizer_class", "a tokenizer class nobody knows", tokenizer_settings(tokenizer_class="FooTokenizer"), Refused(("tokenizer",)), Ends()),
        model_case("mod_remote_code", "code of its own", tokenizer_settings(auto_map={"AutoTokenizer": ["x.Y", None]}, tokenizer_class="FooTokenizer"), Refused(("tokenizer",)), Ends()),
        model_case("mod_no_template", "no chat template", template(None), Refused(("chat.template", "apply_chat_template"))),
        model_case("mod_no_eos", "no end token", tokenizer_settings(eos_token=None), Refused(("eos",))),
        model_case("mod_bad_template", "a template that does not parse", template("{% for m in messages %}{{ m"), Refused(("chat.template", "row|model"))),
        model_case("mod_template_raises", "a template that refuses", template(raises), Refused(("only users may speak", "chat.template"))),
        model_case("mod_template_undefined", "a template of unknown names", template("{{ messages[0].nothing.more }}"), Refused(("chat.template", "row|model"))),
        model_case("mod_template_deaf", "a template that leaves the prompt out", template("hello"), Refused(("prompt|template",), harm=False), Ends(("same|identical|duplicate",))),
        model_case("mod_template_loop", "a template that asks for the system's files", template("{{ ''.__class__.__mro__ }}"), Refused(("chat.template",)), ),
    ]  # fmt: skip


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
        at("mod_empty", "an empty folder", lambda place: str(place.material.made("empty", Path.mkdir)), Refused((r"model\.path", r"config\.json"))),
        at("mod_gguf", "a GGUF file", gguf, Refused((r"model\.path", "gguf|folder"))),
        at("mod_adapter", "a LoRA adapter", adapter, Refused((r"model\.path", "adapter|LoRA"))),
        at("mod_loop", "a link to itself", looped, Refused((r"model\.path",))),
        at("mod_link", "a link", linked, Ends()),
        at("mod_slash", "a slash at the end", lambda place: f"{place.material.model('llama')}/", Ends()),
    ]  # fmt: skip


def forms() -> list[Case]:
    """Good models in other forms."""
    same = lambda folder: None  # noqa: E731
    return [
        model_case("mod_llama", "Llama", same, Ends()),
        model_case("mod_qwen2", "Qwen2", same, Ends(), family="qwen2"),
        model_case("mod_mixtral", "Mixtral", same, Ends(), family="mixtral"),
        model_case("mod_tied", "tied, without a head", tied, Ends()),
        model_case("mod_tied_equal", "tied, with an equal head", equal_head, Ends()),
        model_case("mod_sharded", "two files and an index", sharded, Ends()),
        model_case("mod_bf16", "weights in bfloat16", all_to("bfloat16"), Ends()),
        model_case("mod_f16", "weights in float16", all_to("float16"), Ends()),
        model_case("mod_f64", "weights in float64", all_to("float64"), Ends(), Refused(("float64|dtype",), before="engine")),
        model_case("mod_mixed", "one matrix in bfloat16", first_matrix(to("bfloat16")), Ends(), Refused(("down_proj|number format|dtype",), before="engine")),
        model_case("mod_eos_list", "two end tokens", settings(eos_token_id=[1, 0]), Ends()),
        model_case("mod_more_files", "files that do not belong", lambda folder: (folder / "notes.txt").write_text("x"), Ends()),
        Case("mod_pickle", "model", "a pickle that runs code", pickle_runs, (Refused(("safetensors",), before="engine"), Ends()), "warm"),
    ]  # fmt: skip


def pickle_runs(place: Place) -> Outcome:
    """A .bin that writes a file when it is unpickled, beside no safetensors."""
    from tests.trials.material import small

    model = place.material.copy_of("llama", place.folder / "model")
    proof = place.folder / "ran"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(harmful_pickle(proof))
    outcome = place.warm(small(model, place.material.rows(), place.folder / "run"))
    wrong = ["the pickle ran code"] if proof.exists() else []
    return outcome.noting([*wrong, *(looks.not_trained(place.folder / "run") if outcome.code else [])])


def harmful_pickle(proof: Path) -> bytes:
    """Unpickling it creates the file ``proof``."""
    import os
    import pickle

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(proof),)

    return pickle.dumps(Harm())


def cases() -> list[Case]:
    return [*configs(), *tensors(), *tokenizers(), *paths(), *forms()]
