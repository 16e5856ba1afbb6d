"""Attention of many query tokens over one kv head: what is static about a call, its operands, its fold."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import validation
from jax_paged_attn.calls import folding
from jax_paged_attn.dispatch import Operation


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static about one call. Hashable; dimensions may be symbolic (`jax.export`).

    Attributes
    ----------
    batch, q_len, kv_len, num_heads, head_dim, v_head_dim : int
        Sizes of queries, keys and values.
    dtype : numpy.dtype
        Of all of them and of the output.
    causal, return_lse : bool
        Whether a query token, of which the last is the last key's, sees no later ones; whether the
        log-sum-exp is wanted.
    """

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    head_dim: int
    v_head_dim: int
    dtype: np.dtype
    causal: bool = True
    return_lse: bool = False

    @property
    def is_symbolic(self) -> bool:
        """Whether any dimension is symbolic."""
        return validation.is_symbolic(self)

    @property
    def is_empty(self) -> bool:
        """Whether the shapes alone say that no query has a key."""
        return any(dim == 0 for dim in (self.batch, self.q_len, self.kv_len))

    def nonempty(self) -> "Problem":
        """Return the smallest problem of this kind that isn't empty."""
        sizes = ("batch", "q_len", "kv_len")
        return dataclasses.replace(self, **{name: max(getattr(self, name), 1) for name in sizes})


class Operands(NamedTuple):
    """q [batch, q_len, num_heads, head_dim], k [batch, kv_len, head_dim], v [batch, kv_len, v_head_dim]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sm_scale: jax.Array


def nothing(problem: Problem, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Yield (out, lse) of queries without keys."""
    queries = (problem.batch, problem.q_len, problem.num_heads)
    lse = jnp.full(queries, -jnp.inf, jnp.float32) if problem.return_lse else None
    return jnp.zeros((*queries, problem.v_head_dim), problem.dtype), lse


def fold(
    problem: Problem, size: int, batched: Operands, operands: Operands
) -> tuple[Problem, Operands] | None:
    """Fold a mapped axis of `size` into the batch."""
    if batched.sm_scale:
        return None
    names = ("q", "k", "v")
    joined = {
        name: folding.join(folding.mapped(getattr(operands, name), getattr(batched, name), size))
        for name in names
    }
    return dataclasses.replace(problem, batch=size * problem.batch), operands._replace(**joined)


MLA_PREFILL = Operation("mla_prefill", ("mla_prefill_attention", "mla_fused_prefill"), nothing, fold)


def describe(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, return_lse: bool) -> Problem:
    """Check a call's shapes, dtypes and flags and describe it; its k and v have an axis of one head."""
    validation.check_bool("causal", causal)
    validation.check_bool("return_lse", return_lse)
    expected = "shape [batch, q_len, num_heads, head_dim], without an axis of heads or columns of size 0"
    validation.check(q.ndim == 4 and 0 not in q.shape[2:], "q", expected, f"shape {q.shape}")
    batch, q_len, num_heads, head_dim = q.shape
    expected = f"a dtype of {validation.DTYPES}"
    validation.check(q.dtype.name in validation.DTYPES, "q", expected, f"dtype {q.dtype}")
    ok = k.ndim == 4 and (k.shape[0], *k.shape[2:]) == (batch, 1, head_dim)
    validation.check(ok, "k", f"shape [{batch}, kv_len, 1, {head_dim}]", f"shape {k.shape}")
    ok = v.ndim == 4 and v.shape[:3] == k.shape[:3] and v.shape[3] != 0
    validation.check(ok, "v", f"shape {(*k.shape[:3], 'v_head_dim')}", f"shape {v.shape}")
    for name, x in (("k", k), ("v", v)):
        validation.check(x.dtype == q.dtype, name, f"the dtype of q, {q.dtype}", f"dtype {x.dtype}")
    return Problem(
        batch=batch,
        q_len=q_len,
        kv_len=k.shape[1],
        num_heads=num_heads,
        head_dim=head_dim,
        v_head_dim=v.shape[3],
        dtype=np.dtype(q.dtype),
        causal=causal,
        return_lse=return_lse,
    )
