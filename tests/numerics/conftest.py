"""Models that many tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a HF directory of every tiny family, each under its name."""
    from tests import zoo

    folder = tmp_path_factory.mktemp("hf_models")
    for name in zoo.FAMILIES:
        zoo.save_tiny_model(name, folder / name)
    return folder


@pytest.fixture(scope="session")
def seeing_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a HF directory of every tiny vision-language model, each under its name."""
    from tests import zoo

    folder = tmp_path_factory.mktemp("seeing_models")
    for name in zoo.SEEING:
        zoo.save_tiny_model(name, folder / name)
    return folder
