"""Measure what the host adds to a decode step: ``python -m benchmarks.dispatch_overhead``.

Three things: how long a jitted step through the library takes to dispatch, beside a jitted function that does
next to nothing with as many arguments; whether the host waits for the GPU anywhere within a step of 32 layers
in one jit, by a profile; and how long the first call of a shape takes, in a fresh process and in a second one
that finds the persistent compilation cache. The step is compared with the reference first. ``--dry-run``
walks the same path at tiny sizes on any machine, and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.session import add_output_options, current_device
from jax_paged_attn import (
    PageTable,
    paged_attention,
    reference,
    rope_append_paged_kv,
    rope_frequencies,
    testing,
)

ANNOTATION = "dispatch of the step"
MOST_OF_A_NO_OP = 1.2
MOST_SECONDS_TO_FIRST_RESULT = 10.0

NOTES = """\
- **dispatch**: the time from a call of the jitted function until it returns, while the GPU is idle: the
  median over {calls} calls, which take turns with the no-op's. The no-op has the same arguments, gives back
  the donated pools and negates q. Both are called as users do, by `jax.jit`.
- **32 layers**: a scan over layers within one jit, each with rotation, append and attention. Waits are what a
  host thread that launches kernels does to wait for the GPU between its first and its last launch, and copies
  to the host.
- **first call**: from the call to its result, in a process of its own, without what importing jax takes. The
  second process finds what the first one left in the persistent compilation cache."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A decode step of equal rows.

    Attributes
    ----------
    batch, kv_len, num_layers : int
        Rows, tokens of each with the new one, and layers, each with pages of its own.
    num_q_heads, num_kv_heads, head_dim, page_size : int
        As in the library.
    """

    batch: int
    kv_len: int
    num_layers: int = 1
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def width(self) -> int:
        """Pages of a row."""
        return -(-self.kv_len // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of a layer."""
        return self.batch * self.width

    def shrunk(self) -> Size:
        """The same step, tiny."""
        layers = min(self.num_layers, 3)
        return dataclasses.replace(
            self, batch=2, kv_len=20, num_layers=layers, num_q_heads=4, num_kv_heads=2, head_dim=16
        )

    def describe(self) -> str:
        return f"{self.batch} rows of {self.kv_len} tokens, {self.num_q_heads}/{self.num_kv_heads} heads"


DISPATCHED = Size(8, 1024)  # whose kernels take less time than the host
PROFILED = Size(64, 1024, num_layers=32)
COMPILED = (Size(8, 1024), Size(64, 4096), Size(1, 131072), Size(128, 2048, num_q_heads=64))


class Pools(NamedTuple):
    """Of all layers: a layer's pages follow those of the one before."""

    k: jax.Array
    v: jax.Array


