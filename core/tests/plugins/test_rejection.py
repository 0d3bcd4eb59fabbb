"""When drafts may be verified by rejection, and what is said of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pegboard.cli import main
from pegboard.compose import Prepared, prepare
from pegboard.compose.making import Maker
from pegboard.compose.worker import worker_parts
from pegboard.config import Config
from pegboard.errors import CompositionRefused, InterfaceNotSatisfied
from pegboard.interfaces.drafter import DrafterContext, SampledDrafter
from pegboard.testing.guessing_drafter import GuessingDrafter
from pegboard.testing.tiny import write_tiny_model


class Guessing(GuessingDrafter):
    """Takes its context, as factories do."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__({}, 1.0)


class Drawing(Guessing, SampledDrafter):
    """Says from what it draws, although it draws nothing."""

    manifest: ClassVar[Any] = {"promises": ["probabilities"]}

    def propose_sampled(self, seen: Any) -> Any:
        raise NotImplementedError


class Boasting(Guessing):
    """Promises what it has not."""

    manifest: ClassVar[Any] = {"promises": ["probabilities"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", num_hidden_layers=1)


def prepared(model: Path, drafter: Any, verification: str, **settings: Any) -> Prepared:
    config = {"model": str(model), "max_model_len": 64, **settings}
    drafting = {"drafter": {"verification": verification, "num_speculative_tokens": 3}}
    return prepare(Config.from_values(config | drafting), drafter=drafter)


def test_a_drafter_that_draws_is_verified_by_rejection_where_asked(model: Path) -> None:
    exact, rejection = (prepared(model, Drawing, how) for how in ("exact", "rejection"))
    operations = [
        {kernel.operation for kernel in each.composition.target.kernels}
        for each in (exact, rejection)
    ]
    assert operations[1] - operations[0] == {"probabilities"}
    assert rejection.composition.numerics == "fast"
    lines = [{e.name: e.num_bytes for e in each.ledger.entries} for each in (exact, rejection)]
    assert lines[1].keys() - lines[0].keys() == {"probabilities of drafts"}
    assert lines[1]["probabilities of drafts"] > 64 * 3 * 517 * 4
    for each in (exact, rejection):
        maker = Maker(each.composition, each.objects)
        assert worker_parts(each.composition, maker).verification == each.composition.verification


def test_a_drafter_that_does_not_draw_is_refused(model: Path) -> None:
    with pytest.raises(
        CompositionRefused, match=r"verification: rejection, but drafter 'Guessing'"
    ):
        prepared(model, Guessing, "rejection")
    said = prepared(model, Boasting, "rejection")
    with pytest.raises(InterfaceNotSatisfied, match="SampledDrafter"):
        worker_parts(said.composition, Maker(said.composition, said.objects))


def test_invariance_and_rejection_do_not_go_together(model: Path) -> None:
    with pytest.raises(CompositionRefused) as refusal:
        prepared(model, Drawing, "rejection", numerics="invariant")
    assert any("tokens depend on the drafts" in reason for reason in refusal.value.reasons)


def test_probabilities_are_no_operation_of_exact_verification(model: Path) -> None:
    named = {"kernels": {"probabilities": "torch"}}
    prepared(model, Drawing, "rejection", **named)
    with pytest.raises(CompositionRefused, match=r"kernels\.probabilities: unknown operation"):
        prepared(model, Drawing, "exact", **named)


PLUGIN = """# /// pegboard
# [plugin]
# name = "drawing"
# [[provides]]
# interface = "drafter"
# version = 1
# name = "drawing"
# summary = "Of the test"
# promises = ["probabilities"]
# [[provides]]
# interface = "drafter"
# version = 1
# name = "guessing"
# summary = "Of the test"
# ///
"""


def test_check_says_what_is_not_promised_and_who_could_be_taken(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "drawing.py"
    file.write_text(PLUGIN)

    def check(drafter: str) -> tuple[int, str]:
        sets = [f"plugins.load=[{file}]", f"drafter={{name: {drafter}, verification: rejection}}"]
        code = main(["check", str(model), *(f"--set={one}" for one in sets)])
        said = capsys.readouterr()
        return code, said.out + said.err

    code, said = check("drawing")
    assert code == 0 and "verification   rejection: a drafter changes tokens, not their" in said
    code, said = check("guessing")
    (able,) = re.findall(r"installed ones that do: (.*?);", said)
    assert code == 2 and "drawing" in able.split(", ")
