"""Which settings go with servers, and with older weights."""

import pytest

from megatron_rl.config.rules.source_rules import source_problems
from tests.unit.config.made_configs import config

PATHS = ["precision=fp32", "rollout=vllm_cpu"]
CORRECTED = ["method.mismatch.kind=tis", "method.mismatch.cap=2.0"]
STAGES = [
    "rollout.response_stages=[{from_step: 1, max_response_tokens: 8},"
    " {from_step: 5, max_response_tokens: 3072}]"
]
PLAIN = ["rollout.anneal.start=1.2"]
ANNEALED = [*PLAIN, "rollout.anneal.policy=annealed"]
OLDER = ["source=servers", "source.staleness=1"]
FREE = ["source=servers", "source.staleness=2", "source.schedule=free"]
REPLAYED = ["rollout.router_replay=rollout"]
TRUNCATED = ["rollout.top_p=0.9", "rollout.top_k=50"]
TURNS = ["env=tools"]
HINTED = ["rollout_hooks.ghpo={}", "data.columns.solution=steps"]
PARTIAL = ["source.partial.groups_in_flight=160"]  # of 128 that a step takes


def problems(*overrides: str) -> list[str]:
    return list(source_problems(config(*PATHS, *overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["evaluation.top_p=0.9", "evaluation.temperature=0.6"],
        ["source=servers"],
        [*OLDER, *CORRECTED],
        [*FREE, *CORRECTED],
        ["rollout_hooks.erpo={}", *OLDER, *CORRECTED],
        [*OLDER, "method.mismatch.kind=icepop", "method.mismatch.cap=2.0"],
        [*OLDER, "method=dppo"],
        [*PARTIAL, "method=ipo", "method.mismatch.kind=sequence_mask"],
        TRUNCATED,
        [*TRUNCATED, *ANNEALED],
        [*TRUNCATED, *OLDER, *CORRECTED],
        [*TRUNCATED, *STAGES, "rollout_hooks.vcrl={}"],
        ["rollout.top_k=1"],
        TURNS,
        [*TURNS, *STAGES, "method=dapo", "rollout.stop=[x]"],
        [*TURNS, *TRUNCATED, *ANNEALED, "source=servers", "rollout_hooks.vcrl={}"],
        [*PARTIAL, *CORRECTED],
        [*REPLAYED, *PARTIAL, *CORRECTED],
        [*REPLAYED, *OLDER, *CORRECTED],
        [*PARTIAL, *CORRECTED, "trainer.epochs_per_rollout=2", "batch.prompts_per_minibatch=32"],
        ["rollout_hooks.vcrl={}", "rollout_hooks.dars.schedule=hw"],
        ["rollout_hooks.erpo.increase=0.2", *CORRECTED],
        ANNEALED,
        [*PLAIN, *CORRECTED],
        [*ANNEALED, "rollout.anneal.decay_growth=0.0", *PARTIAL, *CORRECTED],
        [*ANNEALED, "rollout_hooks.vcrl={}", "rollout_hooks.dars.schedule=hw"],
        ["rollout.temperature=0.7", "rollout.anneal.end=0.5"],
        [*PARTIAL, *CORRECTED, *STAGES],
        [*PARTIAL, *CORRECTED, "method=dapo", "rollout_hooks.dars={}"],
        [*PARTIAL, *CORRECTED, "source=servers"],
        [*ANNEALED, "source=servers"],
        [*TURNS, "source=servers"],
        ["rollout_hooks.vcrl={}", *STAGES],
        ["rollout_hooks.erpo={}", "method=dapo", *CORRECTED],
        ["rollout_hooks.vcrl={}", *FREE, *CORRECTED],
        [*HINTED, "method=ghpo", *OLDER, *CORRECTED],
        ["rollout_hooks.ampo={}", "method=ampo", *FREE, *CORRECTED],
    ],
)
def test_what_goes_together(overrides):
    assert problems(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.top_p=0.9"],
            "rollout.top_p = 0.9, rollout.top_k = -1: the tokens that the sampler keeps travel",
        ),
        (["env.agent=program"], "env.agent = program: is not read with env.name = single"),
        ([*TURNS, "env.agent=program"], "is not read with env.name = tools; leave it out, or"),
        (["env=agent", "env.corpus=f"], "env.corpus = f: is not read with env.name = agent"),
        ([*TRUNCATED, *FREE, *CORRECTED], "with source.schedule = free responses come without"),
        ([*TRUNCATED, *PARTIAL, *CORRECTED], "with source.partial.groups_in_flight responses come"),
        (["source.staleness=1"], "colocated engines always sample with the newest"),
        (OLDER, "method.mismatch.kind = none does not correct"),
        (
            [*OLDER, "method.mismatch.kind=sequence_mask", "method.mismatch.cap=2.0"],
            "sequence_mask does not correct",
        ),
        (
            [*OLDER, *CORRECTED, "mismatch_limits.abort_above=0.001"],
            "differ on purpose; set it to null",
        ),
        (["source=servers", "source.schedule=free"], "set it to lockstep, or raise"),
        (["source=servers", "weight_sync.method=gather"], "servers take weights by a plan"),
        (["source=servers", "memory.offload=[optimizer]"], "share no device"),
        (PARTIAL, "method.mismatch.kind = none does not correct"),
        (
            [*ANNEALED, "rollout.temperature=0.7"],
            "rollout.temperature = 0.7: rollout.anneal.start = 1.2 says the temperatures",
        ),
        (
            [*ANNEALED, "rollout.anneal.end=1.3"],
            "rollout.anneal.end = 1.3: is above rollout.anneal.start = 1.2",
        ),
        (
            [*ANNEALED, "rollout.anneal.decay_limit=400.0"],
            "rollout.anneal.decay_limit = 400: less than rollout.anneal.decay_tokens = 500",
        ),
        (
            [*ANNEALED, *PARTIAL, *CORRECTED],
            "rollout.anneal.decay_growth = 100: with source.partial",
        ),
        (
            [*ANNEALED, *CORRECTED, "rollout_hooks.erpo={}"],
            "rollout_hooks.erpo: defines the temperature of the tokens of a response",
        ),
        (
            PLAIN,
            "rollout.anneal.policy = plain: tokens are sampled at other temperatures than 1, which"
            " method.mismatch.kind = none does not correct",
        ),
        ([*PARTIAL, *CORRECTED, "mismatch_limits.abort_above=1.0"], "differ on purpose"),
        (["source.partial.groups_in_flight=257", *CORRECTED], "and at most 256"),
        (["source.partial.groups_in_flight=127", *CORRECTED], "give at least"),
        ([*PARTIAL, *FREE, *CORRECTED], "where a step ends is a number of tokens"),
        ([*PARTIAL, *CORRECTED, "rollout.stop=[END]"], "would not be seen; set it to []"),
        ([*REPLAYED, "rollout.pipeline=2"], "rollout.pipeline = 2: with rollout.router_replay ="),
        ([*REPLAYED, "rollout.enable_prefix_caching=false"], "set it to true, or replay old_pol"),
        ([*REPLAYED, *FREE, *CORRECTED], "source.schedule = free: with rollout.router_replay"),
        (
            [*REPLAYED, *PARTIAL, *CORRECTED, "source=servers"],
            "source.partial.groups_in_flight: with rollout.router_replay = rollout a server",
        ),
        (HINTED[:1], "rollout_hooks.ghpo: shows parts of solutions; name their column"),
        (HINTED[1:], "data.columns.solution = steps: only rollout_hooks.ghpo reads it"),
        ([*HINTED, "data.hint_ratios=[0.5, 0.25]"], "[0.5, 0.25]: rollout_hooks.ghpo wants"),
        ([*HINTED, "data.hint_ratios=[]"], "data.hint_ratios = []: rollout_hooks.ghpo wants"),
        ([*HINTED, "rollout_hooks.dars={}"], "rollout_hooks.ghpo: rollout_hooks.dars takes"),
        ([*HINTED, "method=dapo"], "ghpo: method.filters.dynamic_sampling refuses the groups"),
        ([*HINTED, *TURNS], "rollout_hooks.ghpo: env.name = tools has turns"),
        ([*HINTED, *FREE, *CORRECTED], "rollout_hooks.ghpo: source.schedule = free records"),
        (["rollout_hooks.ampo={}", "method=dapo"], "ampo: method.filters.dynamic_sampling refuses"),
        (["rollout_hooks.ar3po={}", "method=dapo"], "ar3po: method.filters.dynamic_sampling refu"),
        (["rollout_hooks.erpo={}"], "method.mismatch.kind = none does not correct"),
    ],
)
def test_what_does_not_is_said_with_a_remedy(overrides, words):
    found = problems(*overrides)
    assert len(found) == 1 and words in found[0], found
