"""The native library: found beside this file, called through ctypes.

Tensors cross as addresses; those who call check shapes, dtypes and strides before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

LIBRARY = "libpegboard_cpu.so"
INSTRUCTION_SETS = ("avx512_vnni", "avx512", "avx2", "portable")
"""The instruction sets that kernels are built for, the fastest first."""

POINTER = ctypes.c_void_p
INT = ctypes.c_int
SIZE = ctypes.c_int64
FLOAT = ctypes.c_float


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(__file__).with_name(LIBRARY)))


@cache
def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of the library, with the ctypes of its result and arguments.

    Raises:
        OSError: the library was not built, or does not fit this machine.
    """
    found = getattr(_library(), name)
    found.restype, found.argtypes = result, arguments
    return cast(Callable[..., Any], found)


def instruction_set() -> str:
    """The first of `INSTRUCTION_SETS` that this processor has, or the one that the environment variable
    PEGBOARD_CPU_ISA names."""
    name: bytes = function("pb_instruction_set", ctypes.c_char_p)()
    return name.decode()


class Pool:
    """Threads that share out an operation's outputs; `handle` is what the library takes."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._destroy = function("pb_pool_destroy", None, POINTER)
        self.handle: int = function("pb_pool_create", POINTER, INT)(num_threads)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._destroy(self.handle)


_POOLS: WeakValueDictionary[int, Pool] = WeakValueDictionary()


def pool_of(num_threads: int) -> Pool:
    """The process's pool of that many threads; the kernels of all engines share it, one at a time."""
    pool = _POOLS.get(num_threads)
    if pool is None:
        _POOLS[num_threads] = pool = Pool(num_threads)
    return pool
