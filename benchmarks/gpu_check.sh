#!/usr/bin/env bash
# Checks the package on a machine with a GPU: the whole test suite with the real kernels, then the decode
# benchmark; on request that of cache writes and the sweep over batch and length as well. Run it from the root of
# the repository; it needs no network. A failing step does not keep the later ones from running, but makes the
# exit status 1.
#
#   OUT      folder for logs and results (left out: build/gpu_check, and the results in benchmarks/results)
#   STEPS    which of the steps tests, bench, append, dispatch and sweep to run (default "tests bench")
#   PYTHON   the interpreter (default python3)
#   WORKERS  parallel test processes on the GPU, if pytest-xdist is installed (default 8)
#   TESTS    what pytest is given (default: the whole suite)
#   BENCH    further arguments of benchmarks.decode, such as "--workloads A,E"
#   APPEND   further arguments of benchmarks.append, such as "--configs"
#   SWEEP    further arguments of benchmarks.sweep, such as "--points *x4096"
#   TESTS_LIMIT_S, BENCH_LIMIT_S, APPEND_LIMIT_S, DISPATCH_LIMIT_S, SWEEP_LIMIT_S   seconds after which a step is
#            interrupted (defaults 280, 300, 240, 240 and 240); what a benchmark measured until then is kept
#   GPU_CHECK_COMMIT   the commit that results name, where this folder is a copy without git
set -uo pipefail

logs=${OUT:-build/gpu_check}
results=${OUT:+$OUT/results}
results=${results:-benchmarks/results}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
# Python would otherwise find the package of an earlier install before this folder's.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$logs" "$results"
failed=()

step() { # name, command...: runs it, prints its duration, and remembers a failure
  local name=$1 start=$SECONDS status
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$logs/$name.log"
  status=${PIPESTATUS[0]}
  echo "== $name: exit status $status after $((SECONDS - start)) s"
  [ "$status" -eq 0 ] || failed+=("$name")
}

show_machine() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv
  "$python" - <<'PY'
import importlib.metadata
import platform

import jax

print("python", platform.python_version(), "| jax", jax.__version__, "on", jax.default_backend(), jax.devices())
for name in (
    "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy", "chex", "hypothesis", "pytest", "pytest-xdist",
    "flash-attn3-jax",
):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "not installed")
if jax.default_backend() != "gpu":
    raise SystemExit("JAX does not use the GPU here")
PY
}

run_tests() {
  local options=()
  if "$python" -c "import xdist" 2>/dev/null; then options=(-n "${WORKERS:-8}"); fi
  # A kernel that hangs is named, instead of taking the whole step with it.
  if "$python" -c "import pytest_timeout" 2>/dev/null; then options+=(--timeout=120 --timeout-method=thread); fi
  # The processes share the GPU: none may take its memory ahead. cpu beside cuda: some tests compare the two.
  # The benchmark plugin, where a machine has it, warns under xdist, and here a warning is an error.
  XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda,cpu timeout --signal=INT --kill-after=15 "${TESTS_LIMIT_S:-280}" \
    "$python" -m pytest -ra --durations=15 -p no:cacheprovider -p no:benchmark "${options[@]}" \
    --junitxml="$logs/junit.xml" ${TESTS:-} || return
  # A skipped test here is a kernel that nobody ran.
  "$python" - "$logs/junit.xml" <<'PY'
import sys
import xml.etree.ElementTree as ET

suites = list(ET.parse(sys.argv[1]).getroot().iter("testsuite"))
tests, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped"))
print(f"{tests} tests, {skipped} skipped")
sys.exit(1 if skipped or not tests else 0)
PY
}

benchmark() { # seconds, module, its further arguments in one string, in which a * is not for the shell
  local arguments
  read -ra arguments <<<"$3"
  JAX_PLATFORMS=cuda timeout --signal=INT --kill-after=15 "$1" "$python" -m "$2" --out "$results" "${arguments[@]}"
}

run_bench() { benchmark "${BENCH_LIMIT_S:-300}" benchmarks.decode "${BENCH:-}"; }
run_append() { benchmark "${APPEND_LIMIT_S:-240}" benchmarks.append "${APPEND:-}"; }
run_dispatch() { benchmark "${DISPATCH_LIMIT_S:-240}" benchmarks.dispatch_overhead ""; }
run_sweep() { benchmark "${SWEEP_LIMIT_S:-240}" benchmarks.sweep "${SWEEP:-}"; }

# Rows that a run does not measure are kept: a fresh results folder starts from the committed ones.
for rows in benchmarks/results/*.csv; do
  [ -e "$results/${rows##*/}" ] || cp "$rows" "$results"
done

step machine show_machine
for name in ${STEPS:-tests bench}; do
  step "$name" "run_$name"
done
echo "== in all: $SECONDS s; failed: ${failed[*]:-none}"
[ "${#failed[@]}" -eq 0 ]
