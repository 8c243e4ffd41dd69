"""A push of the export of a finished run to the Hugging Face hub, with a model card."""

import logging
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCardData, get_token

from megatron_rl.config.data_names import HF, entries, is_file_name
from megatron_rl.config.schema import Config
from megatron_rl.errors import concerning
from megatron_rl.reporting.report import report
from megatron_rl.run.files import CONFIG, CURVES, METRICS, REQUEUE
from megatron_rl.run.hub import repo_and_commit
from megatron_rl.run.run_record import read_record
from megatron_rl.runtime.launch import World

_HUB_SET = re.compile(rf"{HF}([\w.-]+/[\w.-]+):")
logger = logging.getLogger(__name__)


def check_token(repo: str | None) -> None:
    """Raises ValueError where a push could only fail, before work is lost; asks no network."""
    if repo is not None and get_token() is None:
        raise ValueError(f"hub.push = {repo}: no token of the hub is set here; set HF_TOKEN")


def push_export(config: Config, world: World) -> None:
    """Writes the card into the export of a run and uploads it to ``hub.push`` on rank 0. Does
    nothing where the run has been stopped and is to be resumed.

    A repository that is not there is made, and is private: who may read it is decided there.

    Raises:
        ValueError: the hub does not take it. The run is finished and its export is whole.
    """
    run_dir = Path(config.run_dir)
    repo = config.hub.push
    if repo is None or not world.is_main or (run_dir / REQUEUE).exists():
        return
    export = run_dir / "export"
    card = model_card(repo, read_record(run_dir / CONFIG) or {}, report(run_dir / METRICS))
    (export / "README.md").write_text(card, encoding="utf-8")
    shutil.copyfile(run_dir / CURVES, export / CURVES)
    logger.info("uploading %s to %s", export, repo)
    again = shlex.join(["hf", "upload", "--private", repo, str(export), "."])
    with concerning(
        f"hub.push = {repo}: the upload failed", f"the run is finished; try again: {again}"
    ):
        hub = HfApi()
        hub.create_repo(repo, private=True, exist_ok=True)
        world.watch(math.inf, run_dir)  # hours are no stall: the library ends an upload that hangs
        commit = hub.upload_folder(repo_id=repo, folder_path=export)
    print(f"pushed: {commit.commit_url}", flush=True)


def model_card(repo: str, record: Mapping[str, Any], results: str) -> str:
    """The README.md of a model.

    Args:
        record: config.json of the run.
        results: its table, as text.
    """
    base = repo_and_commit(record["model"]["path"])
    train, held_out = (_data_names(record["data"][key]) for key in ("train", "eval"))
    method = record["method"]
    head = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base[0] if base else None,
        datasets=[found[1] for name in train if (found := _HUB_SET.match(name))] or None,
        tags=["megatron_rl", "reinforcement-learning", method["name"]],
    )
    settings = {
        "base model": " at revision ".join(base or [Path(record["model"]["path"]).name]),
        "training data": train,
        "held-out data": held_out,
        "seed": record["seed"],
        "adapters": record["model"]["lora"],
        "batch": record["batch"],
        "optim": record["optim"],
        "method": method,
        "versions": {"megatron_rl": record["git_commit"], **record["versions"]},
    }
    return f"""---
{head.to_yaml()}
---
# {repo.split("/")[1]}

Trained by reinforcement learning with verifiable rewards, method `{method["name"]}`, with
megatron_rl. The answers of this model have not been checked beyond what stands here.

```
{results}
```

![Curves of the run]({CURVES})

## Settings and versions

```yaml
{yaml.safe_dump(settings, sort_keys=False, default_flow_style=False).strip()}
```
"""


def _data_names(value: str | Sequence[str]) -> list[str]:
    """Of files the name alone: a card does not show the folders of a machine."""
    names = entries(value if isinstance(value, str) else tuple(value))
    return [Path(name).name if is_file_name(name) else name for name in names]
