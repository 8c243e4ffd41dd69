"""The experts of the old-policy pass lie with the rows that they belong to, in the trainer's own
classes with a real policy: on one rank, on owners of rows, and on ranks that cut the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_rl.rollouts.rows.exchange import gathered_on_main
from tests import zoo
from tests.distributed.owned_rows_worker import ONE_ROW, parts
from tests.ranks import call

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "tensor": (2, dict(tensor=2, sequence=True)),
}
BYTES = 2 * 2  # layers, experts of each


def step(path: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Of all rows in canonical order, on rank 0: experts as they were recorded; of the rows of a
    minibatch elsewhere, whether they have the same."""
    rollouts, learner, policy = parts(path, layout, 1, ONE_ROW)
    learner = replace(learner, records_experts=True)
    experience = learner.score(rollouts.collect(1))
    experts = experience.responses.experts
    assert experts is not None and experience.local.batch.experts is not None
    lengths = experience.sequences.lengths.numpy()
    world = learner.placement.world
    everything = gathered_on_main(experts, experience.responses, world, lengths)
    (whole,) = world.all_gather(everything)[:1]
    of_row = dict(zip(whole.rows.tolist(), whole.views("experts"), strict=True))
    num_rows = 0
    with mock.patch.object(policy, "update", wraps=policy.update) as update:
        metrics = learner.update(1, experience)
    for one in update.call_args_list:
        local = one.args[0]
        batch = local.batch
        assert batch.experts is not None, "updates take them"
        for place, row in enumerate(local.rows.tolist()):
            found = batch.experts[batch.offsets[place] : batch.offsets[place + 1]]
            assert np.array_equal(found.numpy(), of_row[row]), "with their row"
            num_rows += 1
    policy.close()
    return {"experts": whole.columns["experts"], "rows": num_rows, "metrics": metrics}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.mark.full  # in the core tier: numerics/test_router_replay.py
def test_experts_lie_with_their_rows(model: Path) -> None:
    reports = {
        name: call(count, step, model, layout, timeout=400)
        for name, (count, layout) in LAYOUTS.items()
    }
    wanted = reports["1"][0]
    assert wanted["experts"].dtype == np.uint8 and wanted["experts"].shape[1] == BYTES
    assert len(np.unique(wanted["experts"])) == 4, "all experts"
    for name, (_, layout) in LAYOUTS.items():
        for report in reports[name]:
            pairs = [torch.from_numpy(one["experts"]).view(-1, 2, 2) for one in (report, wanted)]
            same = torch.equal(*(pair.sort(-1).values for pair in pairs))
            assert same, "layouts round alike here: no router is near a tie"
            loss = report["metrics"]["loss/total"]
            assert loss == pytest.approx(wanted["metrics"]["loss/total"], rel=2e-3, abs=1e-5)
        total = sum(report["rows"] for report in reports[name])
        assert total == wanted["rows"] * layout.get("tensor", 1)
