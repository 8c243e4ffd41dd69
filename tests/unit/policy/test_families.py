"""HF configurations of each family: what is read, and what is refused by name."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from megatron_rl import models as families
from megatron_rl.models import architecture_from, read_architecture
from megatron_rl.models.parameter_map import layer_parameters, shards
from tests.zoo import CLASSES, SMALL, TEXT_PARTS
from tests.zoo import FAMILIES as TINY

ROWS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())

FAMILIES_FOLDER = Path(families.__file__).parent


def config(kind: str, **more: Any) -> Any:
    name = next(name for name in TINY if CLASSES[name] == kind)
    of_text = "Text" if name in TEXT_PARTS else ""
    return getattr(transformers, f"{kind}{of_text}Config")(**(SMALL | TINY[name] | more))


def read(kind: str, **more: Any) -> Any:
    return architecture_from(config(kind, **more), f"{kind}ForCausalLM")


def test_options_of_each_family() -> None:
    assert read("Qwen2").qkv_bias
    assert not read("Llama").qkv_bias
    assert (read("Qwen3").qk_norm, read("Qwen3").head_dim) == (True, 24)
    assert (read("Llama").head_dim, read("Llama").rope_type) == (16, "llama3")
    assert (read("Qwen3Moe").num_experts, read("Qwen3Moe").expert_ffn_hidden_size) == (4, 48)
    assert (read("Mixtral").num_experts, read("Mixtral").expert_ffn_hidden_size) == (4, 96)
    window = dict(use_sliding_window=True, sliding_window=16, max_window_layers=0)
    for kind, more in (("Mistral", dict(sliding_window=16)), ("Mixtral", dict(sliding_window=16))):
        assert (read(kind, **more).window, read(kind).windowed) == (16, ())
    for kind in ("Qwen2", "Qwen3", "Qwen3Moe"):
        assert set(read(kind, **window).windowed) == {True} and not read(kind).windowed
    assert not read("Qwen2", **window | dict(max_window_layers=4)).windowed
    gemma = read("Gemma3", layer_types=None, num_hidden_layers=8)
    assert [n for n in range(8) if not gemma.windowed[n]] == [5]
    assert (gemma.rope_theta, gemma.local_rope_theta, gemma.embedding_scale) == (1e6, 1e4, 8.0)
    glm = read("Glm4Moe", n_shared_experts=2, use_qk_norm=False, attention_bias=False)
    assert (glm.num_experts, glm.expert_ffn_hidden_size, glm.shared_ffn_hidden_size) == (4, 48, 96)
    assert (glm.qk_norm, glm.qkv_bias, glm.rotary_share) == (False, False, 0.5)
    assert [glm.has_experts(layer) for layer in range(4)] == [False, True, True, True]


@pytest.mark.parametrize(
    ("kind", "option", "named"),
    ROWS["an_option_that_is_not_implemented_is_refused_by_name"],
)
def test_an_option_that_is_not_implemented_is_refused_by_name(
    kind: str, option: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        read(kind, **option)


def test_directories_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: .*missing is not a directory"):
        read_architecture(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLN"]}))
    words = r"\['Qwen3ForCausalLN'\].*did you mean Qwen3ForCausalLM\?.*LlamaForCausalLM"
    with pytest.raises(ValueError, match=words):
        read_architecture(tmp_path)


README = FAMILIES_FOLDER / "README.md"


def test_the_page_shows_the_file_as_it_is() -> None:
    (shown, _) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert shown in (FAMILIES_FOLDER / "qwen3.py").read_text()


def test_the_shards_on_the_page_are_those_of_the_map() -> None:
    names = {
        "arch": read("Qwen3", hidden_size=64, head_dim=16),
        "shards": shards,
        "layer_parameters": layer_parameters,
    }
    failed, tried = doctest.testfile(str(README), module_relative=False, globs=names)
    assert (failed, tried) == (0, 2)
