"""Small pieces of machine code that Numba lacks: typed pointers, bit casts, atomics, and how a thread waits."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as numba_intrinsic

I32, I64 = ir.IntType(32), ir.IntType(64)
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")
_PATIENCE = 100  # looks at a flag before a waiting thread gives its core away

intrinsic: Any = numba_intrinsic  # its calls carry no typing context, which a type checker cannot see


def _digest_sources() -> int:
    """A positive number that changes with any source file of the kernels."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return int.from_bytes(sha256(text).digest()[:7], "big") + 1


#: Functions cached on disk close over this: Numba itself looks only at the file that holds the function.
SOURCES = _digest_sources()

#: How every compiled function here is built: no GIL, no Python errors, strict IEEE arithmetic in the written order.
compiled: Any = njit(nogil=True, error_model="numpy")


def _pointer_to(element: types.Type) -> Callable[..., Any]:
    """An intrinsic that reads an address as a pointer to `element`."""

    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.intp), codegen

    return pointer


f32 = _pointer_to(types.float32)
i8 = _pointer_to(types.int8)
u8 = _pointer_to(types.uint8)
u16 = _pointer_to(types.uint16)
i32 = _pointer_to(types.int32)
i64 = _pointer_to(types.int64)
u64 = _pointer_to(types.uint64)


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """The int32 with the bits of a float32."""
    return types.int32(types.float32), lambda context, b, signature, args: b.bitcast(args[0], I32)


@intrinsic
def float_of(typingctx: Any, value: Any) -> Any:
    """The float32 with the bits of an int32."""
    return types.float32(types.int32), lambda context, b, signature, args: b.bitcast(args[0], ir.FloatType())


@intrinsic
def _fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8, typ=I64)

    return types.int64(types.intp), codegen


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


_give_way = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


@compiled
def meet(sync: int, members: int) -> None:
    """A barrier: return when all `members` threads have called. `sync` points to 128 zero bytes that they share."""
    if members == 1:
        return
    generation = _load(sync + 64)
    if _fetch_add(sync, 1) == members - 1:
        _store(sync, 0)
        _store(sync + 64, generation + 1)
        return
    looks = 0
    while _load(sync + 64) == generation:
        looks += 1
        if looks < _PATIENCE:
            _pause()
        else:
            _give_way()


@compiled
def share(total: int, member: int, members: int) -> tuple[int, int]:
    """The range of 0 .. total - 1 that is this member's part."""
    return total * member // members, total * (member + 1) // members
