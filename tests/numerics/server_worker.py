"""A Megatron policy with tensor parallelism pushes its weights into a vLLM server.

Usage: ``server_worker.py URL ARCH FOLDER CASE...``
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.errors import WeightSyncError
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import launch
from megatron_rl.types import Prompt, Shard, TransferOptions
from megatron_rl.weight_sync import transport
from megatron_rl.weight_sync.fleet.commands import HttpServer, switch_weights
from megatron_rl.weight_sync.fleet.fleet import FleetSync
from tests.numerics import rollout_models as small
from tests.numerics.server import ask, tokens_sampled
from tests.pushes import OneServer
from tests.zoo import build_policy

URL, ARCH, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
WORLD = launch.start()
PROMPTS = [
    *small.make_prompts(3),
    *small.make_prompts(2, length=260),
]  # the long ones fill blocks of the prefix cache
MAX_GAP = 1e-4
OPTIONS = TransferOptions(bucket_mib=1, timeout_s=60.0)


@cache
def the_policy() -> MegatronPolicy:
    path = WORLD.from_main(lambda: small.write(ARCH, 2, FOLDER))
    more = {"sequence": True} if ARCH == "qwen3_moe" else {}
    return build_policy(path, {"tensor": 2, **more})


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
    """Collective: between the server's logprobs and those of transformers with the policy's
    weights."""
    path = FOLDER / "export"
    policy.export(path)
    return small.logprob_gap(
        AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
        PROMPTS,
        groups,
        lambda logits: logits,
    )


def pushed_equals_transformers() -> None:
    policy = the_policy()
    assert gap(policy, answers(0)[0]) > 0.1, "the server starts with other weights"
    sync = OneServer(policy, HttpServer(URL), WORLD, TransferOptions(bucket_mib=1))
    keys = {shard.key for shard in policy.weight_shards()}
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
        small.say(
            f"{ARCH}: {sync.plan.bytes_sent} bytes sent, least {sync.plan.lower_bound}; {seconds} s"
        )
    sync.close()


TARGET = "model.layers.1.self_attn.o_proj.weight"
KEY = "0:decoder.layers.1.self_attention.linear_proj.weight"


def refused(call: Callable[[], object], kind: type[Exception], *words: str) -> str:
    """On every rank."""
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def connect(policy: object) -> OneServer:
    return OneServer(policy, HttpServer(URL), WORLD, OPTIONS, in_flight="keep")


def misfits_are_refused_and_the_server_serves_on() -> None:
    """Another model, a tensor that nobody holds, a weight that changed its kind: the old weights
    serve on."""
    before, policy = answers(3), the_policy()
    tampered = Tampered(policy)
    for change, words in {
        lambda shard: [replace(shard, full=(256, 128))]: (
            TARGET,
            "shape (256, 128)",
            "shape (128, 128)",
        ),
        lambda shard: []: (TARGET, "held by no training rank"),
        lambda shard: [shard, replace(shard, name="model.layers.1.self_attn.sinks")]: (
            "sinks",
            "needed by none of the rollout ranks",
        ),
        lambda shard: [replace(shard, dtype="bfloat16")]: (TARGET, "bfloat16", "float32"),
    }.items():
        tampered.shard = lambda shard, change=change: (
            change(shard) if shard.name == TARGET else [shard]
        )
        refused(lambda: connect(tampered), ValueError, *words)
        assert answers(3)[1:] == before[1:]
    tampered.shard = lambda shard: [shard]
    sync = connect(tampered)
    sync.sync(3)
    tampered.value = lambda tensor: tensor.bfloat16()
    refused(lambda: sync.sync(4), ValueError, "rank 1", KEY, "bfloat16")
    assert answers(3)[1:] == before[1:]
    tampered.value = lambda tensor: tensor
    sync.sync(5)
    assert answers(5)[1:] == before[1:]
    sync.close()


def long_request(pool: ThreadPoolExecutor) -> Future | None:
    """Collective: its first tokens are there when every rank goes on. The answer is rank 0's."""
    sent: list[Future] = []

    def send() -> None:
        before = tokens_sampled(URL)
        sent.append(pool.submit(ask, URL, PROMPTS[:1], 400))
        while tokens_sampled(URL) == before and not sent[0].done():
            time.sleep(0.01)

    WORLD.from_main(send)
    return sent[0] if sent else None


def request_under_way_goes_on_with_new_weights() -> None:
    """Its answer says which tokens came from which weights; the later ones are those of the new
    weights with a cache made anew."""
    policy = the_policy()
    sync, path = connect(policy), FOLDER / "under_way"
    with ThreadPoolExecutor(1) as pool:
        long = long_request(pool)
        with torch.no_grad():
            for key in {shard.key for shard in policy.weight_shards()}:
                policy.weight(key).mul_(1.1)
        sync.sync(6)
        policy.export(path)
        if long is not None:
            ((completion,),), (spans,) = long.result()
            assert [span["version"] for span in spans] == ["5", "6"] and spans[1]["end"] == 400, (
                spans
            )
            turn = spans[0]["end"]
            model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
            prompt = Prompt("", (*PROMPTS[0].token_ids, *completion.token_ids[:turn]), "", "")
            rest = replace(
                completion,
                token_ids=completion.token_ids[turn:],
                sampler_logprobs=completion.sampler_logprobs[turn:],
            )
            assert small.logprob_gap(model, [prompt], [[rest]], lambda logits: logits) <= MAX_GAP
    sync.close()


