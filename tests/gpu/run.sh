#!/usr/bin/env bash
# Tests and measures on a machine with a GPU, in less than nine minutes, and prints the table of figures last:
#
#     tests/gpu/run.sh [--wheels FOLDER] [--out FOLDER] [--gguf FILE --llama-bench FILE] [--dry-run]
#
# It needs Python 3.11 or newer with torch, triton and pytest; packages that are missing are taken from FOLDER, where one
# is given, and installed into a folder that is deleted at the end. No setting of the card is changed.
set -uo pipefail
cd "$(dirname "$0")/../.."

wheels='' out='' bench=() dry=''
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --gguf | --llama-bench) bench+=("$1" "$2") && shift 2 ;;
    --dry-run) dry=1 && bench+=("$1") && shift ;;
    *) sed -n 2,7p "$0" >&2 && exit 2 ;;
  esac
done

total=525 tests=190  # seconds: of everything, and of the tests
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=${out:-$scratch}
mkdir -p "$out"
if [ -n "$wheels" ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$wheels"/*.whl &&
    export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$scratch/triton"

echo "== $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no GPU'), $(date -u +%F)"
python3 -c 'import sys, torch, triton; print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)'
if [ -n "$dry" ]; then
  export TRITON_INTERPRET=1
else
  echo "== tests on the GPU"
  INGLE_TEST_GPU=1 timeout --kill-after=5 "$tests" python3 -m pytest -q -n 4 -m 'gpu or kernels' \
    --continue-on-collection-errors --durations=5 -p no:cacheprovider 2>&1 | tee "$out/tests.log" | tail -n 40
  tested=${PIPESTATUS[0]}
fi

echo "== benchmark"
timeout --kill-after=5 $((total - SECONDS)) python3 -m tests.gpu.bench --seconds $((total - SECONDS - 10)) \
  --json "$out/figures.json" "${bench[@]}"
measured=$?
[ -z "$dry" ] && echo "tests: $([ "$tested" = 0 ] && echo passed || echo "status $tested, see above"), in all $SECONDS s"
[ "${tested:-0}" = 0 ] && [ "$measured" = 0 ]