class New(NamedTuple):
    """What a step takes beside the pools; the same for each layer."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    positions: jax.Array
    slots: jax.Array
    table: PageTable
    inv_freq: jax.Array


def make_inputs(size: Size) -> tuple[Pools, New]:
    """Make random pools, and the newest token of each row."""
    rng = np.random.default_rng(0)
    pages = rng.permutation(size.num_pages).reshape(size.batch, size.width).astype(np.int32)
    last = size.kv_len - 1
    slots = pages[:, last // size.page_size] * size.page_size + last % size.page_size
    shape = (size.num_layers * size.num_pages, size.num_kv_heads, size.page_size, size.head_dim)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 5)
    normal = jax.jit(functools.partial(jax.random.normal, dtype=jnp.bfloat16), static_argnums=1)
    of_heads = ((size.batch, heads, size.head_dim) for heads in (size.num_q_heads, *[size.num_kv_heads] * 2))
    q, k, v = (normal(key, dims) for key, dims in zip(keys[2:], of_heads, strict=True))
    lens = jnp.full(size.batch, size.kv_len, jnp.int32)
    table = PageTable.from_block_tables(pages, lens)
    new = New(q, k, v, lens - 1, jnp.asarray(slots), table, rope_frequencies(size.head_dim))
    return Pools(normal(keys[0], shape), normal(keys[1], shape)), new


def step(pools: Pools, new: New, *, write: Any = rope_append_paged_kv, attend: Any = paged_attention) -> Any:
    """Rotate, write and attend, in one layer."""
    q, k, v = write(new.q, new.k, new.v, new.positions, *pools, new.slots, inv_freq=new.inv_freq)
    return Pools(k, v), attend(q, k, v, new.table)


def no_op(pools: Pools, new: New) -> tuple[Pools, jax.Array]:
    """Take and give what `step` does."""
    return pools, -new.q


def program(pools: Pools, new: New, size: Size) -> tuple[Pools, jax.Array]:
    """Step through the layers, of which each one's output is the next one's query."""

    def layer(carry, i):
        pools, q = carry
        table = dataclasses.replace(new.table, indices=new.table.indices + i * size.num_pages)
        slots = new.slots + i * size.num_pages * size.page_size
        return step(pools, new._replace(q=q, table=table, slots=slots)), None

    layers = jnp.arange(size.num_layers, dtype=jnp.int32)
    return jax.lax.scan(layer, (pools, new.q), layers)[0]


def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Jit a function of pools, which it updates; unused arguments count as the others do."""
    return jax.jit(fn, donate_argnums=0, keep_unused=True)


def check(size: Size) -> None:
    """Compare a step with the reference."""
    pools, new = make_inputs(size)
    of_reference = functools.partial(
        step, write=reference.rope_append_paged_kv, attend=reference.paged_attention
    )
    expected = jax.jit(of_reference)(pools, new)[1]
    testing.assert_close(jit(step)(pools, new)[1], expected)


