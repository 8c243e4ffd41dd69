"""The choices of every named method, as its paper's table of settings has them."""

import math
from dataclasses import dataclass, field

PROGRESS = 0.25  # of the run


@dataclass
class Choice:
    """A method as its paper's table of settings has it."""

    estimator: str = "zscore"
    shaping: tuple[str, ...] = ()
    loss: str = "ppo"
    low: float = 0.2
    high: float = 0.2
    dual: float = math.inf  # at most -dual A is lost where A < 0
    aggregate: str = "response_mean"
    kl: float = 0.0
    dads: bool = False
    entropy: float = 0.0
    drops_all_correct: bool = False
    token: str = ""  # what happens inside a response, see ``token_reference``
    knobs: dict[str, float] = field(default_factory=dict)


NAMED = {
    "grpo": Choice(kl=1e-3),
    "f_grpo": Choice(shaping=("focal",)),
    "krpo": Choice("krpo"),
    "tree_rpo": Choice("tree"),
    "rloo": Choice("rloo", loss="reinforce", aggregate="sum"),
    "dr_grpo": Choice("centered", aggregate="norm"),
    "dapo": Choice(high=0.28, aggregate="token"),
    "gspo": Choice(loss="gspo", low=3e-4, high=4e-4),
    "cispo": Choice(loss="cispo", low=1.0, high=2.0, aggregate="token"),
    "sapo": Choice(loss="sapo"),
    "gmpo": Choice(token="gmpo"),
    "dppo": Choice("centered", aggregate="sum", token="dppo tv"),
    "dppo_kl": Choice("centered", aggregate="sum", token="dppo kl"),
    "clip_cov": Choice(aggregate="token", token="clip_cov"),
    "kl_cov": Choice(aggregate="token", token="kl_cov"),
    "ipo": Choice("centered", aggregate="token", token="ipo"),
    "score_centered": Choice("centered", aggregate="token", token="score_centered"),
    "reinforce_pp": Choice("whitened", aggregate="token"),
    "opo": Choice("opo", aggregate="token"),
    "gpg": Choice("gpg", loss="reinforce", aggregate="token"),
    "pass_at_k": Choice("pass_at_k", aggregate="token", knobs={"k": 4}),
    "w_reinforce": Choice("signed", aggregate="token", knobs={"positive": 0.1, "negative": 1.0}),
    "psr": Choice("signed", aggregate="token", knobs={"positive": 1.0, "negative": 0.0}),
    "nsr": Choice("signed", aggregate="token", knobs={"positive": 0.0, "negative": 1.0}),
    "grpo_lead": Choice("lead", aggregate="token"),
    "mapo": Choice("mixed", high=0.3, dual=3.0, aggregate="token", kl=1e-2),
    "mapo_apd": Choice("apd", high=0.3, dual=3.0, aggregate="token", kl=1e-2),
    "apo": Choice(shaping=("stcr",), kl=1e-3, dads=True, drops_all_correct=True),
    "apo_dads": Choice(kl=1e-3, dads=True, drops_all_correct=True),
    "apo_stcr": Choice(shaping=("stcr",), kl=1e-3),
    "a_grae": Choice(shaping=("ddas", "ass")),
    "a_grae_ddas": Choice(shaping=("ddas",)),
    "a_grae_ass": Choice(shaping=("ass",)),
    "positive_dominant": Choice(shaping=("positive",), knobs={"scale": 10.0}),
    "negative_dominant": Choice(shaping=("positive",), knobs={"scale": 0.1}),
    "hard_focused": Choice(shaping=("hard",)),
    "easy_focused": Choice(shaping=("easy",)),
    "a_grae_dapo": Choice(shaping=("ddas", "ass"), high=0.28, aggregate="token"),
    "a_grae_dr_grpo": Choice("centered", shaping=("ddas", "ass"), aggregate="norm"),
    "rl_zvp": Choice(aggregate="token", token="zero_variance"),
    "gigpo": Choice(aggregate="token", token="gigpo"),
    "turn_discount": Choice(aggregate="token", token="turn_discount"),
    "entropy_advantage": Choice(aggregate="token", token="entropy_bonus"),
    "dcpo": Choice("smoothed", dual=10.0, token="dcpo"),
    "cde": Choice(aggregate="token", knobs={"weight": 1 - PROGRESS}),
    "perplexity": Choice(shaping=("perplexity",), high=0.28, aggregate="token"),
    "position_bonus": Choice(high=0.28, aggregate="token", token="position_bonus"),
    "arm": Choice(shaping=("gap",), high=0.28, aggregate="token"),
    "dph_forward_kl": Choice(high=0.28, aggregate="token", token="dph forward_kl"),
    "dph_js": Choice(high=0.28, aggregate="token", token="dph js"),
    "dph_alpha": Choice(high=0.28, aggregate="token", token="dph alpha"),
    "rl_plus": Choice(
        "centered", low=1, high=math.inf, aggregate="norm", entropy=1e-3, token="rl_plus"
    ),
    "exgrpo": Choice(
        "centered", low=1, high=math.inf, aggregate="norm", entropy=1e-3, token="exgrpo"
    ),
    "ampo": Choice("centered", dual=10.0, aggregate="norm", entropy=1e-3, token="ampo"),
    "ghpo": Choice(aggregate="token"),
    "ar3po": Choice(shaping=("given",), aggregate="token"),
    "sft": Choice(
        "signed", aggregate="token", token="sft", knobs={"positive": 1.0, "negative": 0.0}
    ),
    "opd": Choice(
        "signed", aggregate="token", token="teacher", knobs={"positive": 0.0, "negative": 0.0}
    ),
    "opd_top_k": Choice(
        "signed", aggregate="token", token="teacher_top_k", knobs={"positive": 0.0, "negative": 0.0}
    ),
    "siren": Choice("centered", high=0.28, aggregate="norm", token="siren"),
    "campo": Choice(high=0.28, aggregate="token"),
    "laser": Choice(aggregate="token", token="laser"),
    "papo": Choice(high=0.3, dual=3.0, kl=1e-2, token="papo"),
    "pacs": Choice(aggregate="sum", token="pacs"),
    "simko": Choice(aggregate="token", token="simko"),
    "archer": Choice(aggregate="token", kl=1e-3, token="archer"),
    "durian": Choice(
        "durian",
        high=0.3,
        dual=3.0,
        aggregate="token",
        kl=1e-2,
        knobs={"group": 0.6, "perceptual": 0.2, "reasoning": 0.2},
    ),
    "durian_perceptual": Choice(
        "durian",
        high=0.3,
        dual=3.0,
        aggregate="token",
        kl=1e-2,
        knobs={"group": 0.5, "perceptual": 0.5, "reasoning": 0.0},
    ),
    "durian_reasoning": Choice(
        "durian",
        high=0.3,
        dual=3.0,
        aggregate="token",
        kl=1e-2,
        knobs={"group": 0.5, "perceptual": 0.0, "reasoning": 0.5},
    ),
}
