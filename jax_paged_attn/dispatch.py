"""Choice of the implementation that serves a call, and the record of that choice."""

import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jax_paged_attn import validation

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# (multiprocessors, bytes of shared memory a block may use) of each compute capability's data-centre part,
# where there is one. The real count is read from the device when it is at hand.
_CUDA_PARTS = {
    (8, 0): (108, 166_912),
    (8, 6): (84, 101_376),
    (8, 9): (142, 101_376),
    (9, 0): (132, 232_448),
    (10, 0): (148, 232_448),
    (10, 3): (148, 232_448),
    (12, 0): (188, 101_376),
}
_DEFAULT_CUDA = (9, 0)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a call is compiled for.

    Attributes
    ----------
    platform : str
        "cpu", "cuda", "rocm" or "tpu".
    compute_capability : tuple[int, int] or None
        Of a CUDA device: (9, 0) is sm_90.
    core_count : int
        Streaming multiprocessors of a CUDA device, else 0.
    smem_bytes : int
        Shared memory that one block may use, else 0.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    core_count: int = 0
    smem_bytes: int = 0

    @classmethod
    def cuda(cls, compute_capability: tuple[int, int], core_count: int | None = None) -> "Target":
        """Describe a CUDA device; a capability not in the table gets the limits of the next older one."""
        known = [part for part in _CUDA_PARTS if part <= compute_capability]
        cores, smem_bytes = _CUDA_PARTS[max(known)] if known else (16, 49_152)
        return cls("cuda", compute_capability, core_count or cores, smem_bytes)

    @classmethod
    def parse(cls, name: str) -> "Target":
        """Look up a target by name: a platform, or a CUDA architecture such as "sm_90"."""
        expected = f"one of {_PLATFORMS} or an architecture as 'sm_90'"
        validation.check(isinstance(name, str), "target", expected, repr(name))
        if name == "cuda":
            return cls.cuda(_DEFAULT_CUDA)
        if name in _PLATFORMS:
            return cls(name)
        match = re.fullmatch(r"sm_(\d{1,2})(\d)a?", name)
        if match is None:
            raise ValueError(f"target: expected {expected}, got {name!r}")
        return cls.cuda((int(match[1]), int(match[2])))

    @classmethod
    def current(cls) -> "Target":
        """Describe the device that JAX runs on by default, or what `assume_target` says instead."""
        if _assumed.value is not None:
            return _assumed.value
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(device, str):
            device = jax.devices(device)[0]
        device = device or jax.devices()[0]
        if device.platform != "gpu":
            return cls(device.platform)
        if "rocm" in device.client.platform_version.lower():
            return cls("rocm")
        major, minor = device.compute_capability.split(".")
        return cls.cuda((int(major), int(minor)), device.core_count)

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.platform
        return "sm_{}{}".format(*self.compute_capability)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one or several public functions ask of an implementation.

    Attributes
    ----------
    name : str
        The module of an implementation's package that serves it.
    functions : tuple[str, ...]
        The public functions that it serves.
    nothing : callable
        ``nothing(problem, operands)`` is the result of a call that computes nothing.
    fold : callable
        ``fold(problem, size, batched, operands)`` is the call of one problem that a vmapped one of `size`
        elements becomes, as (problem, operands), or None where it can't become one. `batched` says which
        operands have the mapped axis.
    in_place : bool
        Whether it updates its operands.
    """

    name: str
    functions: tuple[str, ...]
    nothing: Callable[[Any, Any], Any]
    fold: Callable[[Any, int, Any, Any], tuple[Any, Any] | None]
    in_place: bool = False


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute the public functions.

    Attributes
    ----------
    name : str
        What ``implementation=`` calls it.
    package : str
        Package with a module for each operation, which has the names that `jax_paged_attn.kernels` lists;
        imported when it may be used.
    platforms : tuple[str, ...] or None
        Where it runs; None is everywhere.
    interpreted_on : tuple[str, ...]
        Where an explicit choice interprets it.
    updates_varying : bool
        Whether it updates arrays that `jax.shard_map` tracks as varying over its axes. Pallas kernels don't.
    """

    name: str
    package: str
    platforms: tuple[str, ...] | None = None
    interpreted_on: tuple[str, ...] = ()
    updates_varying: bool = True

    def module(self, operation: Operation) -> str:
        """Name the module that serves an operation."""
        return f"{self.package}.{operation.name}"

    def load(self, operation: Operation) -> ModuleType:
        """Import the module that serves an operation."""
        return importlib.import_module(self.module(operation))

    def why_not(self, operation: Operation, problem: Any, target: Target) -> str | None:
        """Say why it can't run this problem on this target; None if it can."""
        if self.platforms is not None and target.platform not in self.platforms:
            return f"runs on {', '.join(self.platforms)}, not on {target.platform}"
        try:
            module = self.load(operation)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == self.module(operation):
                return f"has no kernel for {' and '.join(operation.functions)}"
            return f"cannot be imported: {error}"
        return module.why_not(problem, target)


