"""Two ranks: a vision-language policy pushes its weights into a vLLM server, which then answers
about images that it has seen before.

Usage: ``vision_server_worker.py URL FOLDER``
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import launch
from megatron_rl.types import Completion, Prompt, TransferOptions
from megatron_rl.weight_sync.fleet.commands import HttpServer
from tests import zoo
from tests.numerics import rollout_models as small
from tests.numerics.seeing import hf_logprobs
from tests.pushes import OneServer
from tests.unit.data.pictures import image

URL, FOLDER = sys.argv[1], Path(sys.argv[2])
WORLD = launch.start()
VISION = VisionProcessor(FOLDER / "after")
MAX_GAP = 1e-5  # nats of one token; both sides compute in float32
IMAGES = [image(84, 84), image(56, 140), image(84, 84, seed=1)]


class KeepsCaches(HttpServer):
    """vLLM's pause drops its caches of its own accord; here it does not, as with
    ``clear_cache=false``, and no route of ``without`` is called."""

    def __init__(self, url: str, without: Sequence[str] = ()) -> None:
        super().__init__(url)
        self._without = without

    def call(self, path: str, *body: Any, **more: Any) -> Any:
        if path in self._without:
            return None
        if path == "pause":
            more["clear_cache"] = "false"
        return super().call(path, *body, **more)


def answer(number: int) -> tuple[Prompt, Completion]:
    """What the server says about an image, greedily."""
    asked = IMAGES[number]
    data = base64.b64encode(asked.source).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": "What is it?"},
    ]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0.0,
        "max_tokens": 8,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    reply = HttpServer(URL).call("v1/chat/completions", body)
    (choice,) = reply["choices"]
    logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
    prompt = Prompt(str(number), tuple(reply["prompt_token_ids"]), "", "", images=(asked,))
    assert prompt.token_ids.count(VISION.image_token_id) == VISION.num_tokens(asked)
    return prompt, Completion(tuple(choice["token_ids"]), logprobs, True, 0)


def gap(model: Path) -> float:
    """The largest |server - transformers| over answers about all images."""
    hf = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    differences = []
    for number in range(len(IMAGES)):
        prompt, one = answer(number)
        theirs = hf_logprobs(hf, prompt, one.token_ids, VISION)
        differences.append((torch.tensor(one.sampler_logprobs) - theirs).abs().max().item())
    return max(differences)


def gap_on_all(model: Path) -> float:
    return WORLD.from_main(lambda: gap(model))


def change_the_tower(policy: MegatronPolicy) -> Path:
    """Returns a directory with the new weights."""
    with torch.no_grad():
        for key in {box.key for box in policy.weight_shards() if box.name.startswith("visual.")}:
            policy.weight(key).mul_(1.5)
    path = FOLDER / f"changed{len(list(FOLDER.glob('changed*')))}"
    WORLD.barrier()
    policy.export(path)
    return path


def a_push_leaves_nothing_of_the_old_tower() -> None:
    policy = zoo.tiny_policy(FOLDER / "after", dict(tensor=2, sequence=True))
    assert gap_on_all(FOLDER / "before") <= MAX_GAP
    gaps = {}
    servers = {
        "stock": HttpServer(URL),
        "its caches kept": KeepsCaches(URL),
        "nothing reset": KeepsCaches(URL, without=["reset_encoder_cache"]),
    }
    for version, (name, server) in enumerate(servers.items(), start=1):
        changed = change_the_tower(policy)
        sync = OneServer(policy, server, WORLD, TransferOptions(bucket_mib=1))
        sync.sync(version)
        sync.close()
        gaps[name] = gap_on_all(changed)
    small.say(f"largest differences: {gaps}")
    assert max(gaps["stock"], gaps["its caches kept"]) <= MAX_GAP, gaps
    assert gaps["nothing reset"] > 100 * MAX_GAP, f"the test cannot see old features: {gaps}"


if __name__ == "__main__":
    cases = (a_push_leaves_nothing_of_the_old_tower,)
    small.run_cases({case.__name__: case for case in cases})
