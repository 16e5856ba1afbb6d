"""The static side of the append kernel: its configuration, and what follows from it and from the problem."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls.append import Problem
from jax_paged_attn.validation import check, check_positive_int

from . import shared_memory
from .equal_slots import EqualSlots
from .integers import ceil_div, round_up
from .layouts import f32
from .shared_tile import swizzle_columns
from .token_rows import Registers, TokenRows

i32 = jnp.int32
BLOCK_TOKENS = (2, 4, 8, 16)
WARPGROUPS = (1, 2, 4)
# Scales and positions come in copies that begin at multiples of 16 bytes.
MIN_BLOCK_TOKENS_WITH_VECTORS = 4
STAGES = (1, 2)
COPY_VALUES = 256  # of a flat array in one copy at most
COPY_BYTES = 16  # what copies move multiples of
MAX_HEADS = 256  # rows of a copy


@dataclasses.dataclass(frozen=True)
class Config:
    """How the append kernel cuts its work.

    Attributes
    ----------
    block_tokens : int
        Tokens of a tile, which a warpgroup brings and writes at a time: 2, 4, 8 or 16; with rotation or with
        scales of tokens 4 or more.
    warpgroups : int
        Warpgroups of a thread block, each with tiles of its own: 1, 2 or 4.
    blocks : int
        Thread blocks at most, between which the tiles are divided.
    num_stages : int
        Tiles that a warpgroup has in shared memory: 1, or 2, of which one goes while the other comes.
    """

    block_tokens: int = 4
    warpgroups: int = 1
    blocks: int = 132
    num_stages: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check_positive_int(field.name, value)
            object.__setattr__(self, field.name, int(value))  # of numpy's integers
        choices_of = {"block_tokens": BLOCK_TOKENS, "warpgroups": WARPGROUPS, "num_stages": STAGES}
        for name, choices in choices_of.items():
            value = getattr(self, name)
            check(value in choices, name, f"one of {choices}", repr(value))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every static quantity of a launch, which writes the tokens from `start` to `end` of its problem."""

    problem: Problem
    config: Config
    start: int
    end: int

    def __post_init__(self):
        least = min_block_tokens(self.problem)
        ok = self.config.block_tokens >= least
        check(ok, "config", f"block_tokens of at least {least}", repr(self.config))

    @property
    def tiles(self) -> int:
        """Tiles of tokens, of which the last may have fewer."""
        return ceil_div(self.end - self.start, self.config.block_tokens)

    @property
    def blocks(self) -> int:
        """The grid: no block without a tile."""
        return min(self.config.blocks, ceil_div(self.tiles, self.config.warpgroups))

    @property
    def one_tile_each(self) -> bool:
        """Whether each warpgroup has exactly one tile."""
        return self.tiles == self.blocks * self.config.warpgroups

    @property
    def equal_slots(self) -> EqualSlots:
        tiles = ceil_div(self.tiles, self.blocks)
        own_tokens = tiles * self.config.block_tokens
        return EqualSlots(self.start, self.end, self.problem.num_slots, own_tokens, self.config.warpgroups)

    @property
    def arrays(self) -> tuple[str, ...]:
        """What comes and goes a row a head."""
        return ("k", "v") if self.problem.rotation is None else ("k", "v", "q")

    def heads(self, name: str) -> int:
        """Heads of "k", "v" or "q"."""
        rotation = self.problem.rotation
        return rotation.num_q_heads if name == "q" and rotation is not None else self.problem.num_kv_heads

    def pool_dtype(self, name: str) -> np.dtype:
        """Dtype that "k", "v" or "q" leaves in."""
        return {"k": self.problem.k_dtype, "v": self.problem.v_dtype}.get(name, self.problem.dtype)

    def converts(self, name: str) -> bool:
        """Whether "k", "v" or "q" leaves in another dtype than it comes in."""
        return self.pool_dtype(name) != self.problem.dtype

    def rotates(self, name: str) -> bool:
        return self.problem.rotation is not None and name != "v"

    def scale_kind(self, name: str) -> str | None:
        return {"k": self.problem.k_scale, "v": self.problem.v_scale}.get(name)

    def stored_name(self, name: str) -> str:
        """The shared memory that "k", "v" or "q" leaves from."""
        return f"{name}_stored_smem" if self.converts(name) else f"{name}_smem"

    def slices(self, name: str) -> tuple[int, ...]:
        """How a row's columns fall apart on their way through registers."""
        p = self.problem
        columns = p.v_head_dim if name == "v" else p.head_dim
        if p.rotation is None or name == "v":
            return (columns,)
        rotary_dim = p.rotation.rotary_dim
        rest = (columns - rotary_dim,) if rotary_dim != columns else ()
        return (rotary_dim // 2, rotary_dim // 2, *rest)

    def rows(self, name: str) -> TokenRows:
        """Rows of "k", "v" or "q", the same in every dtype."""
        p, slices = self.problem, self.slices(name)
        itemsize = min(p.dtype.itemsize, self.pool_dtype(name).itemsize)
        rows = TokenRows.choose(self.config.block_tokens, self.heads(name), slices, itemsize)
        if self.converts(name) or self.rotates(name):
            rows = rows.padded(max(self.registers(name, columns).rows for columns in slices))
        return rows

    def find_registers(self, name: str, columns: int) -> Registers | None:
        """Registers for a slice of the rows of "k", "v" or "q", or for "cos" and "sin"."""
        if name in ("cos", "sin"):
            return Registers.choose(columns, columns * 4, 4)
        itemsize = self.pool_dtype(name).itemsize
        return Registers.choose(columns, sum(self.slices(name)) * itemsize, itemsize)

    def registers(self, name: str, columns: int) -> Registers:
        found = self.find_registers(name, columns)
        assert found is not None, (name, columns)  # why_not says so first
        return found

    @property
    def half(self) -> int:
        """Pairs of columns that are rotated."""
        assert self.problem.rotation is not None
        return self.problem.rotation.rotary_dim // 2

    @property
    def cos_sin_rows(self) -> int:
        """Tokens of a tile, rounded up to what registers hold."""
        return round_up(self.config.block_tokens, self.registers("cos", self.half).rows)

    def scale_values(self, name: str) -> int:
        """Scales of "k" or "v" that a tile needs, rounded up to whole copies."""
        tokens = self.config.block_tokens if self.scale_kind(name) == "token" else 1
        return round_up(tokens * self.problem.num_kv_heads, 4)

    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of a thread block, by the name of the body's argument."""
        return self.stage_scratch() | self.warpgroup_scratch() | self.equal_slots.scratch()

    def stage_scratch(self) -> dict[str, Any]:
        """What a tile comes to: each stage of each warpgroup has its own, at its index."""
        p, stages = self.problem, self.config.warpgroups * self.config.num_stages
        types: dict[str, Any] = {}
        arrivals = 0
        for name in self.arrays:
            rows = self.rows(name)
            types[f"{name}_smem"] = rows.scratch(stages, p.dtype)
            arrivals += rows.copies
            if self.scale_kind(name) in ("head", "token"):
                values = self.scale_values(name)
                # A token's scales are read with those of the padding rows, whose values don't matter.
                types[f"{name}_scale_smem"] = plgpu.SMEM((stages, round_up(values + rows.pitch, 32)), f32)
                arrivals += ceil_div(values, COPY_VALUES)
        if p.rotation is not None:
            types["positions_smem"] = plgpu.SMEM((stages, round_up(self.cos_sin_rows, 32)), i32)
            types["positions_ready"] = plgpu.Barrier(num_barriers=stages)
        types["rows_ready"] = plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)
        return types

    def warpgroup_scratch(self) -> dict[str, Any]:
        """What each warpgroup has of its own besides, at its index."""
        warpgroups = self.config.warpgroups
        types: dict[str, Any] = {}
        for name in self.arrays:
            if self.converts(name):
                types[f"{name}_stored_smem"] = self.rows(name).scratch(warpgroups, self.pool_dtype(name))
        if self.problem.rotation is not None:
            for name in ("cos_smem", "sin_smem"):
                types[name] = plgpu.SMEM((warpgroups, self.cos_sin_rows, self.half), f32)
        return types


