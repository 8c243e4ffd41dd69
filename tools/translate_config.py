"""The overrides here that do what a configuration of another system does.

    python tools/translate_config.py verl run.sh
    python tools/translate_config.py trl grpo.py --gpus 8

Reads key=value words of a launch script (verl), YAML, or the keywords of GRPOConfig(...) in Python
(TRL). Overrides are printed one a line; what is not taken over, and why, goes to stderr, with what
the configuration's own checks say of the result. Tables: tools/translations.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.keys import flat
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError

TABLES = Path(__file__).with_name("translations")
TO_GIVE = ("model.path", "data.train", "data.eval")


@dataclass
class Translation:
    """Overrides by key, notes on what is left out, and keys the table has no row of."""

    overrides: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def set(self, key: str, value: object) -> None:
        self.overrides[key] = shown(value)


def shown(value: object) -> str:
    """As an override: what YAML reads is what was meant."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


def read(path: Path) -> dict[str, Any]:
    """The file's values by dotted key.

    Raises:
        ValueError: nothing in it is a value.
    """
    text = path.read_text()
    if path.suffix == ".py":
        found = {
            keyword.arg: ast.literal_eval(keyword.value)
            for call in ast.walk(ast.parse(text))
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("GRPOConfig")
            for keyword in call.keywords
            if keyword.arg and isinstance(keyword.value, ast.Constant | ast.UnaryOp)
        }
    elif path.suffix in (".yaml", ".yml"):
        OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
        found = dict(flat(values)) if isinstance(values, dict) else {}
    else:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
        pairs = [
            word.lstrip("+~").split("=", 1) for word in words if re.match(r"\W*\w+\.\S*=", word)
        ]
        found = {key: yaml.safe_load(os.path.expandvars(value)) for key, value in pairs}
    if not found:
        raise ValueError(f"{path}: no key with a value in it; give a launch script, YAML or Python")
    return found


def translate(system: str, given: Mapping[str, Any], num_gpus: int) -> Translation:
    """``given`` over the defaults that make a run of ``system`` another one than a run here."""
    table = yaml.safe_load((TABLES / f"{system}.yaml").read_text())
    values = {**table["defaults"], **given}
    made = Translation()
    for override in table["always"]:
        made.set(*override.split("=", 1))
    for key, value in values.items():
        # A row of a section is for all keys in it.
        above = [key.rsplit(".", cut)[0] for cut in range(key.count(".") + 1)]
        row = next((table["keys"][name] for name in above if name in table["keys"]), None)
        if row is None:
            made.unknown.append(f"{key} = {shown(value)}")
        else:
            _apply(made, key, value, row)
    _COMPUTED[system](made, values, num_gpus)
    return made


def _apply(made: Translation, key: str, value: object, row: Any) -> None:
    """One row: a key here or several, or a mapping with what stands for some values (overrides, or
    why there are none), the key for all others, or the reason why nothing is set."""
    if row == "computed":
        return
    if not isinstance(row, dict):
        for name in [row] if isinstance(row, str) else row:
            made.set(name, value)
        return
    of_value = row.get("values", {}).get(shown(value))
    if of_value is None and "to" in row:
        of_value = [f"{row['to']}={shown(value)}", *row.get("also", ())]
    if isinstance(of_value, list):
        for override in of_value:
            made.set(*override.split("=", 1))
    elif "always" not in row:
        reason = of_value or row.get("why", f"{shown(value)} has no counterpart")
        made.notes.append(f"{key} = {shown(value)}: {reason}")


def _verl(made: Translation, values: Mapping[str, Any], num_gpus: int) -> None:
    actor = "actor_rollout_ref.actor."
    coef = values[f"{actor}kl_loss_coef"] if values[f"{actor}use_kl_loss"] else 0.0
    if values["algorithm.use_kl_in_reward"]:
        coef = values["algorithm.kl_ctrl.kl_coef"]
        made.set("method.kl.placement", "reward")
    made.set("method.kl.coef", coef)


