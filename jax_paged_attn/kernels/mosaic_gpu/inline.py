"""What the pieces that are written in MLIR and PTX have in common."""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def int32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i32(value: int) -> ir.Value:
    return utils.c(value, int32())


def asm(
    results: list[ir.Type], code: str, constraints: str, operands: list[ir.Value], **kwargs: Any
) -> list[Any]:
    """PTX; gives the list of its results."""
    if len(results) <= 1:
        result = llvm.inline_asm(results[0] if results else None, operands, code, constraints, **kwargs)
        return [result] if results else []
    struct = llvm.inline_asm(llvm.StructType.get_literal(results), operands, code, constraints, **kwargs)
    return [llvm.extractvalue(result, struct, [i]) for i, result in enumerate(results)]
