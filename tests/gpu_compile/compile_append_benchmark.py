"""Compiles the calls of one of `benchmarks.append`'s workloads for an H200, on a machine without a GPU.

`python compile_append_benchmark.py WORKLOAD` prints one JSON line a layout: what the call became, and whether
it can be timed. A process of its own, as `compile_calls.py`; PYTHONPATH names the root of the repository.
"""

import functools
import json
import sys
import traceback

import compile_calls  # before jax, which reads the environment that it sets
import jax

from benchmarks import append_workloads
from benchmarks.session import LAYOUTS
from benchmarks.timing import UpdatingCalls


def compile_call(workload: append_workloads.AppendWorkload, layout: str, sharding, seen):
    inputs = jax.eval_shape(lambda: append_workloads.make_inputs(workload, seed=0))
    first = jax.eval_shape(lambda inputs: append_workloads.calls_arguments(workload, inputs)[0], inputs)
    state, new = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (append_workloads.pool_shapes(workload, layout), first),
    )
    call = functools.partial(append_workloads.append, kv_layout=layout)
    calls = UpdatingCalls(call, [(new,)], state).compiled()
    launches, compiled = compile_calls.new_in_dump(seen)
    return {
        "operations": compile_calls.operations(calls.fn.as_text()),
        "why_not_timed": calls.why_not_timed(),
        "launches": len(launches),
        "compiled": compiled,
    }


def main(name: str):
    sharding, seen = compile_calls.h200(), set()
    (workload,) = (w for w in append_workloads.WORKLOADS if w.name == name)
    for layout in LAYOUTS:
        try:
            result = compile_call(workload, layout, sharding, seen)
        except Exception:
            result = {"error": traceback.format_exc(limit=-3)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
