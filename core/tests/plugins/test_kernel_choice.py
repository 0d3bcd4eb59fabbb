"""Which kernels run: what the config names, else the highest priority of what works on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard import Engine, errors
from pegboard.config import Config

Configure = Callable[..., Config]


KERNEL_FILE = """# /// pegboard
# [plugin]
# name = "{name}"
# [[provides]]
# interface = "kernel"
# version = 1
# name = "{family}"
# summary = "s"
# priority = {priority}
# operations = [{{operation = "silu_mul"}}]
# ///
import torch
from pegboard import hookimpl
from pegboard.interfaces.kernel import SiluMulKernel


class Mine(SiluMulKernel):
    def __init__(self, context):
        self.context = context

    def self_test(self):
        assert {works}, "the tile is wrong"

    def silu_mul(self, gate, up):
        return torch.nn.functional.silu(gate) * up


@hookimpl
def pegboard_kernels():
    return {{"{family}": Mine}}
"""


def kernel_file(folder: Path, name: str, family: str, priority: int = 0, works: bool = True) -> str:
    path = folder / f"{name}.py"
    path.write_text(KERNEL_FILE.format(name=name, family=family, priority=priority, works=works))
    return str(path)


def silu_kernel(engine: Engine) -> str:
    kernels = engine.prepared.composition.target.kernels
    return next(kernel.part.name for kernel in kernels if kernel.operation == "silu_mul")


def test_a_kernel_of_negative_priority_runs_when_it_is_named(
    tmp_path: Path, config_of: Configure
) -> None:
    load = [kernel_file(tmp_path, "slow", "slow", priority=-1)]
    with Engine(config_of(plugins={"load": load})) as engine:
        assert silu_kernel(engine) == "torch"
    config = config_of(plugins={"load": load}, kernels={"silu_mul": "slow"})
    with Engine(config) as engine:
        assert silu_kernel(engine) == "slow"
    with Engine(config_of(plugins={"load": load}, kernels="slow")) as engine:
        assert silu_kernel(engine) == "slow"
        decisions = {
            decision.key: decision.why for decision in engine.prepared.composition.decisions
        }
        assert decisions["kernels.linear"] == "slow has none that fits"
    with pytest.raises(errors.UserError, match=r"kernels\.rotary: slow has no kernel"):
        Engine(config_of(plugins={"load": load}, kernels={"rotary": "slow"}))


def test_kernels_that_fail_their_self_test_are_left_out_unless_named(
    tmp_path: Path, config_of: Configure
) -> None:
    load = [
        kernel_file(tmp_path, "bad", "bad", priority=9, works=False),
        kernel_file(tmp_path, "worse", "worse", priority=8, works=False),
    ]
    with Engine(config_of(plugins={"load": load})) as engine:
        assert silu_kernel(engine) == "torch"
    with pytest.raises(errors.KernelUnusable, match="the tile is wrong"):
        Engine(config_of(plugins={"load": load}, kernels={"silu_mul": "bad"}))


def test_kernels_of_one_name_are_settled_by_replace_and_run_as_chosen(
    tmp_path: Path, config_of: Configure
) -> None:
    load = [kernel_file(tmp_path, "mine", "torch")]
    with pytest.raises(errors.UserError, match="provided by several plugins"):
        Engine(config_of(plugins={"load": load}))
    replace = {"kernel.torch": "builtin"}
    with Engine(config_of(plugins={"load": load, "replace": replace})) as engine:
        chosen = {
            kernel.part.origin.plugin for kernel in engine.prepared.composition.target.kernels
        }
        assert chosen == {"builtin"}
    with pytest.raises(errors.ConfigError, match="does not provide it"):
        Engine(config_of(plugins={"load": load, "replace": {"kernel.torch": "no"}}))
