"""Tokenizers and chat templates of a model directory, and paths to one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trials.makers import model_case, warm_case
from tests.trials.material import edit_json
from tests.trials.model_cases import PATH, no_file
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Refused


def tokenizer_settings(**values: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", **values)


def template(text: str | None) -> Callable[[Path], object]:
    """The chat template lives in a file of its own, or in tokenizer_config.json."""

    def spoil(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        edit_json(folder / "tokenizer_config.json", chat_template=... if text is None else text)

    return spoil


def tokenizers() -> list[Case]:
    """Tokenizers that are missing or damaged."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    return [
        model_case(
            "mod_no_tokenizer", "no tokenizer", no_file(*names), Refused(("tokenizer", PATH))
        ),
        model_case(
            "mod_bad_tokenizer",
            "a cut tokenizer.json",
            lambda folder: cut_text(folder / "tokenizer.json"),
            Refused(("tokenizer",)),
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
            tokenizer_settings(
                auto_map={"AutoTokenizer": ["x.Y", None]}, tokenizer_class="FooTokenizer"
            ),
            Refused(("tokenizer",)),
            Ends(),
        ),
    ]


def templates() -> list[Case]:
    """Chat templates that are missing, do not parse, or say nothing; no end token."""
    raises = "{{ raise_exception('only users may speak') }}"
    return [
        model_case(
            "mod_no_template",
            "no chat template",
            template(None),
            Refused(("chat.template", "apply_chat_template")),
        ),
        model_case(
            "mod_no_eos", "no end token", tokenizer_settings(eos_token=None), Refused(("eos",))
        ),
        model_case(
            "mod_bad_template",
            "a template that does not parse",
            template("{% for m in messages %}{{ m"),
            Refused(("chat.template", "row|model")),
        ),
        model_case(
            "mod_template_raises",
            "a template that refuses",
            template(raises),
            Refused(("only users may speak", "chat.template")),
        ),
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
    return warm_case(
        name,
        title,
        lambda place: (Path(find(place)), place.material.rows()),
        *expected,
        group="model",
    )


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
        at(
            "mod_no_folder",
            "no such folder",
            lambda place: str(place.folder / "nowhere"),
            Refused((r"model\.path", "nowhere")),
        ),
        at(
            "mod_hub_name",
            "a name of the hub",
            lambda place: "Qwen/Qwen2.5-0.5B",
            Refused((r"model\.path", "Qwen/Qwen2.5-0.5B")),
        ),
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
        at(
            "mod_slash",
            "a slash at the end",
            lambda place: f"{place.material.model('llama')}/",
            Ends(),
        ),
    ]


def cases() -> list[Case]:
    return [*tokenizers(), *templates(), *paths()]
