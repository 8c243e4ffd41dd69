"""The commands that the documents print: how each is made small and run. Those that are not run are
in ``commands_not_run``."""

from __future__ import annotations

from dataclasses import dataclass, field

MAKER = "torchrun --standalone --nproc-per-node 2 tools/make_toy_model.py --out DIR"
SWEEP = (
    "python -m megatron_rl.sweep --out runs/ablation --nproc 2 experiment=quickstart_cpu"
    " model.path=TOY method=grpo,dapo,a_grae seed=1,2"
)
OWN_MODEL = (
    "torchrun --nproc-per-node 8 -m megatron_rl.train model.path=/models/Qwen2.5-7B"
    " data.train=train.parquet data.eval=eval.jsonl parallel.tensor=4 rollout.tensor=2"
    " method=dr_grpo"
)
EVALUATE = "torchrun --nproc-per-node 8 -m megatron_rl.evaluate"
PASS_AT = "evaluation.responses_per_prompt=256 'evaluation.pass_at=[1,4,16,64,256]'"
EVALUATE_MODEL = (
    f"{EVALUATE} model.path=/models/Qwen2.5-7B data.eval=eval.jsonl evaluation.temperature=0.6"
    f" {PASS_AT}"
)
EVALUATE_RUN = f"{EVALUATE} runs/mine --steps all evaluation.temperature=1.0 {PASS_AT}"
RUN_SH = "bash examples/quickstart_cpu/run.sh"
VISION_SH = "bash examples/vision_cpu/run.sh"
SBATCH = "examples/slurm/train.sbatch"
CONVERT = "python tools/convert_checkpoint.py"
BENCH = "python tools/bench"
PLAN_RUN = "python tools/plan_run.py --nodes 1 --model qwen2.5-7b experiment=qwen2_5_7b_8gpu"
PLAN_72B = (
    "python tools/plan_run.py --nodes 8 --model 72b --host-gib 1800 experiment=qwen2_5_7b_8gpu"
    " parallel=tp8_pp4 rollout.tensor=8 batch.prompts_per_step=256"
    " batch.tokens_per_microbatch=16384 rollout.max_response_tokens=8192"
)
PLAN_235B = (
    "python tools/plan_run.py --nodes 128 --model qwen3-235b-a22b --host-gib 1800"
    " experiment=qwen2_5_7b_8gpu parallel=tp4 parallel.sequence=true parallel.pipeline=8"
    " parallel.first_stage_layers=11 parallel.last_stage_layers=11 parallel.expert=32"
    " parallel.recompute=full rollout.tensor=8 rollout.gpu_memory_utilization=0.8"
    " rollout.max_response_tokens=16384 batch.prompts_per_step=1024 batch.responses_per_prompt=16"
    " batch.prompts_per_minibatch=256 batch.tokens_per_microbatch=32768"
)
# Seconds of training instead of minutes. An overlong penalty and resampling need a model that can
# do something: left as they are.
SHORT = (
    "trainer.num_steps=1 batch.prompts_per_step=8 batch.prompts_per_minibatch=8"
    " evaluation.num_prompts=8 logging.tensorboard=false"
)
ON_CPU = (
    "precision=fp32 rollout=vllm_cpu rollout.tensor=2 rollout.kv_cache_gib=0.03125"
    " model.make_vocab_divisible_by=4 data.drop_eval_overlap=false reward.verifier=exact"
    " trainer.num_steps=1 batch.prompts_per_step=8 batch.prompts_per_minibatch=8"
    " batch.responses_per_prompt=4 batch.tokens_per_microbatch=256 rollout.max_prompt_tokens=8"
    " rollout.max_response_tokens=2"
)
ENGINE_ON_CPU = (
    "rollout=vllm_cpu rollout.kv_cache_gib=0.03125 reward.verifier=exact"
    " rollout.max_prompt_tokens=8 rollout.max_response_tokens=2"
)
FEW = {"-node 8": "-node 2", "=256": "=8", "[1,4,16,64,256]": "[1,4,8]"}
PLUGIN = f"{RUN_SH} --plugin examples/plugins"
RENAMING = (
    "mkdir -p runs/renamed",
    "cp .work/toy_model-*/* runs/renamed",
    """sed -i 's/"Qwen3ForCausalLM"/"RenamedQwen3ForCausalLM"/' runs/renamed/config.json""",
)
PACK = (
    "mkdir parts && tar -c wheels | split -b 60M - parts/wheels."
    " && (cd parts && sha256sum wheels.* > sums)"
)
JOIN = "(cd parts && sha256sum --check --quiet sums) && cat parts/wheels.* | tar -x"
IN_PARTS = f"cd {{new}} && mkdir wheels && echo whole > wheels/a.whl && {PACK}"


