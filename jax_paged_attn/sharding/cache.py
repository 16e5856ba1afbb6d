"""How a cache lies over a mesh of devices, and the calls on it, by `jax.shard_map`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental import checkify
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_paged_attn import append, decode, merge, paged, validation
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.sharding.local import local_lens, local_slots, local_table, merge_across
from jax_paged_attn.sharding.table import ShardedPageTable
from jax_paged_attn.validation import LAYOUT_AXES, Ints

# One mesh axis, several that count as one (the first the slowest), or none.
type Axes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class CacheSharding:
    """How a KV cache lies over the devices of a mesh, and the calls on such a cache.

    Every method takes the arguments of the function of its name and gives the same result. Arrays are those
    of the whole mesh, and no device ever sees another's part of the cache. The three ways may be combined;
    over mesh axes that are not named, everything is repeated.

    **Heads** (tensor parallel): each device has some kv heads and the query heads that attend to them. With
    more devices than kv heads, several devices keep the same head: the pools have as many heads as there are
    devices (`stored_kv_heads`), each head repeated in place; writes repeat the new tokens.

    **Rows** (data parallel): each device has some rows and a pool of its own, which only they use. The pools
    are one array, cut along ``num_pages``; page ids and slots are local to each pool. So that they can't be
    taken for ids of the whole array, tables are a `ShardedPageTable`, and slots [num_shards, num_tokens].

    **Context** (context parallel): each device has a part of every page, or of a contiguous cache's
    positions: the pools are cut along ``page_size``, which is that of the whole page. Rows are spread
    evenly however long they are, page tables and slots are as on one device. Each device attends to what it
    has; one exchange of outputs and lse (`merge_across`), which are rounded to q's dtype before it, makes the
    whole.

    Parameters
    ----------
    mesh : jax.sharding.Mesh
        Of any number of processes. With explicit axes, the pools have to come in as `pages_spec` says; with
        automatic ones, XLA moves what lies elsewhere, on every call: put the pools in place once.
    heads, rows, context : str or tuple[str, ...], optional
        Mesh axes over which each of these is cut.

    Raises
    ------
    ValueError
        If an axis isn't the mesh's, or is used twice.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax_paged_attn import PageTable
    >>> from jax_paged_attn.sharding import CacheSharding
    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> sharded = CacheSharding(mesh, heads="tp")
    >>> sharded.pages_spec("HND")
    P(None, 'tp', None, None)
    >>> k_pages = v_pages = jax.device_put(jnp.ones((3, 2, 16, 64)), sharded.pages_sharding("HND"))
    >>> page_table = PageTable.from_block_tables([[2, 0], [1, -1]], [20, 3])
    >>> jax.jit(sharded.paged_attention)(jnp.ones((2, 8, 64)), k_pages, v_pages, page_table).shape
    (2, 8, 64)
    """

    mesh: Mesh | AbstractMesh
    heads: Axes = None
    rows: Axes = None
    context: Axes = None

    def __post_init__(self):
        used = []
        for name in ("heads", "rows", "context"):
            axes = getattr(self, name)
            ok = axes is None or all(axis in self.mesh.axis_names for axis in _as_tuple(axes))
            validation.check(ok, name, f"axes of the mesh, {self.mesh.axis_names}", repr(axes))
            used += _as_tuple(axes)
        once = len(set(used)) == len(used)
        validation.check(once, "heads, rows, context", "each mesh axis once", f"{used}")

    def pages_spec(self, kv_layout: str = "HND") -> PartitionSpec:
        """How the pools lie over the mesh; the scales of tokens do as well, but for the last axis."""
        validation.check_layout(kv_layout)
        cuts = {"num_pages": self.rows, "num_kv_heads": self.heads, "page_size": self.context}
        return PartitionSpec(*(cuts.get(axis) for axis in LAYOUT_AXES[kv_layout]))

    def pages_sharding(self, kv_layout: str = "HND") -> NamedSharding:
        """`pages_spec` on the mesh, for `jax.device_put` or ``jax.jit``'s ``out_shardings``.

        A contiguous cache lies like a pool: its rows are the pages, its positions a page's tokens.
        """
        return NamedSharding(self.mesh, self.pages_spec(kv_layout))

    def stored_kv_heads(self, num_kv_heads: int) -> int:
        """How many heads the pools have: `num_kv_heads`, or one a device where those are more.

        Raises
        ------
        ValueError
            If neither number is a multiple of the other.
        """
        validation.check_positive_int("num_kv_heads", num_kv_heads)
        devices = self._devices(self.heads)
        fits = num_kv_heads % devices == 0 or devices % num_kv_heads == 0
        expected = f"a multiple or a divisor of the {devices} devices along {self.heads!r}"
        validation.check(fits, "num_kv_heads", expected, repr(num_kv_heads))
        return max(int(num_kv_heads), devices)

    def paged_attention(
        self,
        q: ArrayLike,
        k_pages: ArrayLike,
        v_pages: ArrayLike,
        page_table: PageTable | ShardedPageTable,
        **options: Any,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Attend over a sharded pool, as `jax_paged_attn.paged_attention`.

        Parameters
        ----------
        q : float[batch, num_q_heads, head_dim]
            Cut over rows and heads.
        k_pages, v_pages : float or int8
            As `pages_spec` says.
        page_table : PageTable or ShardedPageTable
            With `rows`, a `ShardedPageTable` of as many shards, cut along its first axis; else a `PageTable`,
            repeated on all devices.
        **options
            Of `jax_paged_attn.paged_attention`. Scales of heads, ``alibi_slopes`` and ``sinks`` are cut over
            heads, scales of tokens as the pools, ``kv_starts`` and ``mask`` over rows; others are repeated.
            With `context`, ``alibi_slopes``, ``mask`` and several query tokens a row are refused.
            ``validate_values`` checks each device's part: a local page id has to lie in its own pool.

        Returns
        -------
        out, or (out, lse)
            Cut over rows and heads; with `context`, heads are cut over its axes too where they divide.

        Raises
        ------
        ValueError
            If an argument is wrong, doesn't divide over the mesh, or the table is of the other kind.
        NotImplementedError
            As the function; or an option that `context` doesn't know.
        """
        if self.rows is None:
            wrong = isinstance(page_table, ShardedPageTable)
            validation.check(not wrong, "page_table", "a PageTable, as rows=None", "a ShardedPageTable")
            page_table = validation.as_page_table(page_table)
        else:
            shards = self._devices(self.rows)
            expected = f"a ShardedPageTable of {shards} shards, whose ids are local, as rows={self.rows!r}"
            if not isinstance(page_table, ShardedPageTable):
                raise ValueError(f"page_table: expected {expected}, got a {type(page_table).__name__}")
            found = page_table.num_shards
            validation.check(found == shards, "page_table", expected, f"one of {found}")
        arguments = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
        return _start(_attend, self, paged.paged_attention, arguments, options)

    def decode_attention(
        self, q: ArrayLike, k_cache: ArrayLike, v_cache: ArrayLike, kv_lens: Ints, **options: Any
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Attend over a sharded contiguous cache, as `jax_paged_attn.decode_attention`.

        Parameters
        ----------
        q : float[batch, num_q_heads, head_dim]
            Cut over rows and heads.
        k_cache, v_cache : float or int8
            As `pages_spec` says of pools: batch over rows, max_kv_len over context.
        kv_lens : int[batch] or an int scalar
            Cut over rows.
        **options
            As in `paged_attention`.

        Returns
        -------
        out, or (out, lse)
            As in `paged_attention`.

        Raises
        ------
        ValueError, NotImplementedError
            As `paged_attention`.
        """
        validation.check_layout(options.get("kv_layout", "HND"), ("HND", "NHD"))
        kv_lens = validation.as_int32("kv_lens", kv_lens)  # an int would count as a static option
        arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "kv_lens": kv_lens}
        return _start(_attend, self, decode.decode_attention, arguments, options)

    def append_paged_kv(
        self,
        k_pages: ArrayLike,
        v_pages: ArrayLike,
        k_new: ArrayLike,
        v_new: ArrayLike,
        slot_mapping: Ints,
        **options: Any,
    ) -> tuple[jax.Array, ...]:
        """Write new keys and values into a sharded pool, as `jax_paged_attn.append_paged_kv`.

        Parameters
        ----------
        k_pages, v_pages : float or int8
            As `pages_spec` says; updated in place where the caller's ``jax.jit`` donates them.
        k_new, v_new : float[num_tokens, num_kv_heads, head_dim]
            Cut over rows and heads; repeated where the pools repeat heads.
        slot_mapping : int[num_tokens], or with `rows` int[num_shards, num_tokens / num_shards]
            With `rows`, slots of each shard's own pool, from `ShardedPageTable.slot_mapping`, and cut along
            the first axis; else slots of the whole pool, repeated on all devices.
        **options
            Of `jax_paged_attn.append_paged_kv`. Scales of heads are cut over heads, those of tokens over rows
            and heads, pools of scales as the pools.

        Returns
        -------
        k_pages, v_pages
            Followed by the pools of scales that were given; cut as they came.

        Raises
        ------
        ValueError, NotImplementedError
            As the function; ValueError also if something doesn't divide over the mesh.
        """
        arguments = {"k_pages": k_pages, "v_pages": v_pages, "k_new": k_new, "v_new": v_new}
        arguments |= {"slot_mapping": slot_mapping}
        return _start(_append, self, append.append_paged_kv, arguments, options)

    def append_kv(
        self,
        k_cache: ArrayLike,
        v_cache: ArrayLike,
        k_new: ArrayLike,
        v_new: ArrayLike,
        kv_lens: Ints,
        **options: Any,
    ) -> tuple[jax.Array, ...]:
        """Write behind each row's tokens in a sharded contiguous cache, as `jax_paged_attn.append_kv`.

        Parameters
        ----------
        k_cache, v_cache : float or int8
            As `pages_spec` says of pools: batch over rows, max_kv_len over context.
        k_new, v_new : float[batch, num_new, num_kv_heads, head_dim]
            Cut over rows and heads; repeated where the cache repeats heads.
        kv_lens : int[batch] or an int scalar
            Tokens of each row before the append; cut over rows.
        **options
            Of `jax_paged_attn.append_kv`, cut as those of `append_paged_kv`.

        Returns
        -------
        k_cache, v_cache
            Followed by the caches of scales that were given; cut as they came.

        Raises
        ------
        ValueError, NotImplementedError
            As `append_paged_kv`.
        """
        kv_lens = validation.as_int32("kv_lens", kv_lens)  # an int would count as a static option
        validation.check_layout(options.get("kv_layout", "HND"), ("HND", "NHD"))
        arguments = {"k_cache": k_cache, "v_cache": v_cache, "k_new": k_new, "v_new": v_new}
        arguments |= {"kv_lens": kv_lens}
        return _start(_append, self, append.append_kv, arguments, options)

    def rope_append_paged_kv(
        self,
        q: ArrayLike,
        k_new: ArrayLike,
        v_new: ArrayLike,
        positions: Ints,
        k_pages: ArrayLike,
        v_pages: ArrayLike,
        slot_mapping: Ints,
        **options: Any,
    ) -> tuple[jax.Array, ...]:
        """Rotate q and k and write k and v, as `jax_paged_attn.rope_append_paged_kv`.

        Parameters
        ----------
        q : float[num_tokens, num_q_heads, head_dim]
            Cut over rows and heads.
        positions : int[num_tokens]
            Cut over rows.
        k_new, v_new, k_pages, v_pages, slot_mapping
            As in `append_paged_kv`.
        **options
            Of `jax_paged_attn.rope_append_paged_kv`.

        Returns
        -------
        q, k_pages, v_pages
            Followed by the pools of scales that were given; cut as they came.

        Raises
        ------
        ValueError, NotImplementedError
            As `append_paged_kv`.
        """
        arguments = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "k_new": k_new, "v_new": v_new}
        arguments |= {"positions": positions, "slot_mapping": slot_mapping}
        return _start(_append, self, append.rope_append_paged_kv, arguments, options)

    def _devices(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in _as_tuple(axes))

    def _check_divides(self, name: str, size: int, axes: Axes) -> None:
        devices = self._devices(axes)
        expected = f"a multiple of the {devices} devices along {axes!r}"
        validation.check(size % devices == 0, name, expected, f"an axis of {size}")

    def _specs(self, arrays: dict[str, Any], static: dict[str, Any]) -> dict[str, PartitionSpec]:
        """How each argument of any of the calls lies over the mesh."""
        cache = self.pages_spec(static.get("kv_layout", "HND"))
        shape_of_k = next(arrays[name].shape for name in ("k_pages", "k_cache") if name in arrays)
        cache = cache[4 - len(shape_of_k) :]  # an unbatched contiguous cache has no axis of rows
        of_new = (self.rows, None)[: arrays["k_new"].ndim - 2] if "k_new" in arrays else ()

        def spec(name, x):
            if name in ("k_pages", "v_pages", "k_cache", "v_cache"):
                return cache
            if name in _SCALE_CACHES:
                return cache[:-1]
            if name in ("k_scale", "v_scale") and x.ndim > 1:  # of new tokens, or of those in a cache
                return (*of_new[: x.ndim - 1], self.heads) if of_new else cache[:-1]
            if name in ("k_scale", "v_scale", "alibi_slopes", "sinks"):
                return (self.heads,) if x.ndim else ()
            if name == "q":
                return (*(self.rows, None)[: x.ndim - 2], self.heads, None)
            if name in ("k_new", "v_new"):
                return (*of_new, self.heads, None)
            if name == "page_table":
                return () if self.rows is None else (self.rows,)
            if name in ("positions", "slot_mapping", "kv_lens", "kv_starts", "mask"):
                return (self.rows,) if x.ndim else ()
            return ()

        return {name: PartitionSpec(*spec(name, x)) for name, x in arrays.items()}

    def _map(
        self,
        local: Callable[[dict[str, Any]], Any],
        arrays: dict[str, Any],
        specs: dict[str, PartitionSpec],
        out_specs: Any,
        *,
        check_vma: bool,
    ) -> Any:
        placed = {name: self._place(name, x, specs[name]) for name, x in arrays.items()}
        options: dict[str, Any] = {"mesh": self.mesh, "check_vma": check_vma}
        return jax.shard_map(local, in_specs=(specs,), out_specs=out_specs, **options)(placed)

    def _place(self, name: str, array: Any, spec: PartitionSpec) -> Any:
        """Check that an array can be cut, and where mesh axes are explicit, cut it."""
        if isinstance(array, jax.Array):
            for size, axes in zip(array.shape, spec, strict=False):
                self._check_divides(name, size, axes)
        if any(kind != AxisType.Explicit for kind in self.mesh.axis_types):
            return array
        if name not in _CACHES:
            return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(self.mesh, spec)), array)
        lies = tuple(axes for axes in jax.typeof(array).sharding.spec)
        wanted = (*spec, *[None] * (array.ndim - len(spec)))
        validation.check(lies == wanted, name, f"an array sharded as {spec}", f"one sharded as {lies}")
        return array


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call without its arrays; hashable, so that it can key a compilation.

    Attributes
    ----------
    run : callable
        `_attend` or `_append`.
    sharding : CacheSharding
        How the arrays lie.
    function : callable
        What each device calls.
    options : tuple[tuple[str, type, Any], ...]
        Those of its options that are static, with their types, as True equals 1.
    """

    run: Callable[["_Call", dict[str, Any]], Any]
    sharding: CacheSharding
    function: Callable[..., Any]
    options: tuple[tuple[str, type, Any], ...]

    @property
    def static(self) -> dict[str, Any]:
        return {name: value for name, _, value in self.options}


# Jitted, so that an eager call compiles once a shape.
@functools.partial(jax.jit, static_argnums=0)
def _run(call: _Call, arrays: dict[str, Any]) -> Any:
    return call.run(call, arrays)


def _start(
    run: Callable[..., Any],
    sharding: CacheSharding,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Tell arrays, which shard_map cuts, from static options, and run the call."""
    given = arguments | {name: value for name, value in options.items() if value is not None}
    static = {name: x for name, x in given.items() if isinstance(x, bool | str | int) or name == "config"}
    arrays = {name: _as_array(name, x) for name, x in given.items() if name not in static}
    call = _Call(run, sharding, function, tuple((name, type(x), x) for name, x in sorted(static.items())))
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays))
    if static.get("validate_values") is not True or traced:
        return _run(call, arrays)
    # Values are always traced within shard_map: what is concrete outside of it raises here.
    error, results = checkify.checkify(functools.partial(_run, call))(arrays)
    message = error.get()
    if message is not None:
        raise ValueError(message.removesuffix(" (`check` failed)"))
    return results


def _attend(call: _Call, arrays: dict[str, Any]) -> Any:
    sharding, static = call.sharding, call.static
    return_lse, context = static.get("return_lse", False), sharding.context
    validation.check_bool("return_lse", return_lse)
    q = arrays["q"]
    validation.check(q.ndim in (2, 3, 4), "q", "shape [batch, num_q_heads, head_dim]", f"shape {q.shape}")
    specs = sharding._specs(arrays, static)
    scattered = False
    if context is not None:
        refused = [name for name in ("alibi_slopes", "mask") if name in arrays]
        refused += ["q of several tokens a row"] if q.ndim == 4 else []
        if refused:
            raise NotImplementedError(f"{refused[0]}: can't be had with {context=}")
        devices = sharding._devices(sharding.heads) * sharding._devices(context)
        scattered = q.shape[-2] % devices == 0

    def local(arrays):
        if isinstance(table := arrays.get("page_table"), ShardedPageTable):
            arrays["page_table"] = jax.tree.map(lambda x: x[0], table.tables)
        if context is None:
            return call.function(**arrays, **static)
        out, lse = _attend_to_part(call.function, arrays, static, context)
        out, lse = merge_across(out, lse, context, scatter_axis=lse.ndim - 1 if scattered else None)
        return (out, lse) if return_lse else out

    rows = specs["q"][:-2]
    heads = _as_tuple(sharding.heads) + scattered * _as_tuple(context)
    lse_spec, out_spec = PartitionSpec(*rows, heads or None), PartitionSpec(*rows, heads or None, None)
    out_specs = (out_spec, lse_spec) if return_lse else out_spec
    return sharding._map(local, arrays, specs, out_specs, check_vma=True)


def _append(call: _Call, arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
    sharding, static, k_new = call.sharding, call.static, arrays["k_new"]
    paged = "k_pages" in arrays
    axes = ("num_tokens" if paged else "batch, num_new", "num_kv_heads", "head_dim")
    ok = k_new.ndim == (3 if paged else 4)
    validation.check(ok, "k_new", f"shape [{', '.join(axes)}]", f"shape {k_new.shape}")
    num_kv_heads, heads_axis = k_new.shape[-2], k_new.ndim - 2
    if paged:
        tokens, shards = k_new.shape[0], sharding._devices(sharding.rows)
        sharding._check_divides("k_new", tokens, sharding.rows)
        slots_shape = (tokens,) if sharding.rows is None else (shards, tokens // shards)
        validation.check_shape("slot_mapping", arrays["slot_mapping"], slots_shape)
    specs = sharding._specs(arrays, static)
    # Where devices share a kv head, each takes what is new of the one that it keeps.
    copies = sharding.stored_kv_heads(num_kv_heads) // num_kv_heads
    shared = {
        name: min(arrays[name].ndim - 1, heads_axis)
        for name in ("k_new", "v_new", "k_scale", "v_scale")
        if copies > 1 and name in arrays and arrays[name].ndim
    }
    shared = {name: axis for name, axis in shared.items() if arrays[name].shape[axis] == num_kv_heads}
    specs |= {name: PartitionSpec(*specs[name][:axis]) for name, axis in shared.items()}

    def local(arrays):
        for name, axis in shared.items():
            head = lax.axis_index(_as_tuple(sharding.heads)) // copies
            arrays[name] = lax.dynamic_slice_in_dim(arrays[name], head, 1, axis)
        if paged and sharding.rows is not None:
            arrays["slot_mapping"] = arrays["slot_mapping"][0]
        if sharding.context is None:
            return call.function(**arrays, **static)
        page_size = _tokens_of_a_page(arrays["k_pages" if paged else "k_cache"], static)
        if not paged:
            arrays = _as_pages(arrays, page_size * sharding._devices(sharding.context), static)
        slots = local_slots(arrays["slot_mapping"], sharding.context, page_size=page_size)
        function = append.append_paged_kv if not paged else call.function
        return function(**arrays | {"slot_mapping": slots}, **static)

    results = ("q", *_CACHES)
    out_specs = tuple(specs[name] for name in results if name in arrays)
    # Kernels don't update arrays that JAX tracks as varying over a mesh.
    return sharding._map(local, arrays, specs, out_specs, check_vma=False)


def _as_pages(arrays: dict[str, Any], max_kv_len: int, static: dict[str, Any]) -> dict[str, Any]:
    """Turn the arguments of `append_kv` into those of `append_paged_kv`: a row is a page."""
    batch, num_new = arrays["k_new"].shape[:2]
    kv_lens = arrays.pop("kv_lens")
    if static.get("validate_values"):
        append.check_room(kv_lens, num_new, max_kv_len)
    for name in ("k_new", "v_new", "k_scale", "v_scale"):
        if name in arrays and arrays[name].ndim > 1:
            arrays[name] = arrays[name].reshape(batch * num_new, *arrays[name].shape[2:])
    slots = append.slots_behind(kv_lens, batch, num_new, max_kv_len)
    return {name.replace("cache", "pages"): x for name, x in arrays.items()} | {"slot_mapping": slots}


def _attend_to_part(
    function: Callable[..., Any], arrays: dict[str, Any], static: dict[str, Any], axis_name: Any
) -> tuple[jax.Array, jax.Array]:
    """Attend to the part of each row that this device has: what concerns positions, turned into its own."""
    k = arrays["k_pages"] if "k_pages" in arrays else arrays["k_cache"]
    page_size = _tokens_of_a_page(k, static)
    tokens = page_size * lax.axis_size(axis_name)  # of a whole page
    static = static | {"return_lse": True}
    if "page_table" in arrays:
        table = arrays["page_table"]
        kv_lens = table.clipped(tokens)[1]
        arrays["page_table"] = local_table(table, axis_name, page_size=page_size)
    else:
        kv_lens = jnp.broadcast_to(jnp.clip(arrays["kv_lens"], 0, tokens), arrays["q"].shape[:-2])
        arrays["kv_lens"] = local_lens(arrays["kv_lens"], axis_name, page_size=page_size)
    window_left = arrays.pop("window_left", static.pop("window_left", None))
    if window_left is not None:  # of one query token, which is the last
        first = jnp.where(window_left < 0, 0, jnp.maximum(kv_lens - 1 - window_left, 0))
        arrays["kv_starts"] = jnp.maximum(arrays.get("kv_starts", 0), first)
    if "kv_starts" in arrays:
        arrays["kv_starts"] = local_lens(arrays["kv_starts"], axis_name, page_size=page_size)
    sinks = arrays.pop("sinks", None)
    out, lse = function(**arrays, **static)
    if sinks is not None:  # a state of its own, which one device adds
        mine = jnp.where(lax.axis_index(axis_name) == 0, sinks.astype(jnp.float32), -jnp.inf)
        out, lse = merge.merge_state(out, lse, jnp.zeros_like(out), jnp.broadcast_to(mine, lse.shape))
    return out, lse


# What of the cache is given; the rest of a call's arrays is small.
_SCALE_CACHES = ("k_scale_pages", "v_scale_pages", "k_scale_cache", "v_scale_cache")
_CACHES = ("k_pages", "v_pages", "k_cache", "v_cache", *_SCALE_CACHES)
_INTS = ("kv_lens", "kv_starts", "positions", "slot_mapping")


def _as_tuple(axes: Axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _tokens_of_a_page(cache: jax.Array, static: dict[str, Any]) -> int:
    axes = LAYOUT_AXES[static.get("kv_layout", "HND")]
    return cache.shape[axes.index("page_size") - 4]


def _as_array(name: str, value: Any) -> Any:
    if isinstance(value, PageTable | ShardedPageTable):
        return value
    return validation.as_int32(name, value) if name in _INTS else validation.as_array(name, value)
