"""Rows that differ in their number of query tokens: there is no kernel for them yet, only the reason."""

from jax_paged_attn.calls.ragged import Problem
from jax_paged_attn.dispatch import Target


def why_not(problem: Problem, target: Target) -> str:
    """Why no kernel can run `problem` on `target`."""
    return "rows that differ in their number of query tokens (q_indptr) unsupported"
