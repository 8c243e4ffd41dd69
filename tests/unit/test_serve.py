"""A server is started with the words of the trainer, groups and plug-ins of the user's own among
them."""

from __future__ import annotations

import pytest

from megatron_rl import serve

pytestmark = pytest.mark.usefixtures("fresh_registries")
PLUGIN = """
from megatron_rl.loss import Evidence, register_estimator

@register_estimator("mine")
def mine(evidence: Evidence):
    return evidence.rewards
"""


def refused(*words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        serve.main([*words, "model.path=m", "data.train=t.jsonl", "data.eval=e.jsonl"])
    return str(ended.value)


def test_groups_of_a_folder_of_ones_own(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrainer:\n  num_steps: -7\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    said = refused("--config-dir", str(tmp_path), "experiment=mine")
    assert said.startswith("error: ") and "trainer.num_steps" in said and "-7" in said
    assert "no such folder" in refused("--config-dir", f"{tmp_path}/none", "experiment=mine")


def test_a_plug_in_is_known(tmp_path):
    (tmp_path / "own.py").write_text(PLUGIN)
    words = ("trainer.num_steps=-7", "method.estimator={name: mine}")
    assert "mine" in refused(*words)
    said = refused("--plugin", str(tmp_path / "own.py"), *words)
    assert "trainer.num_steps" in said and "mine" not in said


def test_a_run_without_servers_and_an_address_out_of_range_are_refused():
    assert "servers need source=servers" in refused("model.path=m")
    for word in ("--port=99999", "--lease-s=-1"):
        assert "a port is 0" in refused(word, "source=servers")
