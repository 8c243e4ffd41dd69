"""Arguments of TRL's GRPOConfig, with values of our own."""

from trl import GRPOConfig

args = GRPOConfig(
    output_dir="runs/a",
    learning_rate=2e-6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    steps_per_generation=16,
    num_generations=8,
    num_iterations=2,
    max_completion_length=512,
    max_steps=400,
    save_steps=40,
    beta=0.001,
    epsilon=0.1,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards=False,
    vllm_importance_sampling_mode="token_truncate",
    bf16=True,
    use_vllm=True,
    vllm_mode="colocate",
    min_p=0.1,
)