def _trl(made: Translation, values: Mapping[str, Any], num_gpus: int) -> None:
    """TRL counts responses on each device, and steps of the optimizer."""
    _trl_loss(made, values)
    responses = values["num_generations"]
    of_device = values["per_device_train_batch_size"] * num_gpus
    accumulated = values["gradient_accumulation_steps"]
    of_generation = values["generation_batch_size"]
    if of_generation is None:
        of_generation = of_device * (values["steps_per_generation"] or accumulated)
    made.set("batch.prompts_per_minibatch", of_device * accumulated // responses)
    made.set("batch.prompts_per_step", of_generation // responses)
    # Steps of the optimizer that one generation serves.
    updates = of_generation // (of_device * accumulated) * values["num_iterations"]
    for key, name in (
        ("max_steps", "trainer.num_steps"),
        ("save_steps", "checkpoint.every_steps"),
        ("eval_steps", "evaluation.every_steps"),
    ):
        if values.get(key, -1) > 0:
            made.set(name, values[key] // updates)
    if values["max_steps"] <= 0:
        made.set("trainer.num_steps", None)
        made.set("trainer.num_epochs", int(values["num_train_epochs"]))


def _trl_loss(made: Translation, values: Mapping[str, Any]) -> None:
    """The clip, in the terms of the loss that is chosen, and what only looks the same."""
    loss, low = values["loss_type"], values["epsilon"]
    high = low if values["epsilon_high"] is None else values["epsilon_high"]
    if loss == "cispo":  # a largest ratio there, a distance from 1 here
        made.set("method.policy_loss.high", round(high - 1, 12))
    elif loss != "sapo":  # which has no clip
        made.set("method.policy_loss.low", low)
        made.set("method.policy_loss.high", high)
    if values["beta"] and values["use_bias_correction_kl"]:
        # k3 times the ratio has the gradient of k2 times the ratio.
        made.set("method.kl.estimator", "k2")
        made.notes.append(
            "use_bias_correction_kl = true: k2 has the gradient of k3 times the ratio where the"
            " ratio is 1; it is not weighted by it in later minibatches"
        )
    if loss in ("cispo", "sapo") and values["importance_sampling_level"] == "sequence":
        made.notes.append(f"importance_sampling_level = sequence: {loss} is by token here")
    if loss == "bnpo":
        made.notes.append("loss_type = bnpo: of all tokens of an update, not of those of a device")
    if made.overrides.get("method.mismatch.kind") == "sequence_mask":
        made.notes.append(
            "vllm_importance_sampling_mode = sequence_mask: by the mean of a response here, weights"
            " 0 and 1; there by its sum, and what stays is weighted by the ratio"
        )


def _nemo_rl(made: Translation, values: Mapping[str, Any], num_gpus: int) -> None:
    responses = values["grpo.num_generations_per_prompt"]
    made.set("batch.prompts_per_minibatch", values["policy.train_global_batch_size"] // responses)
    longest = values["policy.max_total_sequence_length"]
    made.notes.append(
        f"policy.max_total_sequence_length = {longest}: prompt and response have limits of their"
        " own here, rollout.max_prompt_tokens and rollout.max_response_tokens"
    )


_COMPUTED: dict[str, Callable[[Translation, Mapping[str, Any], int], None]] = {
    "verl": _verl,
    "trl": _trl,
    "nemo_rl": _nemo_rl,
}


def problems(overrides: Mapping[str, str]) -> list[str]:
    """What the configuration says of the overrides, but for paths that are still to be given."""
    missing = [f"{key}=to_be_given" for key in TO_GIVE if key not in overrides]
    words = [f"{key}={value}" for key, value in overrides.items()]
    try:
        validate(Config, compose("config", [*words, *missing]), "the translation")
    except ConfigError as error:
        return str(error).splitlines()
    return []


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("system", choices=sorted(_COMPUTED))
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--gpus", type=int, default=1, help="processes of the launch, by which TRL counts its batch"
    )
    options = parser.parse_args()
    try:
        made = translate(options.system, read(options.file), options.gpus)
    except (OSError, ValueError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for key, value in made.overrides.items():
        print(f"{key}={value}")
    found = problems(made.overrides)
    missing = [key for key in TO_GIVE if key not in made.overrides]
    for title, lines in (
        ("not taken over", made.notes),
        ("not in the table", made.unknown),
        ("to be given", missing),
        ("refused here", found),
    ):
        if lines:
            print(f"{title}:", *lines, sep="\n  ", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
