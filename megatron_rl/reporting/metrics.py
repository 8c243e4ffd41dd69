"""The metrics of a run: every key of metrics.jsonl, with its meaning and unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """The meaning of a metric key.

    Attributes:
        unit: empty for numbers without one.
    """

    meaning: str
    unit: str = ""


_NATS = "nats"

# An exact key, or a prefix that ends in "/" with the rule for what follows it.
TABLE: Mapping[str, Metric] = {
    "step": Metric("number of the finished step; 0 is the state before training"),
    "reward/mean": Metric("mean total reward, after rollout hooks and before shaping"),
    "reward/std": Metric("population standard deviation of the same"),
    "reward/accuracy": Metric("share of responses whose accuracy reward is 1", "share"),
    "reward/excluded_share": Metric("responses that left the step without a verdict", "share"),
    "reward/part/": Metric("mean of one part of the reward, before its weight"),
    "rollout/response_tokens_mean": Metric("mean response length", "tokens"),
    "rollout/response_tokens_correct_mean": Metric("the same of correct responses", "tokens"),
    "rollout/response_tokens_wrong_mean": Metric("the same of wrong responses", "tokens"),
    "rollout/response_tokens_max": Metric("longest response", "tokens"),
    "rollout/truncated_share": Metric("responses cut by the length limit", "share"),
    "rollout/discarded_groups": Metric("groups thrown away by dynamic sampling", "groups"),
    "rollout/sampling_rounds": Metric(
        "prompts seen by dynamic sampling, in steps, rounded up", "batches"
    ),
    "rollout/num_responses": Metric("responses of the step", "responses"),
    "rollout/temperature_mean": Metric("annealed sampling only: mean over response tokens"),
    "rollout/temperature_min": Metric("the same: lowest"),
    "rollout/anneal_decay_tokens": Metric("the same: d of the step", "tokens"),
    "rollout/entropy": Metric("mean entropy of the policy at the start of the step", _NATS),
    "source/staleness_mean": Metric(
        "servers and partial rollouts: updates between the weights that sampled a token and those"
        " that the step trains, mean over tokens",
        "updates",
    ),
    "source/staleness_max": Metric("the same: largest of these", "updates"),
    "source/mixed_share": Metric("the same: responses of more than one weight version", "share"),
    "source/old_tokens_share": Metric("partial rollouts only: tokens of older weights", "share"),
    "source/group_age_max": Metric("partial rollouts only: age of the oldest group", "steps"),
    "source/step_tokens": Metric("the same: tokens that a response gets in the step", "tokens"),
    "source/open_tokens": Metric("the same: of groups that continue in the next step", "tokens"),
    "source/servers": Metric("servers only: those at work", "servers"),
    "source/lost_servers": Metric("servers only: marked dead since the start", "servers"),
    "source/reissued_requests": Metric("the same: requests sent to another server", "requests"),
    "hook/": Metric("NAME/KEY: what the rollout hook NAME reports of the step"),
    "environment/turns": Metric("several turns only: answers of the model in a response", "turns"),
    "environment/tool_calls": Metric("the same: calls of tools in a response", "calls"),
    "environment/ended_by/": Metric("the same: responses that ended so", "share"),
    "tokens/trained": Metric(
        "sampled tokens in the loss of the step, those of overlong responses too; with the four"
        " below all that were sampled (partial rollouts: in the step that trains them); those of"
        " demonstrations are in none",
        "tokens",
    ),
    "tokens/filtered": Metric("of responses that a filter of the method leaves out", "tokens"),
    "tokens/no_verdict": Metric("of responses without a verdict, or in too small groups", "tokens"),
    "tokens/dropped": Metric("of groups that rollout hooks have dropped", "tokens"),
    "tokens/discarded": Metric(
        "of groups that dynamic sampling refused, sampled ahead and not needed (how many depends on"
        " when scores arrive), or beyond the end of a step of partial rollouts; on servers of"
        " refused groups alone, as a server does not say what it had of a request that was taken"
        " back",
        "tokens",
    ),
    "credit/": Metric("statistics of the advantage estimation, see the method's card"),
    "loss/total": Metric("policy loss + KL loss - entropy bonus, mean over the optimizer steps"),
    "loss/": Metric("one term of the same"),
    "policy/token_advantage_mean": Metric("mean over response tokens, after token shaping"),
    "policy/clip_up_positive_share": Metric(
        "share of loss tokens with an advantage > 0 and a ratio above the upper bound of the"
        " clip; under ppo_clip without gradient",
        "share",
    ),
    "policy/clip_down_positive_share": Metric(
        "advantage > 0, ratio below the lower bound", "share"
    ),
    "policy/clip_up_negative_share": Metric("advantage < 0, ratio above the upper bound", "share"),
    "policy/clip_down_negative_share": Metric(
        "advantage < 0, ratio below the lower bound; under ppo_clip without gradient", "share"
    ),
    "policy/": Metric("ratios and clipped tokens, mean over the optimizer steps (*_max: largest)"),
    "entropy/": Metric("entropy of the policy during the update", _NATS),
    "entropy/masked_sampled_mean": Metric("mean -logprob of tokens after masked images", _NATS),
    "kl/": Metric("divergence estimates during the update", _NATS),
    "optim/grad_norm": Metric("gradient norm before clipping, mean over the optimizer steps"),
    "optim/learning_rate": Metric("learning rate of the last optimizer step"),
    "optim/skipped": Metric("optimizer steps skipped for a loss or norm not finite", "steps"),
    "optim/empty_minibatches": Metric("minibatches without a response to train on", "minibatches"),
    "mismatch/logprob_abs_diff_mean": Metric("mean |old - sampler| over response tokens", _NATS),
    "mismatch/logprob_abs_diff_max": Metric("largest of the same", _NATS),
    "mismatch/ratio_mean": Metric("mean exp(old - sampler); 1 when trainer and sampler agree"),
    "mismatch/kl_k3": Metric("mean exp(d) - d - 1, d = old - sampler: KL(sampler, trainer)", _NATS),
    "sync/bytes_sent": Metric("sent by rank 0 to other ranks in the weight sync", "bytes"),
    "sync/bytes_total": Metric("weights that rank 0 took over in the weight sync", "bytes"),
    "sync/logprob_check_diff": Metric("mean |engine - policy| logprob of fixed sequences", _NATS),
    "sync/logprob_check_diff_max": Metric("the same, of the token where it is largest", _NATS),
    "eval/": Metric(
        "held-out evaluation, at the steps that have one; pass_at_K: chance that one of K responses"
        " to a prompt is correct, mean over prompts; maj_at_N: share of prompts whose most frequent"
        " extracted answer is correct, where N > 1 responses have them; accuracy_std_of_N_runs:"
        " spread of the accuracy of N runs, a response of each prompt a run; KEY/PART: of one data"
        " source or category, in the rows of megatron_rl.evaluate"
    ),
    "eval/excluded_share": Metric("held-out responses without a verdict, counted nowhere", "share"),
    "eval/accuracy": Metric("share of held-out responses whose accuracy reward is 1", "share"),
    "eval/accuracy/": Metric("the same, of one data source or category, column=value", "share"),
    "eval/reward_mean": Metric("mean total reward of held-out responses"),
    "eval/response_tokens_mean": Metric("mean length of held-out responses", "tokens"),
    "eval/truncated_share": Metric("held-out responses cut by the length limit", "share"),
    "eval_low/": Metric("megatron_rl.evaluate only: lower end of the 95 % interval of eval/"),
    "eval_high/": Metric("upper bound of the same"),
    "time/": Metric("PHASE_s: one phase of the step on rank 0", "s"),
    "time/step_s": Metric("the whole step on rank 0", "s"),
    "time/start_prompts_s": Metric("first row of a start only: reading the prompts", "s"),
    "time/start_policy_s": Metric("the same row: building the policy, its weights included", "s"),
    "time/start_engine_s": Metric("the same row: building the rollout engine", "s"),
    "time/start_restore_s": Metric("the same row: loading the checkpoint, where there is one", "s"),
    "time/start_sync_s": Metric("the same row: the first weight sync", "s"),
    "throughput/response_tokens_per_s": Metric("response tokens / seconds of the step", "tokens/s"),
    "throughput/discarded_tokens_share": Metric(
        "sampled tokens of no response of the step", "share"
    ),
    "memory/rss_gib": Metric("resident memory of rank 0", "GiB"),
    "memory/": Metric(
        "PHASE_KIND_gib: in use on rank 0 at the end of a phase. Kinds: allocated and reserved by"
        " torch, engine (held by vLLM), used (of the whole device), host",
        "GiB",
    ),
}


def metric(key: str) -> Metric | None:
    """The entry of ``key`` in the table, else that of its longest prefix; None without one."""
    if key in TABLE:
        return TABLE[key]
    prefixes = [prefix for prefix in TABLE if prefix.endswith("/") and key.startswith(prefix)]
    return TABLE[max(prefixes, key=len)] if prefixes else None


def defined(key: str) -> bool:
    return metric(key) is not None
