"""Models of the Hugging Face hub: a name becomes a local folder, of one commit in a whole run."""

import hashlib
import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from megatron_rl.config.schema import Config
from megatron_rl.errors import first_line
from megatron_rl.run.files import CONFIG
from megatron_rl.run.run_record import read_record
from megatron_rl.runtime.launch import World

# One slash, no ./ and no /: the name of a model; behind @ a branch, a tag or a commit.
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<commit>\w+)$")
# What the checks of the start and the tokenizer read; then the weights.
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
_ALL = (*_DESCRIPTION, "*.safetensors")
logger = logging.getLogger(__name__)


def with_model(config: Config, world: World) -> Config:
    """Collective: ``config`` with the local folder of a model that ``model.path`` names on the hub.

    Everything but the weights is there then, so that the start-up checks come before they are
    downloaded. A run that resumes has the commit that it began with, unless a revision is given.

    Raises:
        ValueError: the hub does not give it.
    """
    path = config.model.path
    named = _named(path)
    if named is None:
        return config

    def first() -> str:
        """The commit is looked up once: a branch may move while ranks ask for it."""
        pinned = named["revision"] or _commit_of_run(Path(config.run_dir), named["repo"])
        return _fetched(path, named["repo"], pinned, _DESCRIPTION)

    folder = world.from_main(first)
    config = config.with_values(model={"path": folder})
    fetch_weights(config, world, _DESCRIPTION)
    logger.info("model.path = %s: commit %s", path, Path(folder).name)
    return config


def local_folder(path: str) -> str:
    """``path``, or the folder of the model that it names on the hub, downloaded where it is not
    there. Raises ValueError as ``with_model``."""
    named = _named(path)
    return _fetched(path, named["repo"], named["revision"], _ALL) if named else path


def fetch_weights(config: Config, world: World, patterns: Sequence[str] = _ALL) -> None:
    """Collective: downloads what of a model of the hub is not there yet, once on each machine.

    Args:
        config: from ``with_model``, where that has found a model of the hub.

    Raises:
        ValueError: the hub does not give it.
    """
    found = repo_and_commit(config.model.path)
    assert found is not None, "a folder of the library's cache"
    repo, commit = found

    def fetch() -> None:
        """The first rank of a machine downloads; progress bars are those of the first machine."""
        if world.local_rank != 0:
            return
        if not world.is_main:
            disable_progress_bars()
        folder = _fetched(repo, repo, commit, patterns)
        if folder != config.model.path:
            raise ValueError(
                f"model.path = {repo}: this machine keeps it in {folder}, the first one in"
                f" {config.model.path}; set HF_HOME to the same folder on all machines"
            )

    world.on_all_ranks(fetch)


def _named(path: str) -> re.Match[str] | None:
    """``path`` as a name on the hub; None where it is no such name, or exists on this machine."""
    return None if Path(path).exists() else _NAME.fullmatch(path)


def _commit_of_run(run_dir: Path, repo: str) -> str | None:
    """The commit that a run of this folder began with, if it is of ``repo``."""
    record = read_record(run_dir / CONFIG) or {}
    found = repo_and_commit(record.get("model", {}).get("path", ""))
    return found[1] if found and found[0] == repo else None


def repo_and_commit(folder: str) -> tuple[str, str] | None:
    """``("OWNER/NAME", commit)`` of a folder of the library's cache; None of any other."""
    found = _SNAPSHOT.search(folder)
    return (f"{found['owner']}/{found['name']}", found["commit"]) if found else None


def _check_digests(folder: Path, before: Collection[str]) -> None:
    """The hub names a large file in its cache by its SHA-256; the library does not compare it.

    Args:
        folder: of a commit.
        before: names in the cache that were compared when they came.

    Raises:
        OSError: a file is not what the hub has; it is removed.
    """
    for file in folder.iterdir():
        blob = file.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name) and blob.name not in before:
            with blob.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != blob.name:
                file.unlink()
                blob.unlink()
                raise OSError(f"{file.name} has other bytes than on the hub")


def _fetched(path: str, repo: str, revision: str | None, patterns: Sequence[str]) -> str:
    """The folder of a commit, with the files of ``patterns``; from the cache where they are there.

    Raises:
        ValueError: what is wrong, and what to do about it.
    """
    blobs = Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}", "blobs")
    before = {blob.name for blob in blobs.glob("*")}
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
        _check_digests(folder, before)
        return str(folder)
    except GatedRepoError:
        problem = "the hub asks for an agreement; accept it there, and set HF_TOKEN"
    except RevisionNotFoundError:
        problem = f"the hub has no revision {revision} of it; give a branch, a tag or a commit"
    except RepositoryNotFoundError:
        problem = "not there; correct the name, or set HF_TOKEN for one that is private"
    except LocalEntryNotFoundError as error:
        problem = f"not in the cache (HF_HOME), and the hub does not answer ({first_line(error)});"
        problem += f" on a machine that reaches it: hf download {repo}"
    except Exception as error:  # noqa: BLE001 (of the library, of its HTTP client, and Python's)
        problem = f"the download failed ({first_line(error)}); start again: what is there is kept"
    raise ValueError(f"model.path = {path}: no such folder; as a model of the hub: {problem}")
