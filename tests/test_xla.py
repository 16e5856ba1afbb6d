"""The XLA implementation's own: its config, its splits, and the modes of JAX that its loop is traced in."""

import os
import subprocess
import sys
import textwrap
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PageTable, decode_attention, explain, merge_state, paged_attention, testing
from jax_paged_attn.kernels.xla import attention as xla_attention


def inputs():
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((2, 4, 16)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, 40, 2, 8, 16)), jnp.float32)
    tables = rng.permutation(40).reshape(2, 20)
    return q, k, v, PageTable.from_block_tables(tables, [157, 3])


@pytest.mark.parametrize("block_kv", [0, -1, 2**20 + 1, 2**31, 1.0, True])
def test_bad_config(block_kv):
    with pytest.raises(ValueError, match=r"^block_kv: expected an int in .*, got "):
        xla_attention.Config(block_kv=block_kv)


@pytest.mark.parametrize("num_splits", [320, 10**8, 2**31])
def test_no_more_splits_than_tiles(num_splits):
    options: dict[str, Any] = {
        "implementation": "xla",
        "config": xla_attention.Config(block_kv=16),
        "return_lse": True,
    }
    # The longest row has 10 tiles, and the 40 entries hold 20.
    expected = paged_attention(*inputs(), num_splits=20, **options)
    chex.assert_trees_all_equal(paged_attention(*inputs(), num_splits=num_splits, **options), expected)
    usages = [
        explain(paged_attention, *inputs(), num_splits=n, **options).workspace_bytes for n in (20, num_splits)
    ]
    assert usages[0] == usages[1]


def test_more_splits_than_a_symbolic_row_has_tiles():
    (w,) = jax.export.symbolic_shape("w")
    q, k, v, table = inputs()

    def call(tables, lens):
        table = PageTable.from_block_tables(tables, lens)
        return paged_attention(q, k, v, table, num_splits=5, implementation="xla", return_lse=True)

    exported = jax.export.export(jax.jit(call))(
        jax.ShapeDtypeStruct((2, w), "int32"), jax.ShapeDtypeStruct((2,), "int32")
    )
    tables = table.indices.reshape(2, -1)
    testing.assert_close(exported.call(tables, table.kv_lens), call(tables, table.kv_lens))


@pytest.mark.parametrize("kv_layout", ["HND", "NHD", "HPND"])
def test_without_rank_promotion(kv_layout):
    q, k, v, table = inputs()
    order = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "HPND": (1, 0, 2, 3)}[kv_layout]
    options: dict[str, Any] = {
        "kv_layout": kv_layout,
        "num_splits": 2,
        "kv_starts": [2, 1],
        "implementation": "xla",
    }
    with jax.numpy_rank_promotion("raise"):
        out, lse = paged_attention(
            q, k.transpose(order), v.transpose(order), table, return_lse=True, **options
        )
        merge_state(out, lse, out, lse)
        decode_attention(q, k[:2], v[:2], [5, 3], implementation="xla", validate_values=True)
        PageTable.from_csr([0, 2, 3], [7, 2, 4], [4, 3], page_size=16, validate_values=True)


# Devices can't be added once JAX runs, hence another process.
SHARDED = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec as P

    from jax_paged_attn import PageTable, decode_attention, paged_attention

    def paged(q, k, v, table):
        return paged_attention(q, k, v, table, implementation="xla", return_lse=True, num_splits=2)

    def contiguous(q, k, v, lens):
        return decode_attention(q, k, v, lens, implementation="xla", return_lse=True)

    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((2, 4, 16)), jnp.float32)
    pages = jnp.asarray(rng.standard_normal((2, 3, 2, 8, 16)), jnp.float32)
    caches = jnp.asarray(rng.standard_normal((2, 2, 2, 16, 16)), jnp.float32)
    table = PageTable.from_block_tables([[2, 0], [1, -1]], [12, 3])
    lens = jnp.array([12, 3], jnp.int32)
    # A list of entries shared by all devices, of which each row's part lies on one.
    rows = PageTable(P(), P("x"), P("x"), P("x"))
    heads = P(None, "x")
    cases = {
        "heads": (paged, (q, *pages, table), (heads, heads, heads, P()), heads),
        "rows": (paged, (q, *pages, table), (P("x"), P(), P(), rows), P("x")),
        "contiguous heads": (contiguous, (q, *caches, lens), (heads, heads, heads, P()), heads),
        "contiguous rows": (contiguous, (q, *caches, lens), (P("x"), P("x"), P("x"), P("x")), P("x")),
        "only lengths": (contiguous, (q[:1], *caches[:, :1], lens), (P(), P(), P(), P("x")), P("x")),
    }
    mesh = Mesh(jax.devices(), ("x",))
    assert mesh.size == 2
    for name, (call, arguments, in_specs, out_specs) in cases.items():
        sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
        if name == "only lengths":
            whole = [call(*arguments[:3], arguments[3][i : i + 1]) for i in range(2)]
            whole = jax.tree.map(lambda *x: jnp.concatenate(x), *whole)
        else:
            whole = call(*arguments)
        for actual, expected in zip(sharded(*arguments), whole, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        print(name)
"""


def test_shard_map_with_its_check_of_varying_axes():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 5
