"""The kernel of latent attention: which calls it takes, how it cuts them, what they lower to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_mosaic_gpu_lowering import kernels_of

from jax_paged_attn import PageTable, dispatch, explain, mla_decode
from jax_paged_attn.kernels.mosaic_gpu.mla import Config
from jax_paged_attn.kernels.mosaic_gpu.rows import SearchedRows


def call(
    heads=128, rank=512, rope_dim=64, page_size=64, batch=128, dtype=jnp.bfloat16, q_len=None, cache=None
):
    shape = jax.ShapeDtypeStruct
    lead = (batch, heads) if q_len is None else (batch, q_len, heads)
    q_nope, q_pe = shape((*lead, rank), dtype), shape((*lead, rope_dim), dtype)
    pages = shape((40, page_size, rank + rope_dim), cache or dtype)
    entries, rows = shape((7 * batch,), jnp.int32), shape((batch,), jnp.int32)
    return q_nope, q_pe, pages, PageTable(entries, rows, rows, rows)  # pyright: ignore[reportArgumentType]


def explained(*arguments, **options):
    return explain(functools.partial(mla_decode, sm_scale=0.1, **options), *arguments, target="sm_90")


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": jnp.float32}, "dtype float32 unsupported"),
        ({"cache": jnp.float8_e4m3fn}, "a cache of float8_e4m3fn unsupported"),
        ({"rank": 96}, "kv_lora_rank 96 unsupported; supported: 128, 256, 384, 512"),
        ({"rope_dim": 16}, "rope_dim 16 unsupported; supported: 32, 64"),
        ({"page_size": 12}, "page_size 12 unsupported; supported: multiples of 8 from 16 on"),
        ({"page_size": 8}, "page_size 8 unsupported"),
    ],
)
def test_says_what_it_cannot_run(sizes, reason):
    record = explained(*call(**sizes))
    assert record.implementation == "xla"
    assert dict(record.passed_over)["mosaic_gpu"].startswith(reason)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({}, 64),  # two blocks of 64 heads: 66 parts, but 64 end where rows do
        ({"heads": 16}, 128),
        ({"batch": 48}, 66),
        ({"batch": 1}, 66),
        ({"heads": 128, "q_len": 2, "batch": 64}, 32),
        ({"heads": 128, "q_len": 200, "batch": 3}, 1),
    ],
)
def test_parts(sizes, parts):
    record = explained(*call(**sizes))
    assert (record.implementation, record.config) == ("mosaic_gpu", Config(num_parts=parts))


@pytest.mark.parametrize(("num_splits", "kernels"), [(None, 2), (1, 1), (3, 2)])
def test_lowers_to_kernels_alone(num_splits, kernels):
    options = {"sm_scale": 0.1, "num_splits": num_splits, "return_lse": True}
    assert kernels_of(mla_decode, *call(), **options) == kernels
    assert kernels_of(mla_decode, *call(), implementation="mosaic_gpu", **options) == kernels


def test_config_errors():
    for parts in (0, 70_000, 1.5):
        with pytest.raises(ValueError, match="num_parts: expected"):
            Config(num_parts=parts)  # pyright: ignore[reportArgumentType]
    assert Config(num_parts=np.int64(3)) == Config(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="config: expected"), dispatch.assume_target("sm_90"):
        explained(*call(), config=3)


class _Sums:
    """`SearchedRows` of running counts, without a kernel around them."""

    def __init__(self, tiles):
        self.tiles, self.batch, self.buffer = tiles, len(tiles), 0
        chunks = -(-len(tiles) // 128)
        counts = np.zeros((1, chunks, 256), np.int32)
        for b, count in enumerate(tiles):
            counts[0, b // 128, 128 + b % 128] = count
        self.sums_smem = jnp.asarray(np.concatenate([counts[..., :128], counts[..., 128:].cumsum(-1)], -1))
        self.sums = [None] * chunks
        self._chunk_total = lambda c: self.sums_smem[0, c, 255]

    def row(self, b):
        return int(b)


@pytest.mark.parametrize("batch", [1, 33, 128, 129, 300])
def test_finds_the_row_of_a_tile(batch):
    tiles = np.random.default_rng(batch).integers(1, 5, batch)
    owners = np.repeat(np.arange(batch), tiles)
    before = np.cumsum(tiles) - tiles
    rows = _Sums(tiles.tolist())
    edges = [row for row in (0, 1, 32, 127, 128, 129, 255, 256, batch - 1) if row < batch]
    for tile in {*map(int, before[edges]), *(int(before[row]) - 1 for row in edges[1:]), len(owners) - 1}:
        found, count = SearchedRows.find(rows, jnp.int32(tile))  # pyright: ignore[reportArgumentType]
        assert (found, int(count)) == (owners[tile], before[owners[tile]])
    found, _ = SearchedRows.find(rows, jnp.int32(len(owners)))  # pyright: ignore[reportArgumentType]
    assert found == batch - 1  # past the end