def staged_weights_wait_while_the_server_answers() -> None:
    """They are in use when it is told so, as if they had been pushed then; and it can come back to
    them."""
    policy, keys = the_policy(), {shard.key for shard in the_policy().weight_shards()}
    before = answers(6)
    fleet = FleetSync(policy, WORLD, "", OPTIONS, "keep", "cpu")

    def push(version: int, *, staged: bool = False) -> None:
        report = fleet.sync(version, {"the server": URL}, staged=staged)
        assert report.updated == ("the server",), report.lost

    def scale() -> None:
        with torch.no_grad():
            for key in keys:
                policy.weight(key).mul_(1.1)

    def switch(version: int) -> None:
        WORLD.from_main(lambda: switch_weights(HttpServer(URL), version, "keep"))

    with ThreadPoolExecutor(1) as pool:
        long = long_request(pool)
        scale()
        push(60, staged=True)
        assert answers(6)[1:] == before[1:]
        if long is not None:
            _, (spans,) = long.result()
            assert spans == [{"version": "6", "start": 0, "end": 400}], spans
    switch(60)
    after = answers(60)
    assert gap(policy, after[0]) <= MAX_GAP < gap(policy, before[0])
    push(61)
    assert answers(61)[1:] == after[1:], "the same weights, the same bits"
    scale()
    push(62)
    assert answers(62)[1:] != after[1:]
    switch(60)
    assert answers(60)[1:] == after[1:]
    push(6)
    fleet.keep({})


class Tampered:
    """A policy of which rank 1 passes on other shards, or other values of one weight."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self.policy = policy
        self.wait_for_param_gather = policy.wait_for_param_gather
        self.shard: Callable[[Shard], list[Shard]] = lambda shard: [shard]
        self.value: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def weight_shards(self) -> list[Shard]:
        return [new for shard in self.policy.weight_shards() for new in self.shard(shard)]

    def weight(self, key: str) -> Tensor:
        tensor = self.policy.weight(key)
        return self.value(tensor) if WORLD.rank == 1 and key == KEY else tensor


def half_updated_server_never_answers(
    harm: Callable[[Tampered], Callable[[], None]], *words: str
) -> None:
    """The last case of a server. ``harm`` makes the next sync of rank 1 fail after some weights
    have gone, until what it returns is called."""
    policy = the_policy()
    fails_in_the_middle(Tampered(policy), harm, 7, *words)
    whole = connect(policy)
    whole.sync(8)  # a whole update repairs it
    after = answers(8)
    assert gap(policy, after[0]) <= MAX_GAP, gap(policy, after[0])
    whole.close()
    fails_in_the_middle(Tampered(policy), harm, 9, *words)
    if WORLD.rank == 0:
        server = HttpServer(URL, timeout_s=20)
        server.resume()
        refused(lambda: ask(URL, PROMPTS), ConnectionError)
        log = (FOLDER / "server.log").read_text(errors="replace")
        assert "restart this engine: its weights are half replaced" in log
        assert "weight version 9" in log


def fails_in_the_middle(
    tampered: Tampered,
    harm: Callable[[Tampered], Callable[[], None]],
    version: int,
    *words: str,
) -> None:
    sync = connect(tampered)
    undo = harm(tampered)
    message = refused(
        lambda: sync.sync(version),
        WeightSyncError,
        f"weight version {version} failed",
    )
    assert WORLD.rank != 1 or all(word in message for word in words), message
    undo()
    if WORLD.rank == 0:
        server = HttpServer(URL, timeout_s=20)
        assert server.call("is_paused", method="GET") == {"is_paused": True}
        before = {"weight_version": "6" if version == 7 else "8"}
        assert server.call("weight_info", method="GET") == before
        server.cancel()


def rank_that_fails() -> None:
    def harm(tampered: Tampered) -> Callable[[], None]:
        calls = []

        def fail(tensor: Tensor) -> Tensor:
            calls.append(tensor)
            if len(calls) > 1:  # the first is the check before anything moves
                raise OSError("the disk is gone")
            return tensor

        tampered.value = fail
        return lambda: None

    half_updated_server_never_answers(harm, "the disk is gone")


def changed_byte() -> None:
    def harm(_: Tampered) -> Callable[[], None]:
        packed = transport._TransportRun.packed
        if WORLD.rank == 1:
            transport._TransportRun.packed = lambda run, message, buffer: (
                packed(run, message, buffer),
                buffer.bitwise_xor_(1),
            )

        def undo() -> None:
            transport._TransportRun.packed = packed

        return undo

    half_updated_server_never_answers(harm, "other bytes arrived than were sent", "from rank 1")


if __name__ == "__main__":
    small.run_cases({name: globals()[name] for name in sys.argv[4:]})
