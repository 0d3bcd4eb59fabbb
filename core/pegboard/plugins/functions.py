"""The torch-free functions that manifests name: found, called under guard, their answers checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel

from pegboard.config_values import shown
from pegboard.errors import INTERRUPTS, ManifestFunctionFailed, UserError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.drafter import DrafterFacts
from pegboard.interfaces.kv import TensorSpec
from pegboard.interfaces.model import ModelShape
from pegboard.interfaces.quantizer import StoredKVScales, StoredParameter
from pegboard.plugins.composition import Part
from pegboard.plugins.guard import failure, guarded
from pegboard.plugins.loader import resolve_dotted
from pegboard.plugins.manifest import Origin

NumBytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

Options = tuple[BaseModel, ...]

ANSWERS: dict[tuple[str, str], Any] = {
    ("checkpoint_source", "describe"): CheckpointFacts,
    ("model", "describe"): ModelShape,
    ("drafter", "describe"): DrafterFacts,
    ("quantizer", "formats"): tuple[str, ...],
    ("quantizer", "parameters"): tuple[StoredParameter, ...],
    ("quantizer", "resident_bytes"): NumBytes,
    ("quantizer", "kv_scales"): tuple[StoredKVScales, ...],
    ("quantizer", "notes"): tuple[str, ...],
    ("quantizer", "alternatives"): Options,
    ("attention", "layout"): tuple[TensorSpec, ...],
}
"""The type of a function's answer, by interface and manifest field. `estimate` is of any interface."""


@dataclass(frozen=True)
class ManifestFunction:
    """A function that a plugin's manifest names.

    Attributes:
        origin: the plugin.
        field: of the manifest entry.
        dotted: what the entry says there.
        function: what that means.
        answers: the type of what it returns.
    """

    origin: Origin
    field: str
    dotted: str
    function: Callable[..., Any]
    answers: Any

    def __call__(self, *arguments: Any) -> Any:
        """Its answer.

        Raises:
            UserError: raised by the function, about what it was given.
            ManifestFunctionFailed: anything else was raised, or the answer is of another type.
        """
        # Without the watch of `guarded`: some are asked once for every tensor.
        try:
            answer = self.function(*arguments)
        except (UserError, *INTERRUPTS):
            raise
        except BaseException as problem:
            raise failure(
                ManifestFunctionFailed, self.origin, f"its {self.field} {self.dotted!r}", problem
            ) from problem
        self._check(answer)
        return answer

    def _check(self, answer: Any) -> None:
        """Checks an answer by the encoding in which it goes to workers."""
        try:
            if self.answers is Options:
                _check_options(answer)
                return
            if isinstance(self.answers, type) and not isinstance(answer, self.answers):
                raise TypeError(f"expected {self.answers.__name__}")
            msgspec.json.decode(msgspec.json.encode(answer), type=self.answers)
        except (Exception, RecursionError) as problem:
            raise self.origin.error(
                ManifestFunctionFailed,
                f"its {self.field} {self.dotted!r} answered {shown(answer)}: {problem}",
                allowed=_name(self.answers),
            ) from problem


def named_function(part: Part, field: str) -> ManifestFunction:
    """The function that a manifest entry names in a field.

    Raises:
        PluginImportFailed: it cannot be had.
        ManifestFunctionFailed: it is no function.
    """
    dotted, origin = getattr(part.entry, field), part.origin
    function = resolve_dotted(dotted, origin)
    if not callable(function):
        raise origin.error(
            ManifestFunctionFailed,
            f"its {field} {dotted!r} is {shown(function)}",
            allowed="a function",
        )
    return ManifestFunction(
        origin=origin,
        field=field,
        dotted=dotted,
        function=function,
        answers=ANSWERS.get((part.entry.interface, field), NumBytes),
    )


def ask(part: Part, field: str, *arguments: Any) -> Any:
    """The answer of a function that a manifest entry names in a field, asked once; a long wait is told
    in the log. Raises as `named_function` and the call do."""
    with guarded(ManifestFunctionFailed, part.origin, f"its {field}"):
        return named_function(part, field)(*arguments)


def _check_options(answer: Any) -> None:
    if not isinstance(answer, (tuple, list)) or not answer:
        raise TypeError("expected one or more")
    if not all(isinstance(one, BaseModel) for one in answer):
        raise TypeError("expected options")


def _name(answers: Any) -> str:
    if answers is NumBytes:
        return "a whole number of bytes"
    return answers.__name__ if isinstance(answers, type) else str(answers).replace("typing.", "")
