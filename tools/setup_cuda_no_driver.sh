#!/usr/bin/env bash
# An environment with the GPU stack of setup.py on a machine without GPU and driver, for the tests
# that take --cuda-python and --te-python: things are imported and built there, and run on tensors
# without data.
#
#   bash tools/setup_cuda_no_driver.sh DIR [--python EXE]
#
# Needs Python 3.12 (for megatron-core; default python3.12), a compiler for C++20, the CUDA 13
# toolkit (CUDA_HOME, default /usr/local/cuda) and about 15 GB of disk. pip's own configuration is
# left aside: it may name a CPU build of torch.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
usage="Usage: bash tools/setup_cuda_no_driver.sh DIR [--python EXE]"
python=python3.12
venv=

fail() {
    echo "setup_cuda_no_driver: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --python) python=${2:?--python needs an executable}; shift 2 ;;
        -*) fail "unknown option $1. $usage" ;;
        *) venv=$1; shift ;;
    esac
done
[ -n "$venv" ] || fail "no folder given. $usage"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null ||
    fail "$python is not Python 3.12, which megatron-core asks for. Name one with --python EXE"
cuda=${CUDA_HOME:-/usr/local/cuda}
[ -f "$cuda/include/crt/host_config.h" ] ||
    fail "$cuda has no headers of the CUDA toolkit; set CUDA_HOME"
command -v c++ >/dev/null || fail "no C++ compiler. On Debian: apt-get install g++"

export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_FIND_LINKS PIP_CONSTRAINT PIP_EXTRA_INDEX_URL

# The requirements of setup.py and of its extra `gpu`, one a line; Transformer Engine is installed
# apart.
wanted() {
    "$python" - "$repo/setup.py" <<'PYTHON'
import ast
import sys

tree = ast.parse(open(sys.argv[1], encoding="utf-8").read())
assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
values = {ast.unparse(node.targets[0]): node.value for node in assigned}
lines = ast.literal_eval(values["EXTRAS"])["gpu"] + ast.literal_eval(values["REQUIRED"])
print("\n".join(lines))
PYTHON
}
mapfile -t requirements < <(wanted | grep -v '^transformer-engine')
engine=$(wanted | sed -n 's/^transformer-engine\[pytorch\]==//p')

"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip)
"${pip[@]}" install --no-cache-dir "${requirements[@]}" setuptools wheel packaging psutil
"${pip[@]}" install --no-cache-dir --no-deps \
    "transformer-engine==$engine" "transformer-engine-cu13==$engine" nvdlfw-inspect
"${pip[@]}" install --no-cache-dir einops onnx onnxscript "nvidia-cudnn-frontend>=1.29.0"

# The torch part of Transformer Engine is source. All of it as one unit, not optimised: the headers
# of torch are then read once, which takes minutes where the ordinary build takes up to an hour on
# two cores. It is imported here, never run on a GPU.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${pip[@]}" download --no-cache-dir --no-deps --no-build-isolation --no-binary=:all: \
    --dest "$work" "transformer-engine-torch==$engine"
tar -xzf "$work"/transformer_engine_torch-*.tar.gz -C "$work"
cd "$work/transformer_engine_torch-$engine"
find csrc -name '*.cpp' | sort | sed 's|^csrc/\(.*\)|#include "\1"|' > csrc/all_in_one.cc
ask() { "$venv/bin/python" -c "import sysconfig; print(sysconfig.$1)"; }
site=$(ask 'get_path("purelib")')
library=$site/transformer_engine_torch$(ask 'get_config_var("EXT_SUFFIX")')
headers=$(ask 'get_path("include")')
common=common_headers
torch=$site/torch/include
include=("$cuda/include" "$common" "$common/common" "$common/common/include" csrc
    "$torch" "$torch/torch/csrc/api/include" "$headers" "$site"/nvidia/*/include)
c++ -std=c++20 -O0 -w -fPIC -fvisibility=hidden -DNDEBUG -DTORCH_API_INCLUDE_EXTENSION_H \
    -DTORCH_EXTENSION_NAME=transformer_engine_torch "${include[@]/#/-I}" \
    -x c++ -c csrc/all_in_one.cc -o all_in_one.o
c++ -shared all_in_one.o "-L$site/torch/lib" \
    -ltorch -ltorch_cpu -ltorch_cuda -ltorch_python -lc10 -lc10_cuda -o "$library"
# Transformer Engine asks the package's metadata for its version.
mkdir -p "$site/transformer_engine_torch-$engine.dist-info"
printf 'Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: %s\n' "$engine" \
    > "$site/transformer_engine_torch-$engine.dist-info/METADATA"

"$venv/bin/python" -c 'import torch, transformer_engine, transformer_engine.pytorch
print("torch", torch.__version__, "Transformer Engine", transformer_engine.__version__)'
