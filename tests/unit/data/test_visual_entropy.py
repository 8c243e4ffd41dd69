"""The entropy by hand, and the tool on a random tiny vision tower of Qwen2.5-VL and on a CLIP
one."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from megatron_rl.config.method import load_method
from megatron_rl.signals import visual_entropy
from megatron_rl.signals.visual_entropy import visual_entropy as entropy_of
from tools import visual_entropy as tool


def test_entropy_by_hand() -> None:
    """Centred patches (+-1, 0), (0, +-2): variances 2/3 and 8/3, shares 1/5 and 4/5."""
    features = torch.tensor([[1.0, 0], [-1, 0], [0, 2], [0, -2]]) + 7
    expected = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8))
    assert entropy_of(features).item() == pytest.approx(expected, abs=1e-6)
    wide = torch.nn.functional.pad(
        features, (0, 8), value=3.0
    )  # more columns than patches: the other matrix
    assert entropy_of(wide).item() == pytest.approx(expected, abs=1e-6)


def test_limits() -> None:
    """Equal patches 0; one direction 0; n orthogonal patches of equal norm ln(n - 1)."""
    assert entropy_of(torch.ones(5, 3)).item() == 0
    assert entropy_of(torch.arange(5.0)[:, None] * torch.ones(3)).item() == pytest.approx(
        0, abs=1e-6
    )
    assert entropy_of(torch.eye(6)).item() == pytest.approx(math.log(5), abs=1e-6)
    with pytest.raises(ValueError, match="at least 2 patches"):
        entropy_of(torch.ones(1, 3))


@pytest.mark.parametrize("shape", [(40, 7), (7, 40)])
def test_both_matrices_and_chunks_agree_with_the_covariance(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(features.T)).clamp(min=1e-300)
    share = eigenvalues / eigenvalues.sum()
    expected = -(share * share.log()).sum().item()
    assert entropy_of(features).item() == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr(visual_entropy, "CHUNK", 3)
    assert entropy_of(features).item() == pytest.approx(expected, rel=1e-9)


def encoder_folder(kind: str, path: Path) -> Path:
    from transformers import CLIPVisionConfig, CLIPVisionModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64}
    if kind == "clip":
        clip = CLIPVisionConfig(
            num_hidden_layers=1, num_attention_heads=2, image_size=56, patch_size=14, **size
        )
        CLIPVisionModel(clip).save_pretrained(path)
        square = {"height": 56, "width": 56}
        CLIPImageProcessorPil(size=square, crop_size=square).save_pretrained(path)
    else:
        qwen = Qwen2_5_VLVisionConfig(
            depth=2,
            num_heads=2,
            out_hidden_size=32,
            patch_size=14,
            window_size=56,
            fullatt_block_indexes=[1],
            **size,
        )
        Qwen2_5_VisionTransformerPretrainedModel(qwen).save_pretrained(path)
        Qwen2VLImageProcessorPil(patch_size=14).save_pretrained(path)
    return path


def images(folder: Path) -> list[Path]:
    """One colour, and noise."""
    noise = np.random.default_rng(0).integers(0, 255, (112, 140, 3), dtype=np.uint8)
    paths = [folder / "flat.png", folder / "noise.png"]
    for path, pixels in zip(paths, (np.full_like(noise, 90), noise), strict=True):
        Image.fromarray(pixels).save(path)
    return paths


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "clip"])
def test_tool_scores_images_and_caches(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, paths = encoder_folder(kind, tmp_path / "encoder"), images(tmp_path)
    cache = tmp_path / "scores.parquet"
    arguments = [str(folder), "--cache", str(cache), *map(str, paths)]
    assert tool.main(arguments) == 0
    first = capsys.readouterr()
    flat, noise = (float(line.split()[0]) for line in first.out.splitlines())
    assert noise > flat >= 0
    encoder = tool.Encoder(folder)
    with Image.open(paths[1]) as image:
        features = encoder.features(image)
    assert features.shape == ((80, 32) if kind == "qwen2_5_vl" else (16, 32))  # no class token
    assert noise == pytest.approx(entropy_of(features).item(), abs=1e-5)
    assert "2 computed, 0 in the cache" in first.err
    assert tool.main(arguments) == 0
    assert "0 computed, 2 in the cache" in capsys.readouterr().err
    assert pq.read_table(cache).num_rows == 2


def test_tool_scores_a_data_file_that_feeds_durian(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, paths = encoder_folder("clip", tmp_path / "encoder"), images(tmp_path)
    rows = [
        {"prompt": "a", "images": ["flat.png"], "extra": {"level": 1}},
        {"prompt": "b", "images": [path.name for path in paths]},
    ]
    data, out = tmp_path / "train.jsonl", tmp_path / "scored.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(folder), "--cache", str(tmp_path / "c.parquet")]
    words += ["--data", str(data), "--out", str(out)]
    assert tool.main(words) == 0
    flat, both = (json.loads(line)["extra"] for line in out.read_text().splitlines())
    assert flat["level"] == 1 and 0 <= flat["visual_entropy"] < both["visual_entropy"]
    assert "visual_entropy" in load_method("durian").reads
    assert tool.main([*words, "--images-column", "picture"]) == 1
    assert "error: row 1: column 'picture' holds no image" in capsys.readouterr().err
    data.write_text('{"prompt": "a"}\n{"prompt": \n')
    assert tool.main(words) == 1
    assert f"error: {data}: row 2: not JSON (Expecting value)" in capsys.readouterr().err
