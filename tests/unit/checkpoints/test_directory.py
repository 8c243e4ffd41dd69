import json
import logging

import pytest

from megatron_rl.checkpoints import directory


def write(root, step, content=b"weights"):
    path = directory.step_path(root, step)
    partial = directory.begin(path)
    (partial / "model").mkdir()
    (partial / "model" / "shard.bin").write_bytes(content)
    directory.finish(path, {"step": step})
    return path


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_finished_checkpoint_is_whole_and_named_by_its_step(tmp_path):
    path = write(tmp_path, 12)
    assert names(tmp_path) == ["step_000012"] and directory.step_of(path) == 12
    assert directory.problem(path) is None and directory.check(path) == {"step": 12}
    assert (
        directory.step_of(tmp_path / "step_12") is None
        and directory.step_of(tmp_path / "step_000012.tmp-partial") is None
    )


def test_newest_is_by_number_not_by_text(tmp_path):
    for step in (2, 1_000_000, 999_999):
        write(tmp_path, step)
    assert directory.newest_valid(tmp_path).name == "step_1000000"


def test_nothing_there(tmp_path):
    assert directory.newest_valid(tmp_path / "absent") is None
    assert directory.prune(tmp_path, keep=1) == []


def truncate(path):
    (path / "model" / "shard.bin").write_bytes(b"weig")


def remove_file(path):
    (path / "model" / "shard.bin").unlink()


def remove_manifest(path):
    (path / "manifest.json").unlink()


def break_manifest(path):
    (path / "manifest.json").write_text('{"files": {"model')


def take_info(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({"files": manifest["files"]}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "model/shard.bin has 4 bytes, 7 were written"),
        (remove_file, "model/shard.bin is missing"),
        (remove_manifest, "no manifest.json"),
        (break_manifest, "manifest.json cannot be read"),
        (take_info, "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, caplog, damage, said):
    older = write(tmp_path, 3)
    newer = write(tmp_path, 4)
    damage(newer)
    with caplog.at_level(logging.WARNING):
        assert directory.newest_valid(tmp_path) == older
    assert "step_000004" in caplog.text and said in caplog.text
    with pytest.raises(ValueError, match="step_000004"):
        directory.check(newer)


def test_a_flipped_bit_is_noticed_by_its_digest_and_not_by_its_size(tmp_path):
    path = write(tmp_path, 3)
    names = directory.file_names(path)
    assert names == ["model/shard.bin"] and directory.damaged(path, names) is None
    (path / "model" / "shard.bin").write_bytes(b"weighty")
    assert directory.problem(path) is None
    assert (
        directory.damaged(path, names)
        == "model/shard.bin is not what was written (its digest differs)"
    )


def test_digests_that_other_processes_took_are_not_taken_again(tmp_path):
    path = directory.step_path(tmp_path, 1)
    partial = directory.begin(path)
    (partial / "a").write_bytes(b"mine")
    (partial / "b").write_bytes(b"theirs, and larger")
    directory.finish(path, {}, {"b": "given"})
    manifest = json.loads((path / "manifest.json").read_text())["files"]
    assert manifest["b"] == {"bytes": 18, "xxh3": "given"} and len(manifest["a"]["xxh3"]) == 32
    assert directory.file_names(path) == ["b", "a"], "the largest first"


def test_entries_of_a_folder_are_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """fsync of a file does not force its entry in its folder to the disk, see fsync(2)."""
    forced = []
    monkeypatch.setattr(
        directory, "to_disk", lambda path: forced.append((path.name, path.exists()))
    )
    path = write(tmp_path, 3)
    partial = "step_000003.tmp-partial"
    assert forced[-3:] == [("manifest.json", True), (partial, True), (path.parent.name, True)]
    (directory.begin(tmp_path / "export") / "weights").write_text("whole")
    forced.clear()
    directory.publish(tmp_path / "export")
    assert forced == [("weights", True), ("export.tmp-partial", True), (tmp_path.name, True)]


def test_what_dead_writers_left_goes_and_what_they_were_replacing_comes_back(tmp_path):
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / "step_000001").rename(tmp_path / "step_000001.tmp-replaced")
    directory.begin(tmp_path / "export")
    (tmp_path / "step_000002.tmp-replaced").mkdir()
    (tmp_path / "notes.tmp-partial").write_text("a file is nobody's checkpoint")
    removed = directory.clean(tmp_path)
    assert sorted(path.name for path in removed) == [
        "export.tmp-partial",
        "step_000002.tmp-replaced",
    ]
    assert names(tmp_path) == ["notes.tmp-partial", "step_000001", "step_000002"]
    assert directory.problem(tmp_path / "step_000001") is None


def test_a_protected_step_stays_besides_the_newest(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    directory.prune(tmp_path, keep=2, protected=[2])
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000005"]
    assert [path.name for path in directory.later_steps(tmp_path, 3)] == [
        "step_000004",
        "step_000005",
    ]
    assert directory.newest_valid(tmp_path, below=4) == tmp_path / "step_000002"


def test_a_writer_that_died_leaves_nothing_that_counts(tmp_path):
    older = write(tmp_path, 3)
    (directory.begin(directory.step_path(tmp_path, 4)) / "half.bin").write_bytes(b"x")
    assert directory.newest_valid(tmp_path) == older
    assert write(tmp_path, 4, b"new") == directory.newest_valid(tmp_path)
    assert not (tmp_path / "step_000004" / "half.bin").exists()


def test_the_same_step_can_be_written_again(tmp_path):
    write(tmp_path, 3, b"first")
    path = write(tmp_path, 3, b"second time")
    assert (path / "model" / "shard.bin").read_bytes() == b"second time" and directory.problem(
        path
    ) is None
    assert names(tmp_path) == ["step_000003"]


def test_prune_keeps_the_newest_whole_ones(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    truncate(tmp_path / "step_000004")
    truncate(tmp_path / "step_000001")
    directory.begin(directory.step_path(tmp_path, 6))
    (tmp_path / "notes.txt").write_text("not ours")
    removed = directory.prune(tmp_path, keep=2)
    # Whole: 2, 3, 5. Kept: 3 and 5; the damaged 4 is newer than 3 and stays; the damaged 1 and the
    # unfinished 6 go.
    assert names(tmp_path) == ["notes.txt", "step_000003", "step_000004", "step_000005"]
    assert sorted(path.name for path in removed) == [
        "step_000001",
        "step_000002",
        "step_000006.tmp-partial",
    ]


def test_prune_never_removes_the_only_whole_one(tmp_path):
    for step in (1, 2):
        write(tmp_path, step)
    truncate(tmp_path / "step_000002")
    assert (
        directory.prune(tmp_path, keep=1) == []
        and directory.newest_valid(tmp_path).name == "step_000001"
    )


def test_every_kth_checkpoint_stays(tmp_path):
    for step in range(1, 8):
        write(tmp_path, step)
    removed = directory.prune(tmp_path, keep=2, every=3)
    assert sorted(map(directory.step_of, removed)) == [1, 2, 4, 5]
    assert [directory.step_of(path) for path in directory.steps(tmp_path)] == [3, 6, 7]
