"""The folder of tokenized prompts that the ranks of a machine share."""

from __future__ import annotations

import os

from megatron_rl.data.shared import KEPT, prune


def test_the_files_used_last_stay_and_drafts_of_killed_writers_go(tmp_path):
    draft = tmp_path / "a.arrow.0123"
    draft.touch()
    os.utime(draft, (0, 0))
    for number in range(KEPT + 1):
        file = tmp_path / f"{number}.arrow"
        file.touch()
        os.utime(file, (number + 1, number + 1))
    prune(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{number}.arrow" for number in range(1, KEPT + 1)
    }


def test_a_file_that_another_launch_has_removed_meanwhile_is_no_error(tmp_path):
    (tmp_path / "gone.arrow").symlink_to(tmp_path / "nowhere")  # listed, and not there
    (tmp_path / "here.arrow").touch()
    prune(tmp_path)
    assert (tmp_path / "here.arrow").exists()