# In order of preference.
IMPLEMENTATIONS = (
    Implementation(
        "mosaic_gpu", "jax_paged_attn.kernels.mosaic_gpu", ("cuda",), ("cpu",), updates_varying=False
    ),
    Implementation("xla", "jax_paged_attn.kernels.xla"),
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run; the result of `explain`.

    Attributes
    ----------
    implementation : str
        The implementation's name.
    target : Target
        What it was chosen for.
    interpreted : bool
        Whether the target only interprets the kernels.
    problem : object
        The call's static description; under `jax.vmap`, of the larger batch that the mapped calls make.
    config : object
        The implementation's own ``Config``.
    smem_bytes : int
        Shared memory of one block; 0 where the implementation doesn't manage it.
    workspace_bytes : int
        Device memory for partial results.
    accumulator_dtype : str
        In which scores, softmax and partial outputs are kept.
    deterministic : bool
        Whether the same inputs and config always give the same bits.
    passed_over : tuple[tuple[str, str], ...]
        Name and reason of each other implementation.
    """

    implementation: str
    target: Target
    interpreted: bool
    problem: Any
    config: Any
    smem_bytes: int
    workspace_bytes: int
    accumulator_dtype: str
    deterministic: bool
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [
            f"implementation: {self.implementation} on {self.target}{', interpreted' * self.interpreted}",
            f"config: {self.config}",
            f"shared memory a block: {self.smem_bytes} bytes",
            f"workspace: {self.workspace_bytes} bytes",
            f"accumulator: {self.accumulator_dtype}",
            f"deterministic: {'yes' if self.deterministic else 'no'}",
            *(f"not {name}: {reason}" for name, reason in self.passed_over),
        ]
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any) -> Explanation:
    """Say what a call would run, and why the other implementations were passed over; computes nothing.

    Parameters
    ----------
    fn : callable
        A function of this package, or any traceable function whose first call of one is of interest.
    *args, **kwargs
        Its arguments; `jax.ShapeDtypeStruct` may stand for any array.
    target : str, optional
        What to choose for: an architecture such as "sm_80", or "cpu", "cuda", "rocm", "tpu"; from any host.
        None is JAX's default device.

    Returns
    -------
    Explanation

    Raises
    ------
    ValueError, NotImplementedError
        As the call itself would; ValueError also if `target` is unknown or `fn` calls no function of this
        package.

    Examples
    --------
    >>> import jax
    >>> from jax_paged_attn import PageTable, explain, paged_attention
    >>> q = jax.ShapeDtypeStruct((2, 8, 64), "bfloat16")
    >>> pages = jax.ShapeDtypeStruct((3, 2, 16, 64), "bfloat16")
    >>> page_table = PageTable.from_block_tables([[2, 0], [1, -1]], [20, 3])
    >>> explain(paged_attention, q, pages, pages, page_table, target="cpu").implementation
    'xla'
    """
    validation.check(callable(fn), "fn", "a function", repr(fn))
    traced = {name: value for name, value in kwargs.items() if _holds_arrays(value)}
    static = {name: value for name, value in kwargs.items() if name not in traced}
    recording = _Recording(Target.current() if target is None else Target.parse(target))
    # The context is part of the key of JAX's caches: a function traced before runs its Python again here, and
    # nothing traced here is used elsewhere. The function is new each time, because eval_shape remembers too.
    with _recording(recording):
        jax.eval_shape(lambda args, traced: fn(*args, **traced, **static), args, traced)
    if not recording.records:
        raise ValueError(f"fn: expected a function that calls jax_paged_attn, got {fn!r}")
    return recording.records[0]


def run(operation: Operation, problem: Any, operands: Any, *, implementation: str | None, config: Any) -> Any:
    """Run a checked call by the implementation asked for, or by the first that can.

    Parameters
    ----------
    operation : Operation
        Whose `problem` and `operands` these are.
    problem
        What is static about the call; hashable.
    operands
        A pytree of the call's arrays.

    Returns
    -------
    What the operation yields, a pytree of arrays.
    """
    names = tuple(candidate.name for candidate in IMPLEMENTATIONS)
    known = implementation is None or (isinstance(implementation, str) and implementation in names)
    validation.check(known, "implementation", f"None or one of {names}", repr(implementation))
    for leaf in jax.tree.leaves(operands):
        if any(axis is not None for axis in jax.typeof(leaf).sharding.spec):
            raise NotImplementedError(
                "arrays sharded over explicit mesh axes: call the function inside jax.shard_map, or through "
                f"jax.sharding.auto_axes; got {jax.typeof(leaf)}"
            )
    call = _Call(operation, problem, implementation, config, bool(varying_axes(operands)))
    if (recording := _recording.value) is None:
        call.choices()  # here as well, so that what can't run is said before anything is traced
    else:
        recording.choose(call)
    return _run(call, operands)


def varying_axes(operands: Any) -> tuple[str, ...]:
    """List the axes of `jax.shard_map` that some operand is known to vary over."""
    types = (jax.typeof(leaf) for leaf in jax.tree.leaves(operands))
    return tuple(sorted(frozenset().union(*(t.manual_axis_type.varying for t in types))))


# Jitted, so that an eager call compiles once a shape.
@functools.partial(jax.jit, static_argnums=0)
def _run(call: "_Call", operands: Any) -> Any:
    # Around the operands, not the implementation: kernels that update a Ref can't be traced under custom_jvp.
    leaves, structure = jax.tree.flatten(operands)
    inexact = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    for i, leaf in zip(inexact, _without_derivative(call, *(leaves[i] for i in inexact)), strict=True):
        leaves[i] = leaf
    return call(jax.tree.unflatten(structure, leaves))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_derivative(call: "_Call", *operands: jax.Array) -> tuple[jax.Array, ...]:
    return operands


@_without_derivative.defjvp
def _(call: "_Call", primals: Any, tangents: Any) -> NoReturn:
    functions = call.operation.functions
    raise NotImplementedError(
        f"{' and '.join(functions)}: no derivative; jax_paged_attn.reference.{functions[0]} is differentiable"
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """A checked call without its operands; hashable, so that it can key a compilation."""

    operation: Operation
    problem: Any
    implementation: str | None
    config: Any
    varying: bool

    def __call__(self, operands: Any) -> Any:
        """Compute it by what is chosen for each platform; under vmap, as a call of the larger problem."""

        @jax.custom_batching.custom_vmap
        def compute(operands):
            if (recording := _recording.value) is not None:
                recording.add(self)
            if recording is not None or self.problem.is_empty:
                return self.operation.nothing(self.problem, operands)
            leaves, structure = jax.tree.flatten(operands)
            branches = {
                platform: lambda *leaves, choice=choice: choice.run(
                    self, jax.tree.unflatten(structure, leaves)
                )
                for platform, choice in self.choices()
            }
            if len(branches) == 1:
                (only,) = branches.values()
                return only(*leaves)
            # One trace holds a branch for each platform, and lowering keeps the one it lowers for.
            return jax.lax.platform_dependent(*leaves, **branches)

        @compute.def_vmap
        def _(size, in_batched, operands):
            (batched,) = in_batched
            if recording := _recording.value:
                recording.drop(self)
            results = self._mapped(size, batched, operands)
            return results, jax.tree.map(lambda _: True, results)

        return compute(operands)

    def _mapped(self, size: int, batched: Any, operands: Any) -> Any:
        leaves, structure = jax.tree.flatten(operands)
        has_axis = jax.tree.leaves(batched)

        def element(i):
            each = (x[i] if mapped else x for x, mapped in zip(leaves, has_axis, strict=True))
            return jax.tree.unflatten(structure, each)

        if size == 0:
            each = (
                jax.ShapeDtypeStruct(x.shape[mapped:], x.dtype)
                for x, mapped in zip(leaves, has_axis, strict=True)
            )
            one = jax.eval_shape(lambda *each: self(jax.tree.unflatten(structure, each)), *each)
            return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), one)
        folded = self.operation.fold(self.problem, size, batched, operands)
        if folded is None:  # one after another
            return jax.lax.map(lambda i: self(element(i)), jnp.arange(size))
        problem, operands = folded
        results = dataclasses.replace(self, problem=problem)(operands)
        return jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), results)

    def choices(self) -> "tuple[tuple[str, _Choice], ...]":
        """Choose for each platform that the call may be lowered for, "default" being any other."""
        host = Target.current()
        cuda = host if host.platform == "cuda" else Target.parse("cuda")
        if self.implementation is None:
            other = Target("cpu") if host.platform == "cuda" else host
            # A config belongs to what the host runs; elsewhere it applies only if it fits.
            choices = {
                target.platform: self.select(target, strict=target == host)[0] for target in (cuda, other)
            }
            on_cuda, elsewhere = choices["cuda"], choices[other.platform]
            if on_cuda == elsewhere:
                return (("default", elsewhere),)
            return (("cuda", on_cuda), ("default", elsewhere))
        (named,) = (candidate for candidate in IMPLEMENTATIONS if candidate.name == self.implementation)
        interpret = host.platform in named.interpreted_on
        # A branch for a real device would not lower beside an interpreted one, as interpreting has side
        # effects; `assume_target` is the way to lower an explicit choice for CUDA elsewhere.
        choice, _ = self.select(_INTERPRETED if interpret else host)
        return (("default", dataclasses.replace(choice, interpret=interpret)),)

    def select(self, target: Target, strict: bool = True) -> "tuple[_Choice, tuple[tuple[str, str], ...]]":
        """Select the implementation asked for, or the first that can run; say why each other was passed over.

        A config of another type than the implementation's is an error where `strict`, else its default is
        taken.
        """
        # Where nothing runs, what would is said of the smallest sizes that aren't empty.
        problem = self.problem.nonempty() if self.problem.is_empty else self.problem
        implementation, config = self.implementation, self.config
        chosen = None
        passed_over = []
        for candidate in IMPLEMENTATIONS:
            if implementation is not None and candidate.name != implementation:
                passed_over.append((candidate.name, f"implementation={implementation!r} was asked for"))
            elif chosen is not None:
                passed_over.append((candidate.name, f"{chosen.name} comes first"))
            elif (reason := self._why_not(candidate, problem, target)) is None:
                chosen = candidate
            elif implementation is not None:
                raise NotImplementedError(f"implementation={implementation!r} can't run this call: {reason}")
            else:
                passed_over.append((candidate.name, reason))
        if chosen is None:
            raise NotImplementedError(f"no implementation can run this call: {passed_over}")
        module = chosen.load(self.operation)
        if config is None or not (strict or isinstance(config, module.Config)):
            config = module.default_config(problem, target)
        expected = f"a {chosen.module(self.operation)}.Config for implementation {chosen.name!r}"
        validation.check(isinstance(config, module.Config), "config", expected, repr(config))
        if target.smem_bytes:
            smem_bytes = module.usage(problem, config).smem_bytes
            expected = f"one that takes at most {target.smem_bytes} bytes of shared memory"
            got = f"{config}, {smem_bytes} bytes"
            validation.check(smem_bytes <= target.smem_bytes, "config", expected, got)
        return _Choice(chosen, config), tuple(passed_over)

    def _why_not(self, candidate: Implementation, problem: Any, target: Target) -> str | None:
        if self.varying and self.operation.in_place and not candidate.updates_varying:
            return "arrays to update vary over axes of jax.shard_map: call that with check_vma=False"
        return candidate.why_not(self.operation, problem, target)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """An implementation with its config, ready to run."""

    implementation: Implementation
    config: Any
    interpret: bool = False

    def run(self, call: _Call, operands: Any) -> Any:
        run = self.implementation.load(call.operation).run
        options = {"interpret": True} if self.interpret else {}
        return run(call.problem, self.config, operands, **options)


# What the interpreter plays: a small device, since every block takes time.
_INTERPRETED = Target.cuda(_DEFAULT_CUDA, core_count=4)


class _Recording:
    """Collects what calls would run on `target`; compared by identity."""

    def __init__(self, target: Target):
        self.target = target
        self.records: list[Explanation] = []

    def choose(self, call: _Call) -> tuple[_Choice, tuple[tuple[str, str], ...], bool]:
        """Choose for the target: the choice, why not another, whether it would be interpreted."""
        named = [candidate for candidate in IMPLEMENTATIONS if candidate.name == call.implementation]
        interpreted = any(self.target.platform in candidate.interpreted_on for candidate in named)
        return *call.select(_INTERPRETED if interpreted else self.target), interpreted

    def add(self, call: _Call) -> None:
        choice, passed_over, interpreted = self.choose(call)
        usage = choice.implementation.load(call.operation).usage(call.problem, choice.config)
        record = Explanation(
            implementation=choice.implementation.name,
            target=self.target,
            interpreted=interpreted,
            problem=call.problem,
            config=choice.config,
            smem_bytes=usage.smem_bytes,
            workspace_bytes=usage.workspace_bytes,
            accumulator_dtype=usage.accumulator_dtype,
            deterministic=usage.deterministic,
            passed_over=passed_over,
        )
        self.records.append(record)

    def drop(self, call: _Call) -> None:
        """Forget the last record of `call`, which turned out to be one element of a mapped call."""
        last = max(i for i, record in enumerate(self.records) if record.problem == call.problem)
        del self.records[last]


# Contexts and not plain variables, so that JAX's caches tell traces within them from others.
_recording = jax.make_user_context(None)
_assumed = jax.make_user_context(None)


@contextlib.contextmanager
def assume_target(name: str) -> Iterator[None]:
    """Make choices as if JAX ran on another device, to trace there for it on a host without one.

    Without it, the default choice already lowers for CUDA from any host, for a Hopper GPU; an explicit
    ``implementation="mosaic_gpu"`` on a CPU host is interpreted.

    Parameters
    ----------
    name : str
        As `explain`'s ``target``.

    Examples
    --------
    >>> import jax
    >>> from jax_paged_attn import decode_attention, dispatch
    >>> q = jax.ShapeDtypeStruct((2, 8, 64), "bfloat16")
    >>> cache = jax.ShapeDtypeStruct((2, 2, 128, 64), "bfloat16")
    >>> with dispatch.assume_target("sm_90"):
    ...     lowered = jax.jit(decode_attention).trace(q, cache, cache, 5).lower(lowering_platforms=("cuda",))
    >>> "mosaic_gpu" in lowered.as_text()
    True
    """
    with _assumed(Target.parse(name)):
        yield


def _holds_arrays(value: Any) -> bool:
    return any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))
