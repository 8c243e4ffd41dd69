"""Completion of overrides in bash, from the groups in ``conf/`` and the keys of the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.config.load import known_keys
from megatron_rl.config.schema import Config

# bash breaks words at "=": only what stands behind it is replaced. A line that does not name
# megatron_rl keeps bash's own completion, since python and torchrun run other programs too.
SCRIPT = """\
_megatron_rl_words='{words}'
_megatron_rl() {{
    local line=${{COMP_LINE:0:COMP_POINT}}
    local word=${{line##*[[:space:]]}}
    COMPREPLY=()
    [[ $line == *megatron_rl* || $line == *quickstart_cpu/run.sh* ]] || return 0
    COMPREPLY=($(compgen -W "$_megatron_rl_words" -- "$word"))
    if [[ $word == *=* ]]; then COMPREPLY=("${{COMPREPLY[@]#"${{word%=*}}="}}"); fi
    if [[ ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace; fi
}}
complete -o bashdefault -o default -F _megatron_rl python python3 torchrun bash
"""


def bash(groups: Mapping[str, Sequence[str]], options: Sequence[str]) -> str:
    """A script for ``eval``: group=option, key= and the options of the command line."""
    chosen = []
    for group, names in groups.items():
        chosen += [f"{group}={name}" for name in names]
    # A key may come several times, from each section that a union allows.
    keys = [f"{key}=" for key in dict.fromkeys(known_keys(Config))]
    return SCRIPT.format(words=" ".join([*chosen, *keys, *options]))
