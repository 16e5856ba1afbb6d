from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PageTable, decode_attention, dispatch, explain, paged_attention, testing
from jax_paged_attn.calls.attention import ATTENTION
from jax_paged_attn.dispatch import IMPLEMENTATIONS, Target
from jax_paged_attn.kernels.xla import attention as xla_attention


def shapes(dtype="bfloat16", head_dim=128, batch=4):
    inputs = testing.make_inputs(testing.Case("explain", (9,) * batch, dtype=dtype, head_dim=head_dim))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs.args)


def test_explain_for_cpu():
    record = explain(paged_attention, *shapes(), target="cpu")
    assert record.implementation == "xla"
    assert record.config == xla_attention.Config()
    assert record.smem_bytes == 0
    assert record.workspace_bytes > 0
    assert record.accumulator_dtype == "float32"
    assert record.deterministic
    assert record.passed_over == (("mosaic_gpu", "runs on cuda, not on cpu"),)
    assert record.problem.num_kv_heads == 2


@pytest.mark.parametrize("target", ["cuda", "sm_90", "sm_90a"])
def test_explain_for_hopper_from_any_host(target):
    record = explain(paged_attention, *shapes(), target=target)
    assert record.implementation == "mosaic_gpu"
    assert 0 < record.smem_bytes <= record.target.smem_bytes
    assert record.passed_over == (("xla", "mosaic_gpu comes first"),)


@pytest.mark.parametrize(
    ("arguments", "target", "reason"),
    [
        (shapes(dtype="float32"), "sm_90", "float32"),
        (shapes(head_dim=20), "sm_90", "head_dim"),
        (shapes(), "sm_80", "sm_80"),
        (shapes(), "rocm", "rocm"),
        (shapes(), "tpu", "tpu"),
    ],
)
def test_a_reason_for_what_was_passed_over(arguments, target, reason):
    record = explain(paged_attention, *arguments, target=target)
    assert record.implementation == "xla"
    ((name, why),) = record.passed_over
    assert name == "mosaic_gpu"
    assert reason in why
    with pytest.raises(NotImplementedError, match=reason):
        explain(paged_attention, *arguments, target=target, implementation="mosaic_gpu")


def test_explain_prints():
    text = str(explain(paged_attention, *shapes(), target="cpu"))
    assert text.splitlines()[0] == "implementation: xla on cpu"
    assert "not mosaic_gpu: runs on cuda, not on cpu" in text


def test_explain_takes_arrays_options_and_other_functions():
    q, *_ = shapes()
    lens = np.array([1, 2, 3, 4], np.int64)
    cache = jax.ShapeDtypeStruct((4, 2, 32, 128), jnp.bfloat16)
    record = explain(
        decode_attention, q, cache, cache, lens, target="cpu", num_splits=3, return_lse=True, kv_starts=lens
    )
    assert (record.problem.num_splits, record.problem.given) == (3, ("kv_starts",))

    @jax.jit
    def layer(q, k, v, table):
        return paged_attention(q, k, v, table) * 2

    args = testing.make_inputs(testing.case("one_row")).args
    layer(*args)
    assert explain(layer, *args, target="cpu").implementation == "xla"
    assert explain(layer, *args, target="cpu").implementation == "xla"


def test_explain_defaults_to_the_host():
    assert explain(paged_attention, *shapes()).target == Target.current()


def test_explain_raises_as_the_call_would():
    with pytest.raises(ValueError, match=r"^kv_layout: expected"):
        explain(paged_attention, *shapes(), kv_layout="NDH")
    with pytest.raises(ValueError, match=r"^target: expected .*, got 'h100'"):
        explain(paged_attention, *shapes(), target="h100")
    with pytest.raises(ValueError, match=r"^fn: expected"):
        explain(jnp.sin, 1.0)


def _body(carry, _):
    return carry, paged_attention(*carry)


def test_explaining_leaves_later_calls_alone():
    """Nothing traced while explaining may be found in JAX's caches afterwards, nor the other way round."""
    inputs = testing.make_inputs(testing.case("float32"))
    expected = inputs.expected()[0]
    inner = jax.jit(lambda *args: paged_attention(*args))

    def scanned(*args):
        return jax.lax.scan(_body, args, None, length=1)[1][0]

    for call in (paged_attention, lambda *args: inner(*args), scanned):
        for _ in range(2):
            assert explain(call, *inputs.args, target="sm_90").implementation == "xla"  # float32
            testing.assert_close(call(*inputs.args), expected)


def test_a_target_assumed_ends_with_the_block():
    inputs = testing.make_inputs(testing.case("group_8"))
    call = jax.jit(lambda *args: paged_attention(*args, implementation="mosaic_gpu"))
    with dispatch.assume_target("sm_90"):
        call.trace(*inputs.args)
    testing.assert_close(call(*inputs.args), inputs.expected()[0])


def test_a_mapped_call_is_explained_as_the_batch_it_makes():
    q, k, v, table = shapes()
    mapped = jax.vmap(paged_attention, in_axes=(0, None, None, None))
    stacked = jax.ShapeDtypeStruct((3, *q.shape), q.dtype)
    assert explain(mapped, stacked, k, v, table).problem.batch == 3 * q.shape[0]


def test_lists_of_lengths():
    q, k, v = (jnp.ones(s) for s in ((2, 4, 64), (2, 2, 32, 64), (2, 2, 32, 64)))
    assert explain(decode_attention, q, k, v, [3, 4]).implementation == "xla"
    out = jax.jit(lambda n: decode_attention(q, k, v, [3, n], kv_starts=[n, 0]))(4)
    chex.assert_shape(out, (2, 4, 64))


