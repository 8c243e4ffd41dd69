"""A Megatron policy on two ranks pushes its weights into a stock vLLM server in processes of its
own."""

from pathlib import Path

import pytest

from megatron_rl.weight_sync.fleet.commands import HttpServer
from tests.launch import REPO, launch
from tests.numerics import rollout_models as small
from tests.numerics.server import ask, serving

pytestmark = pytest.mark.full
WORKER = Path(__file__).parent / "server_worker.py"


CASES = (
    "pushed_equals_transformers",
    "misfits_are_refused_and_the_server_serves_on",
    "request_under_way_goes_on_with_new_weights",
    "staged_weights_wait_while_the_server_answers",
)


@pytest.mark.parametrize(
    ("arch", "tensor", "fault"),
    [("qwen3_moe", 1, "rank_that_fails"), ("qwen2_tied", 2, "changed_byte")],
)
def test_pushed_weights_are_served(tmp_path, arch, tensor, fault):
    small.write(arch, 1, tmp_path)
    with serving(tmp_path / f"{arch}_1", tensor, tmp_path) as url:
        output = launch(WORKER, 2, [url, arch, tmp_path, *CASES, fault], timeout=250).stdout
    failed = [small.verdict(output, name, 2) for name in (*CASES, fault)]
    assert not any(failed), "\n".join(failed)


def test_example_pushes_a_checkpoint(tmp_path):
    before, after = (small.write("llama", seed, tmp_path) for seed in (1, 2))
    with serving(before, 1, tmp_path) as url:
        arguments = [
            "--server",
            url,
            "--model",
            after,
            "--tensor",
            2,
            "--version",
            7,
            "--params",
            "float32",
        ]
        output = launch(REPO / "examples/vllm_server/push.py", 2, arguments, timeout=100).stdout
        assert HttpServer(url).call("weight_info", method="GET") == {"weight_version": "7"}
        groups, _ = ask(url, small.make_prompts(3))
    gap = small.logprob_gap(
        small.build("llama", 2), small.make_prompts(3), groups, lambda logits: logits
    )
    assert gap <= 1e-4 and "bytes, the least possible" in output, (gap, output)
