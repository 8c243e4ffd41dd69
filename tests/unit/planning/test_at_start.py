"""What a start does with its memory plan."""

from __future__ import annotations

import importlib.util
import json
import logging

import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.loss import register_shaper
from megatron_rl.planning.at_start import check_memory, plan
from megatron_rl.planning.engine_memory import GIB
from megatron_rl.planning.phases import MemoryBudget, demands, describe
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import available_gib
from megatron_rl.signals import Signal, register_signal
from tests.e2e.toy import write_large_config, write_model
from tests.launch import REPO


class Ranks(World):
    """Two ranks, of which the other one has ``OTHER_GIB``."""

    OTHER_GIB = 1e6

    def all_gather(self, value):
        return [value, (self.OTHER_GIB, self.OTHER_GIB)]


class SmallNeighbour(Ranks):
    OTHER_GIB = 0.5


def config(model, *overrides) -> Config:
    values = compose("config", ["experiment=quickstart_cpu", f"model.path={model}", *overrides])
    return validate(Config, values, "test")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def planner():
    spec = importlib.util.spec_from_file_location("plan_memory", REPO / "tools/plan_memory.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def world(kind=Ranks) -> World:
    return kind(rank=0, size=2, local_rank=0, launch_id="x", local_size=2)


def test_the_quickstart_says_its_plan_in_one_line_and_fits(model, caplog):
    with caplog.at_level(logging.INFO, "megatron_rl"):
        check_memory(config(model), world())
    (record,) = [
        record for record in caplog.records if record.name.startswith("megatron_rl.planning")
    ]
    line = record.getMessage()
    assert (
        line.startswith("memory plan of a rank in GiB (pipeline stage 0): weights 0.00, ")
        and "kv cache 0.12" in line
    )
    assert float(line.rsplit(" of ")[-1]) <= 1.01 * available_gib() / 2, (
        "a rank has its share of the host"
    )


@pytest.mark.usefixtures("fresh_registries")
def test_a_reference_that_a_signal_reads_is_planned(model):
    """The signal says so, whoever reads it: here a shaper of a plug-in, in a method without KL."""

    @register_signal
    class FarFromReference(Signal):
        columns = ("distance",)
        scores = ("ref",)

    @register_shaper("nearer")
    def nearer(advantages, distance): ...

    budget = MemoryBudget("cpu", 1e6)
    plain, shaped, with_kl = (
        plan(config(model, *chosen), 2, budget, fused=False)[0]
        for chosen in (
            ["method=dr_grpo"],
            ["method=dr_grpo", "method.shaping.nearer={}"],
            ["method=dr_grpo", "method.kl.coef=0.1"],
        )
    )
    assert plain.reference == 0 < shaped.reference == with_kl.reference


def test_teachers_are_planned_by_hand(model, tmp_path):
    """Two are on the host, the larger one on the device while it scores. Of one layer it has the
    embedding (tied), its norms and half of its matrices on a rank."""
    sizes = json.loads((model / "config.json").read_text())
    one = sizes | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(one))
    budget = MemoryBudget("cpu", 1e6)
    chosen = config(model, "method=opd", f"model.teacher={{a: {tmp_path}, b: {model}, c: {model}}}")
    (stage,) = plan(chosen, 2, budget, fused=False)
    layer = stage.weights - stage.teacher_copies + stage.weights
    assert stage.teacher == stage.weights, "the policy's own folder"
    assert 0 < layer < stage.weights and stage.teacher_copies == 2 * stage.weights - layer
    (alone,) = plan(config(model, "method=dr_grpo"), 2, budget, fused=False)
    assert (alone.teacher, alone.teacher_copies) == (0, 0)
    line, without = (describe([one], chosen, budget) for one in (stage, alone))
    assert "teacher 0.0" in line and "teacher" not in without
    needs = [next(demands([one], chosen, budget)).need_gib for one in (stage, alone)]
    both = (stage.teacher + stage.teacher_copies) / GIB
    assert needs[0] - needs[1] == pytest.approx(both - alone.reference / GIB)


def test_the_smallest_rank_decides_for_all(model):
    with pytest.raises(
        ConfigError,
        match=r"the run needs 1\.\d GiB on a rank of pipeline stage 0, there are 0\.5 GiB",
    ):
        check_memory(config(model), world(SmallNeighbour))


def test_a_start_that_is_not_refused_warns(model, caplog):
    with caplog.at_level(logging.WARNING, "megatron_rl"):
        check_memory(config(model, "memory.enforce=false"), world(SmallNeighbour))
    (record,) = [
        record for record in caplog.records if record.name.startswith("megatron_rl.planning")
    ]
    assert record.getMessage().startswith("memory.enforce = False, though the run needs 1.")


# The processes, the stages, the experts and the heads of the model are against it.
IMPOSSIBLE = ("parallel.tensor=3", "parallel.virtual_pipeline=2", "parallel.expert=2")


def test_an_impossible_layout_is_named_instead_of_planned(tmp_path):
    large = write_large_config(tmp_path / "large")
    with pytest.raises(
        ConfigError,
        match=r"4 problems in the layout:\n(?s:.*)  - parallel.tensor = 3: does not divide",
    ):
        check_memory(config(large, *IMPOSSIBLE, "rollout.tensor=1"), world())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("8 parallel=tp8_pp4", "tensor 8 x pipeline 4 x context 1 = 32 does not divide"),
        ("6 parallel=tp4 rollout.tensor=2", "x context 1 = 4 does not divide the 6"),
        ("9 rollout.tensor=3", "rollout.tensor = 3: does not divide the model's 64"),
        ("8 parallel.tensor=8 parallel.expert=2", "parallel.expert = 2: the model has no experts"),
    ],
)
def test_the_planner_names_an_impossible_layout(
    tmp_path, monkeypatch, capsys, planner, layout, message
):
    large = f"model.path={write_large_config(tmp_path / 'large')}"
    words = ["plan_memory.py", "--gpu-gib=80", "--world-size", *layout.split(), large]
    monkeypatch.setattr("sys.argv", [*words, "data.train=no_such_file.jsonl"])
    assert planner.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 1 problem in ") and message in error


def test_the_planner_on_the_command_line_says_the_same(tmp_path, monkeypatch, capsys, planner):
    run = (
        "plan_memory.py --gpu-gib=140 --world-size={} parallel=tp8 rollout.tensor=8"
        " parallel.sequence=true parallel.recompute=full"
    )
    large = f"model.path={write_large_config(tmp_path / 'large')}"
    monkeypatch.setattr("sys.argv", [*run.format(8).split(), large])
    assert planner.main() == 1
    assert (
        "training needs 160.8 GiB on a rank of pipeline stage 0, there are 140.0 GiB; most of it is"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(
        "sys.argv",
        [*run.format(16).split(), large, "rollout.kv_cache_gib=20", "memory.offload=[optimizer]"],
    )
    assert planner.main() == 0
    assert "does not fit" not in capsys.readouterr().out
