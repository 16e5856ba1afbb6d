"""The writing of new tokens into a cache, with rotation and quantization on the way."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import validation
from jax_paged_attn.dispatch import Operation
from jax_paged_attn.validation import LAYOUT_AXES, QUANTIZED_DTYPES


@dataclasses.dataclass(frozen=True)
class Rotation:
    """What is static about the rotary embedding of q and k.

    Attributes
    ----------
    num_q_heads : int
        Heads of q, which has k's head_dim and dtype.
    rotary_dim : int
        Leading columns of each head that are rotated.
    interleaved : bool
        Whether pairs are neighbours, rather than half of `rotary_dim` apart.
    table_positions : int or None
        Rows of the table of cosines and sines; None where frequencies are given instead.
    """

    num_q_heads: int
    rotary_dim: int
    interleaved: bool
    table_positions: int | None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static about one append. Hashable; dimensions may be symbolic (`jax.export`).

    Attributes
    ----------
    num_tokens, num_kv_heads, head_dim, v_head_dim : int
        Sizes of the new keys and values.
    page_size, num_pages : int
        Tokens a page, pages in the pool.
    dtype, k_dtype, v_dtype : numpy.dtype
        Of the new tokens (and q), of the pool of keys, of the pool of values.
    kv_layout : str
        A key of `LAYOUT_AXES`.
    k_scale, v_scale : str or None
        What the scales of a quantized pool belong to: "tensor", "head" or "token"; None is a scale of 1.
    rotation : Rotation or None
        Of q and k; None leaves q out and k as it is.
    joined : bool
        Whether values lie behind the keys in the rows of one pool, `k_pages`, and there is no `v_pages`.
    """

    num_tokens: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    num_pages: int
    dtype: np.dtype
    k_dtype: np.dtype
    v_dtype: np.dtype
    kv_layout: str = "HND"
    k_scale: str | None = None
    v_scale: str | None = None
    rotation: Rotation | None = None
    joined: bool = False

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds, of which slots reach no more than int32 does."""
        slots = self.num_pages * self.page_size
        return min(slots, 2**31 - 1) if isinstance(slots, int) else slots

    @property
    def is_symbolic(self) -> bool:
        """Whether any dimension is symbolic."""
        return validation.is_symbolic(self) or (
            self.rotation is not None and validation.is_symbolic(self.rotation)
        )

    @property
    def is_empty(self) -> bool:
        """Whether the shapes alone say that nothing is written, nor rotated."""
        return self.num_tokens == 0 or (self.rotation is None and 0 in (self.num_pages, self.page_size))

    def nonempty(self) -> "Problem":
        """Return the smallest problem of this kind that isn't empty."""
        sizes = ("num_tokens", "page_size", "num_pages")
        return dataclasses.replace(self, **{name: max(getattr(self, name), 1) for name in sizes})


class RotationOperands(NamedTuple):
    """`frequencies`: a table [positions, rotary_dim] of cosines, then sines, or float32[rotary_dim / 2]."""

    q: jax.Array
    positions: jax.Array
    frequencies: jax.Array


class Operands(NamedTuple):
    """What an implementation computes with.

    Scales are float32[1], float32[num_kv_heads] or float32[num_tokens, num_kv_heads], as the problem says.
    """

    k_pages: jax.Array
    v_pages: jax.Array | None
    k_new: jax.Array
    v_new: jax.Array
    slots: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    k_scale_pages: jax.Array | None = None
    v_scale_pages: jax.Array | None = None
    rotation: RotationOperands | None = None


class Results(NamedTuple):
    """The updated pools; the scale pages and q where the call has them."""

    k_pages: jax.Array
    v_pages: jax.Array | None = None
    k_scale_pages: jax.Array | None = None
    v_scale_pages: jax.Array | None = None
    q: jax.Array | None = None


