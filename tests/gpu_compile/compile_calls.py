"""Compiles one group of `calls.CALLS` to machine code for an H200, on a machine without a GPU.

`python compile_calls.py GROUP` prints one JSON line a call: what `explain` promises, and the shared
memory, registers and spilled bytes that the compilers report of each kernel. A process of its own, since a
target that XLA dislikes aborts it.
"""

import importlib.util
import json
import os
import pathlib
import re
import string
import sys
import tempfile
import traceback
from typing import Any

# Read when jax starts: the plugin must not look for a GPU, and Mosaic GPU has to report on each kernel.
dump = tempfile.TemporaryDirectory()
os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": dump.name, "MOSAIC_GPU_DUMP_PTXAS": "1"}

import jax  # noqa: E402
from calls import CALLS, Call  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import jax_paged_attn  # noqa: E402
from jax_paged_attn import dispatch  # noqa: E402


def h200s(count: int) -> list[Any]:
    """The devices of a host that has so many H200s."""
    cuda = "13.0" if importlib.util.find_spec("jax_cuda13_plugin") else "12.9"
    text = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        target_config=string.Template(text).substitute(CUDA=cuda),
        topology=f"1x1x{count}",
    )
    return list(topology.devices)


def h200():
    """The sharding that makes jit compile for an H200."""
    return jax.sharding.SingleDeviceSharding(h200s(1)[0])


def new_in_dump(seen: set[pathlib.Path]) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """What is new in the reports: the shared memory of each launch, and what each compilation came to.

    jax 0.12 compiles a kernel that it has seen before only once, so there can be fewer compilations.
    """
    launches, compiled = {}, {}
    for report in sorted(set(pathlib.Path(dump.name).iterdir()) - seen):
        seen.add(report)
        name, _, kind = report.name.partition(".")
        if kind == "before_layout_inference.txt":
            # Mosaic takes all of a kernel's shared memory at launch, barriers included.
            [smem_bytes] = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", report.read_text())
            launches[name] = int(smem_bytes)
        elif kind == "ptxas":
            text = report.read_text()
            pattern = r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
            [(stores, loads)] = re.findall(pattern, text)
            [registers] = re.findall(r"Used (\d+) registers", text)
            compiled[name] = {"registers": int(registers), "spilled": int(stores) + int(loads)}
    return launches, compiled


def torn_aliases(text: str) -> int:
    """How many kernels in the compiled HLO update an operand in place, yet are fused with a result's slice.

    XLA (jax 0.11.2, 0.12.0) then lets the kernel write into the slice, without what the operand held.
    """
    fusions = re.findall(r"^%dynamic-slice-fusion.*?^}", text, flags=re.MULTILINE | re.DOTALL)
    return sum("output_to_operand_aliasing" in fusion for fusion in fusions)


def pool_copies(text: str, pool: jax.ShapeDtypeStruct | None) -> int:
    """How many copies of an array like `pool` there are in the compiled HLO."""
    if pool is None:
        return 0
    dims = ",".join(map(str, pool.shape))
    return len(re.findall(rf"\[{dims}\]\S* (?:copy|copy-start)\(", text))


def operations(text: str) -> list[str]:
    """What the compiled HLO launches or copies outside of loops, by its operations."""
    free = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "opt-barrier"}
    entry = text[text.index("ENTRY ") :]
    found = re.findall(r"^ +(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([a-z-]+)\(", entry, flags=re.MULTILINE)
    return [operation for operation in found if operation not in free]


def compile_call(call: Call, sharding, seen):
    to_compile = call.traceable()
    record = jax_paged_attn.explain(to_compile.function, *to_compile.arguments, target="sm_90")
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), to_compile.arguments
    )
    # The default implementation, which is what users get; the explicit one would be interpreted on this host.
    # A config is for the GPU alone, and would be refused for the host.
    with dispatch.assume_target("sm_90"):
        traced = jax.jit(to_compile.function, donate_argnums=to_compile.donated).trace(*arguments)
    text = traced.lower().compile().as_text() or ""
    launches, compiled = new_in_dump(seen)
    return {
        "implementation": record.implementation,
        "estimate": record.smem_bytes,
        "smem_bytes": launches,
        "compiled": compiled,
        "torn_aliases": torn_aliases(text),
        "pool_copies": pool_copies(text, to_compile.pool),
        "other_kernels": [name for name in operations(text) if name != "custom-call"],
    }


def main(group: str):
    sharding = h200()
    seen: set[pathlib.Path] = set()
    for call in CALLS[group]:
        try:
            result = compile_call(call, sharding, seen)
        except Exception:
            result = {"error": traceback.format_exc(limit=-3)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
