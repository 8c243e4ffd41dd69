"""Weights: cut, missing, not numbers; and good ones in other forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trials import looks
from tests.trials.makers import model_case
from tests.trials.material import edit_json, edit_weights, small
from tests.trials.model_cases import POINTER, bytes_of, settings
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused

WEIGHTS = r"model.*safetensors"


def weights(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], object]:
    return lambda folder: edit_weights(folder, change)


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
    convert = to(name)
    return weights(
        lambda tensors: tensors.update({key: convert(value) for key, value in tensors.items()})
    )


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
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_lies(folder: Path) -> None:
    where = sharded(folder)
    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    name = min(where)
    _index(folder, where | {name: other[where[name]]})


def index_missing(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_bad(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text("{")


def pickled(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def other_head(folder: Path) -> None:
    """Said to be tied, with a head of its own that differs."""
    edit_json(folder / "config.json", tie_word_embeddings=True)


def equal_head(folder: Path) -> None:
    def copy_the_embedding(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_json(folder / "config.json", tie_word_embeddings=True)
    edit_weights(folder, copy_the_embedding)


def tied(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))


def weight_files() -> list[Case]:
    """Weight files that are none."""
    return [
        model_case("mod_trunc_st", "a cut weight file", cut, Refused((WEIGHTS,), before="engine")),
        model_case(
            "mod_zero_st",
            "a weight file of zeros",
            bytes_of(bytes(5000)),
            Refused((WEIGHTS,), before="engine"),
        ),
        model_case(
            "mod_empty_st",
            "an empty weight file",
            bytes_of(b""),
            Refused((WEIGHTS,), before="engine"),
        ),
        model_case(
            "mod_header_bomb",
            "a header of 2**60 bytes",
            bytes_of((2**60).to_bytes(8, "little") + bytes(100)),
            Refused((WEIGHTS,), before="engine"),
        ),
        model_case(
            "mod_lfs_pointer",
            "a pointer of Git LFS",
            bytes_of(POINTER.encode()),
            Refused((WEIGHTS, "LFS"), before="engine"),
        ),
        model_case(
            "mod_lfs_tokenizer",
            "a pointer for tokenizer.json",
            bytes_of(POINTER.encode(), "tokenizer.json"),
            Refused((r"tokenizer", "LFS")),
        ),
        model_case(
            "mod_index_lies",
            "an index that names the wrong file",
            index_lies,
            Refused((r"index\.json|" + WEIGHTS,), before="engine"),
        ),
        model_case(
            "mod_index_missing",
            "an index that names no file",
            index_missing,
            Refused((r"model-00002",), before="engine"),
        ),
        model_case(
            "mod_index_bad",
            "an index that is no JSON",
            index_bad,
            Refused((r"index\.json",), before="engine"),
        ),
    ]


def tensors() -> list[Case]:
    """Tensors that are missing, unknown or of another shape."""
    head = "lm_head.weight"
    return [
        model_case(
            "mod_missing",
            "a missing tensor",
            weights(lambda found: found.pop("model.norm.weight")),
            Refused(("missing", r"model\.norm\.weight"), before="engine"),
        ),
        model_case(
            "mod_unknown",
            "an unknown tensor",
            weights(lambda found: found.update({"foo.weight": found["model.norm.weight"].clone()})),
            Refused(("unknown", r"foo\.weight"), before="engine"),
        ),
        model_case(
            "mod_no_head",
            "not tied and no head",
            weights(lambda found: found.pop(head)),
            Refused((r"lm_head",), before="engine"),
        ),
        model_case(
            "mod_shape",
            "a matrix of another shape",
            first_matrix(lambda tensor: tensor[:, :-8].contiguous()),
            Refused(("down_proj", "96|88"), before="engine"),
        ),
    ]


def numbers() -> list[Case]:
    """Numbers that are not finite, or of formats that no model is trained in."""
    finite = ("finite|nan|inf", "down_proj|layers")
    return [
        model_case(
            "mod_one_nan", "a row of NaN", first_matrix(one_nan), Refused(finite, before="engine")
        ),
        model_case(
            "mod_all_nan",
            "a matrix of NaN",
            first_matrix(lambda tensor: tensor * float("nan")),
            Refused(finite, before="engine"),
        ),
        model_case(
            "mod_inf",
            "one infinite weight",
            first_matrix(one_inf),
            Refused(finite, before="engine"),
        ),
        model_case(
            "mod_nan_norm",
            "a norm of NaN",
            weights(lambda found: found["model.norm.weight"].fill_(float("nan"))),
            Refused(("finite|nan",), before="engine"),
        ),
        model_case(
            "mod_int8_tensor",
            "an int8 matrix",
            first_matrix(to("int8")),
            Refused(("down_proj", "int8|float|dtype"), before="engine"),
        ),
        model_case(
            "mod_fp8_tensor",
            "an FP8 matrix without scales",
            first_matrix(to("float8_e4m3fn")),
            Refused(("down_proj", "float8|fp8|dtype|format"), before="engine"),
        ),
        model_case(
            "mod_head_differs",
            "said to be tied, another head",
            other_head,
            Refused((r"lm_head", "tie"), before="engine"),
        ),
        model_case(
            "mod_bin", "weights as .bin only", pickled, Refused(("safetensors",), before="engine")
        ),
    ]


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
        model_case(
            "mod_f64",
            "weights in float64",
            all_to("float64"),
            Ends(),
            Refused(("float64|dtype",), before="engine"),
        ),
        model_case(
            "mod_mixed",
            "one matrix in bfloat16",
            first_matrix(to("bfloat16")),
            Ends(),
            Refused(("down_proj|number format|dtype",), before="engine"),
        ),
        model_case("mod_eos_list", "two end tokens", settings(eos_token_id=[1, 0]), Ends()),
        model_case(
            "mod_more_files",
            "files that do not belong",
            lambda folder: (folder / "notes.txt").write_text("x"),
            Ends(),
        ),
        Case(
            "mod_pickle",
            "model",
            "a pickle that runs code",
            pickle_runs,
            (Refused(("safetensors",), before="engine"), Ends()),
            "warm",
        ),
    ]


def pickle_runs(place: Place) -> Outcome:
    """A .bin that writes a file when it is unpickled, beside no safetensors."""
    model = place.material.copy_of("llama", place.folder / "model")
    proof = place.folder / "ran"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(harmful_pickle(proof))
    outcome = place.warm(small(model, place.material.rows(), place.folder / "run"))
    wrong = ["the pickle ran code"] if proof.exists() else []
    if outcome.code:
        wrong += looks.not_trained(place.folder / "run")
    return outcome.noting(wrong)


def harmful_pickle(proof: Path) -> bytes:
    """Unpickling it creates the file ``proof``."""
    import os
    import pickle

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(proof),)

    return pickle.dumps(Harm())


def cases() -> list[Case]:
    return [*weight_files(), *tensors(), *numbers(), *forms()]
