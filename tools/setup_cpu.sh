#!/usr/bin/env bash
# One command from a bare machine to a working environment without a GPU.
#
#   bash tools/setup_cpu.sh [--venv DIR] [--python EXE] [EXTRA ...]
#
# Makes DIR (default: .venv in the repository) and installs this project there, editable, with the extra `cpu` and every EXTRA named
# (`test`). Does nothing when DIR already holds just that. The extras of setup.py; exact versions from tools/constraints_cpu.txt.
# Without --python: the first of python3, python3.11, python3.12 and python3.13 that will do.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repo/.venv
python=
extras=cpu

fail() {
    echo "setup_cpu: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --venv) venv=${2:?--venv needs a folder}; shift 2 ;;
        --python) python=${2:?--python needs an executable}; shift 2 ;;
        -*) fail "unknown option $1. Usage: bash tools/setup_cpu.sh [--venv DIR] [--python EXE] [EXTRA ...]" ;;
        *) extras=$extras,$1; shift ;;
    esac
done

will_do() { "$1" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))" 2>/dev/null; }
for name in python3 python3.11 python3.12 python3.13; do
    [ -n "$python" ] || ! will_do "$name" || python=$name
done
python=${python:-python3}
will_do "$python" ||
    fail "$python ($("$python" --version 2>&1 | head -n 1)) cannot be used: Python 3.11, 3.12 or 3.13 is needed. Name one with --python EXE."

# What decides the content of the environment. `extras` is kept apart: an environment with more extras serves a request for fewer.
key=$(cd "$repo" && { "$python" --version; pwd; cat setup.py tools/setup_cpu.sh tools/constraints_cpu.txt; } | sha256sum | cut -d' ' -f1)
stamp=$venv/.setup_cpu
if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$key" ]; then
    installed=$(tail -n 1 "$stamp")
    missing=$(comm -23 <(tr ',' '\n' <<<"$extras" | sort -u) <(tr ',' '\n' <<<"$installed" | sort -u))
    if [ -z "$missing" ]; then
        echo "setup_cpu: $venv is up to date ($installed)"
        exit 0
    fi
    extras=$(tr ',' '\n' <<<"$installed,$extras" | sort -u | paste -sd,)
fi

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no module venv. On Debian: apt-get install python3-venv"
# One dependency of reasoning-gym (pycosat) is published as source only.
{ command -v cc && [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ]; } >/dev/null ||
    fail "a C compiler and the headers of Python are needed to build one dependency. On Debian: apt-get install gcc libc6-dev python3-dev"

started=$SECONDS
rm -f "$stamp"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
log=$venv/setup_cpu.log
# --no-compile: of 29,000 modules most are never imported; those that are, Python compiles then.
install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --constraint "$repo/tools/constraints_cpu.txt" "$@" >>"$log" 2>&1; }
: >"$log"

torch=$(sed -n 's/^torch==/torch==/p' "$repo/tools/constraints_cpu.txt")
echo "setup_cpu: $("$python" --version) ($(command -v "$python"))"
echo "setup_cpu: installing $torch (log: $log)"
install --no-deps "$torch" ||
    fail "cannot install $torch, the CPU build of PyTorch, which the main package index does not hold. Remedy: put the address of" \
        "PyTorch's own index of CPU wheels (see its installation page) into the variable PIP_EXTRA_INDEX_URL and run this again." \
        "What pip said: $log"

echo "setup_cpu: installing megatron_rl[$extras]"
stubs=$venv/stub_wheels
absent=(torchaudio torchcodec triton)
"$venv/bin/python" "$repo/tools/write_stub_wheels.py" "$stubs" "${absent[@]}"
# Without their compiled parts (tools/repack_wheel.py): torchvision, of whichever build the index has, and what is for Python 3.12 alone.
repacked=("$(sed -n 's/^\(torchvision==.*\)+python$/\1/p' "$repo/tools/constraints_cpu.txt")")
"$python" -c "import sys; sys.exit(sys.version_info < (3, 12))" || repacked+=("$(grep '^megatron-core==' "$repo/tools/constraints_cpu.txt")")
whole=$(mktemp -d)
trap 'rm -rf "$whole"' EXIT
"$venv/bin/python" -m pip download --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 --dest "$whole" \
    "${repacked[@]}" >>"$log" 2>&1 || fail "cannot download ${repacked[*]} from the package index. What pip said: $log"
"$venv/bin/python" "$repo/tools/repack_wheel.py" "$stubs" "$whole"/*.whl >>"$log"
install --use-pep517 --find-links "$stubs" --constraint "$stubs/constraints.txt" --editable "${repo}[$extras]" || {
    grep -E '^ *(ERROR|error:)' "$log" | tail -n 10 >&2
    fail "installation failed. The whole output of pip: $log"
}

"$venv/bin/python" - "${absent[@]}" <<'EOF' >>"$log" 2>&1 || fail "the installed packages cannot be used. Details: $log"
import importlib.util
import sys

import megatron_rl.policy.megatron_policy, torch, transformers, vllm

import torchvision.transforms.v2

present = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
if present:
    sys.exit(f"installed, although they are builds for CUDA: {', '.join(present)}. pip took them instead of {sys.prefix}/stub_wheels")
EOF
# The sandbox of reward=code, from the system's packages. Unpacked into the environment it needs no root.
if ! command -v bwrap >/dev/null; then
    if (cd "$whole" && apt-get download bubblewrap && dpkg-deb -x bubblewrap_*.deb . && usr/bin/bwrap --version) >>"$log" 2>&1; then
        cp "$whole/usr/bin/bwrap" "$venv/bin/bwrap"
        echo "setup_cpu: bubblewrap, the sandbox of reward=code, is $venv/bin/bwrap"
    else
        echo "setup_cpu: bubblewrap, the sandbox of reward=code, was not found; on Debian, as root: apt-get update && apt-get install bubblewrap"
    fi
fi

printf '%s\n%s\n' "$key" "$extras" >"$stamp"
echo "setup_cpu: $venv is ready ($extras) after $((SECONDS - started)) s"