def nothing(problem: Problem, operands: Operands) -> Results:
    """Yield the pools as they are."""
    x = operands
    return Results(
        x.k_pages, x.v_pages, x.k_scale_pages, x.v_scale_pages, None if x.rotation is None else x.rotation.q
    )


def fold(
    problem: Problem, size: int, batched: Operands, operands: Operands
) -> tuple[Problem, Operands] | None:
    """Fold a mapped axis of `size` into the pages and the tokens, if pages lead and slots stay in int32.

    Each element has a pool of its own, also where all are given the same one.
    """
    shared = [(batched.k_scale, problem.k_scale), (batched.v_scale, problem.v_scale)]
    if (
        LAYOUT_AXES[problem.kv_layout][0] != "num_pages"
        or (not jax.export.is_symbolic_dim(slots := size * problem.num_slots) and slots >= 2**31)
        or any(mapped and kind != "token" for mapped, kind in shared)
        or (batched.rotation is not None and batched.rotation.frequencies)
    ):
        return None

    def join(array, has_axis):
        array = array if has_axis else jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(size * array.shape[1], *array.shape[2:])

    each = jax.tree.map(join, operands, batched)
    slots = each.slots.reshape(size, problem.num_tokens)
    first = problem.num_slots * jnp.arange(size, dtype=jnp.int32)[:, None]
    slots = jnp.where((slots >= 0) & (slots < problem.num_slots), slots + first, -1)
    each = each._replace(slots=slots.reshape(each.slots.shape))
    if problem.k_scale != "token":
        each = each._replace(k_scale=operands.k_scale)
    if problem.v_scale != "token":
        each = each._replace(v_scale=operands.v_scale)
    if operands.rotation is not None and each.rotation is not None:
        each = each._replace(rotation=each.rotation._replace(frequencies=operands.rotation.frequencies))
    sizes = {"num_tokens": size * problem.num_tokens, "num_pages": size * problem.num_pages}
    return dataclasses.replace(problem, **sizes), each


APPEND = Operation(
    "append",
    ("append_paged_kv", "append_kv", "rope_append_paged_kv", "append_paged_mla_kv"),
    nothing,
    fold,
    in_place=True,
)


def describe(operands: Operands, *, kv_layout: str, names: dict[str, str]) -> Problem:
    """Check the shapes and dtypes of an append without rotation and describe it.

    `operands` has scales as the caller gave them, as arrays. `names` are what the caller knows "k_pages",
    "v_pages", "k_new", "v_new" and the scale pages by.
    """
    x = operands
    assert x.v_pages is not None
    validation.check_layout(kv_layout)
    validation.check_cache_shapes(x.k_pages, x.v_pages, kv_layout, (names["k_pages"], names["v_pages"]))
    sizes = dict(zip(LAYOUT_AXES[kv_layout], x.k_pages.shape, strict=True))
    num_kv_heads = sizes["num_kv_heads"]
    expected = "shape [num_tokens, num_kv_heads, head_dim]"
    validation.check(x.k_new.ndim == 3, names["k_new"], expected, f"shape {x.k_new.shape}")
    num_tokens = x.k_new.shape[0]
    validation.check_shape("slot_mapping", x.slots, (num_tokens,))
    for name, pages in (("k", x.k_pages), ("v", x.v_pages)):
        new, new_name, pages_name = getattr(x, f"{name}_new"), names[f"{name}_new"], names[f"{name}_pages"]
        validation.check_shape(new_name, new, (num_tokens, num_kv_heads, pages.shape[-1]))
        validation.check(
            new.dtype.name in validation.DTYPES,
            new_name,
            f"a dtype of {validation.DTYPES}",
            f"dtype {new.dtype}",
        )
        validation.check(
            pages.dtype.name in QUANTIZED_DTYPES or pages.dtype == new.dtype,
            pages_name,
            f"the dtype of {new_name}, {new.dtype}, or one of {QUANTIZED_DTYPES}",
            f"dtype {pages.dtype}",
        )
        for size in (num_kv_heads, pages.shape[-1]):
            validation.check(
                size != 0, pages_name, "at least one head and head_dim at least 1", "an axis of size 0"
            )
    validation.check(
        x.v_new.dtype == x.k_new.dtype,
        names["v_new"],
        f"the dtype of {names['k_new']}, {x.k_new.dtype}",
        f"dtype {x.v_new.dtype}",
    )
    return Problem(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        head_dim=x.k_pages.shape[-1],
        v_head_dim=x.v_pages.shape[-1],
        page_size=sizes["page_size"],
        num_pages=sizes["num_pages"],
        dtype=np.dtype(x.k_new.dtype),
        k_dtype=np.dtype(x.k_pages.dtype),
        v_dtype=np.dtype(x.v_pages.dtype),
        kv_layout=kv_layout,
        k_scale=_scale_kind("k", x, num_tokens, num_kv_heads, names),
        v_scale=_scale_kind("v", x, num_tokens, num_kv_heads, names),
    )


