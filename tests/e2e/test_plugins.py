"""A run with the plug-ins of examples/plugins, on both engines."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.e2e.toy import overrides, rows, write_data, write_model
from tests.launch import REPO, launch

EXAMPLES = ("clipped_advantage", "brevity", "one_sided", "drop_easy", "renamed_qwen3")


@pytest.mark.full
def test_a_run_with_an_estimator_a_shaper_a_loss_a_hook_and_a_family_of_ones_own(tmp_path: Path):
    """The model has an architecture that neither the policy nor the engine knows without the
    plug-in; the sampler's probabilities are the policy's (``mismatch_limits.abort_above`` of the
    toy)."""
    write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    file = tmp_path / "model" / "config.json"
    renamed = json.loads(file.read_text()) | {"architectures": ["RenamedQwen3ForCausalLM"]}
    file.write_text(json.dumps(renamed))
    paths = [REPO / "examples" / "plugins" / f"{name}.py" for name in EXAMPLES]
    options = [word for path in paths for word in ("--plugin", str(path.relative_to(REPO)))]
    chosen = [
        "trainer.num_steps=2",
        "method=clipped_grpo",
        "method.shaping.brevity.strength=1.0",
        "method.policy_loss={name: one_sided, most: 1.1}",
        "rollout_hooks.drop_easy.penalty=0.25",
    ]
    run_dir = tmp_path / "run"
    launch("megatron_rl.train", 2, [*options, *overrides(tmp_path, run_dir, *chosen)], 240)
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics[1:]:
        charged = 0.25 * row["rollout/truncated_share"]
        assert row["reward/mean"] == pytest.approx(row["reward/accuracy"] - charged, abs=1e-6)
        assert row["hook/drop_easy/dropped_groups"] == 8 - row["rollout/num_responses"] / 16
        assert row["optim/grad_norm"] > 0
    saved = json.loads((run_dir / "config.json").read_text())
    assert saved["plugins"] == {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths
    }
    assert saved["method"]["estimator"] == {"name": "clipped_zscore", "limit": 1.5}
    assert json.loads((run_dir / "export" / "config.json").read_text())["architectures"] == [
        "RenamedQwen3ForCausalLM"
    ]