def dispatch_times(size: Size, num_calls: int) -> dict[str, float]:
    """The median microseconds until a call returns, of the step and of the no-op."""
    pools, new = make_inputs(size)
    calls = {"step": jit(step), "no-op": jit(no_op)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(num_calls + 10):
        for name, call in calls.items():
            jax.block_until_ready(pools)  # or the queue of the GPU would fill up
            start = time.perf_counter()
            pools, out = call(pools, new)
            if i >= 10:  # the first ones compile, and fill caches
                times[name].append(1e6 * (time.perf_counter() - start))
            out.block_until_ready()
    return {name: float(np.median(of_call)) for name, of_call in times.items()}


class Event(NamedTuple):
    """Something in a profile: on which plane and line of it, when, in milliseconds."""

    plane: str
    line: str
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """What the profile of one step of all layers shows.

    Attributes
    ----------
    dispatch_ms, gpu_ms : float
        Until the call returned; from the first kernel to the end of the last.
    kernels, launches : int
        How many the GPU ran, and by how many calls the host launched them.
    busy : float
        The share of `gpu_ms` in which it ran one.
    longest_gap_us : float
        The longest time between two of them.
    waits : tuple of str
        What the host did to wait, or to copy from the GPU, while it launched the kernels.
    """

    dispatch_ms: float
    gpu_ms: float
    kernels: int
    launches: int
    busy: float
    longest_gap_us: float
    waits: tuple[str, ...]


def events_of(folder: Path) -> list[Event]:
    """Read the events of a profile that `jax.profiler.trace` wrote."""
    (file,) = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    return [
        Event(plane.name or "", line.name or "", event.name, event.start_ns / 1e6, event.end_ns / 1e6)
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
    ]


def read_step(events: Sequence[Event]) -> StepProfile:
    """Find in a profile what the host and the GPU did in the one annotated call, and after it.

    Examples
    --------
    >>> host, gpu = ("/host:CPU", "main"), ("/device:GPU:0", "Stream #1(Compute)")
    >>> events = [
    ...     Event(*host, ANNOTATION, 0.0, 1.0),
    ...     Event(*host, "cuLaunchKernel", 0.1, 0.2),
    ...     Event(*host, "cuStreamSynchronize", 0.3, 0.4),
    ...     Event(*host, "cuLaunchKernel", 0.5, 0.6),
    ...     Event(*host, "cuStreamSynchronize", 2.0, 3.0),
    ...     Event(*gpu, "decode", 1.0, 2.0),
    ...     Event(*gpu, "decode", 2.5, 3.0),
    ... ]
    >>> read_step(events)
    StepProfile(dispatch_ms=1.0, gpu_ms=2.0, kernels=2, launches=2, busy=0.75, longest_gap_us=500.0,
        waits=('cuStreamSynchronize',))
    """
    (call,) = (e for e in events if e.name == ANNOTATION)
    events = [e for e in events if e.start >= call.start]
    on_gpu = sorted((e for e in events if e.plane.startswith("/device:GPU")), key=lambda e: e.start)
    on_gpu = [e for e in on_gpu if e.line.startswith("Stream")]
    kernels = [e for e in on_gpu if not re.search(r"memcpy|memset", e.name, re.IGNORECASE)]
    waits = [e.name for e in on_gpu if re.search(r"memcpy *d(2|to)h", e.name, re.IGNORECASE)]
    # The last launch of a thread is the last of the step: what it waits for then is the result.
    threads: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.plane.startswith("/host"):
            threads.setdefault((event.plane, event.line), []).append(event)
    num_launches = 0
    for of_thread in threads.values():
        launches = [e for e in of_thread if re.search(r"^cu.*launch", e.name, re.IGNORECASE)]
        num_launches += len(launches)
        if launches:
            first, last = min(e.start for e in launches), max(e.end for e in launches)
            within = [e.name for e in of_thread if first <= e.start < last]
            waits += [name for name in within if re.search(r"synchroni|DtoH|wait", name, re.IGNORECASE)]
    gpu_ms = max((e.end for e in kernels), default=0.0) - min((e.start for e in kernels), default=0.0)
    gaps = [b.start - a.end for a, b in itertools.pairwise(kernels)]
    return StepProfile(
        dispatch_ms=call.end - call.start,
        gpu_ms=gpu_ms,
        kernels=len(kernels),
        launches=num_launches,
        busy=sum(e.end - e.start for e in kernels) / gpu_ms if kernels else 0.0,
        longest_gap_us=1e3 * max(gaps, default=0.0),
        waits=tuple(waits),
    )


def profile_step(size: Size) -> StepProfile:
    """Profile one step of all layers, after two that warm up."""
    pools, new = make_inputs(size)
    call = jit(functools.partial(program, size=size))
    for _ in range(2):
        pools, out = jax.block_until_ready(call(pools, new))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            with jax.profiler.TraceAnnotation(ANNOTATION):
                pools, out = call(pools, new)
            jax.block_until_ready(out)
        events = events_of(Path(folder))
    profile = read_step(events)
    if current_device().platform == "gpu" and 0 in (profile.kernels, profile.launches):
        lines = sorted({(event.plane, event.line) for event in events})
        raise RuntimeError(f"the profile has {profile}, and so tells nothing; its lines: {lines}")
    return profile


def first_call(size: Size) -> dict[str, float]:
    """Make the first call of a shape in this process: seconds of its parts, and what the cache did."""
    counts = {"hits": 0, "misses": 0}

    def count(event: str, **_: Any) -> None:
        for name in counts:
            counts[name] += event == f"/jax/compilation_cache/cache_{name}"

    pools, new = jax.block_until_ready(make_inputs(size))
    jax.monitoring.register_event_listener(count)
    start = time.perf_counter()
    lowered = jit(step).lower(pools, new)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    jax.block_until_ready(compiled(pools, new))
    return {
        "trace": traced - start,
        "compile": done - traced,
        "run": time.perf_counter() - done,
        "total": time.perf_counter() - start,
        **counts,
    }


def first_calls(size: Size) -> list[dict[str, float]]:
    """Make the first call of a shape in two processes in turn, which share a compilation cache."""
    results = []
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has memory of the same GPU
        }
        command = [sys.executable, "-m", "benchmarks.dispatch_overhead"]
        command += ["--first-call", json.dumps(dataclasses.asdict(size))]
        for _ in range(2):
            done = subprocess.run(
                command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True
            )
            results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def make_page(
    times: dict[str, float], profile: StepProfile, firsts: dict[Size, list[dict[str, float]]]
) -> str:
    """The three tables."""
    ratio = times["step"] / times["no-op"]
    rows = [[name, f"{us:.1f}"] for name, us in times.items()]
    rows.append([f"ratio, at most {MOST_OF_A_NO_OP}: {verdict(ratio <= MOST_OF_A_NO_OP)}", f"{ratio:.2f}"])
    waits = ", ".join(sorted(set(profile.waits))) or "none"
    of_profile = [
        ["call returns after", f"{profile.dispatch_ms:.3f} ms"],
        ["GPU, from first kernel to last", f"{profile.gpu_ms:.3f} ms"],
        ["kernels, launches by the host", f"{profile.kernels}, {profile.launches}"],
        ["busy", f"{profile.busy:.1%}"],
        ["longest gap", f"{profile.longest_gap_us:.1f} us"],
        [f"waits, none: {verdict(not profile.waits)}", f"{len(profile.waits)} ({waits})"],
    ]
    of_compiling = []
    for size, processes in firsts.items():
        for name, result in zip(("first", "second"), processes, strict=True):
            seconds = [f"{result[part]:.2f}" for part in ("trace", "compile", "run", "total")]
            cache = f"{result['hits']:.0f} hits, {result['misses']:.0f} misses"
            met = verdict(result["total"] <= MOST_SECONDS_TO_FIRST_RESULT)
            of_compiling.append([size.describe(), name, *seconds, cache, met])
    header = ["step", "process", "trace, s", "compile, s", "run, s", "in all, s", "cache"]
    header.append(f"at most {MOST_SECONDS_TO_FIRST_RESULT:.0f} s")
    return "\n\n".join(
        [
            report.markdown_table([f"dispatch of {DISPATCHED.describe()}", "us"], rows),
            report.markdown_table([f"32 layers of {PROFILED.describe()}, in one jit", ""], of_profile),
            report.markdown_table(header, of_compiling),
        ]
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dispatch_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--calls", type=int, default=500, help="timed dispatches (default 500)")
    add_output_options(parser)
    parser.add_argument("--first-call", help=argparse.SUPPRESS)  # what the processes of their own are given
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if the step is right, and whatever a dry run would write can be made."""
    arguments = parse_arguments(argv)
    if arguments.first_call:
        print(json.dumps(first_call(Size(**json.loads(arguments.first_call)))))
        return 0
    device, dry_run = current_device(), arguments.dry_run
    if device.platform != "gpu" and not dry_run:
        print(f"this needs a GPU, and JAX's default is {device.platform}; try --dry-run", file=sys.stderr)
        return 2
    as_run: Callable[[Size], Size] = (lambda size: size.shrunk()) if dry_run else (lambda size: size)
    check(as_run(DISPATCHED))
    firsts = {size: first_calls(as_run(size)) for size in (COMPILED[:1] if dry_run else COMPILED)}
    times = dispatch_times(as_run(DISPATCHED), 20 if dry_run else arguments.calls)
    profile = profile_step(as_run(PROFILED))
    page = make_page(times, profile, firsts)
    head = report.head("python -m benchmarks.dispatch_overhead", report.commit(), report.versions())
    notes = NOTES.format(calls=arguments.calls)
    page = "\n\n".join([f"# Time of the host, {device.device_kind}", f"{head}\n{notes}", page])
    print(page)
    if dry_run:
        print("dry run: tiny sizes, its times say nothing, nothing is written")
    else:
        path = arguments.out / f"dispatch_{report.gpu_slug(device.device_kind)}.md"
        path.write_text(f"{page}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