def _scale_kind(
    name: str, operands: Operands, num_tokens: int, num_kv_heads: int, names: dict[str, str]
) -> str | None:
    """Check the scale of keys ("k") or values ("v") and its pages; say what it belongs to."""
    scale_name, scale = f"{name}_scale", getattr(operands, f"{name}_scale")
    scale_pages_name, scale_pages = names[f"{name}_scale_pages"], getattr(operands, f"{name}_scale_pages")
    pages_name, pages = names[f"{name}_pages"], getattr(operands, f"{name}_pages")
    kinds = {(): "tensor", (num_kv_heads,): "head", (num_tokens, num_kv_heads): "token"}
    kind = validation.scale_kind(scale_name, scale, pages_name, pages, kinds)
    if kind == "token":
        expected = f"room for the scales of {scale_name}"
        validation.check(scale_pages is not None, scale_pages_name, expected, "None")
    if scale_pages is not None:
        expected = f"a {scale_name} of shape ({num_tokens}, {num_kv_heads}) for {scale_pages_name}"
        validation.check(
            kind == "token", scale_name, expected, "None" if scale is None else f"shape {scale.shape}"
        )
        validation.check_shape(scale_pages_name, scale_pages, pages.shape[:-1])
        got = f"dtype {scale_pages.dtype}"
        validation.check(scale_pages.dtype == jnp.float32, scale_pages_name, "dtype float32", got)
    return kind


def describe_rotation(problem: Problem, rotation: RotationOperands, *, interleaved: bool) -> Problem:
    """Check q and its positions against a described append, and add its rotation."""
    q, positions, frequencies = rotation
    tokens = (problem.num_tokens,)
    expected = "shape [num_tokens, num_q_heads, head_dim]"
    validation.check(q.ndim == 3, "q", expected, f"shape {q.shape}")
    validation.check(q.shape[1] != 0, "q", "at least one head", f"shape {q.shape}")
    validation.check_shape("q", q, (*tokens, q.shape[1], problem.head_dim))
    validation.check(
        q.dtype == problem.dtype, "q", f"the dtype of k_new, {problem.dtype}", f"dtype {q.dtype}"
    )
    validation.check_shape("positions", positions, tokens)
    from_table = frequencies.ndim == 2
    return dataclasses.replace(
        problem,
        rotation=Rotation(
            num_q_heads=q.shape[1],
            rotary_dim=frequencies.shape[-1] if from_table else 2 * frequencies.shape[0],
            interleaved=interleaved,
            table_positions=frequencies.shape[0] if from_table else None,
        ),
    )


def check_slots(problem: Problem, slots: jax.Array) -> None:
    """Check that no slot lies past the pool; those below 0 are skipped by intent."""
    _, (slots,) = validation.value_module(slots)
    expected = f"slots below {problem.num_slots}, or negative ones to skip"
    validation.check_values(slots < problem.num_slots, "slot_mapping", expected, slots)
