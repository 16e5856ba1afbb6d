"""Which problems the decode kernel takes, with which tiles, stages and parts, and what they cost."""

import dataclasses
import math

from jax_paged_attn.calls import mla
from jax_paged_attn.calls.attention import Problem
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels import Usage
from jax_paged_attn.validation import QUANTIZED_DTYPES

from .integers import ceil_div
from .layouts import MMA_ROWS
from .mask_words import MAX_WORDS, WORD
from .plan import MAX_BLOCK_KV, MAX_PARTS, MAX_ROWS, Config, Plan
from .schedule import even_parts
from .shared_memory import smem_bytes

DTYPES = ("bfloat16", "float16")
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
HEAD_DIM_BYTES = 16  # what copies move multiples of
MAX_QUERIES = 512  # of several tokens: with more it is a prefill, which reads the cache too often here
# Blocks a multiprocessor, tiles in flight in each, bytes of a tile of K and V. On an H200 more blocks, more
# stages or larger tiles each lost 1 to 7% at head_dim 128; of 1-byte values smaller tiles, too.
BLOCKS_PER_CORE = 2
STAGES = 2
TILE_BYTES = 32 * 1024
DEFAULT_BLOCK_KV = (256, 128)  # else 64
# Of a tile: scores, and pages, whose ids are in registers, besides where their scales begin.
MAX_DEFAULT_SCORES, MAX_DEFAULT_PAGES, MAX_SCALED_PAGES = 2048, 64, 16
MIN_DEFAULT_USED = 0.9  # of a tile's rows
# Parts given up at most so that equal rows end where parts end (H200: 256 blocks for 264, 0.5 to 3% faster
# where lengths are equal, 0.8% slower where they differ).
PARTS_GIVEN_UP = 0.05


def rows_per_launch(problem: Problem | mla.Problem) -> int:
    """Rows of each launch that a batch is served by, equal but for the last."""
    most = MAX_ROWS if problem.num_splits is None else max(MAX_PARTS // problem.num_splits, 1)
    return ceil_div(problem.batch, ceil_div(problem.batch, most)) if problem.batch else 1


def one_launch(problem: Problem) -> Problem:
    """The part of a batch that one launch takes."""
    return dataclasses.replace(problem, batch=rows_per_launch(problem))


def usage(problem: Problem, config: Config) -> Usage:
    """What a launch takes."""
    plan = Plan(one_launch(problem), config)
    launches = ceil_div(problem.batch, plan.problem.batch)
    floats = sum(math.prod(shape) for shape in plan.partial_shapes().values())
    cut_rows = 3 * plan.schedule.num_cut_rows if plan.cuts_rows else 0
    return Usage(smem_bytes=smem_bytes(plan), workspace_bytes=4 * launches * (floats + cut_rows))


def why_not(problem: Problem, target: Target) -> str | None:
    """Why the kernel can't run `problem` on `target`; None if it can."""
    if target.compute_capability is None or target.compute_capability[0] != 9:
        return f"is made for Hopper (sm_90), not for {target}"
    if problem.is_symbolic:
        return "needs static shapes"
    if problem.dtype.name not in DTYPES:
        return f"dtype {problem.dtype.name} unsupported; supported: {', '.join(DTYPES)}"
    dtypes = problem.k_dtype, problem.v_dtype
    quantized = [dtype.name in QUANTIZED_DTYPES for dtype in dtypes]
    if any(quantized) and not all(quantized):
        return f"k of dtype {dtypes[0].name} beside v of {dtypes[1].name} unsupported"
    step = HEAD_DIM_BYTES // dtypes[0].itemsize
    for name, dim in (("head_dim", problem.head_dim), ("v's head_dim", problem.v_head_dim)):
        if dim % step or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            supported = f"multiples of {step} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            return f"{name} {dim} unsupported; supported: {supported}"
    smallest = Config(num_stages=1)
    queries = Plan(problem, smallest).group_size
    if queries > max(problem.group_size, MAX_QUERIES):
        return (
            f"{queries} queries a kv head, of {problem.q_len} tokens, unsupported; supported: {MAX_QUERIES}"
        )
    if problem.mask_len > MAX_WORDS * WORD:
        return f"a mask of {problem.mask_len} keys unsupported; supported: {MAX_WORDS * WORD}"
    if problem.num_entries * problem.page_size >= 2**31 - MAX_BLOCK_KV:
        return "positions would not fit in 32 bits: num_entries * page_size is 2**31 or more"
    num_scales = problem.num_pages * problem.page_size * problem.num_kv_heads
    if "token" in (problem.k_scale, problem.v_scale) and num_scales >= 2**31:
        return f"{num_scales} scales of tokens: 2**31 or more"
    if Plan(one_launch(problem), smallest).schedule.parts > MAX_PARTS:
        return f"num_splits {problem.num_splits} unsupported: a grid has at most {MAX_PARTS} parts"
    needed = usage(problem, smallest).smem_bytes
    if needed > target.smem_bytes:
        return f"needs {needed} bytes of shared memory, more than the {target.smem_bytes} of {target}"
    return None


def _block_kv(problem: Problem) -> int:
    """Keys of a tile of TILE_BYTES, or of fewer where pages would leave much of it unused."""
    plan = Plan(problem, Config())
    if plan.wide or (problem.mask_len and plan.token_scaled):  # the latter for registers
        return MMA_ROWS
    row_bytes = (plan.k_columns + plan.v_columns) * problem.k_dtype.itemsize
    for block_kv in DEFAULT_BLOCK_KV:
        if block_kv * row_bytes > TILE_BYTES or block_kv * plan.tile_heads > MAX_DEFAULT_SCORES:
            continue
        # A contiguous row is one page, as long as its capacity, which has a say in nothing.
        if problem.contiguous:
            return block_kv
        few_pages = (
            block_kv <= (MAX_SCALED_PAGES if plan.token_scaled else MAX_DEFAULT_PAGES) * problem.page_size
        )
        if few_pages and Plan(problem, Config(block_kv)).tiling.used >= MIN_DEFAULT_USED:
            return block_kv
    return MMA_ROWS


def default_config(problem: Problem, target: Target) -> Config:
    """The tiles, stages and parts that were fastest on an H200 for problems of this kind.

    Only shapes count: lengths are known on the device alone. The tile never depends on a capacity, so that
    with `num_splits` a row's bits don't either.
    """
    problem = one_launch(problem)
    plans = [
        Plan(problem, Config(block_kv=block_kv, num_stages=stages))
        for block_kv in (_block_kv(problem), MMA_ROWS)
        for stages in range(STAGES, 0, -1)
    ]
    plan = next(plan for plan in plans if smem_bytes(plan) <= target.smem_bytes)
    # A block may use all of a multiprocessor's shared memory but a kilobyte, which each block takes besides.
    per_core = min(BLOCKS_PER_CORE, (target.smem_bytes + 1024) // (smem_bytes(plan) + 1024))
    parts = max(per_core * target.core_count // plan.heads, 1)
    parts = even_parts(parts, problem.batch, PARTS_GIVEN_UP)
    return dataclasses.replace(plan.config, num_parts=parts)
