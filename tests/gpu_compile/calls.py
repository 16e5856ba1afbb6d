"""The calls that have to compile for an H200: real models' heads, and the ways of calling."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_paged_attn
from jax_paged_attn.demo import model
from jax_paged_attn.kernels.mosaic_gpu.mla_plan import BLOCK_QUERIES, Config
from jax_paged_attn.validation import LAYOUT_AXES

H200_CORES = 132


def shape(dims: Any, dtype: Any) -> Any:
    """An array's stand-in, which passes for one."""
    return jax.ShapeDtypeStruct(dims, dtype)


@dataclasses.dataclass(frozen=True)
class Traceable:
    """What to compile: a function, its arguments as shapes, those it gives away, and a pool as it has it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    pool: jax.ShapeDtypeStruct | None = None


def pool_shape(kv_layout: str, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> list[int]:
    sizes = {
        "num_pages": num_pages,
        "num_kv_heads": num_kv_heads,
        "page_size": page_size,
        "head_dim": head_dim,
    }
    return [sizes[axis] for axis in LAYOUT_AXES[kv_layout]]


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of `paged_attention`; without `page_size` of `decode_attention`, with `total_q` a ragged one."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int = 64
    max_kv_len: int = 4096
    page_size: int | None = 16
    kv_layout: str = "HND"
    dtype: str = "bfloat16"
    kv_starts: bool = False
    v_head_dim: int | None = None  # head_dim
    stacked: bool = False  # called in a scan, whose iterations' results are stacked
    cache_dtype: str | None = None  # dtype
    scale: str | None = None  # what the scales of a quantized cache belong to: "head" or "token"
    modifiers: tuple[str, ...] = ()  # traced ones, but for `kv_starts`
    q_len: int | None = None  # one token a row, without an axis of its own
    total_q: int | None = None  # tokens of all rows
    mask_len: int = 20
    options: tuple[tuple[str, object], ...] = ()  # further keyword arguments
    spilled: int = 0  # bytes at most: of values that wait for a row's end while its tiles take all registers

    def traceable(self) -> Traceable:
        page_size = self.page_size or self.max_kv_len
        pages_per_row = -(-self.max_kv_len // page_size)
        cache = pool_shape(
            self.kv_layout, self.batch * pages_per_row, self.num_kv_heads, page_size, self.head_dim
        )
        lead = (self.batch,) if self.q_len is None else (self.batch, self.q_len)
        lead = lead if self.total_q is None else (self.total_q,)
        q = shape((*lead, self.num_q_heads, self.head_dim), self.dtype)
        of_modifiers = {
            "soft_cap": shape((), jnp.float32),
            "window_left": shape((), jnp.int32),
            "alibi_slopes": shape((self.num_q_heads,), jnp.float32),
            "sinks": shape((self.num_q_heads,), jnp.float32),
            "mask": shape((*lead, self.mask_len), jnp.bool_),
        }
        cache_dtype = self.cache_dtype or self.dtype
        k, v = (
            shape((*cache[:-1], dim), cache_dtype)
            for dim in (self.head_dim, self.v_head_dim or self.head_dim)
        )
        of_scales = {"head": (self.num_kv_heads,), "token": tuple(cache[:-1])}
        scales = (shape(of_scales[self.scale], jnp.float32) if self.scale else None,) * 2
        lens = shape((self.batch,), jnp.int32)
        function: Any = jax_paged_attn.paged_attention
        if self.page_size is None:
            function, where = jax_paged_attn.decode_attention, lens
        else:
            block_tables = shape((self.batch, pages_per_row), jnp.int32)
            where = jax.eval_shape(jax_paged_attn.PageTable.from_block_tables, block_tables, lens)
        if self.total_q is not None:
            function, where = ragged, (where, shape((self.batch + 1,), jnp.int32))

        def call(q, k, v, where, kv_starts, scales, modifiers, **more):
            k_scale, v_scale = scales
            options = dict(self.options, kv_layout=self.kv_layout, k_scale=k_scale, v_scale=v_scale)
            return function(q, k, v, where, kv_starts=kv_starts, **modifiers, **options, **more)

        return Traceable(
            stacked(call) if self.stacked else call,
            (
                *(q, k, v, where, lens if self.kv_starts else None, scales),
                {name: of_modifiers[name] for name in self.modifiers},
            ),
        )


def ragged(q, k, v, where, **options):
    return jax_paged_attn.ragged_paged_attention(q, k, v, *where, **options)


def stacked(function):
    """The function at three scales, in a loop that writes each result into a larger array."""

    def scanned(*arguments):
        def step(carry, sm_scale):
            return carry, function(*arguments, sm_scale=sm_scale)

        return jax.lax.scan(step, None, jnp.array([0.1, 0.2, 0.3]))[1]

    return scanned


@dataclasses.dataclass(frozen=True)
class Append:
    """One call of `append_paged_kv`, or with `num_q_heads` of `rope_append_paged_kv`; pools are donated."""

    num_tokens: int = 128
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    kv_layout: str = "HND"
    dtype: str = "bfloat16"
    pool_dtype: str | None = None  # dtype
    v_head_dim: int | None = None  # head_dim
    scale: str | None = None  # of "tensor", "head" or "token"
    num_q_heads: int | None = None
    rotary_dim: int | None = None  # head_dim
    table: bool = False  # of cosines and sines
    steps: int | None = None  # of a scan that carries the pools
    sliced: bool = False  # the pools are a slice of a larger array, as those of one layer
    tokens_sliced: bool = False  # the new tokens are slices of one array, and a rotated q goes into one
    scanned: bool = False  # over steps, whose tokens are slices and whose rotated queries are stacked

    def traceable(self) -> Traceable:
        tokens, heads, dims = (
            self.num_tokens,
            self.num_kv_heads,
            (self.head_dim, self.v_head_dim or self.head_dim),
        )
        pools = [
            shape(pool_shape(self.kv_layout, 4096, heads, self.page_size, dim), self.pool_dtype or self.dtype)
            for dim in dims
        ]
        news = [shape((tokens, heads, dim), self.dtype) for dim in dims]
        slots = shape((tokens,), jnp.int32)
        scales = {}
        if self.scale is not None:
            scale = {"tensor": (), "head": (heads,), "token": (tokens, heads)}[self.scale]
            scales = {name: shape(scale, jnp.float32) for name in ("k_scale", "v_scale")}
            if self.scale == "token":
                scales |= {f"{name}_pages": shape(pools[0].shape[:-1], jnp.float32) for name in scales}
        options: dict[str, Any] = {"kv_layout": self.kv_layout}
        if self.num_q_heads is None:

            def call(pools, news, slots, scales):
                (k_pages, v_pages), (k_new, v_new) = pools, news
                return jax_paged_attn.append_paged_kv(
                    k_pages, v_pages, k_new, v_new, slots, **scales, **options
                )

        else:
            q = shape((tokens, self.num_q_heads, self.head_dim), self.dtype)
            rotary_dim = self.rotary_dim or self.head_dim
            if self.table:
                frequencies = {"cos_sin": shape((4096, rotary_dim), jnp.float32)}
            else:
                frequencies = {"inv_freq": shape((rotary_dim // 2,), jnp.float32)}
            news = [q, *news, slots, frequencies]

            def call(pools, news, slots, scales):
                (k_pages, v_pages), (q, k_new, v_new, positions, frequencies) = pools, news
                return jax_paged_attn.rope_append_paged_kv(
                    q, k_new, v_new, positions, k_pages, v_pages, slots, **frequencies, **scales, **options
                )

        function = call if self.steps is None else functools.partial(carried, call, self.steps)
        if self.tokens_sliced:
            function, news = functools.partial(of_one_array, call), jax.tree.map(stack_of_3, news)
        if self.scanned:
            function = functools.partial(over_steps, call)
            news, slots = jax.tree.map(stack_of_3, (news, slots))
        if self.sliced:
            pools = shape((3, 2, *pools[0].shape), pools[0].dtype)
            function = functools.partial(of_a_layer, call)
            return Traceable(function, (pools, news, slots, scales))
        return Traceable(function, (pools, news, slots, scales), (0, 3), pools[0])


def stack_of_3(x):
    return shape((3, *x.shape), x.dtype)


def of_one_array(append, pools, news, slots, scales):
    """Append the middle of three; a rotated q goes back into the array that it comes from."""
    *q, k_pages, v_pages = append(pools, jax.tree.map(lambda x: x[1], news), slots, scales)
    return [news[0].at[1].set(q[0]) if q else None, k_pages, v_pages]


def over_steps(append, pools, news, slots, scales):
    """Append in a scan over steps that carries the pools and stacks rotated queries."""

    def step(pools, new):
        *q, k_pages, v_pages = append(pools, *new, scales)
        return (k_pages, v_pages), q

    return jax.lax.scan(step, tuple(pools), (news, slots))


def of_a_layer(append, pools, news, slots, scales):
    """Append to the pools of the middle layer and put them back."""
    updated = append((pools[1, 0], pools[1, 1]), news, slots, scales)
    return pools.at[1].set(jnp.stack(updated))


def carried(append, steps, pools, news, slots, scales):
    """Append in a scan that carries the pools, at other slots each time."""

    def step(pools, i):
        return append(pools, news, slots + i, scales), None

    return jax.lax.scan(step, tuple(pools), jnp.arange(steps, dtype=jnp.int32))[0]


@dataclasses.dataclass(frozen=True)
class DemoStep:
    """The demo's decode step of SmolLM2-135M: rotation, append and attention in every layer."""

    batch: int = 4

    def traceable(self) -> Traceable:
        config = model.LlamaConfig(30, 576, 9, 3, 64, 49152, 8192, 1e-5)
        hidden, ffn, q, kv = 576, 1536, 9 * 64, 3 * 64
        rows = {"attn_norm": (), "attn_q": (q,), "attn_k": (kv,), "attn_v": (kv,), "ffn_norm": ()}
        rows |= {"ffn_gate": (ffn,), "ffn_up": (ffn,)}
        weights = {name: shape((30, *lead, hidden), "bfloat16") for name, lead in rows.items()}
        weights["attn_output"] = shape((30, hidden, q), "bfloat16")
        weights["ffn_down"] = shape((30, hidden, ffn), "bfloat16")
        embd = shape((49152, hidden), "bfloat16")
        params = model.Params(
            embd, model.Layers(**weights), shape((hidden,), "bfloat16"), embd, shape((32,), "float32")
        )
        cache = jax.eval_shape(lambda: model.empty_cache(config, 1024, 16, "bfloat16"))
        ints = shape((self.batch,), jnp.int32)
        tables, scalar = shape((self.batch, 64), jnp.int32), shape((), jnp.int32)
        step = functools.partial(
            model.decode_step, config=config, sampling=model.Sampling(), implementation=None
        )
        pool = shape((30 * 1024, 3, 16, 64), "bfloat16")
        tokens = shape((self.batch, 1), jnp.int32)
        return Traceable(step, (params, cache, tokens, tables, ints, scalar), (1,), pool)


