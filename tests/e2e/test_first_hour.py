"""The commands of the page "Your model, your data, a judge", as printed there: a model of a hub, a
file of one's own, a judge that vLLM serves; then evaluation, samples and a report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.documents import of_markdown
from tests.e2e.test_reward_servers import served, write_judge
from tests.e2e.toy import LETTERS, rows, write_model
from tests.hub_server import COMMIT, serving
from tests.hub_server import REPO as MODEL
from tests.launch import REPO, run

PAGE = REPO / "tools/docs/pages/first_hour.md"
# The judge's score is of the last character alone: 9 for an a, 2 for an h, 0 for an empty response.
SCORES = {letter: str(9 - index) for index, letter in enumerate(LETTERS)} | {" ": "0", "?": "5"}
JUDGED = "{% for m in messages %}Judge: {{ m['content'] }}{% endfor %}"
SMALL = (
    "model.make_vocab_divisible_by=4 data.drop_eval_overlap=false batch.prompts_per_step=8"
    " batch.responses_per_prompt=16 batch.prompts_per_minibatch=4 batch.tokens_per_microbatch=256"
    " rollout.max_prompt_tokens=8 rollout.max_response_tokens=2 rollout.kv_cache_gib=0.03125"
    " optim.learning_rate=3e-3 checkpoint.every_steps=2 trainer.num_steps=4"
    r""" "reward.server.template='{response}'" "reward.server.pattern='^(\d)'" """
    "reward.server.max_score=9 reward.server.max_tokens=2"
)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_as_printed(tmp_path: Path) -> None:
    for name in ("model", "judge"):
        (tmp_path / name).mkdir()
    write_model(tmp_path / "model")
    write_judge(tmp_path / "judge", SCORES, JUDGED)
    for name in ("mine", "held_out"):
        lines = [json.dumps({"question": letter, "target": letter}) for letter in LETTERS]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    serve, train, evaluate, sample, report = of_markdown(PAGE.read_text(encoding="utf-8"))
    assert (
        " -m vllm.entrypoints.openai.api_server --model JUDGE " in serve
    )  # what ``served`` starts
    home = {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(REPO), "PET_STANDALONE": "1"}
    home["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def said(command: str, limit_s: int, **env: str) -> str:
        printed = run(["bash", "-c", command], limit_s, env={**home, **env}, cwd=tmp_path).stdout
        assert "Unclosed" not in printed  # connections to the judge
        return printed

    with serving(tmp_path / "model") as hub, served(tmp_path / "judge") as url:
        for word, here in {
            "Qwen/Qwen2.5-0.5B-Instruct": MODEL,
            "http://127.0.0.1:8100": url,
        }.items():
            assert word in train
            train = train.replace(word, here)
        train = train.replace("reward.server.model=JUDGE", "reward.server.model=m")
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        assert f"model.path = {MODEL}: commit {COMMIT}" in said(f"{train} {SMALL}", 400, **online)
        of_run = rows(tmp_path / "runs/mine")
        assert len({row["reward/mean"] for row in of_run if "reward/mean" in row}) > 1
        assert all(row["reward/part/server_tokens"] > 0 for row in of_run if "reward/mean" in row)
        table = said(evaluate, 200, HF_HUB_OFFLINE="1")
        assert "accuracy %" in table
        # The judge sees the prompt, which ends with "?", here too.
        prompt_last = f"{sample} \"reward.server.template='{{response}} {{prompt}}'\""
        assert "reward 0.555556" in said(prompt_last, 120, HF_HUB_OFFLINE="1")
    report = report.replace("tools/", f"{REPO}/tools/")  # the page is of a checkout
    assert "1 run of 1 variant" in said(report, 60)
    page = (tmp_path / "runs/report/index.html").read_text(encoding="utf-8")
    assert "held-out accuracy" in page.lower() and "<img" in page
