"""Which problems the decode kernel takes, with which configuration, and what `explain` says that costs."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PageTable, explain, paged_attention
from jax_paged_attn.calls.attention import Problem
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels.mosaic_gpu import attention, merge_kernel, plan
from jax_paged_attn.kernels.xla import attention as xla_attention

H200 = Target.parse("sm_90")
BF16 = np.dtype(jnp.bfloat16)


def problem(**sizes):
    default = {
        "batch": 64,
        "num_q_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "v_head_dim": sizes.get("head_dim", 128),
        "page_size": 16,
        "num_pages": 20_000,
        "num_entries": 16_384,
        "dtype": BF16,
    }
    sizes = default | sizes
    return Problem(**sizes, k_dtype=sizes["dtype"], v_dtype=sizes["dtype"])


HEADS = ((32, 8), (64, 8), (28, 4), (9, 3), (71, 1), (48, 1), (32, 32), (12, 1), (1, 1))
OPTIONS = ({}, {"num_splits": 1}, {"num_splits": 16}, {"given": ("kv_starts",), "return_lse": True})


def problems():
    shapes = itertools.product(
        HEADS, (16, 24, 64, 80, 128, 192, 256), (1, 12, 16, 64, 544), (1, 8, 40, 300), OPTIONS
    )
    for (num_q_heads, num_kv_heads), head_dim, page_size, batch, options in shapes:
        heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
        yield problem(**heads, head_dim=head_dim, page_size=page_size, batch=batch, **options)


def test_what_no_configuration_fits_has_a_reason():
    """The default choice has to fall to the next."""
    why = attention.why_not(problem(head_dim=256), dataclasses.replace(H200, smem_bytes=60_000))
    assert why is not None
    assert "shared memory" in why


@pytest.mark.newest
def test_the_default_fits_every_problem():
    for p in problems():
        assert attention.why_not(p, H200) is None
        config = attention.default_config(p, H200)
        assert attention.usage(p, config).smem_bytes <= H200.smem_bytes, p
        # Two tiles at least in flight, or loads and arithmetic would take turns.
        assert config.num_stages >= 2, p
        assert 1 <= config.num_parts * p.num_kv_heads <= max(2 * H200.core_count, p.num_kv_heads), p


@pytest.mark.parametrize(
    ("smem_bytes", "head_dim", "fewer"),
    [
        (100_000, 64, False),
        (40_000, 64, True),
        (100_000, 128, False),
        (60_000, 128, True),
        (100_000, 256, True),
    ],
)
def test_fewer_stages_where_shared_memory_is_small(smem_bytes, head_dim, fewer):
    small, p = dataclasses.replace(H200, smem_bytes=smem_bytes), problem(head_dim=head_dim)
    config, roomy = (attention.default_config(p, target) for target in (small, H200))
    assert attention.usage(p, config).smem_bytes <= smem_bytes
    assert (config.num_stages < roomy.num_stages) == fewer
    if fewer:
        one_more = dataclasses.replace(config, num_stages=config.num_stages + 1)
        assert attention.usage(p, one_more).smem_bytes > smem_bytes


def test_the_tile_does_not_depend_on_capacity_or_batch():
    configs = [
        attention.default_config(
            problem(batch=batch, num_entries=entries, num_pages=pages, num_splits=4), H200
        )
        for batch, entries, pages in ((1, 9, 4), (300, 9, 4), (64, 100_000, 1_000_000))
    ]
    assert len({config.block_kv for config in configs}) == 1


@pytest.mark.parametrize("batch", [8, 32, 64, 256])
def test_parts_end_where_equal_rows_end(batch):
    """If few parts must be given up for it."""
    config = attention.default_config(problem(batch=batch), H200)
    assert config.num_parts == 32  # of 33
    assert batch % config.num_parts == 0 or config.num_parts % batch == 0


def test_more_shared_memory_for_more_stages():
    p = problem()
    sizes = [attention.usage(p, attention.Config(num_stages=n)).smem_bytes for n in (1, 2, 3)]
    tile = 64 * (128 + 128) * 2
    assert np.diff(sizes).tolist() == [tile, tile]


def test_workspace_is_the_pieces_of_cut_rows():
    p, parts = problem(), 33
    smaller, larger = (attention.usage(p, attention.Config(num_parts=n)) for n in (parts, 2 * parts))
    # Each part leaves at most two pieces: for 8 kv heads, 8 query heads' outputs, maxima and sums in float32.
    pieces = parts * 2 * 8 * 8 * (128 + 2) * 4
    assert pieces <= smaller.workspace_bytes <= 1.01 * pieces + 4096
    assert larger.workspace_bytes >= 2 * pieces


@pytest.mark.parametrize(
    ("sizes", "target", "reason"),
    [
        ({"dtype": np.dtype(np.float32)}, H200, "dtype float32 unsupported; supported: bfloat16, float16"),
        ({"head_dim": 8}, H200, "head_dim 8 unsupported; supported: multiples of 8 from 16 to 256"),
        ({"head_dim": 20}, H200, "head_dim 20 unsupported"),
        ({"head_dim": 264}, H200, "head_dim 264 unsupported"),
        ({"v_head_dim": 7}, H200, "v's head_dim 7 unsupported"),
        ({}, Target.parse("sm_80"), "is made for Hopper (sm_90), not for sm_80"),
        ({}, Target.parse("sm_100"), "is made for Hopper (sm_90), not for sm_100"),
        ({}, Target("tpu"), "is made for Hopper (sm_90), not for tpu"),
        ({"num_entries": 2**27}, H200, "positions would not fit in 32 bits"),
        ({"page_size": 2**30, "num_entries": 2}, H200, "positions would not fit in 32 bits"),
    ],
)
def test_reasons(sizes, target, reason):
    why = attention.why_not(problem(**sizes), target)
    assert why is not None
    assert why.startswith(reason)


def test_positions_that_just_fit():
    assert attention.why_not(problem(num_entries=2**27 - 64), H200) is None


def test_symbolic_shapes_are_a_reason():
    (batch,) = jax.export.symbolic_shape("b")
    assert attention.why_not(problem(batch=batch), H200) == "needs static shapes"


@pytest.mark.parametrize("name", ["block_kv", "num_stages", "num_parts"])
@pytest.mark.parametrize("value", [0, -64, 1.0, "64", None, True])
def test_a_config_checks_itself(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected an int of at least 1, got {value!r}"):
        attention.Config(**{name: value})


def test_a_tile_in_steps_of_the_matrix_unit():
    for block_kv in (1, 32, 100, 320):
        with pytest.raises(
            ValueError, match=f"^block_kv: expected a multiple of 64 up to 256, got {block_kv}"
        ):
            attention.Config(block_kv=block_kv)
    assert attention.Config(block_kv=128).block_kv == 128


def call(batch=64, num_pages=20_000, pages_per_row=256):
    """Workload A's shapes: 32 query heads, 8 kv heads, pages of 16 tokens."""
    q = jax.ShapeDtypeStruct((batch, 32, 128), BF16)
    pages = jax.ShapeDtypeStruct((num_pages, 8, 16, 128), BF16)
    tables = jax.ShapeDtypeStruct((batch, pages_per_row), np.int32)
    lens = jax.ShapeDtypeStruct((batch,), np.int32)
    return q, pages, pages, jax.eval_shape(PageTable.from_block_tables, tables, lens)