@dataclasses.dataclass(frozen=True)
class Mla:
    """One call of `mla_decode`."""

    num_heads: int = 128
    rank: int = 512
    rope_dim: int = 64
    batch: int = 128
    max_kv_len: int = 4096
    page_size: int = 64
    q_len: int | None = None
    dtype: str = "bfloat16"
    paired: bool = False
    stacked: bool = False  # called in a scan, whose iterations' results are stacked
    few_heads: bool = False  # asked for, rather than blocks of queries
    options: tuple[tuple[str, object], ...] = ()  # further keyword arguments

    @property
    def padded(self) -> bool:
        """Whether XLA pads the queries to whole blocks."""
        return not self.few_heads and self.num_heads * (self.q_len or 1) % BLOCK_QUERIES != 0

    def traceable(self) -> Traceable:
        lead = (self.batch, self.num_heads)
        if self.q_len is not None:
            lead = (self.batch, self.q_len, self.num_heads)
        q_nope, q_pe = (shape((*lead, dim), self.dtype) for dim in (self.rank, self.rope_dim))
        pages_per_row = -(-self.max_kv_len // self.page_size)
        pool = (self.batch * pages_per_row, self.page_size)
        pages: Any = shape((*pool, self.rank + self.rope_dim), self.dtype)
        if self.paired:
            pages = tuple(shape((*pool, dim), self.dtype) for dim in (self.rank, self.rope_dim))
        lens = shape((self.batch,), jnp.int32)
        tables = shape((self.batch, pages_per_row), jnp.int32)
        page_table = jax.eval_shape(jax_paged_attn.PageTable.from_block_tables, tables, lens)

        def call(q_nope, q_pe, pages, page_table, sm_scale=0.1):
            options: dict[str, Any] = dict(self.options, sm_scale=sm_scale)
            if self.few_heads:
                options["config"] = Config(num_parts=H200_CORES, few_heads=True)
            return jax_paged_attn.mla_decode(q_nope, q_pe, pages, page_table, **options)

        return Traceable(stacked(call) if self.stacked else call, (q_nope, q_pe, pages, page_table))


@dataclasses.dataclass(frozen=True)
class MlaAppend:
    """One call of `append_paged_mla_kv`; pools are donated."""

    num_tokens: int = 128
    rank: int = 512
    rope_dim: int = 64
    page_size: int = 64
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16")  # of cached latents and rotated keys
    paired: bool = False
    scale: str | None = None  # of "tensor" or "token"

    def traceable(self) -> Traceable:
        pool = (4096, self.page_size)
        pages: Any = shape((*pool, self.rank + self.rope_dim), self.dtypes[0])
        if self.paired:
            pair = zip((self.rank, self.rope_dim), self.dtypes, strict=True)
            pages = tuple(shape((*pool, dim), dtype) for dim, dtype in pair)
        news = [shape((self.num_tokens, dim), jnp.bfloat16) for dim in (self.rank, self.rope_dim)]
        scales = {}
        if self.scale == "tensor":
            scales = {"kv_scale": shape((), jnp.float32)}
        elif self.scale == "token":
            groups = self.rank // 128
            scales = {"kv_scale": shape((self.num_tokens, groups), jnp.float32)}
            scales["kv_scale_pages"] = shape((*pool, groups), jnp.float32)

        def call(pages, news, slots, scales):
            kv_latent, k_rope = news
            return jax_paged_attn.append_paged_mla_kv(pages, kv_latent, k_rope, slots, **scales)

        slots = shape((self.num_tokens,), jnp.int32)
        return Traceable(call, (pages, news, slots, scales), (0, 3), jax.tree.leaves(pages)[0])


@dataclasses.dataclass(frozen=True)
class Move:
    """One call of a function that moves parts of queries, keys or cache rows, or multiplies groups."""

    function: str
    shapes: tuple[tuple[int, ...], ...]
    donated: tuple[int, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def traceable(self) -> Traceable:
        arguments = tuple(shape(dims, jnp.bfloat16) for dims in self.shapes)
        function = functools.partial(getattr(jax_paged_attn, self.function), **dict(self.options))
        return Traceable(function, arguments, self.donated)


Call = Attention | Append | Mla | MlaAppend | DemoStep

MODELS = {
    "Llama-3 8B": (32, 8, 128),
    "Llama-3 70B": (64, 8, 128),
    "Qwen2.5 7B": (28, 4, 128),
    "Gemma-2 9B": (16, 8, 256),
    "Phi-3 mini": (32, 32, 96),
    "Phi-2": (32, 32, 80),
    "SmolLM2 135M": (9, 3, 64),
    "Falcon 7B": (71, 1, 64),
    "StarCoder 15B": (48, 1, 128),
}

# Groups named "further" take minutes and differ little from the others: CI leaves them out.
CALLS: dict[str, tuple[Call, ...]] = {
    model: (
        Attention(*heads, page_size=16),
        Attention(*heads, page_size=16, kv_layout="NHD", batch=1, max_kv_len=131072),
    )
    for model, heads in MODELS.items()
}
CALLS["models, further"] = tuple(
    call
    for heads in MODELS.values()
    for call in (
        Attention(*heads, page_size=64, kv_layout="NHD"),
        Attention(*heads, page_size=64, batch=8, max_kv_len=1024),
    )
)

llama = MODELS["Llama-3 8B"]
CALLS["page sizes"] = tuple(Attention(*llama, page_size=n) for n in (1, 12, 544))
CALLS["page sizes, further"] = tuple(Attention(*llama, page_size=n) for n in (8, 128, 2048))
CALLS["options"] = (
    Attention(*llama, kv_layout="HPND"),
    Attention(*llama, dtype="float16"),
    Attention(*llama, kv_starts=True),
    Attention(*llama, options=(("return_lse", True),)),
    Attention(*llama, options=(("num_splits", 4),)),
    Attention(*llama, page_size=None),
    Attention(*llama, page_size=None, kv_layout="NHD"),
)
CALLS["scan"] = (
    Attention(*llama, stacked=True),
    Attention(*llama, stacked=True, options=(("return_lse", True),)),
)
CALLS["limits"] = (
    # Most registers: the most query heads of a tile, in registers and in shared memory.
    Attention(32, 2, 256, options=(("return_lse", True),)),
    Attention(72, 1, 64, kv_starts=True, options=(("return_lse", True),)),
    Attention(71, 1, 128, options=(("num_splits", 4),), spilled=80),
    Attention(71, 1, 128, kv_starts=True, options=(("return_lse", True),), spilled=80),
    Attention(64, 2, 256, kv_starts=True),
    Attention(32, 8, 192, v_head_dim=128, options=(("return_lse", True),)),
    Attention(*llama, batch=512, kv_starts=True),
)
CALLS["limits, further"] = (
    Attention(71, 1, 128, dtype="float16", spilled=80),
    Attention(71, 1, 128, spilled=80),
    Attention(56, 1, 192, v_head_dim=128, kv_layout="NHD"),
    Attention(16, 16, 16, v_head_dim=256),
    Attention(*llama, batch=2, options=(("num_splits", 32), ("return_lse", True))),
)
E4M3, E5M2, INT8 = (
    functools.partial(Attention, cache_dtype=dtype) for dtype in ("float8_e4m3fn", "float8_e5m2", "int8")
)
CALLS["quantized"] = (
    E4M3(*llama, scale="head"),
    E4M3(*llama, scale="token"),
    E4M3(*llama, scale="token", page_size=100, kv_layout="HPND"),
    E5M2(*llama, page_size=544, kv_layout="NHD", scale="token"),
    INT8(32, 2, 192, scale="token", options=(("return_lse", True),)),
    INT8(64, 2, 256, scale="token"),
    E4M3(71, 1, 64, dtype="float16"),
    E4M3(32, 8, 80, v_head_dim=48, options=(("num_splits", 4),)),
)
CALLS["quantized, further"] = (
    E4M3(*llama, scale="token", page_size=2),
    E4M3(*llama, page_size=1, kv_layout="NHD"),
    INT8(*llama, page_size=12),
    E4M3(32, 8, 64),
    INT8(9, 3, 64, page_size=None, scale="head"),
)
ALL = ("soft_cap", "window_left", "alibi_slopes", "sinks")
CALLS["modifiers"] = (
    Attention(*llama, modifiers=ALL, options=(("return_lse", True),)),
    Attention(*llama, modifiers=ALL, page_size=None, batch=512, kv_starts=True),
    Attention(16, 8, 256, modifiers=("soft_cap", "window_left"), kv_starts=True),
    Attention(32, 2, 256, modifiers=ALL, kv_starts=True, options=(("return_lse", True),)),
    Attention(72, 1, 64, modifiers=ALL, kv_starts=True),
    Attention(40, 1, 192, v_head_dim=128, modifiers=ALL, kv_layout="NHD"),
    E4M3(*llama, modifiers=ALL, scale="token", kv_starts=True),
    INT8(64, 2, 256, modifiers=ALL, scale="token", kv_starts=True),
)
CALLS["modifiers, further"] = (
    Attention(*llama, modifiers=("window_left",)),
    Attention(*llama, modifiers=ALL, page_size=12, kv_layout="NHD"),
    Attention(*llama, modifiers=ALL, dtype="float16", options=(("num_splits", 4),)),
    Attention(64, 8, 64, modifiers=("window_left", "sinks"), options=(("return_lse", True),)),
    Attention(71, 1, 64, modifiers=ALL),
    Attention(96, 2, 128, modifiers=ALL),
    Attention(72, 1, 128, modifiers=("sinks", "window_left")),
    Attention(56, 1, 192, modifiers=ALL),
    Attention(64, 2, 256, modifiers=ALL),
    E4M3(*llama, modifiers=ALL),
    INT8(32, 2, 192, modifiers=ALL, scale="head", options=(("return_lse", True),)),
    E5M2(64, 4, 128, modifiers=ALL, kv_layout="NHD"),
)
CALLS["queries"] = (
    Attention(*llama, q_len=4, options=(("return_lse", True),)),
    Attention(*llama, q_len=4, modifiers=(*ALL, "mask"), kv_starts=True),
    Attention(*llama, q_len=8, modifiers=("mask",), mask_len=100),
    Attention(*llama, q_len=100, modifiers=("window_left",), page_size=64),
    Attention(*llama, q_len=7, page_size=None, batch=512, kv_starts=True),
    Attention(16, 8, 256, q_len=4, modifiers=("soft_cap", "window_left")),
    E4M3(*llama, q_len=4),
    E4M3(*llama, q_len=4, modifiers=(*ALL, "mask"), scale="token", kv_starts=True),
)
CALLS["queries, further"] = (
    Attention(*llama, q_len=2),
    Attention(*llama, q_len=4, modifiers=ALL, options=(("return_lse", True),)),
    Attention(*llama, q_len=8, options=(("causal", False),)),
    Attention(*llama, q_len=16, modifiers=(*ALL, "mask")),
    Attention(*llama, q_len=4, page_size=12, kv_layout="NHD", modifiers=ALL),
    Attention(*llama, modifiers=("mask",)),
    Attention(64, 8, 64, q_len=5, modifiers=("window_left", "sinks")),
    Attention(32, 2, 256, q_len=2, modifiers=(*ALL, "mask")),
    Attention(*llama, q_len=12, modifiers=(*ALL, "mask"), kv_starts=True),
    Attention(71, 1, 64, q_len=3, modifiers=(*ALL, "mask"), kv_starts=True),
    Attention(48, 1, 128, q_len=3, modifiers=(*ALL, "mask")),
    Attention(40, 1, 192, v_head_dim=128, q_len=2, modifiers=ALL),
    E4M3(*llama, q_len=2, modifiers=(*ALL, "mask"), scale="token", kv_starts=True),
    E4M3(64, 2, 256, q_len=3, modifiers=(*ALL, "mask")),
    INT8(64, 2, 256, q_len=3, modifiers=(*ALL[1:], "mask"), scale="token", kv_starts=True),
    E5M2(*llama, q_len=9, modifiers=ALL, kv_layout="NHD", scale="head"),
)
CALLS["ragged"] = (
    Attention(*llama, batch=122, total_q=4216, max_kv_len=8192),
    Attention(*llama, batch=64, total_q=256, modifiers=ALL, options=(("return_lse", True),)),
    E4M3(*llama, batch=8, total_q=4096, modifiers=("window_left",), scale="head", kv_starts=True),
)
CALLS["append"] = (
    Append(),
    Append(16384),
    Append(16384, kv_layout="NHD"),
    Append(40000, kv_layout="HPND"),
    Append(7, num_kv_heads=3, head_dim=64),
    Append(num_kv_heads=1, head_dim=24),
    Append(dtype="float32"),
    Append(head_dim=192, v_head_dim=128),
    Append(steps=4),
    Append(sliced=True),
    Append(tokens_sliced=True),
    Append(scanned=True),
)
CALLS["append, quantized"] = (
    Append(pool_dtype="float8_e4m3fn", scale="tensor"),
    Append(pool_dtype="float8_e5m2", scale="head", kv_layout="NHD"),
    Append(16384, pool_dtype="int8", scale="token"),
    Append(num_kv_heads=3, head_dim=80, pool_dtype="float8_e4m3fn", scale="token"),
    Append(dtype="float32", pool_dtype="int8"),
    Append(num_kv_heads=4, head_dim=256, dtype="float16", pool_dtype="float8_e4m3fn", scale="head"),
)
CALLS["append, rotated"] = (
    *(Append(num_q_heads=q, num_kv_heads=kv, head_dim=d) for q, kv, d in MODELS.values()),
    Append(16384, num_q_heads=32, pool_dtype="float8_e4m3fn", scale="tensor"),
    Append(num_q_heads=32, rotary_dim=64, table=True, pool_dtype="int8", scale="head", kv_layout="NHD"),
    Append(
        num_q_heads=9, num_kv_heads=3, head_dim=64, dtype="float16", pool_dtype="float8_e5m2", scale="token"
    ),
    Append(40000, num_q_heads=8, num_kv_heads=2, head_dim=128, dtype="float32"),
    Append(num_q_heads=32, table=True),
    Append(num_q_heads=32, tokens_sliced=True),
    Append(num_q_heads=32, scanned=True),
    Append(40000, num_q_heads=32, scanned=True),
    Append(16384, num_q_heads=32, num_kv_heads=32, dtype="float32"),  # the longest rows of all
)
CALLS["latent attention"] = (
    Mla(),
    Mla(64, options=(("return_lse", True),)),
    Mla(16, options=(("return_lse", True),)),
    Mla(16, few_heads=True, options=(("return_lse", True),)),
    Mla(48, rank=128, few_heads=True),
    Mla(71, rank=128),
    Mla(page_size=16, q_len=2, stacked=True),
    Mla(page_size=144, rank=256, rope_dim=32, options=(("num_splits", 1),)),
)
CALLS["latent attention, further"] = (
    Mla(5, rank=256, page_size=16, batch=8, few_heads=True),
    Mla(32, rank=256, few_heads=True, options=(("return_lse", True),)),
    Mla(16, rank=384, page_size=24, few_heads=True),
    Mla(page_size=16, paired=True, dtype="float16"),
    Mla(page_size=24, rank=256, batch=8),
    Mla(rank=384, batch=1, max_kv_len=65536, options=(("num_splits", 66), ("return_lse", True))),
    Mla(192, rank=128, q_len=3, batch=512, max_kv_len=64),
)
CALLS["latent append"] = (
    MlaAppend(),
    MlaAppend(16384, page_size=16),
    MlaAppend(rank=256, rope_dim=32),
    MlaAppend(paired=True),
    MlaAppend(dtypes=("float8_e4m3fn", "float8_e4m3fn"), scale="tensor"),
    MlaAppend(dtypes=("float8_e4m3fn", "bfloat16"), paired=True, scale="tensor"),
    MlaAppend(dtypes=("float8_e4m3fn", "bfloat16"), paired=True, scale="token"),
)
CALLS["demo"] = (DemoStep(),)

# Not kernels of ours: what XLA makes of them is one kernel each.
MOVES = (
    Move("mla_q_rope_extract", ((512, 128, 192),), options=(("nope", 128),)),
    Move("mla_q_rope_writeback", ((512, 128, 192), (512, 128, 64)), (0,), (("nope", 128),)),
    Move("mla_q_final_assemble", ((512, 128, 512), (512, 128, 64))),
    Move("mla_kv_assemble", ((512, 128, 256), (512, 64)), options=(("nope", 128),)),
    Move("mla_kv_assemble", ((512, 128, 320), (512, 64)), options=(("nope", 128), ("v_dim", 128))),
    Move("mla_cache_assemble", ((512, 512), (512, 64))),
    Move("mla_cache_assemble", ((512, 512), (512, 64)), options=(("v_form", "rope"),)),
    Move("grouped_gemm", ((512, 128 * 128), (128 * 512, 128)), options=(("num_groups", 128),)),
)
