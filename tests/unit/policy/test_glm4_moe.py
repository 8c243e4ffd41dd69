"""GLM-4.5 without megatron: sizes of the published model, stages whose layers differ, and files
with a layer that is left unread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.models import Architecture, read_architecture
from megatron_rl.planning.parameter_counts import layers_of_stages, stage_counts
from tests import zoo
from tests.numerics.policy_cases import parallel
from tools.plan_sync import architecture


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Architecture]:
    path = zoo.save_tiny_model("glm4_moe", tmp_path_factory.mktemp("glm") / "model")
    return path, read_architecture(path)[0]


def test_parameters_of_the_published_model() -> None:
    """Counted by hand, without the last layer of the files. Hidden 5120, 96 query and 8 key-value
    heads of 128, 160 experts and a shared one of 1536 in 89 layers, 3 of 12288."""
    hidden, expert = 5120, 3 * 5120 * 1536
    attention = 2 * hidden * 96 * 128 + 2 * hidden * 8 * 128 + (96 + 16) * 128
    norms = 2 * hidden + 2 * 128
    dense = 3 * (attention + norms + 3 * hidden * 12288)
    sparse = 89 * (attention + norms + 161 * expert + 160 * hidden + 160)
    (counts,) = stage_counts(architecture("glm-4.5"), parallel(), 1)
    assert counts.total == dense + sparse + 2 * 151552 * hidden + hidden == 352_797_829_024


def test_stages_know_their_dense_layers(glm: tuple[Path, Architecture]) -> None:
    arch = replace(glm[1], num_layers=16, num_dense_layers=3)
    two, chunks = parallel(pipeline=2), parallel(pipeline=2, virtual_pipeline=2)
    assert layers_of_stages(arch, two) == [list(range(8)), list(range(8, 16))]
    first = [*range(4), *range(8, 12)]
    assert layers_of_stages(arch, chunks) == [first, [n + 4 for n in first]]
    of_kinds = [
        sum(not arch.has_experts(n) for n in stage) for stage in layers_of_stages(arch, two)
    ]
    assert of_kinds == [3, 0]


def test_a_layer_for_further_tokens_is_left_unread(
    glm: tuple[Path, Architecture], tmp_path: Path
) -> None:
    path, arch = glm
    file = tmp_path / "model.safetensors"
    tensors = load_file(path / file.name)
    save_file(tensors | {"model.layers.4.enorm.weight": torch.ones(64)}, file)
    HfDirectory(tmp_path).check(replace(arch, num_unread_layers=1))
    with pytest.raises(ValueError, match=r"1 are unknown \['model\.layers\.4\.enorm\.weight'\]"):
        HfDirectory(tmp_path).check(replace(arch, num_unread_layers=0))
