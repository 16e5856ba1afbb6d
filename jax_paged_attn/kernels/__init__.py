"""Implementations of the public functions: a package each, with a module for each operation that it serves.

Operations are described in `jax_paged_attn.calls`. Each module exposes the same names;
`jax_paged_attn.dispatch` imports it only when it may be used:

``Config``
    A frozen dataclass of its choices that checks itself (ValueError).
``why_not(problem, target) -> str | None``
    Why it can't run this problem on this target; None if it can.
``default_config(problem, target) -> Config``
``usage(problem, config) -> Usage``
``run(problem, config, operands) -> results``
    Of a checked, batched call. One that some platform interprets also takes ``interpret=True``.

``attention`` yields (out, lse): out [batch, q_len, num_q_heads, v_head_dim] in q's dtype, and lse
float32[batch, q_len, num_q_heads] or None without ``problem.return_lse``. ``append`` yields
`jax_paged_attn.calls.append.Results`. ``mla`` and ``mla_prefill`` yield (out, lse) with the axes of their
queries, [batch, q_len, num_heads, ..].
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a configuration takes.

    Attributes
    ----------
    smem_bytes : int
        Shared memory of one block; 0 where the implementation doesn't manage it.
    workspace_bytes : int
        Device memory for partial results; an estimate for the XLA implementation.
    accumulator_dtype : str
        In which scores, softmax and partial outputs are kept.
    deterministic : bool
        Whether the same inputs and configuration always give the same bits.
    """

    smem_bytes: int
    workspace_bytes: int
    accumulator_dtype: str = "float32"
    deterministic: bool = True
