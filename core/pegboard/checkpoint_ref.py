"""Model references: a folder, a file, a hub id, or a file inside an installed package."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from pegboard.config_values import nearest, shown
from pegboard.errors import CheckpointError

_PACKAGE_SCHEME = "pkg://"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_WEIGHTS = ("*.safetensors",)
# Repositories of single-file formats hold the same model many times over.
_HUB_FILES = [*_WEIGHTS, "*.json", "*.jinja"]
# Subfolders and `consolidated*` hold the same weights in another form.
_HUB_FILES_LEFT_OUT = ["*/*", "consolidated*"]
_ALLOWED = "a folder, a file, a hub id (owner/name), or pkg://package/file"


def locate(ref: str, revision: str | None = None, weights: Sequence[str] = _WEIGHTS) -> Path:
    """The folder or file that a reference names, as an absolute path; a hub model is downloaded.

    Args:
        ref: a path that exists on the disk; `pkg://package/file` is found without
            importing the package; anything else that could be one is a hub id.
        revision: branch, tag or commit of a hub model.
        weights: names (fnmatch patterns) of files that checkpoints consist of here.

    Raises:
        CheckpointError: nothing is there, the hub cannot be asked, or a revision is given for
            something that has none.
    """
    if ref.startswith(_PACKAGE_SCHEME):
        _refuse_revision(ref, revision)
        return _in_package(ref)
    path = _on_disk(ref)
    if path is not None:
        _refuse_revision(ref, revision)
        return path.resolve()
    looks_like_a_file = ref.startswith(".") or any(fnmatch(ref, name) for name in weights)
    if looks_like_a_file or not _HUB_ID.fullmatch(ref):
        raise CheckpointError(ref, "no such folder or file", allowed=_ALLOWED)
    return _from_hub(ref, revision)


def _on_disk(ref: str) -> Path | None:
    """The file or folder of that path, if it exists."""
    try:
        path = Path(ref).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError, RuntimeError, ValueError):
        return None  # RuntimeError: of `~nobody`; ValueError: no path has such characters
    except OSError as error:
        raise CheckpointError(shown(ref), f"cannot be read ({error.strerror})") from None
    return path


def _refuse_revision(ref: str, revision: str | None) -> None:
    if revision is not None:
        raise CheckpointError(
            ref, f"has no revision {revision!r}: it is no hub id", fix="revision: none"
        )


def _in_package(ref: str) -> Path:
    package, _, inside = ref.removeprefix(_PACKAGE_SCHEME).partition("/")
    if not (package.isidentifier() and inside.isprintable() and inside):
        raise CheckpointError(ref, "not a file in a package", allowed="pkg://package/file")
    # A top-level name: find_spec of a dotted one would import its parents.
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # of a running program's own `__main__`
        spec = None
    if spec is None or spec.submodule_search_locations is None:
        raise CheckpointError(
            ref,
            f"the package {package!r} is not installed",
            fix=f"pip install {package.replace('_', '-')}",
        )
    folders = [Path(folder).resolve() for folder in spec.submodule_search_locations]
    for folder in folders:
        path = (folder / inside).resolve()
        if path.is_relative_to(folder) and path.exists():
            return path
    files = sorted(name for folder in folders for name in _data_files(folder))
    meant = nearest(inside, files)
    raise CheckpointError(
        ref,
        f"no such file in the package {package!r}",
        allowed=", ".join(files[:8]),
        fix=f"did you mean {meant!r}?" if meant else "",
    )


def _data_files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc", ".pyi", ".so"):
            yield path.relative_to(folder).as_posix()


def _from_hub(ref: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            ref,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_FILES_LEFT_OUT,
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            ref, "the hub gives it only to those who accepted its terms", fix="hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(ref, f"the hub has no revision {revision!r} of it") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            ref, "neither on this disk nor on the hub", allowed=_ALLOWED
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(ref, "not a hub id", allowed=_ALLOWED) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            ref,
            "neither on this disk nor in the hub's cache, and the hub cannot be reached",
            allowed=_ALLOWED,
            fix="check the name and the network, or give the path of a folder",
        ) from error
    return Path(folder).resolve()
