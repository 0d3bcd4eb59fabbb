"""Imports for the tests of plugin authors: a contract suite for each interface, tiny models, a
parity audit and an invariance matrix.

A contract suite is a class with a fixture to override:

    from pegboard.testing.kv_allocator import KVAllocatorContract

    class TestMyAllocator(KVAllocatorContract):
        @pytest.fixture
        def make(self):
            return MyAllocator

The suites are written from the interfaces' docstrings and compare with references of their own, so
that they hold for any implementation. Importing a suite does not import torch.
"""

import sys
from pkgutil import iter_modules

if "pytest" in sys.modules:
    # Under pytest a suite's failure says what was compared. Its modules are not imported yet.
    import pytest

    pytest.register_assert_rewrite(
        *(f"{__name__}.{suite.name}" for suite in iter_modules(__path__))
    )
