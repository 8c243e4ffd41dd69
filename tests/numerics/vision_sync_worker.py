"""Two processes: a vision-language policy and its engine. After every update and sync, by either
method, the engine's logprobs of prompts with the same images are those of the policy."""

import hashlib
import io
import sys
from functools import partial
from pathlib import Path

import PIL.Image
import torch

from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.requests import MultimodalConfig
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.protocols import WeightSync
from megatron_rl.runtime import launch
from megatron_rl.runtime.device import device
from megatron_rl.types import Image, Prompt, TransferOptions
from megatron_rl.weight_sync.gather import GatherSync
from megatron_rl.weight_sync.reshard import ReshardSync
from tests import zoo
from tests.numerics import rollout_models as small
from tests.numerics.seeing import write_model

FOLDER = Path(sys.argv[1])
WORLD = launch.start()
FAMILY = sys.argv[2]
IN_BF16 = small.number_format(FAMILY) == "bfloat16"
QUESTION = (40, 41, 42)


def model_folder() -> Path:
    path = FOLDER / WORLD.launch_id / "model"
    if WORLD.rank == 0:
        write_model(path, family=FAMILY)
    WORLD.barrier()
    return path


def image(color: tuple[int, int, int], width: int, height: int) -> Image:
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), color).save(file, "PNG")
    content = file.getvalue()
    return Image(hashlib.sha256(content).hexdigest(), width, height, source=content)


def prompts(processor: VisionProcessor) -> list[Prompt]:
    """One image; two; none."""
    red = image((255, 0, 0), 56, 84)
    blue = image((0, 0, 255), 112, 56)
    rows = []
    for number, images in enumerate([(red,), (blue, red), ()]):
        short = [token for _ in images for token in processor.place_ids]
        token_ids = tuple(processor.expanded([*short, *QUESTION], images))
        rows.append(Prompt(f"p{number}", token_ids, "", "", images=images))
    return rows


def odd_tokens_are_good(token_ids: torch.Tensor):
    sign = (token_ids % 2) * 2.0 - 1.0

    def loss(view: TokenView) -> LossOutput:
        return LossOutput(loss=-(view.logprobs * sign[view.index]).sum() / sign.numel(), metrics={})

    return loss


def make_sync(method: str, policy: MegatronPolicy, engine: VllmEngine) -> WeightSync:
    if method == "gather":
        return GatherSync(policy, engine, verify=True)
    options = TransferOptions(1, 2, True, cast=IN_BF16)
    return ReshardSync(policy, engine, options, gpus_per_node=2, device=device())


def agree(path: Path, engine: VllmEngine, method: str, layout: dict) -> None:
    processor = VisionProcessor(path)
    asked = prompts(processor)
    more = dict(temperature=1.0, max_sequence_tokens=512, tokens_per_microbatch=4096)
    policy = zoo.tiny_policy(path, layout, image_processor=processor, **more)
    sync = make_sync(method, policy, engine)
    before = None
    for version in range(3):
        report = sync.sync(version)
        assert report.num_tensors == len(dict(policy.gathered_weights())), report
        groups = engine.generate(asked, small.sampling(max_response_tokens=8))
        rows = [
            (prompt.token_ids, one.token_ids)
            for prompt, group in zip(asked, groups, strict=True)
            for one in group
        ]
        images = [prompt.images for prompt, group in zip(asked, groups, strict=True) for _ in group]
        index = torch.arange(len(asked)).repeat_interleave(len(groups[0]))
        batch = sequence_batch(rows, index, images)
        scored = policy.score_alone(batch).logprobs
        gap = (scored.double() - small.logprobs(groups)).abs().max()
        bound = 0.1 if IN_BF16 else 1e-4
        assert gap <= bound, f"sampler and policy differ by {gap} after sync {version}"
        small.say(f"{method} {layout} version {version}: {gap:.1e}")
        if before is not None:
            changed = dict(policy.gathered_weights())
            assert all(not torch.equal(changed[name], value) for name, value in before.items()), (
                "the update changed the tower"
            )
        before = {
            name: value.clone()
            for name, value in policy.gathered_weights()
            if name.startswith("visual.")
        }
        responses = torch.cat([torch.tensor(list(response)) for _, response in rows])
        plan = policy.batching.plan(batch, range(len(rows)))
        share = LocalBatch(batch, plan[policy.ranks.data_rank])
        policy.update(share, odd_tokens_are_good(responses))
    policy.close()


if __name__ == "__main__":
    model = model_folder()
    seeing_engine = VllmEngine(
        str(model),
        small.engine_config(FAMILY, tensor=2, max_prompt_tokens=100),
        seed=0,
        launch_id=WORLD.launch_id,
        multimodal=MultimodalConfig(VisionProcessor(model), 2),
    )
    small.run_cases(
        {
            "gather pipeline": partial(agree, model, seeing_engine, "gather", dict(pipeline=2)),
            "reshard tensor": partial(
                agree, model, seeing_engine, "reshard", dict(tensor=2, sequence=True)
            ),
            "reshard data": partial(agree, model, seeing_engine, "reshard", {}),
        }
    )