@pytest.mark.parametrize(
    ("name", "capability"), [("sm_80", (8, 0)), ("sm_90a", (9, 0)), ("sm_100", (10, 0)), ("sm_121", (12, 1))]
)
def test_targets(name, capability):
    target = Target.parse(name)
    assert (target.platform, target.compute_capability) == ("cuda", capability)
    assert target.core_count > 0
    assert target.smem_bytes > 48_000
    assert str(target) == name.removesuffix("a")


def test_every_implementation_is_last_resort_or_says_why():
    *others, last = IMPLEMENTATIONS
    problem = explain(paged_attention, *shapes(head_dim=7), target="cpu").problem
    for platform in ("cpu", "cuda", "rocm", "tpu"):
        assert last.why_not(ATTENTION, problem, Target.parse(platform)) is None
        assert all(other.why_not(ATTENTION, problem, Target.parse(platform)) for other in others)


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_a_kernel_on_another_platform_names_it(monkeypatch, platform):
    monkeypatch.setattr(Target, "current", classmethod(lambda cls: Target(platform)))
    args = testing.make_inputs(testing.case("one_row")).args
    with pytest.raises(NotImplementedError, match=platform):
        paged_attention(*args, implementation="mosaic_gpu")


def test_an_import_that_fails_is_a_reason(monkeypatch):
    broken = dispatch.Implementation("broken", "jax_paged_attn.kernels.absent")
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (broken, *IMPLEMENTATIONS))
    record = explain(paged_attention, *shapes(), target="cpu")
    assert record.implementation == "xla"
    assert "cannot be imported: No module named" in dict(record.passed_over)["broken"]


@pytest.mark.parametrize("block_kv", [1, 16, 100, 4096])
def test_config(block_kv):
    inputs = testing.make_inputs(testing.case("starts_splits"))
    config = xla_attention.Config(block_kv=block_kv)
    options = {"config": config, "implementation": "xla"}
    result = paged_attention(*inputs.args, return_lse=True, num_splits=3, **inputs.options, **options)
    testing.assert_close(result, inputs.expected())
    assert explain(paged_attention, *inputs.args, **options).config == config


def test_a_config_checks_itself():
    for block_kv in (0, -1, 1.5, "64", True):
        with pytest.raises(ValueError, match=r"^block_kv: expected"):
            xla_attention.Config(block_kv=block_kv)  # pyright: ignore[reportArgumentType]


def test_one_trace_lowers_for_every_platform():
    args = testing.make_inputs(testing.case("one_row")).args
    traced = jax.jit(paged_attention).trace(*args)
    cpu, cuda = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda"))
    assert "mosaic_gpu" not in cpu
    assert "mosaic_gpu" in cuda
    assert "stablehlo.while" in cpu


def test_differentiation_names_the_reference():
    inputs = testing.make_inputs(testing.case("float32"))
    q, *rest = inputs.args

    def loss(q):
        out, lse = paged_attention(q, *rest, return_lse=True)
        return jnp.sum(out) + jnp.sum(lse)

    def scanned(q):
        return jax.lax.scan(lambda total, _: (total + loss(q), None), 0.0, length=2)[0]

    def mapped(q):
        return jnp.sum(jax.vmap(loss)(q[None]))

    for function in (loss, jax.jit(loss), scanned, mapped):
        with pytest.raises(NotImplementedError, match=r"jax_paged_attn\.reference\.paged_attention"):
            jax.grad(function)(q)


def test_a_call_without_tangents_may_stand_in_differentiated_code():
    q, *rest = testing.make_inputs(testing.case("float32"), poison=0.0).args

    def loss(x):
        frozen = paged_attention(jax.lax.stop_gradient(q), *rest)
        return jnp.sum(x * jax.lax.stop_gradient(frozen))

    assert jnp.isfinite(jax.grad(loss)(2.0))


def test_page_table_of_another_int_dtype():
    fields: Any = (np.array(x, np.int64) for x in ([0, 1, 2**40], [0], [3], [20]))
    q, pages = jnp.ones((1, 4, 64)), jnp.ones((2, 2, 16, 64))
    out = paged_attention(q, pages, pages, PageTable(*fields))
    chex.assert_trees_all_close(out, q)


def test_an_empty_call_is_checked_like_any_other():
    table = PageTable.from_block_tables(np.zeros((0, 2), np.int32), np.zeros(0, np.int32))
    q, pages = jnp.ones((0, 4, 64)), jnp.ones((3, 2, 16, 64))
    chex.assert_shape(paged_attention(q, pages, pages, table), (0, 4, 64))
    chex.assert_shape(jax.vmap(lambda q: paged_attention(q, pages, pages, table))(q[None][:0]), (0, 0, 4, 64))
    with pytest.raises(ValueError, match=r"^config: expected"):
        paged_attention(q, pages, pages, table, config=3)
    with pytest.raises(NotImplementedError, match="float32"):
        paged_attention(q, pages, pages, table, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="reference"):
        jax.vjp(lambda q: paged_attention(q, pages, pages, table), q)


def test_no_transfer_that_was_not_asked_for():
    inputs = testing.make_inputs(testing.case("float32"))
    with jax.transfer_guard("disallow"):
        paged_attention(*inputs.args)


@pytest.mark.parametrize("wrong", ["mosaic", np.array(["xla", "mosaic_gpu"]), 3])
def test_names_that_are_none(wrong):
    with pytest.raises(ValueError, match=r"^implementation: expected None or one of"):
        paged_attention(*testing.make_inputs(testing.case("float32")).args, implementation=wrong)
    with pytest.raises(ValueError, match=r"^target: expected one of"):
        explain(paged_attention, *shapes(), target=wrong)
