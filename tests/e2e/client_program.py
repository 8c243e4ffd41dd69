"""What a vLLM server answers to ``ServerClient``, beside the engine in this process with the same
weights; and whom it does not answer.

Usage: ``client_program.py URL SECRET key=value ...``: a run's overrides.
"""

import asyncio
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.data.shared import shared_data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.engine.sampling import eos_token_ids
from megatron_rl.engine.serving.client import ServerClient, ServerLostError, ServerUnreachableError
from megatron_rl.runtime import launch
from megatron_rl.trainer.build import build_engine, build_method, build_policy
from megatron_rl.types import Completion, Prompt, Sampling, TransferOptions
from megatron_rl.weight_sync.fleet.commands import HttpServer
from megatron_rl.weight_sync.fleet.controller import ServersError
from tests.pushes import OneServer

URL, SECRET = sys.argv[1:3]
VERSION = 4
OPTIONS = TransferOptions(timeout_s=60.0)


async def answers(
    client: ServerClient, prompts: list[Prompt], sampling: Sampling
) -> list[Completion]:
    numbers = range(sampling.num_responses)
    asked = [client.generate(prompt, sampling, number) for prompt in prompts for number in numbers]
    return await asyncio.gather(*asked)


async def refused(work, kind: type[Exception], words: str) -> None:
    try:
        await work
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}: {words}")


def number_of_requests() -> float:
    """That the server works on."""
    request = Request(f"{URL}/metrics", headers={"Authorization": f"Bearer {SECRET}"})
    text = urlopen(request).read().decode()
    rows = [row for row in text.splitlines() if row.startswith("vllm:num_requests_running")]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


async def same_answers(client: ServerClient, config: Config, prompts: list[Prompt], engine) -> None:
    base = Sampling(4, config.rollout.max_response_tokens, seed=11)
    for sampling in (
        base,
        replace(base, seed=12, temperature=0.7, top_p=0.9, top_k=5),
        replace(base, temperature=0.0, num_responses=1),
        replace(base, temperature=2.0, num_likely=3),
        replace(base, max_response_tokens=3, stop_token_ids=(4, 5)),
    ):
        expected = [one for group in engine.generate(prompts, sampling) for one in group]
        found = await answers(client, prompts, sampling)
        assert found == expected, "tokens, logprobs, truncation, version and spans, bit for bit"
        assert await answers(client, prompts, sampling) == expected, "asked again"
    assert {one.truncated for one in expected} == {True, False}
    tokens = list(prompts[0].token_ids) + list(expected[0].token_ids)
    assert await client.score(tokens) == engine.score([tokens])[0]


async def strangers(config: Config, prompt: Prompt) -> None:
    """Neither a request nor a command is answered without the secret."""
    sampling = Sampling(1, 2, seed=1)
    for secret in ("guessed", ""):
        client = ServerClient(URL, secret, (1,))
        await refused(client.generate(prompt, sampling, 0), ServerLostError, "401")
        await client.close()
        for path in ("pause", "collective_rpc", "init_weight_transfer_engine"):
            try:
                HttpServer(URL, secret=secret).call(path, {})
            except ConnectionError as error:
                assert "401" in str(error) and "another secret" in str(error), error
            else:
                raise AssertionError(f"{path} was carried out")
    for path in ("health", "weight_info", "openapi.json"):
        try:
            urlopen(f"{URL}/{path}")
        except OSError as error:
            assert "401" in str(error)
        else:
            raise AssertionError(f"{path} was answered")


async def wrong_requests(client: ServerClient, prompt: Prompt) -> None:
    long = replace(prompt, token_ids=prompt.token_ids * 100)
    await refused(client.generate(long, Sampling(1, 2, seed=1), 0), ValueError, prompt.uid)
    gone = ServerClient("http://127.0.0.1:1", SECRET, (1,))
    asked = gone.generate(prompt, Sampling(1, 2, seed=1), 0)
    await refused(asked, ServerUnreachableError, "no connection")
    await gone.close()


async def cancelled_request_ends(client: ServerClient, prompt: Prompt) -> None:
    """While the server is paused it can end in no other way."""
    server = HttpServer(URL, secret=SECRET)
    server.pause("keep")
    task = asyncio.create_task(client.generate(prompt, Sampling(1, 8, seed=1), 0))
    await asyncio.sleep(1.0)
    assert not task.done()
    task.cancel()
    await asyncio.sleep(1.0)
    server.resume()
    deadline = time.monotonic() + 30
    while number_of_requests():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def all_cases(config: Config, prompts: list[Prompt], engine) -> None:
    client = ServerClient(URL, SECRET, eos_token_ids(Path(config.model.path)))
    await same_answers(client, config, prompts, engine)
    await strangers(config, prompts[0])
    await wrong_requests(client, prompts[0])
    await cancelled_request_ends(client, prompts[0])
    await client.close()


def main() -> None:
    world = launch.start()
    config = validate(Config, compose("config", sys.argv[3:]), "the configuration")
    data = shared_data(config, world, load_tokenizer(config.model.path), None)
    policy = build_policy(config, build_method(config, data)[1])
    engine, _ = build_engine(config, world, policy)
    connect = partial(OneServer, policy, HttpServer(URL, secret=SECRET), world, OPTIONS)
    try:
        connect(secret="another one")
    except ServersError as error:
        assert "does not know the secret" in str(error), error
    else:
        raise AssertionError("workers that know another secret were let in")
    sync = connect(secret=SECRET)
    sync.sync(VERSION)
    engine.load_weights(policy.gathered_weights(), VERSION)
    asyncio.run(all_cases(config, list(data.train_prompts), engine))
    sync.close()
    print("all cases hold", flush=True)


if __name__ == "__main__":
    with launch.reported():
        main()
    launch.exit_process(0)
