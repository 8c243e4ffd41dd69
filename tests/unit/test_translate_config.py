"""tools/translate_config.py: what keys of other systems become here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from tools import translate_config
from tools.translate_config import TABLES, problems, read, translate

EXCERPTS = Path(__file__).parent / "translations"
TABLE = {path.stem: yaml.safe_load(path.read_text()) for path in TABLES.glob("*.yaml")}


@pytest.mark.parametrize("system", sorted(TABLE))
def test_rows_name_keys_that_there_are(system: str) -> None:
    overrides = list(TABLE[system]["always"])
    for row in TABLE[system]["keys"].values():
        if isinstance(row, dict):
            assert row.keys() <= {"values", "to", "also", "why", "always"}, row
            texts = [row.get("why", ""), row.get("always", "")]
            for value in row.get("values", {}).values():
                assert isinstance(value, str | list)
                overrides += value if isinstance(value, list) else []
                texts += [value] if isinstance(value, str) else []
            assert all(isinstance(text, str) for text in texts)
            overrides += [f"{row['to']}=null"] if "to" in row else []
        elif row != "computed":
            overrides += [f"{key}=null" for key in ([row] if isinstance(row, str) else row)]
    paths = ["data.train=a", "data.eval=a", "model.path=a"]
    tree = validate(Config, compose("config", ["method=dapo", *paths]), "all keys").model_dump()
    for override in overrides:
        section = tree
        for part in override.split("=")[0].split("."):
            assert part in section, override
            section = section[part]


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    made = translate("verl", read(EXCERPTS / "verl.sh"), 8)
    wanted = {
        "data.train": "/data/train.parquet",
        "batch.prompts_per_step": "1024",
        "batch.prompts_per_minibatch": "256",  # prompts there as well
        "batch.responses_per_prompt": "5",
        "method": "grpo",
        "method.aggregate.name": "token_mean",  # defaults of verl
        "method.policy_loss.dual_c": "3.0",
        "method.std_ddof": "1",
        "method.kl.coef": "0.01",
        "method.kl.estimator": "k3",
        "method.policy_loss.high": "0.28",
        "parallel.tensor": "4",
        "parallel.recompute": "full",
        "checkpoint.every_steps": "0",
        "trainer.num_epochs": "15",
        "trainer.num_steps": "null",
        "data.on_long_prompt": "drop",
    }
    assert wanted.items() <= made.overrides.items()
    notes = "\n".join(made.notes)
    assert "ppo_micro_batch_size_per_gpu = 32: a micro-batch is counted in tokens" in notes
    assert "param_offload = true: offload: memory.offload" in notes
    assert not made.unknown and not problems(made.overrides)


def test_the_kl_of_verl_is_in_the_loss_the_reward_or_nowhere() -> None:
    def kl(**given: object) -> dict[str, str]:
        keys = {key.replace("__", "."): value for key, value in given.items()}
        made = translate("verl", keys, 1).overrides
        return {key: value for key, value in made.items() if key.startswith("method.kl")}

    assert kl() == {"method.kl.coef": "0.0"}
    assert kl(actor_rollout_ref__actor__use_kl_loss=True)["method.kl.coef"] == "0.001"
    in_reward = kl(algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__kl_coef=0.02)
    assert in_reward == {"method.kl.placement": "reward", "method.kl.coef": "0.02"}


def test_trl_counts_responses_of_a_device_and_updates() -> None:
    """4 x 8 devices x 8 accumulated: 256 responses an update, 512 a generation, used twice."""
    made = translate("trl", read(EXCERPTS / "trl.py"), 8)
    wanted = {
        "batch.prompts_per_minibatch": "32",
        "batch.prompts_per_step": "64",
        "trainer.epochs_per_rollout": "2",
        "trainer.num_steps": "100",  # 4 updates each
        "checkpoint.every_steps": "10",
        "method.estimator.name": "centered",
        "method.aggregate.name": "seq_mean_token_sum_norm",
        "method.policy_loss.low": "0.1",
        "method.policy_loss.high": "0.28",
        "method.mismatch.kind": "tis",
        "method.mismatch.cap": "3.0",
        "run_dir": "runs/a",
        "source": "colocated",
    }
    assert wanted.items() <= made.overrides.items()
    assert made.notes[0] == "min_p = 0.1: there is top_p and top_k"
    assert "k2 has the gradient" in made.notes[1] and len(made.notes) == 2
    assert not made.unknown and not problems(made.overrides)


def test_the_clip_of_trl_is_that_of_its_loss() -> None:
    """CISPO's bound is a ratio there, a distance from 1 here; SAPO has none; GSPO has TRL's 0.2."""

    def loss(**given: object) -> dict[str, str]:
        made = translate("trl", given, 1)
        assert not problems(made.overrides)
        marks = ("method.policy_loss", "method.agg")
        return {key: value for key, value in made.overrides.items() if key.startswith(marks)}

    assert loss(loss_type="cispo", epsilon_high=5.0)["method.policy_loss.high"] == "4.0"
    assert "method.policy_loss.low" not in loss(loss_type="sapo", epsilon=0.1)
    assert loss(importance_sampling_level="sequence", loss_type="luspo") == {
        "method.policy_loss.name": "gspo",
        "method.policy_loss.low": "0.2",
        "method.policy_loss.high": "0.2",
        "method.aggregate.name": "seq_mean_token_sum",
    }


def test_nemo_rl() -> None:
    made = translate("nemo_rl", read(EXCERPTS / "nemo_rl.yaml"), 8)
    wanted = {
        "batch.prompts_per_step": "32",
        "batch.prompts_per_minibatch": "16",
        "batch.responses_per_prompt": "16",
        "optim.clip_grad": "0.5",
        "optim.learning_rate": "5e-06",
        "method.aggregate.name": "seq_mean_token_mean",
        "method.policy_loss.dual_c": "null",
        "rollout.top_k": "-1",
        "parallel.tensor": "2",
    }
    assert wanted.items() <= made.overrides.items()
    notes = "\n".join(made.notes)
    assert "use_leave_one_out_baseline = true: method=rloo" in notes
    assert "converter_type = Qwen2ForCausalLM: see parallel" in notes
    assert not made.unknown and not problems(made.overrides)


def test_unknown_keys_missing_paths_and_refusals_are_said(capsys, monkeypatch, tmp_path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "main algorithm.adv_estimator=gae trainer.vibes=1 actor_rollout_ref.rollout.n=0"
    )
    monkeypatch.setattr(sys, "argv", ["translate_config.py", "verl", str(file)])
    assert translate_config.main() == 1
    said = capsys.readouterr()
    assert "batch.responses_per_prompt=0\n" in said.out
    assert "algorithm.adv_estimator = gae: a critic (PPO, GAE) is not supported" in said.err
    assert "not in the table:\n  trainer.vibes = 1" in said.err
    assert "to be given:\n  model.path\n" in said.err
    assert "batch.responses_per_prompt = 0" in said.err.partition("refused here")[2]


def test_a_file_without_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.sh").write_text("echo hello")
    with pytest.raises(ValueError, match="no key with a value"):
        read(tmp_path / "empty.sh")
