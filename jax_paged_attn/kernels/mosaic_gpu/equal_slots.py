"""Which of several tokens for one slot is the last: that one alone is written.

A block writes a run of tokens. It enters their slots into a hash table in its shared memory, which keeps the
last token of each, then looks up the slots of all later tokens, and notes those that it finds. A token is
written if its slot still has it as the last.

Every thread follows its own slots through the table, which is written in PTX; beside it stands a plain twin
that interpret mode runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from .inline import address, array_of, asm, i32, int32, int64, meet, read_only
from .integers import ceil_div, round_up
from .layouts import THREADS

# Of the hash table for each own token: the more, the fewer slots have to be looked for beyond their hash.
ENTRIES_PER_TOKEN, MIN_ENTRIES = 16, 64
# Slots that lie side by side in the table too, as they mostly come: a warp then reads all banks at once.
LINE_BITS = 5
LINE = 1 << LINE_BITS
SLOTS_AT_ONCE = 32  # that a thread loads before it looks the first of them up
MULTIPLIER = 0x9E3779B1  # 2**32 over the golden ratio, as D. E. Knuth hashes by multiplication
NO_SLOT, NO_TOKEN, LATER_TOKEN = -1, -1, 2**31 - 1
# The bit of an entry that says that another slot has this hash, or came by on its way, and lies further on.
PASSED = -(2**31)

# From the hash of a slot on, entry by entry, until one has the slot or none.
PROBE = """{{
    .reg .pred here;
    .reg .b32 entry, at, key;
    shr.u32 entry, {slot}, {line_bits};
    mul.lo.u32 entry, entry, {multiplier};
    shr.u32 entry, entry, {shift};
    shl.b32 entry, entry, {line_bits};
    and.b32 key, {slot}, {line} - 1;
    add.u32 entry, entry, key;
probe:
    mad.lo.u32 at, entry, 4, {table};
    {read}
    setp.eq.s32 here, key, {no_slot};
    @here bra none;
    and.b32 key, key, 0x7FFFFFFF;
    setp.eq.s32 here, key, {slot};
    @here bra found;
    {passed}
    add.u32 entry, entry, {line};
    and.b32 entry, entry, {mask};
    bra probe;
none:
    {none}
    bra end;
found:
    {found}
end:
}}"""


@dataclasses.dataclass(frozen=True)
class EqualSlots:
    """The search for the last token of each slot, by a block.

    Attributes
    ----------
    start, end : int
        The tokens that the launch writes.
    num_slots : int
        Slots of the pool.
    own_tokens : int
        Tokens of a block at most, past the end included.
    warpgroups : int
        Warpgroups of a block.
    """

    start: int
    end: int
    num_slots: int
    own_tokens: int
    warpgroups: int

    @property
    def entries(self) -> int:
        """Of the hash table, a power of two."""
        return max(MIN_ENTRIES, 1 << (ENTRIES_PER_TOKEN * self.own_tokens - 1).bit_length())

    def scratch(self) -> dict[str, Any]:
        """What the warpgroups share."""
        return {
            "kept_smem": plgpu.SMEM((round_up(self.own_tokens, 32),), jnp.int32),
            "table_smem": plgpu.SMEM((2, self.entries), jnp.int32),  # slots, and the last token of each
            "kept_ready": plgpu.Barrier(num_arrivals=self.warpgroups),
        }

    def fetch(self, slots_gmem: Any, begin: Any, count: Any, *, interpret: bool) -> jax.Array:
        """Begin to load the slots that `find` looks at first: for each thread one of its own, and later ones.

        Called before large copies begin, behind which these loads would queue.
        """
        shape = (THREADS * (1 + self._at_once),)
        if interpret:
            return jnp.zeros(shape, jnp.int32)
        scalar, layout = plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_STRIDED(shape, vec_size=1)
        return plgpu.inline_mgpu(
            arg_types=(read_only(), scalar, scalar),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout),
        )(
            lambda _, slots, begin, count: _strided_array(
                self._fetch(address(slots, int64()), begin.registers.item(), count.registers.item()), layout
            )
        )(slots_gmem, begin, count)

    def find(
        self,
        fetched: jax.Array,
        slots_gmem: Any,
        begin: Any,
        count: Any,
        warpgroup: Any,
        refs: dict[str, Any],
        *,
        interpret: bool,
    ) -> None:
        """Put the slots of the block's tokens, `count` from `begin` on, into "kept_smem".

        In place of those that are not to be written comes `NO_SLOT`.
        """
        if interpret:
            pl.when(warpgroup == 0)(lambda: self._find_plainly(slots_gmem, begin, refs["kept_smem"]))
        else:
            scalar, ref = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()
            layout = plgpu.Layout.WG_STRIDED(fetched.shape, vec_size=1)
            plgpu.inline_mgpu(arg_types=(layout, read_only(), scalar, scalar, ref, ref))(
                lambda _, fetched, slots, begin, count, kept, table: self._find(
                    [vector.extract(x, [], [0]) for x in fetched.registers.ravel()],
                    address(slots, int64()),
                    begin.registers.item(),
                    count.registers.item(),
                    address(kept, int32()),
                    address(table, int32()),
                )
            )(fetched, slots_gmem, begin, count, refs["kept_smem"], refs["table_smem"])
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["kept_ready"])
        plgpu.barrier_wait(refs["kept_ready"])

    def _find_plainly(self, slots_gmem: Any, begin: Any, kept_smem: Any) -> None:
        slots = slots_gmem[...]
        tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
        valid = (tokens < self.end) & (slots >= 0) & (slots < self.num_slots)
        own = begin + jnp.arange(kept_smem.shape[0], dtype=jnp.int32)
        at = jnp.minimum(own, slots.shape[0] - 1)
        later = (slots == slots[at][:, None]) & (tokens > own[:, None]) & valid
        kept = (own == at) & valid[at] & ~later.any(axis=1)
        kept_smem[...] = jnp.where(kept, slots[at], NO_SLOT)

    @property
    def _threads(self) -> int:
        return self.warpgroups * THREADS

    @property
    def _at_once(self) -> int:
        return min(SLOTS_AT_ONCE, ceil_div(self.end - self.start, self._threads))

    def _slot(self, slots: ir.Value, token: ir.Value) -> ir.Value:
        """The slot of a token, or `NO_SLOT`."""
        at = arith.extui(int64(), arith.minsi(token, i32(self.end - 1)))
        at = arith.addi(slots, arith.muli(at, utils.c(4, int64())))
        slot = llvm.load(int32(), llvm.inttoptr(llvm.PointerType.get(1), at))
        exists = arith.cmpi(arith.CmpIPredicate.slt, token, i32(self.end))
        valid = arith.cmpi(arith.CmpIPredicate.ult, slot, i32(self.num_slots))
        return arith.select(arith.andi(exists, valid), slot, i32(NO_SLOT))

    def _slots(self, slots: ir.Value, first: ir.Value) -> list[ir.Value]:
        """Of several tokens, the first of them `first`."""
        return [self._slot(slots, arith.addi(first, i32(i * self._threads))) for i in range(self._at_once)]

    def _fetch(self, slots: ir.Value, begin: ir.Value, count: ir.Value) -> list[ir.Value]:
        thread = utils.thread_idx()
        own = self._slot(slots, arith.addi(begin, thread))
        own = arith.select(_less(thread, count), own, i32(NO_SLOT))
        return [own, *self._slots(slots, arith.addi(arith.addi(begin, count), thread))]

    def _find(
        self,
        fetched: list[ir.Value],
        slots: ir.Value,
        begin: ir.Value,
        count: ir.Value,
        kept: ir.Value,
        table: ir.Value,
    ) -> None:
        thread, threads = utils.thread_idx(), self._threads
        own_end = arith.addi(begin, count)
        own_slot, *later_slots = fetched

        for first in range(0, 2 * self.entries, threads):
            entry = arith.minui(arith.addi(thread, i32(first)), i32(2 * self.entries - 1))
            _store_shared(i32(NO_SLOT), table, entry)  # and NO_TOKEN
        meet(threads)

        self._enter(table, own_slot, arith.addi(begin, thread))
        more = arith.addi(thread, i32(threads))

        @_strided(arith.addi(begin, more), own_end, threads)
        def _(token: ir.Value) -> None:
            self._enter(table, self._slot(slots, token), token)

        meet(threads)

        def overwrite(some: list[ir.Value]) -> None:
            keys = [_load_shared(table, self._hash(slot)) for slot in some]
            for slot, key in zip(some, keys, strict=True):
                self._overwrite(table, slot, key)

        overwrite(later_slots)

        @_strided(
            arith.addi(own_end, arith.addi(thread, i32(threads * self._at_once))),
            i32(self.end),
            threads * self._at_once,
        )
        def _(token: ir.Value) -> None:
            overwrite(self._slots(slots, token))

        meet(threads)

        def keep(offset: ir.Value, slot: ir.Value) -> None:
            last = self._last(table, slot)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, last, arith.addi(begin, offset))
            _store_shared(arith.select(is_last, slot, i32(NO_SLOT)), kept, offset)

        with utils.when(_less(thread, count)):
            keep(thread, own_slot)

        @_strided(more, count, threads)
        def _(offset: ir.Value) -> None:
            keep(offset, self._slot(slots, arith.addi(begin, offset)))

    def _hash(self, slot: ir.Value) -> ir.Value:
        """The entry that a slot is looked for at first, as in `PROBE`."""
        line = arith.muli(arith.shrui(slot, i32(LINE_BITS)), i32(MULTIPLIER))
        line = arith.shli(arith.shrui(line, i32(self._shift)), i32(LINE_BITS))
        return arith.addi(line, arith.andi(slot, i32(LINE - 1)))

    def _enter(self, table: ir.Value, slot: ir.Value, token: ir.Value) -> None:
        """Make `token` the last of its slot, if it is; `NO_SLOT` stays without one."""
        skipped = arith.cmpi(arith.CmpIPredicate.eq, slot, i32(NO_SLOT))
        token = arith.select(skipped, i32(NO_TOKEN), token)
        store = f"red.shared.max.s32 [at + {4 * self.entries}], $2;"
        code = self._probe(
            "$0",
            "$1",
            read="atom.shared.cas.b32 key, [at], -1, $0;",
            passed=f"red.shared.or.b32 [at], {PASSED};",
            none=store,
            found=store,
        )
        asm([], code, "r,r,r,~{memory}", [slot, table, token], has_side_effects=True)

    def _overwrite(self, table: ir.Value, slot: ir.Value, key: ir.Value) -> None:
        """Make a later token the last of a slot, if the block has a token for it; `key` is at its hash."""
        equal, signed = arith.CmpIPredicate.eq, arith.CmpIPredicate.slt
        empty = arith.cmpi(equal, key, i32(NO_SLOT))
        passed = arith.cmpi(signed, key, i32(0))
        same = arith.cmpi(equal, arith.andi(key, i32(~PASSED)), slot)
        maybe = arith.andi(arith.ori(passed, same), arith.xori(empty, utils.c(1, empty.type)))
        store = f"st.shared.b32 [at + {4 * self.entries}], {LATER_TOKEN};"
        with utils.when(maybe):
            code = self._probe("$0", "$1", found=store)
            asm([], code, "r,r,~{memory}", [slot, table], has_side_effects=True)

    def _last(self, table: ir.Value, slot: ir.Value) -> ir.Value:
        """The last token of a slot; `NO_TOKEN` for `NO_SLOT`."""
        load = f"ld.shared.b32 $0, [at + {4 * self.entries}];"
        code = self._probe("$1", "$2", none=f"mov.b32 $0, {NO_TOKEN};", found=load)
        [token] = asm([int32()], code, "=&r,r,r,~{memory}", [slot, table], has_side_effects=True)
        return token

    @property
    def _shift(self) -> int:
        return 32 - ((self.entries // LINE).bit_length() - 1)

    def _probe(
        self,
        slot: str,
        table: str,
        *,
        found: str,
        none: str = "",
        passed: str = "",
        read: str = "ld.shared.b32 key, [at];",
    ) -> str:
        return PROBE.format(
            slot=slot,
            table=table,
            read=read,
            passed=passed,
            none=none,
            found=found,
            no_slot=NO_SLOT,
            multiplier=MULTIPLIER,
            shift=self._shift,
            line=LINE,
            line_bits=LINE_BITS,
            mask=self.entries - 1,
        )


def _strided_array(values: list[ir.Value], layout: Any) -> Any:
    """An array of so many values of each thread."""
    one = ir.VectorType.get((1,), int32())
    registers = np.array([vector.broadcast(one, value) for value in values], dtype=object)
    return array_of(registers, (THREADS * len(values),), layout, is_signed=True)


def _less(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def _strided(first: ir.Value, end: ir.Value, step: int) -> Callable[[Callable[[ir.Value], None]], None]:
    """A loop over [first, end)."""

    def over(body: Callable[[ir.Value], None]) -> None:
        loop = scf.ForOp(first, end, i32(step))
        with ir.InsertionPoint(loop.body):
            body(loop.induction_variable)
            scf.yield_([])

    return over


def _shared(base: ir.Value, index: ir.Value) -> ir.Value:
    return llvm.inttoptr(llvm.PointerType.get(3), arith.addi(base, arith.muli(index, i32(4))))


def _load_shared(base: ir.Value, index: ir.Value) -> ir.Value:
    return llvm.load(int32(), _shared(base, index))


def _store_shared(value: ir.Value, base: ir.Value, index: ir.Value) -> None:
    llvm.store(value, _shared(base, index))
