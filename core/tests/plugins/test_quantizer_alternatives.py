"""A quantizer's open options are settled as the best for which a kernel is made, else the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.compose import prepare
from pegboard.config import Config

Configure = Callable[..., Config]

QUANTIZER = """# /// pegboard
# [plugin]
# name = "either"
# [[provides]]
# interface = "quantizer"
# version = 2
# name = "either"
# summary = "s"
# options = ":Options"
# methods = ["none"]
# formats = ":formats"
# parameters = "pegboard.builtin.unquantized_plan:parameters"
# resident_bytes = ":resident_bytes"
# alternatives = ":alternatives"
# ///
from typing import Literal

from pydantic import BaseModel

from pegboard import hookimpl


class Options(BaseModel):
    keep: Literal["auto", "codes", "floats"] = "auto"


def alternatives(facts, options):
    ways = ("codes", "floats") if options.keep == "auto" else (options.keep,)
    return tuple(Options(keep=way) for way in ways)


def formats(facts, options):
    return ("float",) if options.keep == "floats" else ("uint4", "float")


def resident_bytes(layer, facts, dtype, options):
    return 1 if options.keep == "codes" else 1000


@hookimpl
def pegboard_quantizers():
    return {}
"""
KERNEL = """# /// pegboard
# [plugin]
# name = "quick"
# [[provides]]
# interface = "kernel"
# version = 1
# name = "quick"
# summary = "s"
# priority = PRIORITY
# operations = [{operation = "linear", formats = ["uint4"]}]
# ///
from pegboard import hookimpl


@hookimpl
def pegboard_kernels():
    return {}
"""


@pytest.fixture
def settled(tmp_path: Path, config_of: Configure) -> Callable[..., tuple[dict[str, Any], str, int]]:
    """(keep, priority of a kernel for codes or none, **config) -> options, why, bytes of weights."""

    def settle(
        keep: str, priority: int | None = None, **values: Any
    ) -> tuple[dict[str, Any], str, int]:
        load = [_file(tmp_path / "either.py", QUANTIZER)]
        if priority is not None:
            load.append(_file(tmp_path / "quick.py", KERNEL.replace("PRIORITY", str(priority))))
        quantizer = {"name": "either", "options": {"keep": keep}}
        prepared = prepare(config_of(plugins={"load": load}, quantizer=quantizer, **values))
        composition = prepared.composition
        why = [each.why for each in composition.decisions if each.key == "quantizer.options"]
        weights = [entry for entry in prepared.ledger.entries if entry.name == "weights: embedding"]
        options = dict(composition.target.parts["quantizer"].options)
        return options, "".join(why), weights[0].num_bytes

    return settle


def _file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_reference_kernel_is_no_reason_to_keep_codes(settled: Any) -> None:
    options, why, num_bytes = settled("auto")
    assert options == {"keep": "floats"}
    assert why == "nothing installed is made for uint4 weights here"
    assert num_bytes == 1000


def test_a_kernel_that_is_made_for_codes_is_one(settled: Any) -> None:
    options, why, num_bytes = settled("auto", priority=1)
    assert options == {"keep": "codes"}
    assert why == "every weight format has a kernel made for it"
    assert num_bytes == 1


def test_what_the_config_names_stays(settled: Any) -> None:
    assert settled("codes") == ({"keep": "codes"}, "", 1)
    assert settled("floats", priority=1) == ({"keep": "floats"}, "", 1000)


@pytest.mark.parametrize(
    "values", [{"kernels": {"linear": "torch"}}, {"kernels": "torch"}], ids=["linear", "all"]
)
def test_a_kernel_that_the_config_does_not_allow_does_not_count(
    settled: Any, values: dict[str, Any]
) -> None:
    assert settled("auto", priority=1, **values)[0] == {"keep": "floats"}


def test_a_kernel_that_auto_never_takes_does_not_count(settled: Any) -> None:
    assert settled("auto", priority=-1)[0] == {"keep": "floats"}
