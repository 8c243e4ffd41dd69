"""A training checkpoint that was written with megatron-core 0.16.1, and the form in which 0.19
writes them: a training resumes from either, and both are verified and converted."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from megatron_rl.checkpoints.safe_load import COMMON
from tests.numerics import megatron_checkpoint
from tests.numerics.small_policy import SHARDED, Case, build, update
from tests.ranks import call
from tools.convert_checkpoint import to_hf
from tools.verify_checkpoint import verify

# A Qwen2 of two layers, four wide. step_000002 is that of ``Case("dp2", SHARDED)`` after
# ``update(policy, 0)`` and ``update(policy, 1)``; after.safetensors has the weights that
# ``Case("alone", SHARDED)`` had after it had read that and made ``update(policy, 2)``.
WRITTEN = Path(__file__).with_name("trained_0_16_1.zip")
STEP = "step_000002"


def resume(folder: Path) -> None:
    policy = build(folder, Case("alone", SHARDED, model="model"))
    wanted = load_file(folder / "after.safetensors")
    update(policy, 7)  # whatever was there must be replaced
    assert policy.load(folder / STEP) == {"step": 2}
    megatron_checkpoint.save(policy, folder / "newer" / STEP, {"step": 2})
    for path in (folder / STEP, folder / "newer" / STEP):
        assert policy.load(path) == {"step": 2} and policy.optimizer_steps == 2
        update(policy, 2)
        for name, tensor in policy.gathered_weights():
            # Adam's step is 3e-3; the order of sums is the processor's.
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6)
    policy.close()


def test_both_forms_are_resumed_verified_and_converted(tmp_path, capsys):
    with zipfile.ZipFile(WRITTEN) as archive:
        archive.extractall(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "newer").mkdir()
    call(1, resume, tmp_path)
    digests = set()
    for name, has_file in ((STEP, True), (f"newer/{STEP}", False)):
        path = tmp_path / name
        assert (path / COMMON).is_file() == has_file
        assert not verify(path, sizes_only=False, threads=1), capsys.readouterr().out
        digests.add(to_hf(path, path.with_name("hf"), tmp_path / "model", 10**9))
    assert len(digests) == 1
