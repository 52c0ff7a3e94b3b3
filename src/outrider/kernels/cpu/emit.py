"""Helpers that emit LLVM vector code in 16 lanes: LLVM maps them to whatever vectors the processor has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()


def vector(element: Any, lanes: int) -> ir.VectorType:
    """An LLVM vector of so many elements."""
    return ir.VectorType(element, lanes)


LANES_I32, LANES_F32 = vector(I32, 16), vector(FLOAT, 16)
ZEROS = ir.Constant(LANES_F32, [0.0] * 16)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """A vector of one value."""
    return ir.Constant(kind, [value] * kind.count)


def number(value: int) -> ir.Constant:
    """A 64-bit integer."""
    return ir.Constant(I64, value)


def declare(b: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """The LLVM intrinsic or function `name` of this module."""
    return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, arguments), name)


def define(module: Any, name: str, result: Any, arguments: int, body: Callable[[Any, Any], None]) -> Any:
    """A machine function of this module that takes int64 arguments, made once by `body(builder, args)`."""
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(result, [I64] * arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    body(ir.IRBuilder(function.append_basic_block()), function.args)
    return function


def load(b: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """Read a value or vector at any alignment."""
    at = b.add(address, number(offset)) if offset else address
    value = b.load(b.inttoptr(at, ir.PointerType()), typ=kind)
    value.align = 1
    return value


def store(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    """Write a value to an address (bytes) that need not be aligned."""
    at = b.add(address, number(offset)) if offset else address
    b.store(value, b.inttoptr(at, ir.PointerType())).align = 1


def prefetch(b: Any, address: Any, offset: int = 0, locality: int = 3) -> None:
    """Ask for the cache line at an address; never faults."""
    at = b.inttoptr(b.add(address, number(offset)), ir.PointerType())
    call = declare(b, "llvm.prefetch.p0", ir.VoidType(), [ir.PointerType(), I32, I32, I32])
    b.call(call, [at, ir.Constant(I32, 0), ir.Constant(I32, locality), ir.Constant(I32, 1)])


def splat(b: Any, value: Any, lanes: int = 16) -> Any:
    """A vector with `value` in every lane."""
    kind = vector(value.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), constant(vector(I32, lanes), 0))


def part(b: Any, value: Any, start: int, lanes: int) -> Any:
    """Lanes start .. start + lanes - 1 of a vector."""
    return b.shuffle_vector(value, value, ir.Constant(vector(I32, lanes), list(range(start, start + lanes))))


def join(b: Any, low: Any, high: Any) -> Any:
    """Two vectors as one."""
    lanes = low.type.count * 2
    return b.shuffle_vector(low, high, ir.Constant(vector(I32, lanes), list(range(lanes))))


def fold(b: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes of a vector pairwise: the upper half onto the lower until one is left."""
    while value.type.count > 1:
        half = value.type.count // 2
        low, high = part(b, value, 0, half), part(b, value, half, half)
        value = combine(low, high)
    return b.extract_element(value, ir.Constant(I32, 0))


def loop(
    b: Any, count: Any, initial: list[Any], body: Callable[[Any, list[Any]], list[Any]], step: int = 1
) -> list[Any]:
    """for index in range(0, count, step): state = body(index, state), from state `initial`; gives the last state."""
    entry, head = b.block, b.append_basic_block()
    inside, end = b.append_basic_block(), b.append_basic_block()
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(number(0), entry)
    state = [b.phi(value.type) for value in initial]
    for phi, value in zip(state, initial, strict=True):
        phi.add_incoming(value, entry)
    b.cbranch(b.icmp_signed("<", index, count), inside, end)
    b.position_at_end(inside)
    following = body(index, list(state))
    index.add_incoming(b.add(index, number(step)), b.block)
    for phi, value in zip(state, following, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(end)
    return state
