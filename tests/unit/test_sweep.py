"""Ablations: which runs a sweep makes, under which names, and its table."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.load import ConfigError
from megatron_rl.sweep import check, combinations, command, main, run_names, summary


def test_the_product_of_all_choices_in_the_order_given():
    runs = combinations(["experiment=x", "method=grpo,dapo", "seed=1,2"])
    assert runs == [["experiment=x", f"method={method}", f"seed={seed}"] for method in ("grpo", "dapo") for seed in (1, 2)]


def test_lists_are_values_and_not_choices():
    assert combinations(["evaluation.pass_at=[1,4]"]) == [["evaluation.pass_at=[1,4]"]]


def test_names_hold_what_differs():
    assert run_names([["a=1", "seed=1"], ["a=1", "seed=2"]]) == ["seed=1", "seed=2"]
    with pytest.raises(ValueError, match="seed=1 comes twice"):
        run_names([["seed=1", "a=0"], ["seed=1", "a=0"], ["seed=2", "a=0"]])


def test_every_combination_is_checked_before_the_first_runs():
    runs = combinations(["method=grpo,dapo", "method.kl.coeff=1", "model.path=m", "data.train=t", "data.eval=e"])
    with pytest.raises(ConfigError) as caught:
        check(runs, run_names(runs))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["method=grpo", "method=dapo"]


def test_the_command_of_a_local_and_of_a_slurm_run(tmp_path):
    assert command(["seed=2"], tmp_path / "r", 4, None)[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "megatron_rl.train", "seed=2", f"run_dir={tmp_path}/r",
    ]  # fmt: skip
    words = command(["seed=2"], tmp_path / "r", 8, ["--nodes=2"])
    assert words[:2] == ["sbatch", "--nodes=2"]
    assert words[2].endswith("examples/slurm/train.sbatch")
    assert words[3:] == ["--nproc", "8", "seed=2", f"run_dir={tmp_path}/r"]


def test_the_table_averages_over_seeds(tmp_path):
    runs = combinations(["method=grpo,dapo", "seed=1,2"])
    names = run_names(runs)
    for name, score in zip(names, (0.2, 0.4, 0.9)):
        (tmp_path / name).mkdir()
        lines = [{"step": 0, "eval/accuracy": 0.0}, {"step": 1, "eval/accuracy": score}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [line.split() for line in summary(tmp_path, runs, names).splitlines()[2:]]
    assert rows == [["method=grpo", "2", "0.300", "+-", "0.100"], ["method=dapo", "1", "0.900", "+-", "0.000"]]


def test_a_wrong_sweep_is_one_message(capsys, tmp_path):
    assert main(["--out", str(tmp_path), "--nproc", "2", "method=gpro,dapo"]) == 1
    assert capsys.readouterr().err.count("error: ") == 1


@pytest.mark.usefixtures("fresh_registries")
def test_plug_ins_are_loaded_for_the_check_and_handed_to_every_run(capsys, tmp_path):
    plugin = "examples/plugins/clipped_advantage.py"
    overrides = ["method=clipped_grpo", "seed=1,2", "model.path=m", "data.train=t", "data.eval=e"]
    options = ["--out", str(tmp_path), "--nproc", "2", "--plugin", plugin, "--dry-run"]
    assert main([*options, *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    absolute = Path(plugin).resolve()
    assert len(lines) == 2
    assert all(f"-m megatron_rl.train --plugin {absolute} method=clipped_grpo" in line for line in lines)
    words = command(["seed=2"], tmp_path / "r", 8, [], ["mine.py"])
    assert words[2:] == ["--nproc", "8", "--plugin", "mine.py", "seed=2", f"run_dir={tmp_path}/r"]
    assert main([*options[:-2], "no_such_module", *overrides]) == 1
    assert "--plugin = no_such_module: cannot be imported" in capsys.readouterr().err
