"""Time one decode call against batch and against length: ``python -m benchmarks.sweep``.

A point is a batch of rows of equal length: "64x4096". All points share one pool of pages, and one compilation
of our function serves all lengths of a batch. At each point some rows are first compared with the float32
reference; then every kernel of the call is timed by CUPTI, with FlashAttention-3 beside it, in the same run,
where it is installed. Results are written after each point, so that an interrupted run keeps them;
`benchmarks.plots` draws them. ``--dry-run`` walks the same path at tiny sizes on any machine, times nothing
and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checked import Check, Failed, attempt, attempt_ours
from benchmarks.peers import run_peer
from benchmarks.report import Result
from benchmarks.session import Session, add_options, chosen
from benchmarks.timing import Calls
from benchmarks.workloads import COUNTED, Cache, Workload, expected_output, make_cache, to_layout
from jax_paged_attn import PageTable, paged_attention
from jax_paged_attn.testing import assert_close

LENGTH = 4096  # of the rows, where the cost against batch is asked
BATCHES = tuple(2**n for n in range(10))
SWEPT_BATCHES = (1, 8, 64)  # at which the cost against length is asked
LENGTHS = tuple(2**n for n in range(7, 18))
LAYOUT = "HND"
# Two copies of a point's keys and values, as the peer reads another layout, leave room on a GPU of 80 GB.
MAX_BYTES = 60e9
# Read in turn, as many tables as make this together are cold in an L2 of 60 MB.
COLD_BYTES = 256_000_000
CHECKED_ROWS = 8

NOTES = f"""\
- **workload**: batch x length; 32/8 heads, head_dim 128, bfloat16, page 16.
- {CHECKED_ROWS} rows of each point, evenly spread, are compared with the float32 reference before it is
  timed, and the timed outputs again.
- Inputs are random normal, pages in random order. All reads are cold: calls take in turn as many page tables,
  over pages of their own, as hold 256 MB. Our tables are as wide as the longest row of the same batch.
- The peer reads the layout NHD, by tables just wide enough, at the best of its split counts."""


def make_point(batch: int, kv_len: int) -> Workload:
    """Describe a point; its `num_caches` are page tables over one pool, as many as make its reads cold."""
    once = Workload(f"{batch}x{kv_len}", kv_lens=(kv_len,) * batch, num_q_heads=32, num_kv_heads=8)
    return dataclasses.replace(once, num_caches=-(-COLD_BYTES // once.num_bytes))


def grid() -> tuple[Workload, ...]:
    """List all points, by batch and then length."""
    points = {(batch, LENGTH) for batch in BATCHES} | set(itertools.product(SWEPT_BATCHES, LENGTHS))
    made = [make_point(*point) for point in sorted(points)]
    return tuple(point for point in made if 2 * point.num_bytes <= MAX_BYTES)


POINTS = grid()


def block_tables(point: Workload) -> np.ndarray:
    """Deal the pool's first pages out in random order: int32 [num_caches, batch, pages_per_row]."""
    shape = (point.num_caches, point.batch, max(point.pages_per_row))
    return np.random.default_rng(0).permutation(np.prod(shape)).astype(np.int32).reshape(shape)


class Pool(NamedTuple):
    """What all points read."""

    q: np.ndarray  # [largest batch, num_q_heads, head_dim]
    nhd: tuple[jax.Array, jax.Array]  # K and V, each [num_pages, page_size, num_kv_heads, head_dim]
    ours: tuple[jax.Array, jax.Array]  # the same pages in LAYOUT


def make_pool(points: Sequence[Workload]) -> Pool:
    """Make queries for the largest batch, and on the device as many pages as any point takes."""
    num_pages = max(point.num_caches * sum(point.pages_per_row) for point in points)
    one_row = dataclasses.replace(points[0], kv_lens=(num_pages * points[0].page_size,))
    cache = make_cache(one_row, seed=0)
    shape = (max(point.batch for point in points), *cache.q.shape[1:])
    q = np.random.default_rng(0).standard_normal(shape, np.float32).astype(cache.q.dtype)
    nhd = cache.k_pages, cache.v_pages
    return Pool(q, nhd, (to_layout(nhd[0], LAYOUT), to_layout(nhd[1], LAYOUT)))


