"""A Megatron policy on two ranks pushes its weights into a stock vLLM server in processes of its own."""

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics import rollout_models as small
from tests.numerics.server import serving

pytestmark = pytest.mark.full
WORKER = Path(__file__).parent / "server_worker.py"


@pytest.mark.parametrize(("arch", "tensor"), [("qwen3_moe", 1), ("qwen2_tied", 2)])
def test_pushed_weights_are_served(tmp_path, arch, tensor):
    small.write(arch, 1, tmp_path)
    names = ("pushed_equals_transformers",)
    with serving(tmp_path / f"{arch}_1", tensor, tmp_path) as url:
        output = launch(WORKER, 2, [url, arch, tmp_path, *names], timeout=200).stdout
    print(output)
    for name in names:
        assert not small.verdict(output, name, 2), small.verdict(output, name, 2)
