"""What importing the package and calling it needs: each in a fresh process."""

import os
import subprocess
import sys
import textwrap

import pytest


def run(code, **environment):
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_without_gpu_triton_or_torch():
    run(
        """
        import sys

        for name in ("triton", "jax_triton", "torch", "chex"):
            sys.modules[name] = None  # any import of it fails
        import jax_paged_attn

        assert all(hasattr(jax_paged_attn, name) for name in jax_paged_attn.__all__)
        assert "jax_paged_attn.kernels.mosaic_gpu" not in sys.modules
        """,
        JAX_PLATFORMS="cpu",
    )


@pytest.mark.newest
def test_no_deprecation_warning_from_any_call():
    run(
        """
        import jax.numpy as jnp
        from jax_paged_attn import PageTable, decode_attention, explain, merge_state, paged_attention

        q, pages = jnp.ones((1, 4, 64), "bfloat16"), jnp.ones((2, 2, 16, 64), "bfloat16")
        table = PageTable.from_block_tables([[1, 0]], [20])
        for implementation in (None, "xla", "mosaic_gpu"):
            state = paged_attention(q, pages, pages, table, return_lse=True, implementation=implementation)
        decode_attention(q, pages[:1], pages[:1], 9)
        merge_state(*state, *state)
        explain(paged_attention, q, pages, pages, table, target="sm_90")
        """
    )


def test_the_reference_imports_no_kernel():
    run(
        """
        import sys
        import jax.numpy as jnp
        from jax_paged_attn import reference

        cache = jnp.ones((1, 2, 16, 64))
        reference.decode_attention(jnp.ones((1, 4, 64)), cache, cache, 9)
        assert not [name for name in sys.modules if name.startswith("jax_paged_attn.kernels.")]
        """,
        JAX_PLATFORMS="cpu",
    )


def test_the_page_pool_touches_no_device():
    run(
        """
        from jax._src import xla_bridge
        from jax_paged_attn import PagePool

        pool = PagePool(num_pages=8, page_size=2)
        seq_id = pool.allocate([1, 2, 3]).seq_id
        rows = [seq_id, pool.fork(seq_id), -1]
        pool.append_batch(rows, [4, 5, 0])
        pool.truncate(seq_id, 1)
        pool.block_tables(rows), pool.csr(rows), pool.kv_lens(rows), pool.stats()
        pool.free(seq_id)
        assert not xla_bridge.backends_are_initialized()
        """
    )
