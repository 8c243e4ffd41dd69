"""The commands that the documents print and no test runs as they stand, with the reason."""

from tests.command_table import BENCH
from tests.launch import REPO

EIGHT = "--standalone --nproc-per-node 8"
GPU_ALL = "a GPU; with tiny models on a CPU: tests/unit/test_gpu_all.py"
GPU_PROGRAMS = ("probe", "waits", "policy", "logprob", "refit", "steps")
TRL = "an environment with TRL from the network; the other side of the benchmark runs above"
NEMO = (
    "an environment with NeMo from the network; tests/numerics/test_nemo_toolkit.py with"
    " --nemo-python"
)
GUIDE = "needs the files of its guide: tests/test_guides.py"
GUIDE_TESTS = (
    "loss/test_spread_scaled.py",
    "loss/test_forking.py",
    "policy/test_seed_oss.py",
    "rewards/test_close_number.py",
    "trainer/test_alternating.py",
)
CLAIMS = sorted((REPO / "examples" / "claims").glob("*/README.md"))
CLAIM = "half an hour; a short one from nothing: tests/e2e/test_claims.py"
NOT_RUN = {
    "torchrun --nproc-per-node N tools/replay_step.py RUN --step 7": (
        "a run on two servers before it: tests/e2e/test_servers.py"
    ),
    **{f"python tools/claims.py run {folder.parent.name}": CLAIM for folder in CLAIMS},
    "bash tools/setup_cpu.sh test && .venv/bin/pytest -n 2": "all tests, from nothing: .ci/run",
    "bash tools/setup_cpu.sh test": "the network, minutes: .ci/run",
    ".venv/bin/pytest": "all tests: .ci/run",
    ".venv/bin/ruff format . && .venv/bin/ruff check .": (
        "writes into the repository; what it would write: tests/test_lint.py"
    ),
    ".venv/bin/python -m megatron_rl.train --cfg job method=rloo_token_mean": GUIDE,
    **{f".venv/bin/pytest tests/unit/{name}": GUIDE for name in GUIDE_TESTS},
    "bash tools/setup_cpu.sh": "the network, minutes: .ci/run",
    "python tools/verify_checkpoint.py run_dir/checkpoints/step_000020": (
        "the folder of all of a run is given above"
    ),
    "torchrun --standalone --nproc-per-node 2 tools/bench/checkpoint.py --folder DIR": (
        "minutes, and gigabytes on the disk"
    ),
    "bash examples/vision_cpu/ablation.sh trainer.num_steps=2 evaluation.num_prompts=16": (
        "as without the overrides, which the test gives smaller"
    ),
    "python tools/mutate_loss.py": "minutes: tests/unit/loss/test_mutations.py",
    "python tools/mutate_loss.py --sample 20 --seed 1": (
        "a minute: tests/unit/loss/test_mutations.py"
    ),
    "python tools/method_cards.py": "writes into the repository; what it writes: --check above",
    "python tools/metrics_table.py": "writes into the repository; what it writes: --check above",
    (
        "python3.11 -m venv NEMO && NEMO/bin/pip install torch==2.13.0 && NEMO/bin/pip"
        " install '.[nemo]'"
    ): (NEMO),
    ".venv/bin/pytest -m full tests/numerics/test_nemo_toolkit.py --nemo-python=NEMO/bin/python": (
        NEMO
    ),
    "python -m venv trl_env && trl_env/bin/pip install torch==2.13.0 trl==1.16.0": TRL,
    (
        f"{BENCH}/end_to_end.py --model UNTRAINED --max-response-tokens 64 --trl-python"
        " trl_env/bin/python --steps 15"
    ): (TRL),
    f"{BENCH}/same_run.py --commits OLD HEAD --model TOY -- trainer.num_steps=25": (
        "wants the repository's history; what it compares is tested by tests/unit/test_same_run.py"
    ),
    (
        "pip download --no-deps -d wheels --python-version 3.12 --only-binary=:all:"
        " megatron-core==0.16.1 vllm==0.32.0 ..."
    ): ("the network"),
    "pip install --no-deps --no-index wheels/*.whl": "a bare machine, gigabytes of wheels",
    f"{BENCH}/gpu_all.py --folder /tmp/megatron_rl_bench": GPU_ALL,
    f"{BENCH}/gpu_all.py --folder DIR": GPU_ALL,
    f"{BENCH}/gpu_all.py --folder DIR --dry-run": (
        "runs all of the next ones: tests/unit/test_gpu_all.py"
    ),
    **{f"{BENCH}/gpu_{name}.py --folder DIR": GPU_ALL for name in GPU_PROGRAMS},
    "bash tools/setup_cuda_no_driver.sh DIR": (
        "gigabytes of wheels, and a compiler at work for an hour"
    ),
    f"{BENCH}/gpu_tests.py --folder DIR tests/gpu/test_engine.py": GPU_ALL,
    (
        f"torchrun {EIGHT} tools/bench/gpu_refit.py --folder DIR --override parallel=tp4"
        " --override rollout.tensor=2"
    ): (GPU_ALL),
    "bash tools/slurm/local_cluster.sh up DIR": "root and Slurm: tests/cluster/test_slurm.py",
    "bash tools/slurm/local_cluster.sh down DIR": "root and Slurm: tests/cluster/test_slurm.py",
}
