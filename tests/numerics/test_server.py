"""A Megatron policy on two ranks pushes its weights into a stock vLLM server in processes of its own."""

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics import rollout_models as small
from tests.numerics.server import serving

pytestmark = pytest.mark.full
WORKER = Path(__file__).parent / "server_worker.py"


CASES = ("pushed_equals_transformers", "misfits_are_refused_and_the_server_serves_on", "request_under_way_goes_on_with_new_weights")


@pytest.mark.parametrize(("arch", "tensor", "fault"), [("qwen3_moe", 1, "rank_that_fails"), ("qwen2_tied", 2, "changed_byte")])
def test_pushed_weights_are_served(tmp_path, arch, tensor, fault):
    small.write(arch, 1, tmp_path)
    with serving(tmp_path / f"{arch}_1", tensor, tmp_path) as url:
        output = launch(WORKER, 2, [url, arch, tmp_path, *CASES, fault], timeout=200).stdout
    failed = [small.verdict(output, name, 2) for name in (*CASES, fault)]
    assert not any(failed), "\n".join(failed)