@dataclass(frozen=True)
class Run:
    """How a command is run: ``more`` is appended, ``instead`` replaces text before the common
    substitutions do, ``before`` are commands that it needs."""

    more: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    shows: str = ""
    code: int = 0
    limit_s: int = 280
    before: tuple[tuple[str, Run], ...] = ()


# What a document calls by a name, and the small real thing that the test makes of it.
SUBSTITUTIONS = {
    "TOY": "{place}/toy",
    "M": "{place}/toy",
    "MODEL": "{place}/letters",
    "NEW_WEIGHTS": "{place}/letters",
    "HF_DIRECTORY": "{place}/letters",
    "/models/Qwen2.5-7B": "{place}/letters",
    "train.parquet": "{place}/train.parquet",
    "eval.jsonl": "{place}/eval.jsonl",
    "train.jsonl": "{place}/images.jsonl",
    "ENCODER": "{place}/encoder",
    "IMAGE...": "{place}/image.png",
    "CHECKPOINT": "{new}/checkpoint",
    "FOLDER": "{new}/folder",
    "DIR": "{new}/folder",
    "UNTRAINED": "{new}/untrained",
    "TASKS": "{place}/vision/tasks",
}

SWEPT = Run(SHORT, shows=r"method=a_grae +2 ", limit_s=580)
BUNDLE = ((RUN_SH, Run(f"{SHORT} nonfinite.bundle_step=1 run_dir=runs/bundle")),)


def verified(folder: str) -> Run:
    """Of a run of the quickstart, whose folder the document calls ``folder``."""
    instead = {folder: "runs/quickstart_cpu"}
    return Run(instead=instead, shows=r"step_\d{6}: whole", before=((RUN_SH, Run(SHORT)),))


# Seconds each, without the engines.
QUICK = {
    (
        "python tools/plan_memory.py --world-size 8 --gpu-gib 80"
        " experiment=qwen2_5_7b_8gpu model.path=/models/Qwen2.5-7B"
    ): Run(instead={"/models/Qwen2.5-7B": "{place}/qwen"}, shows="training GiB"),
    (
        "python tools/plan_sync.py --model 72b --train tp=8,pp=4,dp=2 --rollout tp=2,dp=224"
        " --disaggregated --network-gb-s 50"
    ): Run(shows="across nodes.*ratio 1.00"),
    "python tools/method_cards.py --check": Run(shows="up to date"),
    "python tools/claims.py page nsr_keeps_coverage": Run(shows="nsr_keeps_coverage: .*reproduced"),
    "python tools/style_figures.py": Run(
        shows=r"comment / code lines .*\n.*\n\| \*\*megatron_rl\*\*"
    ),
    "python tools/metrics_table.py --check": Run(shows="up to date"),
    "python -m megatron_rl.train --info": Run(shows=r"(?m)^method=a_grae \| "),
    "python -m megatron_rl.train --info method": Run(shows="(?m)^method=dapo +DAPO, "),
    "python -m megatron_rl.train --cfg job experiment=quickstart_cpu method=dapo": Run(
        shows="name: dapo"
    ),
    'eval "$(python -m megatron_rl.train --completion bash)"': Run(
        "&& complete -p torchrun", shows="-F _megatron_rl"
    ),
    PACK: Run("&& cat parts/sums", {PACK: IN_PARTS}, shows="(?m)  wheels.aa$"),
    JOIN: Run(
        "&& cat wheels/a.whl", {JOIN: f"{IN_PARTS} && rm -r wheels && {JOIN}"}, "(?m)^whole$"
    ),
    (
        f"sbatch --nodes 4 {SBATCH} run_dir=/shared/runs/a experiment=qwen2_5_7b_8gpu"
        " model.path=/shared/models/Qwen2.5-7B"
    ): Run(
        instead={f"sbatch --nodes 4 {SBATCH}": f"bash {SBATCH} --dry-run --nproc 8"},
        shows=r"torch\.distributed\.run .* megatron_rl\.train .*run_dir=/shared/runs/a",
    ),
    f"sbatch {SBATCH} run_dir=DIR key=value": Run(
        instead={f"sbatch {SBATCH}": f"bash {SBATCH} --dry-run --nproc 8"},
        shows="key=value resume=auto",
    ),
}

