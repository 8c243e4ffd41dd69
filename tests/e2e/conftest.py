"""What whole runs need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy import write_data, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``model`` and ``data.jsonl``."""
    path = tmp_path_factory.mktemp("toy")
    write_model(path / "model")
    write_data(path / "data.jsonl")
    return path
