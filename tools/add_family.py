"""How far the known model families carry for another architecture, and a file to begin with.

    python tools/add_family.py HF_DIRECTORY

Reads config.json and, where the folder has weights, the names in their headers; without weights the
names are those of the model that transformers makes. Each known family is asked whether it would
read the configuration, and its tensors are compared with those names, layer numbers aside. Printed:
a line a family, the nearest first; options that the nearest one's configuration lacks or has at
another default; a skeleton of megatron_rl/models/NAME.py. What a family refuses decides, not the
number of tensors: see .github/guides/family.md.
"""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.engine.weights.stream import expected_tensors
from megatron_rl.errors import first_few, first_line
from megatron_rl.models import FAMILIES
from megatron_rl.models.parameter_map import hf_names

# Of every configuration, and no part of an architecture.
_IGNORED = {
    *("architectures", "dtype", "id2label", "label2id", "model_type", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache"),
    *("attention_dropout", "max_position_embeddings", "rope_parameters", "vocab_size"),
    "_name_or_path",
}
SKELETON = '''"""{architecture}: begin with {nearest}, and say here what differs."""

from typing import Any

from megatron_rl.models.base import Architecture, Family, refuse
from {module} import {reader} as nearest


def read(hf: Any) -> Architecture:
    # The values that this family implements.
    refuse(
        hf,
        {{
{options}        }},
    )
    return nearest(hf)


FAMILY = Family("{architecture}", read)
'''


@dataclass(frozen=True)
class Answer:
    """What one family makes of a configuration: why it refuses, or names that differ."""

    architecture: str
    refusal: str | None
    missing: list[str]
    unknown: list[str]

    @property
    def distance(self) -> tuple[bool, int]:
        return self.refusal is not None, len(self.missing) + len(self.unknown)

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.architecture}: refuses: {self.refusal}"
        parts = (("lacks", self.missing), ("does not know", self.unknown))
        found = [f"{what} {', '.join(first_few(names))}" for what, names in parts if names]
        return f"{self.architecture}: {'; '.join(found) or 'has the same tensors'}"


def patterns(names: Any) -> set[str]:
    """Names with a star for each number."""
    return {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}


def tensors_of(folder: Path, hf: Any) -> set[str]:
    """Patterns of the files' tensors, or of those that transformers would make."""
    if any(folder.glob("*.safetensors")):
        return patterns(expected_tensors(folder))
    maker: Any = transformers.AutoModelForCausalLM
    if hasattr(hf, "vision_config"):
        maker = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = maker.from_config(hf)
    names = patterns(model.state_dict())
    return names - {"lm_head.weight"} if hf.tie_word_embeddings else names


def asked(architecture: str, hf: Any, there: set[str]) -> Answer:
    try:
        arch = FAMILIES[architecture].read(copy.deepcopy(hf))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        own_words = re.search("attribute '(.+)'", str(error))
        why = f"there is no {own_words[1]}" if own_words else first_line(error)
        return Answer(architecture, why, [], [])
    own = patterns(hf_names(arch))
    return Answer(architecture, None, sorted(own - there), sorted(there - own))


def new_options(hf: Any, architecture: str) -> dict[str, Any]:
    """What is not at the default of the configuration of a known family, sizes aside."""
    model: Any = getattr(transformers, architecture)
    default = model.config_class().to_dict()
    values = hf.to_dict()
    return {
        key: value
        for key, value in values.items()
        if key not in _IGNORED and (key not in default or type(value) in (bool, str))
        if value is not None and value != default.get(key)
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="HF_DIRECTORY")
    folder = parser.parse_args().folder
    try:
        if not (folder / "config.json").is_file():
            raise ValueError("there is no config.json in it; give the folder of a HF model")
        hf = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        print(f"error: {folder}: {first_line(error)}", file=sys.stderr)
        return 2
    architecture = ", ".join(hf.architectures or ["an architecture without a name"])
    if architecture in FAMILIES:
        print(f"{architecture} is a known family; a run reads {folder}")
        return 0
    there = tensors_of(folder, hf)
    answers = sorted((asked(name, hf, there) for name in FAMILIES), key=lambda one: one.distance)
    print(f"{architecture} is not a known family. Known ones, the nearest first:")
    print(*(f"  {answer}" for answer in answers), sep="\n")
    if answers[0].refusal is not None:
        print("\nEach of them refuses it: begin with the guide, .github/guides/family.md")
        return 0
    nearest = answers[0].architecture
    options = new_options(hf, nearest)
    print(f"\nOptions that {nearest} does not have, or not so: {options or 'none'}")
    allowed = "".join(
        f'            "{key}": ({value!r},),\n'.replace("'", '"') for key, value in options.items()
    )
    read = FAMILIES[nearest].read
    names = dict(module=read.__module__, reader=read.__name__)
    print(f"\nmegatron_rl/models/{hf.model_type}.py, to begin with:\n")
    print(
        SKELETON.format(architecture=architecture, nearest=nearest, options=allowed, **names),
        end="",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
