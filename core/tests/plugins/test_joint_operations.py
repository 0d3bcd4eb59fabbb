"""A joint operation is chosen where one family runs all that it joins, and never costs a promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.interfaces.kernel import JOINT_OPERATIONS

SOURCE = """
# /// pegboard
# [plugin]
# name = "family"
# [[provides]]
# interface = "kernel"
# version = 1
# name = "family"
# summary = "Kernels of the test"
# priority = 99
# operations = [
#     {{ operation = "linear", row_invariant = true }},
#     {{ operation = "rms_norm", row_invariant = true }},
#     {{ operation = "silu_mul", row_invariant = true }},
#     {{ operation = "rotary", row_invariant = true }},
#     {{ operation = "sample", row_invariant = true }},
#     {{ operation = "decoder_layer", row_invariant = {joint} }},
# ]
# [[provides]]
# interface = "attention"
# version = 0
# name = "family"
# summary = "Attention of the test"
# priority = 99
# layout = "pegboard.builtin.torch_attention_layout:layout"
# promises = ["row_invariant", "window", "soft_cap"]
# ///
"""


def chosen(folder: Path, model: Path, joint: bool, **values: str) -> tuple[str, str]:
    """The numerics, and the family of the joint operation or ""."""
    path = folder / "family.py"
    path.write_text(SOURCE.format(joint=str(joint).lower()).lstrip())
    config = {"model": str(model), "max_model_len": 64, "kv_cache": {"memory": "8MiB"}}
    plugins = {"load": [str(path)]}
    composition = prepare(Config.from_values({**config, "plugins": plugins, **values})).composition
    names = [k.part.name for k in composition.target.kernels if k.operation in JOINT_OPERATIONS]
    return composition.numerics, "".join(names)


@pytest.mark.parametrize(("joint", "family"), [(True, "family"), (False, "")])
def test_it_never_costs_invariance(
    tmp_path: Path, tiny_model: Path, joint: bool, family: str
) -> None:
    assert chosen(tmp_path, tiny_model, joint) == ("invariant", family)
    assert chosen(tmp_path, tiny_model, joint, numerics="invariant") == ("invariant", family)


def test_it_is_left_out_where_something_else_was_named(tmp_path: Path, tiny_model: Path) -> None:
    assert chosen(tmp_path, tiny_model, True, attention="torch") == ("fast", "")
