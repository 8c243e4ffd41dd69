"""Resume is exact: 2 updates, save, NEW processes, load, 2 updates give the same bits as 4
updates."""

from pathlib import Path

import pytest

from megatron_rl.checkpoints import directory
from tests import zoo
from tests.launch import launch

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    for name in ("llama", "qwen2_tied", "qwen3_moe"):
        zoo.save_tiny_model(name, path / name)
    return path


def phase(name: str, nproc: int, folder: Path, cases: int) -> None:
    result = launch(WORKER, nproc, [name, folder], timeout=400)
    assert result.stdout.count(f"OK {name} ") == cases, result.stdout


def test_two_ranks(folder):
    """TP, DP with the distributed optimizer (overlapped too), PP with tied embeddings, EP; fp32 and
    bf16."""
    phase("write", 2, folder, 7)
    path = folder / "tp2" / "step_000002"
    assert directory.newest_valid(folder / "tp2") == path and directory.problem(path) is None
    phase("read", 2, folder, 7)


@pytest.mark.full
def test_four_ranks_and_other_layouts(folder):
    """TP x PP (interleaved too), TP x DP, and more tensor ranks than key-value heads; then every
    checkpoint is read by another layout."""
    phase("write", 4, folder, 4)
    phase("read", 4, folder, 4)
    if not (folder / "tp2").exists():
        phase("write", 2, folder, 7)
    phase("reshape", 2, folder, 7)


@pytest.mark.full
def test_the_plain_way_writes_and_reads_the_same_bits(folder):
    phase("gathered", 2, folder, 7)


@pytest.mark.full
def test_every_bit_moves_into_other_layouts(folder):
    """TP2 to PP2 and DP2, DP2 to one rank and to TP2 x DP2, EP2 to TP2 x EP2 and EP2 x DP2;
    with and without the distributed optimizer, in fp32 and bf16."""
    if not (folder / "tp2").exists():
        phase("write", 2, folder, 7)
    for nproc, cases in ((1, 3), (2, 6), (4, 3)):
        phase("moved", nproc, folder, cases)