# One function, so that points of equal shapes share its compilation.
attend = functools.partial(paged_attention, kv_layout=LAYOUT)
make_table = jax.jit(PageTable.from_block_tables)


@dataclasses.dataclass(frozen=True)
class PointCalls:
    """The calls of a point, one for each of its page tables.

    Attributes
    ----------
    ours : Calls
        Of `attend`.
    peers : list of Cache
        The same for a peer, with tables no wider than the rows.
    check : callable
        Compares some rows of our or a peer's outputs with the reference.
    """

    ours: Calls
    peers: list[Cache]
    check: Check


def make_calls(point: Workload, pool: Pool, width: int) -> PointCalls:
    """Make a point's inputs and its check; `width` is that of our page tables."""
    tables = block_tables(point)
    wide = np.pad(tables, ((0, 0), (0, 0), (0, width - tables.shape[2])))
    lens = np.array(point.kv_lens, np.int32)
    q, kv_lens = jnp.asarray(pool.q[: point.batch]), jnp.asarray(lens)
    ours = Calls(attend, [(q, *pool.ours, make_table(table, kv_lens)) for table in wide])
    peers = [Cache(q, *pool.nhd, jnp.asarray(table), kv_lens) for table in tables]

    # The same number of rows at every point, some of them repeated where there are fewer: one compilation.
    sample = np.linspace(0, point.num_caches * point.batch - 1, CHECKED_ROWS).astype(int)
    calls, rows = np.divmod(sample, point.batch)
    q_of_rows, tables_of_rows, lens_of_rows = (
        jnp.asarray(x) for x in (pool.q[rows], wide[calls, rows], lens[rows])
    )
    expected = expected_output(Cache(q_of_rows, *pool.nhd, tables_of_rows, lens_of_rows))

    def check(outputs: Sequence[jax.Array]) -> None:
        checked = [np.asarray(outputs[call])[row] for call, row in zip(calls, rows, strict=True)]
        assert_close(np.stack(checked), expected)

    return PointCalls(ours, peers, check)


def run_point(point: Workload, pool: Pool, width: int, session: Session, min_calls: int) -> Result:
    """Check and time one point, with the peer beside it."""
    calls = attempt(lambda: make_calls(point, pool, width))
    if isinstance(calls, Failed):
        implementation, ours, beside = "none", calls, calls
    else:
        rounds = -(-min_calls // point.num_caches)
        beside = run_peer(session.peer, point, calls.peers, calls.check, session.measure, rounds)
        implementation, ours = attempt_ours(calls.ours, calls.check, session.measure, rounds)
    return Result(point.name, LAYOUT, point.dtype, implementation, point.num_bytes, ours, beside)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; see ``--help``."""
    names = [point.name for point in POINTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--points",
        type=functools.partial(chosen, names, "point"),
        default=names,
        help=f"such as 1x128,64x4096; * stands for any characters, as in *x{LENGTH} or 64x*; default all",
    )
    add_options(parser, iterations="timed calls of a point, at least")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; 0 if every result of ours was right and, but for a dry run, timed."""
    arguments = parse_arguments(argv)
    command = f"python -m benchmarks.sweep --iterations {arguments.iterations}"
    session = Session.start(command, dry_run=arguments.dry_run)
    if session is None:
        return 2
    points = [point for point in POINTS if point.name in arguments.points]
    if arguments.dry_run:
        points = [point.shrunk() for point in points]
    pool = make_pool(points)
    # One width for all lengths of a batch: tables and lengths are data, so that our function compiles once.
    widths: dict[int, int] = {}
    for point in points:
        widths[point.batch] = max(widths.get(point.batch, 0), *point.pages_per_row)

    stem = f"{session.gpu}_sweep"
    results: list[Result] = []
    for point in points:
        result = run_point(point, pool, widths[point.batch], session, arguments.iterations)
        session.keep([result], arguments.out / f"{stem}.csv")
        results.append(result)

    return session.finish(
        arguments.out / f"{stem}.md",
        results,
        title="One decode call against batch and length",
        counted=COUNTED,
        timed=f"{arguments.iterations} calls or more",
        notes=NOTES,
        whole=len(results) == len(POINTS),
    )


if __name__ == "__main__":
    sys.exit(main())
