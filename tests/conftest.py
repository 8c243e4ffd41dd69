"""Session set-up: thread and compiler settings before torch is imported, and run-time checks of
annotated signatures."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from jaxtyping import install_import_hook

# One thread per process: two spinning OpenMP threads on a shared core are up to thirty times
# slower. No compiler: its first call costs seconds and needs g++. Child processes inherit both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# torch asks the name service for the name of each peer of a store, also of this machine. One answer
# that is lost costs five seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# No test asks the network for a model.
os.environ.setdefault("HF_ENDPOINT", "http://127.0.0.1:9")
# Bytecode is kept, whatever the environment says: some hundred processes import the package, and to
# compile it costs each more than a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Modules whose annotations (shape, dtype, type) are executed at every call and every dataclass
# construction.
TYPED_MODULES = (
    "megatron_rl.passes",
    "megatron_rl.types",
    "megatron_rl.loss",
    "megatron_rl.data",
    "megatron_rl.rewards",
    "megatron_rl.reporting",
)
assert not [name for name in sys.modules if name.startswith(TYPED_MODULES)], (
    "imported before their annotations could be checked"
)
install_import_hook(TYPED_MODULES, "beartype.beartype")

# The machine may be busy with other tests.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

import megatron_rl.policy  # noqa: E402, F401 (what megatron needs of it before it is imported)


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of ``DISK_SIZE`` of the test's module."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"size={request.module.DISK_SIZE}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


# Millions of objects that live as long as the session, of the libraries and of the tests: no
# collection looks at them, not while they are made and not later. A look takes a second.
gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist, in the process that hands the tests out to nodes."""
    from tests import warm

    node.workerinput["warm"] = (str(warm.folder()), os.getpid())


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        from tests import warm

        place, owner = config.workerinput["warm"]
        warm.share(Path(place), owner)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nemo-python",
        metavar="PYTHON",
        help="Python of an environment with the extra `nemo`, for tests that run NeMo",
    )
    parser.addoption(
        "--triton-path",
        metavar="FOLDER",
        help="where Triton is installed, for tests that interpret its kernels",
    )
    parser.addoption(
        "--te-python",
        metavar="PYTHON",
        help="Python of an environment with Transformer Engine; no GPU is needed",
    )
    cuda = "Python of an environment with the CUDA build of torch 2.13.0; no GPU is needed"
    parser.addoption("--cuda-python", metavar="PYTHON", help=cuda)
    wheels = (
        "folder with wheels of the extra `gpu` (vllm-0.32.0-*.whl), as pip download leaves them"
    )
    parser.addoption("--cuda-wheels", metavar="FOLDER", help=wheels)
    library = "Python of an environment with verifiers 0.4.0, for tests of its environments"
    parser.addoption("--verifiers-python", metavar="PYTHON", help=library)
    image = "build Dockerfile.ngc on a stand-in for its base: root, buildah, debootstrap, some GB"
    parser.addoption("--build-image", action="store_true", help=image)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where there is no CUDA device."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_unconfigure() -> None:
    """The processes that tests fork from end with the session."""
    from tests import ranks, warm

    ranks.close()
    warm.close()
