"""Contract suite of `CheckpointSource`.

    class TestMySource(CheckpointSourceContract):
        @pytest.fixture
        def make(self):
            return SourceUnderTest(describe=describe, open=MySource, write=write_my_format)

The suite has a checkpoint written in the source's format, describes it, reads it back, and damages it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, CheckpointSource
from pegboard.testing.tiny import FAMILIES, ODD_SHAPE, parameter_shapes

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]

_TORCH_FREE = """
import importlib, sys
from pathlib import Path
module, name, path = sys.argv[1:]
getattr(importlib.import_module(module), name)(Path(path))
sys.exit("torch" in sys.modules)
"""


@dataclass(frozen=True, slots=True)
class SourceUnderTest:
    """A source and a writer of its format.

    Attributes:
        describe: the torch-free function that the manifest names.
        open: the factory.
        write: (folder, config, tensors) -> the path that `describe` takes; tensors are float32, in
            Hugging Face's names.
    """

    describe: Callable[[Path], CheckpointFacts]
    open: Callable[[CheckpointFacts], CheckpointSource]
    write: Callable[[Path, Mapping[str, Any], Tensors], Path]


class CheckpointSourceContract:
    """The contract of every source."""

    @pytest.fixture
    def make(self) -> SourceUnderTest:
        """The source under test."""
        raise NotImplementedError("override the fixture `make`")

    @pytest.fixture
    def config(self) -> dict[str, Any]:
        """The config of the checkpoint that is written."""
        return {**ODD_SHAPE, **FAMILIES["llama"], "dtype": "float32"}

    @pytest.fixture
    def tensors(self, config: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint that is written."""
        import torch

        generator = torch.Generator().manual_seed(4)
        return {
            name: torch.randn(shape, generator=generator)
            for name, shape in parameter_shapes(config).items()
        }

    @pytest.fixture
    def path(
        self,
        make: SourceUnderTest,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        tmp_path: Path,
    ) -> Path:
        """A checkpoint in the source's format."""
        return make.write(tmp_path / "model", config, tensors)

    def test_facts_name_every_tensor(
        self, make: SourceUnderTest, path: Path, tensors: dict[str, torch.Tensor]
    ) -> None:
        facts = make.describe(path)
        assert set(facts.tensors) == set(tensors)
        for name, fact in facts.tensors.items():
            assert fact.shape == tuple(tensors[name].shape)
        assert Path(facts.path).is_absolute() and path.samefile(facts.path)

    def test_facts_hold_the_config(
        self, make: SourceUnderTest, path: Path, config: dict[str, Any]
    ) -> None:
        facts = make.describe(path)
        for key in ("architectures", "hidden_size", "num_hidden_layers", "num_key_value_heads"):
            assert facts.config[key] == config[key]

    def test_tensors_come_back_bit_for_bit(
        self, make: SourceUnderTest, path: Path, tensors: dict[str, torch.Tensor]
    ) -> None:
        facts = make.describe(path)
        source = make.open(facts)
        for name, expected in tensors.items():
            got = source.read(name)
            assert str(got.dtype) == f"torch.{facts.tensors[name].dtype}"
            assert bool((got.float() == expected).all()), name
        del got
        source.close()

    def test_rows_are_part_of_the_first_axis(
        self, make: SourceUnderTest, path: Path, tensors: dict[str, torch.Tensor]
    ) -> None:
        source = make.open(make.describe(path))
        name = "model.embed_tokens.weight"
        for rows in (slice(0, 3), slice(500, 517), slice(7, 8)):
            assert bool((source.read(name, rows).float() == tensors[name][rows]).all())
        source.close()

    def test_an_unknown_tensor_is_an_error_naming_it(
        self, make: SourceUnderTest, path: Path
    ) -> None:
        source = make.open(make.describe(path))
        with pytest.raises(CheckpointError, match=r"model\.nothing\.weight"):
            source.read("model.nothing.weight")
        source.close()

    def test_closing_twice_does_nothing(self, make: SourceUnderTest, path: Path) -> None:
        source = make.open(make.describe(path))
        source.close()
        source.close()

    def test_fingerprint_follows_the_checkpoint(
        self,
        make: SourceUnderTest,
        path: Path,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        tmp_path: Path,
    ) -> None:
        first = make.describe(path).fingerprint
        assert first == make.describe(path).fingerprint
        other = make.write(tmp_path / "other", config | {"rms_norm_eps": 1e-3}, tensors)
        assert make.describe(other).fingerprint != first

    def test_a_missing_checkpoint_is_an_error_naming_it(
        self, make: SourceUnderTest, path: Path
    ) -> None:
        gone = path.with_name(path.name + "-gone")
        with pytest.raises(CheckpointError, match="gone"):
            make.describe(gone)

    @pytest.mark.parametrize("kept", [0, 3, 100])
    def test_a_cut_header_is_an_error(self, make: SourceUnderTest, path: Path, kept: int) -> None:
        file = _largest_file(path)
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(CheckpointError):
            make.describe(path)

    def test_cut_weights_are_an_error(self, make: SourceUnderTest, path: Path) -> None:
        file = _largest_file(path)
        file.write_bytes(file.read_bytes()[:-64])
        with pytest.raises(CheckpointError):
            facts = make.describe(path)
            source = make.open(facts)
            for name in facts.tensors:
                source.read(name)

    def test_describing_does_not_import_torch(self, make: SourceUnderTest, path: Path) -> None:
        function = make.describe
        argv = [sys.executable, "-c", _TORCH_FREE, function.__module__, function.__name__]
        done = subprocess.run([*argv, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr or "torch was imported"


def _largest_file(path: Path) -> Path:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)
