"""XLA makes one kernel for each array that functions yield which only move data, or multiply groups."""

import json
import pathlib
import subprocess
import sys

import jax
from calls import MOVES


def test_a_kernel_for_each_result():
    worker = pathlib.Path(__file__).with_name("compile_moves.py")
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    launched = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for move, kernels in zip(MOVES, launched, strict=True):
        to_compile = move.traceable()
        results = jax.tree.leaves(jax.eval_shape(to_compile.function, *to_compile.arguments))
        assert len(kernels) == len(results), (move, kernels)
