"""An AsyncLLM and a Megatron policy in one process: what the policy pushes is what the engine
serves.

Usage: ``async_engine_worker.py FOLDER``
"""

import asyncio
import os
import sys
import threading
from pathlib import Path

from transformers import AutoModelForCausalLM

from megatron_rl.engine.async_engine import AsyncEngine
from megatron_rl.runtime import launch
from megatron_rl.types import Completion, Prompt
from megatron_rl.weight_sync.fleet.server import ServerSync
from tests.numerics import rollout_models as small
from tests.zoo import policy_beside_engine

MAX_GAP = 1e-4


def start(path: Path, loop: asyncio.AbstractEventLoop):
    from vllm import AsyncEngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        str(path),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=2**25,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend="megatron_rl"),
    )

    async def build():
        return AsyncLLM.from_engine_args(arguments)

    return asyncio.run_coroutine_threadsafe(build(), loop).result()


async def answer(engine, prompt: Prompt, number: int) -> tuple[Completion, list]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
    async for output in engine.generate(
        {"prompt_token_ids": list(prompt.token_ids)}, params, f"{prompt.uid}-{number}"
    ):
        last = output.outputs[0]
    logprobs = tuple(
        step[token].logprob for step, token in zip(last.logprobs, last.token_ids, strict=True)
    )
    return (
        Completion(tuple(last.token_ids), logprobs, truncated=True, weight_version=0),
        last.weight_versions,
    )


def main(folder: Path) -> None:
    world, prompts = launch.start(), small.make_prompts(3)
    paths = [small.write("qwen2_tied", seed, folder) for seed in (1, 2)]
    policy = policy_beside_engine(paths[1], {})
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    engine = start(paths[0], loop)
    sync, models = (
        ServerSync(policy, AsyncEngine(engine, loop), world),
        map(AutoModelForCausalLM.from_pretrained, paths),
    )
    for version, model in enumerate(models):
        if version:
            small.say(f"{sync.sync(version)}")
        got = [
            asyncio.run_coroutine_threadsafe(answer(engine, prompt, version), loop).result()
            for prompt in prompts
        ]
        gap = small.logprob_gap(
            model.float(), prompts, [[completion] for completion, _ in got], lambda logits: logits
        )
        assert gap <= MAX_GAP, gap
        assert [[span.version for span in spans] for _, spans in got] == [
            [str(version) if version else "default"]
        ] * 3, got
    small.say("OK async_engine")
    engine.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
