"""A Megatron policy with tensor parallelism pushes its weights into a vLLM server.

Usage: ``server_worker.py URL ARCH FOLDER CASE...``
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_rl.config.schema import ModelConfig
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import launch
from megatron_rl.weight_sync.server import HttpServer, ServerSync
from tests.numerics import policy_cases
from tests.numerics import rollout_models as small
from tests.numerics.server import ask

URL, ARCH, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
WORLD = launch.start()
PROMPTS = [*small.make_prompts(3), *small.make_prompts(2, length=260)]  # the long ones fill blocks of the prefix cache
MAX_GAP = 1e-4


def policy_of(arch: str, seed: int) -> MegatronPolicy:
    path = WORLD.from_main(lambda: small.write(arch, seed, FOLDER))
    more = {"sequence": True} if arch in ("qwen3_moe", "mixtral") else {}
    return MegatronPolicy(
        ModelConfig(path=str(path), make_vocab_divisible_by=64),
        policy_cases.parallel(tensor=2, **more),
        policy_cases.precision(),
        policy_cases.optim(),
        temperature=1.0,
        keep_reference=False,
        total_optimizer_steps=1,
        max_sequence_tokens=512,
    )


def answers(version: int) -> tuple:
    """Of the server, which stamps every one of their tokens with the version."""

    def get() -> tuple:
        groups, spans = ask(URL, PROMPTS)
        stamp = str(version) if version else "default"
        assert spans == [[{"version": stamp, "start": 0, "end": 16}]] * len(PROMPTS), spans
        assert HttpServer(URL).call("weight_info", method="GET") == {"weight_version": stamp}
        return groups, small.tokens(groups), small.logprobs(groups).tolist()

    return WORLD.from_main(get)


def gap(policy: MegatronPolicy, groups: list) -> float:
    """Collective: between the server's logprobs and those of transformers with the policy's weights."""
    path = FOLDER / "export"
    policy.export(path)
    return small.logprob_gap(AutoModelForCausalLM.from_pretrained(path, dtype="float32"), PROMPTS, groups, lambda logits: logits)


def pushed_equals_transformers() -> None:
    policy = policy_of(ARCH, 2)
    assert gap(policy, answers(0)[0]) > 0.1, "the server starts with other weights"
    sync = ServerSync(policy, HttpServer(URL), WORLD, bucket_mib=1)
    keys = {box.key for box in policy.weight_boxes()}
    first = sync.sync(1)
    one = answers(1)
    assert gap(policy, one[0]) <= MAX_GAP, gap(policy, one[0])
    with torch.no_grad():
        kept = {key: policy.weight(key).clone() for key in keys}
        for key in keys:
            policy.weight(key).mul_(1.1)
    second = sync.sync(2)
    two = answers(2)
    assert gap(policy, two[0]) <= MAX_GAP < gap(policy, one[0]), gap(policy, two[0])
    with torch.no_grad():
        for key, value in kept.items():
            policy.weight(key).copy_(value)
    third = sync.sync(3)
    assert answers(3)[1:] == one[1:], "the same weights, the same bits"
    sent = sum(WORLD.all_gather(first.bytes_sent))
    assert sent == first.bytes_total == sync.plan.bytes_sent == sync.plan.lower_bound
    if WORLD.rank == 0:
        seconds = [round(report.seconds, 3) for report in (first, second, third)]
        small.say(f"{ARCH}: {sync.plan.bytes_sent} bytes sent, least {sync.plan.lower_bound}, gather {sync.plan.gather_bytes}; {seconds} s")
    sync.close()
    policy.close()


if __name__ == "__main__":
    small.run_cases({name: globals()[name] for name in sys.argv[4:]})
