#!/usr/bin/env bash
# Run the GPU tests and the GPU benchmark in less than nine minutes, and print the table of figures at the end.
# --only tests and --only bench take less than nine minutes each. --only memcheck runs the tests of small kernels under
# compute-sanitizer, which must be installed. --only bench --part experts runs one part of the benchmark.
#
#     tests/gpu/run.sh [--wheels FOLDER] [--compiled FOLDER] [--out FOLDER] [--only tests|bench|memcheck]
#                      [--gguf FILE --llama-bench FILE] [--part NAME ...] [--dry-run]
#
# Needs Python 3.11 or newer with torch and triton; the tests also need numpy, llvmlite, platformdirs, filelock, click,
# huggingface_hub, transformers, gguf, hypothesis, pytest, and pytest-xdist. Missing packages are installed from the
# wheels in FOLDER, if given, into a folder that is deleted at the end. The settings of the GPU are not changed.
set -uo pipefail
cd "$(dirname "$0")/../.."

wheels='' compiled='' out='' bench=() dry='' only=''
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2 && shift 2 ;;
    --compiled) compiled=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --only) only=$2 && shift 2 ;;
    --gguf | --llama-bench | --part) bench+=("$1" "$2") && shift 2 ;;
    --dry-run) dry=1 && bench+=("$1") && shift ;;
    *) sed -n 2,11p "$0" >&2 && exit 2 ;;
  esac
done

total=525 tests=190  # seconds: of everything, and of the tests if the benchmark runs as well
[ "$only" = tests ] && tests=$((total - 10))
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=${out:-gpu-results}
mkdir -p "$out"
if [ -n "$wheels" ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$wheels"/*.whl &&
    export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$scratch/triton"
# Other plugins of the machine may print warnings, and each warning is an error.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
pytest=(python3 -m pytest -p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin)
[ -n "$compiled" ] && cp -r "$compiled" "$scratch/triton" # made by python -m tests.gpu.compiled

echo "== $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no GPU'), $(date -u +%F)"
python3 -c 'import sys, torch, triton; print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)'
tested=0 measured=0
[ -n "$dry" ] && export TRITON_INTERPRET=1
if [ -z "$dry" ] && [ -z "$only" -o "$only" = tests ]; then
  echo "== tests on the GPU"
  INGLE_TEST_GPU=1 timeout -s INT --kill-after=5 "$tests" "${pytest[@]}" -v -n "$(($(nproc) / 2 + 1))" -m 'gpu or kernels' \
    --continue-on-collection-errors --durations=5 -p no:cacheprovider \
    tests/quant/kernels tests/quant/cuda tests/engine/kernels tests/engine/backends/cuda 2>&1 | tee "$out/tests.log" | tail -n 40
  tested=${PIPESTATUS[0]}
  echo "tests: $([ "$tested" = 0 ] && echo passed || echo "status $tested, see above"), after $SECONDS s"
fi
if [ "$only" = memcheck ]; then
  echo "== memcheck"
  INGLE_TEST_GPU=1 timeout -s INT --kill-after=5 $((total - SECONDS)) compute-sanitizer --tool memcheck \
    --error-exitcode 9 "${pytest[@]}" -v -p no:cacheprovider \
    tests/engine/kernels tests/quant/kernels/test_packed_product.py 2>&1 | tee "$out/memcheck.log" | tail -n 40
  measured=${PIPESTATUS[0]}
elif [ "$only" != tests ]; then
  echo "== benchmark"
  timeout --kill-after=5 $((total - SECONDS)) python3 -m tests.gpu.bench --seconds $((total - SECONDS - 10)) \
    --json "$out/figures.json" "${bench[@]}"
  measured=$?
fi
[ "$tested" = 0 ] && [ "$measured" = 0 ]