def why_no_plan(problem: Problem) -> str | None:
    """Why the kernel can't run a problem, as far as that hangs on its shapes and dtypes alone."""
    p, plan = problem, Plan(problem, Config(max(BLOCK_TOKENS)), 0, problem.num_tokens)
    if p.rotation is not None and p.rotation.interleaved:
        return "interleaved rotation unsupported"
    for name in plan.arrays:
        if plan.heads(name) > MAX_HEADS:
            return f"{plan.heads(name)} heads of {name} unsupported: at most {MAX_HEADS}"
        slices = plan.slices(name)
        columns = math.gcd(*slices)
        for dtype in (p.dtype, plan.pool_dtype(name)):
            # Of the narrowest piece of a row that a copy moves.
            if columns % 8 != 0 or swizzle_columns(columns) * dtype.itemsize % COPY_BYTES != 0:
                parts = " and slices of it" if len(slices) > 1 else ""
                step = max(8, COPY_BYTES // dtype.itemsize)
                got = " + ".join(map(str, slices))
                return f"{name}: head_dim{parts} must be multiples of {step} for {dtype}, not {got}"
        if plan.converts(name) or plan.rotates(name):
            for columns in slices:
                if plan.find_registers(name, columns) is None:
                    of = f"{sum(slices)} columns of {plan.pool_dtype(name)}"
                    return f"{name}: no layout in registers for {columns} of {of}"
    if p.rotation is not None and plan.find_registers("cos", plan.half) is None:
        return f"rotary_dim {p.rotation.rotary_dim} unsupported"
    return None


def min_block_tokens(problem: Problem) -> int:
    """The fewest tokens that a tile can have."""
    vectors = problem.rotation is not None or "token" in (problem.k_scale, problem.v_scale)
    return MIN_BLOCK_TOKENS_WITH_VECTORS if vectors else BLOCK_TOKENS[0]


def smem_bytes(plan: Plan) -> int:
    """Shared memory of a thread block."""
    return shared_memory.total_bytes(plan.scratch_types())