def test_explain():
    record = explain(paged_attention, *call(), target="sm_90", return_lse=True)
    expected = problem(num_pages=20_000, num_entries=64 * 256, return_lse=True)
    assert record.problem == expected
    assert record.config == attention.default_config(expected, H200)
    usage = attention.usage(expected, record.config)
    assert (record.smem_bytes, record.workspace_bytes) == (usage.smem_bytes, usage.workspace_bytes)
    # Two blocks fit a multiprocessor, whose 228 KB the blocks share with a kilobyte of the system's for each.
    assert 2 * (record.smem_bytes + 1024) <= 228 * 1024
    tiles = record.config.num_stages * record.config.block_kv * (128 + 128) * 2
    assert tiles <= record.smem_bytes <= tiles + 32 * 1024
    assert record.accumulator_dtype == "float32"
    assert record.deterministic


def test_explain_takes_a_config():
    config = attention.Config(block_kv=128, num_stages=1, num_parts=7)
    options = {"config": config, "implementation": "mosaic_gpu", "target": "sm_90"}
    record = explain(paged_attention, *call(), **options)
    assert record.config == config
    usage = attention.usage(problem(), config)
    assert (record.smem_bytes, record.workspace_bytes) == (usage.smem_bytes, usage.workspace_bytes)


def test_a_config_that_needs_too_much_shared_memory():
    options = {"config": attention.Config(num_stages=8), "implementation": "mosaic_gpu", "target": "sm_90"}
    with pytest.raises(ValueError, match=r"^config: expected .*232448 bytes of shared memory"):
        explain(paged_attention, *call(), **options)


def test_a_config_of_another_implementation():
    with pytest.raises(ValueError, match=r"^config: expected a .*mosaic_gpu\.attention\.Config"):
        explain(paged_attention, *call(), target="sm_90", config=xla_attention.Config())


def test_the_merge_of_fixed_splits_does_not_depend_on_the_batch():
    for heads, head_dim, num_splits in ((32, 128, 16), (16, 256, 8), (8, 64, 3)):
        sizes = {"num_q_heads": heads, "num_kv_heads": 8, "head_dim": head_dim, "num_splits": num_splits}
        plans = [
            plan.Plan(problem(batch=batch, num_entries=entries, **sizes), attention.Config(num_parts=parts))
            for batch, entries, parts in itertools.product((1, 17, 64, 500), (300, 40_000), (1, 33))
        ]
        assert len({merge_kernel.pieces_at_once(p) for p in plans}) == 1


def test_more_splits_than_a_row_has_tiles_take_no_more_room():
    few, many = (
        attention.usage(problem(num_entries=64, num_splits=n), attention.Config()) for n in (16, 10**9)
    )
    assert few == many
    why = attention.why_not(problem(num_entries=2**25, num_splits=10**9), H200)
    assert why is not None
    assert "num_splits" in why
