#!/usr/bin/env bash
# Makes a folder with TransformerEngine for a Python that has torch with CUDA 13's libraries. It needs neither a GPU nor nvcc.
#   scripts/te_site.sh [SITE [VERSION]]      default: .venvs/te, where tests/functional/test_trainer_families.py looks, 2.20.2
# Run with PYTHONPATH=SITE.
# PYTHON names the interpreter (default: .venvs/trainer/bin/python), JOBS how many compilers run at once (default: all cores).
# The core comes as a wheel. The torch extension comes as source, which is C++ alone; it is compiled against the headers in
# torch's and NVIDIA's wheels. For a host without an index, copy SITE there, with the same Python and torch.
set -euo pipefail
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; }
case ${1:-} in
  -h | --help) usage; exit ;;
esac
here=$(cd "$(dirname "$0")/.." && pwd)
python=$(realpath -s "${PYTHON:-$here/.venvs/trainer/bin/python}")
version=${2:-2.20.2} jobs=${JOBS:-$(nproc)}
site=${1:-$here/.venvs/te}
mkdir -p "$site"
site=$(cd "$site" && pwd) work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$python" -m pip --disable-pip-version-check -q)
# With its dependencies, but for torch and what torch needs, which stay as they are.
"${pip[@]}" install --upgrade --no-deps --no-compile --target "$site" "transformer_engine==$version" "transformer_engine_cu13==$version" \
  einops onnxscript onnx onnx_ir ml_dtypes protobuf nvdlfw-inspect nvidia-cudnn-frontend
# Some of CUDA's headers come with its compiler and not with torch.
cuda=$("$python" -c 'import torch; print(torch.version.cuda)')
"${pip[@]}" install --no-deps --no-compile --target "$work/cuda" "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*"
# pip runs the source's setup.py for its metadata, which imports torch.
"${pip[@]}" download --no-deps --no-build-isolation --no-binary :all: -d "$work" "transformer_engine_torch==$version"
tar xzf "$work"/transformer_engine_torch-*.tar.gz -C "$work" --strip-components 1
{ read -r lib; read -r headers; read -r suffix; } < <("$python" - <<'PY'
import sysconfig
for x in (sysconfig.get_path("purelib"), sysconfig.get_path("include"), sysconfig.get_config_var("EXT_SUFFIX")):
    print(x)
PY
)
flags=(-O1 -g0 -DNDEBUG -fPIC -std=c++20 -fvisibility=hidden -w -DTORCH_API_INCLUDE_EXTENSION_H
  -DTORCH_EXTENSION_NAME=transformer_engine_torch)
for folder in common_headers common_headers/common common_headers/common/include csrc; do flags+=(-I"$work/$folder"); done
for folder in "$lib"/torch/include{,/torch/csrc/api/include} "$headers" "$lib"/nvidia/{cu13,cudnn,nccl}/include \
  "$work"/cuda/nvidia/cu13/include{,/cccl}; do
  flags+=(-isystem "$folder")
done
# Most of the work is torch's headers, so they are compiled once.
echo '#include "common.h"' >"$work/all.h"
g++ "${flags[@]}" -x c++-header "$work/all.h" -o "$work/all.h.gch"
export work
compile='source=${!#}; g++ -include "$work/all.h" "${@:1:$#-1}" -c "$source" -o "$(mktemp "$work/XXXXXX.o")"'
find "$work/csrc" -name '*.cpp' -print0 | xargs -0 -P "$jobs" -n 1 bash -c "$compile" _ "${flags[@]}"
g++ -shared -o "$site/transformer_engine_torch$suffix" "$work"/*.o -L"$lib/torch/lib" \
  -lc10 -ltorch -ltorch_cpu -ltorch_python -ltorch_cuda -lc10_cuda -Wl,--allow-shlib-undefined
strip --strip-unneeded "$site/transformer_engine_torch$suffix"
PYTHONPATH=$site "$python" -c 'import torch, transformer_engine.pytorch, transformer_engine as te; print("TransformerEngine", te.__version__)'
