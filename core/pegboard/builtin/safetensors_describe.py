"""Describes a safetensors checkpoint from its headers. Torch-free.

A checkpoint is a folder with `config.json` and `model.safetensors`, or shards under
`model.safetensors.index.json`; or one `.safetensors` file with `config.json` beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pegboard.builtin.checkpoint_json import read_json, read_optional_json
from pegboard.builtin.tokenizer_files import tokenizer_facts
from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, TensorFact
from pegboard.regular_files import MAX_INDEX_BYTES, open_regular

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files with the settings of a quantization method, and the method where they do not name one."""

_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
}
"""The format's dtype to ours and its bytes an element."""


def describe(path: Path) -> CheckpointFacts:
    """The facts of a checkpoint; reads headers and JSON, no weights.

    Args:
        path: the folder, or one `.safetensors` file.

    Raises:
        CheckpointError: a file that is missing or damaged, named.
    """
    if not path.exists():
        raise CheckpointError(str(path), "no such folder or file")
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json", fix="a checkpoint's folder holds its config.json")
    generation = read_optional_json(folder / "generation_config.json")
    method, quantization = _quantization(folder, config)
    files = shard_files(path)
    eos_sources = _eos_sources({"generation_config.json": generation, "config.json": config})
    return CheckpointFacts(
        source="safetensors",
        path=str(path.absolute()),
        fingerprint=_fingerprint({**config, "quantization_config": quantization}, files),
        config=config,
        tensors=_tensor_facts(path, files),
        quantization=method,
        quantization_config=quantization,
        eos_token_ids=tuple(dict.fromkeys(chain.from_iterable(eos_sources.values()))),
        tokenizer=tokenizer_facts(folder),
        eos_sources=eos_sources,
        generation=generation,
    )


def _quantization(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The method that the weights are quantized by, None for none, and its settings: of the model's
    config, or of a file of their own, as older tools wrote them.

    Raises:
        CheckpointError: they are no settings.
    """
    file, key, default = folder / "config.json", "quantization_config", None
    if config.get("quantization"):
        default = "mlx"  # which names no method, and repeats its settings under the usual key
    quantization = config.get(key) or config.get("compression_config") or config.get("quantization")
    quantization = quantization or {}
    for name, method_of_file in QUANTIZATION_FILES.items():
        if not quantization and (folder / name).exists():
            file, key, default = folder / name, "", method_of_file
            quantization = read_json(file)
            quantization = quantization.get("quantization", quantization)
    if not isinstance(quantization, dict):
        raise CheckpointError(str(file), f"{key} {quantization!r}", allowed="an object")
    method = quantization.get("quant_method") or quantization.get("method") or default
    if not isinstance(method, str | None):
        raise CheckpointError(
            str(file), f"{key}.quant_method {method!r}".lstrip("."), allowed="a text"
        )
    if quantization and method is None:
        raise CheckpointError(
            str(file),
            f"{key or 'the file'} names no method: {', '.join(map(str, quantization))[:200]}",
            fix="say its quant_method",
        )
    return method, quantization


def shard_files(path: Path) -> tuple[Path, ...]:
    """The files that hold a checkpoint's tensors, in order of their names.

    Raises:
        CheckpointError: none, or one that the index names is missing.
    """
    if not path.is_dir():
        return (path,)
    if (path / SINGLE).exists():
        return (path / SINGLE,)
    if (path / INDEX).exists():
        names = sorted(set(_weight_map(path).values()))
        return tuple(path / name for name in names)
    found = sorted(file.name for file in path.iterdir() if file.suffix in {".safetensors", ".bin"})
    raise CheckpointError(
        str(path),
        f"holds neither {SINGLE} nor {INDEX}" + (f", but {', '.join(found[:4])}" if found else ""),
        fix="point at a folder with safetensors weights, or at the one .safetensors file",
    )


@contextmanager
def open_shard(file: Path, framework: str) -> Iterator[Any]:
    """An open safetensors file, its header checked: sizes, offsets, overlaps, dtypes.

    Raises:
        CheckpointError: it is missing or damaged; reading from it while open raises that too.
    """
    try:
        open_regular(file).close()  # the library would wait for a FIFO
        with safe_open(file, framework=framework) as handle:
            yield handle
    except FileNotFoundError:
        raise CheckpointError(
            str(file), "no such file", fix="download the checkpoint again"
        ) from None
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise CheckpointError(
            str(file), f"damaged or not safetensors ({reason})", fix="download it again"
        ) from error


def _tensor_facts(path: Path, files: tuple[Path, ...]) -> dict[str, TensorFact]:
    facts: dict[str, TensorFact] = {}
    holder: dict[str, str] = {}
    for file in files:
        with open_shard(file, "numpy") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in facts:
                    raise CheckpointError(
                        str(file), f"holds tensor {name}, and so does {holder[name]}"
                    )
                stored = handle.get_slice(name)
                facts[name] = _tensor_fact(file, name, stored.get_shape(), stored.get_dtype())
                holder[name] = file.name
    if path.is_dir() and not (path / SINGLE).exists():
        _check_index(path, holder)
    return facts


def _tensor_fact(file: Path, name: str, shape: list[int], dtype: str) -> TensorFact:
    if dtype not in _DTYPES:
        raise CheckpointError(
            str(file), f"tensor {name} is of dtype {dtype}", allowed=", ".join(_DTYPES)
        )
    ours, item_bytes = _DTYPES[dtype]
    return TensorFact(tuple(shape), ours, "plain", math.prod(shape) * item_bytes)


def _weight_map(folder: Path) -> Mapping[str, str]:
    """The index's tensor name to file name."""
    index = folder / INDEX
    weight_map = read_json(index, limit=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(str(index), "no weight_map", allowed="tensor names to file names")
    for tensor, file in weight_map.items():
        is_name = isinstance(file, str) and file.isprintable() and file not in ("", "..")
        if not is_name or Path(file).name != file:
            raise CheckpointError(
                str(index), f"tensor {tensor} in {file!r}", allowed="a file of the same folder"
            )
    return weight_map


def _check_index(folder: Path, holder: Mapping[str, str]) -> None:
    """Raises CheckpointError unless every tensor is in the file where the index has it."""
    weight_map = _weight_map(folder)
    for tensor, file in weight_map.items():
        if holder.get(tensor) != file:
            raise CheckpointError(str(folder / file), f"tensor {tensor} of {INDEX} is not in it")
    for tensor, file in holder.items():
        if tensor not in weight_map:
            raise CheckpointError(str(folder / file), f"tensor {tensor} is not in {INDEX}")


def _fingerprint(config: Mapping[str, Any], files: tuple[Path, ...]) -> str:
    """A digest of the config, and of each file's name, size, time of change and header."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        with open_shard(file, "numpy"):  # refuses a damaged header before it is read
            status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} ".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(int.from_bytes(handle.read(8), "little")))
    return digest.hexdigest()


def _eos_sources(files: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """The ids that each file names; files that name none are left out."""
    named = {}
    for file, values in files.items():
        value = values.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        named[file] = tuple(token_id for token_id in ids if type(token_id) is int and token_id >= 0)
    return {file: ids for file, ids in named.items() if ids}
