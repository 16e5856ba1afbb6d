"""Other implementations that JAX can call, timed beside ours in the same run when they are installed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence

import jax

from benchmarks.checked import Check, Failed, Measure, Measured, attempt, check_then_time
from benchmarks.timing import Calls
from benchmarks.workloads import Cache, Workload


@dataclasses.dataclass(frozen=True)
class Peer:
    """A decode function of someone else's.

    Attributes
    ----------
    name : str
        Name and version, as results show it.
    why_not : callable
        From a `Workload`, the reason it cannot run that, or None.
    variants : callable
        From a `Workload`, the settings worth trying, as (label, function of a `Cache` giving its output).
        The best of them counts, so that a peer is never judged by a poor setting.
    """

    name: str
    why_not: Callable[[Workload], str | None]
    variants: Callable[[Workload], Iterator[tuple[str, Callable[[Cache], jax.Array]]]]


def flash_attention_3() -> Peer | None:
    """FlashAttention-3 through JAX (package ``flash-attn3-jax``), or None where it is not installed.

    It reads the layout NHD only, and takes a split count that the caller must choose.
    """
    if importlib.util.find_spec("flash_attn3_jax") is None:
        return None
    from flash_attn3_jax import flash_mha_with_kvcache  # pyright: ignore[reportMissingImports]

    def why_not(workload: Workload) -> str | None:
        if workload.q_len or workload.modified or workload.window_left is not None:
            return "not asked for several tokens, windows or caps"
        if (workload.head_dim, workload.v_head_dim) != (128, 128):
            return "its wheels are built for head_dim 128 only"
        if workload.stored_dtype not in ("bfloat16", "float16"):
            return f"no cache of {workload.stored_dtype} under a 16-bit query"
        return None

    def variants(workload: Workload) -> Iterator[tuple[str, Callable[[Cache], jax.Array]]]:
        for num_splits in (1, 2, 4, 8, 16, 32):

            def attend(cache: Cache, num_splits: int = num_splits) -> jax.Array:
                out = flash_mha_with_kvcache(
                    cache.q[:, None],
                    cache.k_pages,
                    cache.v_pages,
                    cache_seqlens=cache.kv_lens,
                    page_table=None if workload.contiguous else cache.block_tables,
                    softmax_scale=workload.head_dim**-0.5,
                    num_splits=num_splits,
                )
                return out[:, 0]

            yield f"{num_splits} splits", attend

    return Peer(f"fa3-jax-{importlib.metadata.version('flash-attn3-jax')}", why_not, variants)


def run_peer(
    peer: Peer | None,
    workload: Workload,
    caches: Sequence[Cache],
    check: Check,
    measure: Measure,
    iterations: int,
) -> Measured | Failed:
    """Measure the peer at its best setting: each is tried briefly, and the best is measured like ours."""
    if peer is None:
        return Failed("not installed")
    if (reason := peer.why_not(workload)) is not None:
        return Failed(f"cannot run: {reason}")
    args = [(cache,) for cache in caches]

    def run(label: str, fn: Callable[[Cache], jax.Array], iterations: int) -> Measured | Failed:
        return attempt(lambda: check_then_time(Calls(fn, args), check, measure, iterations, label))

    tried = []
    for label, fn in peer.variants(workload):
        trial = run(label, fn, -(-iterations // 5))
        if isinstance(trial, Measured):
            tried.append((trial.timing.ms if trial.timing else 0.0, label, fn))
    if not tried:
        return Failed("WRONG or failed at every setting")
    _, label, fn = min(tried, key=lambda trial: trial[0])
    return run(label, fn, iterations)