# With the engines, or more than a few seconds.
LONG = {
    "python tools/plan_sync.py --model 72b --train tp=8,pp=4,dp=2 --rollout tp=8,dp=8": Run(
        shows="lower bound"
    ),
    f"{CONVERT} to-megatron HF_DIRECTORY CHECKPOINT": Run(shows="checkpoint: digest [0-9a-f]{32}"),
    f"{CONVERT} to-hf CHECKPOINT HF_DIRECTORY": Run(
        instead={"CHECKPOINT HF_DIRECTORY": "{place}/checkpoint {new}/hf"},
        shows="hf: digest [0-9a-f]{32}",
    ),
    f"{CONVERT} to-nemo HF_DIRECTORY CHECKPOINT": Run(shows="checkpoint: digest [0-9a-f]{32}"),
    (
        "python tools/plan_sync.py --model qwen3-235b-a22b --train tp=4,pp=8,dp=4,ep=8"
        " --rollout tp=8,dp=16 --json"
    ): Run(shows='"lower_bound'),
    PLAN_RUN: Run(shows="(?s)sync .* peers .*step .*generation"),
    PLAN_72B: Run(shows="24 peers of a rank"),
    PLAN_235B: Run(shows="1024 GPUs(?s:.)*255 peers"),
    MAKER: Run("--steps 150", {"DIR": "{new}/model"}, shows="held-out greedy accuracy"),
    "python tools/make_toy_model.py --out DIR": Run("--steps 2", shows="held-out greedy accuracy"),
    "python tools/make_toy_model.py --out UNTRAINED --steps 1": Run(
        shows="held-out greedy accuracy"
    ),
    RUN_SH: Run(
        SHORT, shows="finished"
    ),  # or "already finished": some of these commands differ in their sizes only
    f"{RUN_SH} run_dir=runs/mine method=dapo trainer.num_steps=20 seed=2": Run(
        SHORT, shows="finished"
    ),
    f"{RUN_SH} run_dir=runs/mine seed=2 method=dapo": Run(SHORT, shows="finished"),
    f"{RUN_SH} run_dir=runs/mine seed=2 trainer.num_steps=4 method=dapo": Run(
        SHORT, shows="finished"
    ),
    "bash examples/servers_cpu/run.sh seed=2": Run(SHORT, shows="finished: ", limit_s=900),
    VISION_SH: Run(SHORT, shows="(?s)finished.*answers.png"),
    f"{VISION_SH} run_dir=runs/mine seed=2 method=durian": Run(
        f"{SHORT} run_dir=runs/vision_durian", shows="(?s)visual entropy of .*finished"
    ),
    f"{VISION_SH} run_dir=runs/mine seed=2 trainer.num_steps=4 method=durian": Run(
        f"{SHORT} run_dir=runs/vision_durian", shows="finished"
    ),
    "python tools/verify_checkpoint.py RUN/checkpoints": verified("RUN"),
    "python tools/verify_checkpoint.py run_dir/checkpoints": verified("run_dir"),
    "python tools/verify_checkpoint.py --sizes-only run_dir/checkpoints": verified("run_dir"),
    "bash examples/quickstart_cpu/ablation.sh": Run(
        f"{SHORT} method=grpo seed=1", shows=r"1 run in 1 variant(?s:.*)wrote .*report\.md"
    ),
    "bash examples/quickstart_cpu/ablation.sh trainer.num_steps=2": Run(
        f"{SHORT} method=grpo seed=1", shows=r"wrote .*report\.md"
    ),
    "bash examples/vision_cpu/ablation.sh": Run(
        SHORT, shows="(?s)combination.*method=durian", limit_s=900
    ),
    "python tools/draw_answers.py RUN": Run(
        instead={"RUN": "runs/vision_cpu"},
        shows="right before",
        before=((VISION_SH, Run(SHORT)),),
    ),
    "python tools/make_vision_tasks.py --out DIR": Run("--train 8 --eval 8", shows=""),
    "python tools/make_toy_vision_model.py --tasks TASKS --out DIR": Run(
        "--steps 2", {"DIR": "{new}/seeing"}, shows="supervised steps"
    ),
    f"{PLUGIN}/clipped_advantage.py method=clipped_grpo trainer.num_steps=5 run_dir=runs/clipped": (
        Run(SHORT, shows="finished: ")
    ),
    (
        f"{PLUGIN}/clipped_advantage.py method=dapo 'method.estimator={{name:"
        f" clipped_zscore, limit: 1.0}}' trainer.num_steps=5 run_dir=runs/clipped_dapo"
    ): Run(SHORT, shows="finished: "),
    (
        f"{PLUGIN}/one_sided.py 'method.policy_loss={{name: one_sided, most: 1.1}}'"
        " trainer.num_steps=5 run_dir=runs/one_sided"
    ): Run(SHORT, shows="finished: "),
    (
        f"{PLUGIN}/drop_easy.py rollout_hooks.drop_easy.above=0.75 trainer.num_steps=5"
        " run_dir=runs/drop_easy"
    ): Run(SHORT, shows="finished: "),
    (
        f"{PLUGIN}/brevity.py method.shaping.brevity.strength=1.0 trainer.num_steps=5"
        " run_dir=runs/brevity"
    ): Run(SHORT, shows="finished: "),
    f"{PLUGIN}/any_case.py reward.verifier=any_case trainer.num_steps=5 run_dir=runs/any_case": Run(
        SHORT, shows="finished: "
    ),
    (
        f"{RUN_SH} reward.function=examples/plugins/letters_in_place.py:score"
        " trainer.num_steps=5 run_dir=runs/letters"
    ): Run(SHORT, shows="finished: "),
    (
        f"{PLUGIN}/renamed_qwen3.py model.path=runs/renamed trainer.num_steps=5"
        " run_dir=runs/renamed_run"
    ): Run(SHORT, shows="finished: ", before=tuple((text, Run()) for text in RENAMING)),
    "python -m megatron_rl.sample runs/quickstart_cpu": Run(
        shows="of 4 answers are correct", before=((RUN_SH, Run(SHORT)),)
    ),
    (
        "python -m megatron_rl.sample runs/mine/checkpoints/step_000100 --num-prompts 8"
        " --responses 2"
    ): Run(
        instead={"mine/checkpoints/step_000100": "quickstart_cpu/checkpoints/step_000001"},
        shows="of 16 answers are correct",
        before=((RUN_SH, Run(SHORT)),),
    ),
    (
        "python -m megatron_rl.sample MODEL"
        ' --prompt "Spell this word backward (example: sun -> nus): milk"'
    ): Run(instead={"MODEL": "{place}/toy"}, shows="(?m)^answer: ", before=((RUN_SH, Run(SHORT)),)),
    EVALUATE_MODEL: Run(ENGINE_ON_CPU, FEW, shows="finished: runs/evaluation"),
    EVALUATE_RUN: Run(
        instead={**FEW, "runs/mine": "runs/quickstart_cpu"},
        shows="finished: runs/quickstart_cpu/evaluation",
        before=((RUN_SH, Run(SHORT)),),
    ),
    (
        "torchrun --nproc-per-node N -m megatron_rl.evaluate model.path=DIR data.eval=FILE"
        " key=value"
    ): Run(
        "--out {new}/out",
        {" N ": " 2 ", "DIR": "MODEL", "FILE": "eval.jsonl", "key=value": ENGINE_ON_CPU},
        shows="finished: ",
    ),
    "torchrun --nproc-per-node N -m megatron_rl.evaluate RUN --steps all key=value": Run(
        "--out {new}/out",
        {" N ": " 2 ", "RUN": "runs/quickstart_cpu", "key=value": "seed=3"},
        shows="(?m)^1 +all ",
        before=((RUN_SH, Run(SHORT)),),
    ),
    "torchrun --nproc-per-node N tools/replay_step.py BUNDLE": Run(
        instead={" N ": " 2 ", "BUNDLE": "runs/bundle/nonfinite/step_000001"},
        shows="gradient norm",
        before=BUNDLE,
    ),
    "python tools/replay_step.py BUNDLE": Run(
        instead={"BUNDLE": "runs/bundle/nonfinite/step_000001"},
        shows="gradient norm",
        before=BUNDLE,
    ),
    "torchrun --nproc-per-node N -m megatron_rl.train experiment=NAME key=value": Run(
        f"model.path=TOY run_dir=DIR {SHORT}",
        {" N ": " 2 ", "NAME": "quickstart_cpu", "key=value": ""},
        shows="finished: ",
    ),
    OWN_MODEL: Run(
        ON_CPU,
        {"--nproc-per-node 8": "--nproc-per-node 2", "parallel.tensor=4": "parallel.tensor=2"},
        shows="finished: ",
    ),
    SWEEP: SWEPT,
    "python -m megatron_rl.report runs/ablation --out runs/ablation/report": Run(
        shows="6 runs in 3 variants.*6 finished(?s:.*)wrote .*report.md", before=((SWEEP, SWEPT),)
    ),
    "python -m megatron_rl.report runs/a runs/b --out DIR --baseline method=grpo": Run(
        instead={"runs/a runs/b": "runs/quickstart_cpu"},
        shows="1 run in 1 variant.*Baseline: method=grpo",
        before=((RUN_SH, Run(SHORT)),),
    ),
    "python tools/visual_entropy.py ENCODER --cache scores.parquet IMAGE...": Run(
        shows="1 computed, 0 in the cache"
    ),
    (
        "python tools/visual_entropy.py ENCODER --cache scores.parquet --data train.jsonl"
        " --images-column images --out scored.jsonl"
    ): Run(shows="in the cache"),
    f"{BENCH}/end_to_end.py --model TOY --trl-python trl_env/bin/python --steps 25": Run(
        "--steps 3 --warmup 1 --turns 1",
        {"--trl-python trl_env/bin/python": ""},
        shows="load average",
    ),
}

# Server and what is started beside it, in the order of the documents.
SERVER = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_CPU_OMP_THREADS_BIND=nobind python -m"
    " vllm.entrypoints.openai.api_server --model MODEL --tensor-parallel-size 2"
    ' --kv-cache-memory-bytes 1G --enforce-eager --weight-transfer-config \'{"backend":'
    ' "megatron_rl"}\''
)
PUSH = (
    "torchrun --nproc-per-node 2 examples/vllm_server/push.py --server http://127.0.0.1:8000"
    " --model NEW_WEIGHTS --tensor 2 --version 1"
)
BESIDE_EACH_OTHER = {SERVER, PUSH}
