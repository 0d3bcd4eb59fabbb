"""The config of `compressed-tensors` checkpoints, read as plain data. Torch-free.

The tools' own classes refuse what older versions of themselves wrote. Here keys that change nothing
are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.model import ParameterKind
from pegboard_quant.keys import check_keys
from pegboard_quant.names import is_any, rank
from pegboard_quant.planning import flag, texts

METHODS = ("compressed-tensors", "sparseml")
"""Names of the method; the second is the older one."""

READABLE = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Layouts that are read, here or by others; the last is one of the two before it."""

Kind = Literal["int", "float"]
"""The numbers that codes stand for."""

_METHOD = "compressed-tensors"
_TOP = frozenset(
    {
        *("config_groups", "ignore", "format", "kv_cache_scheme", "sparsity_config"),
    }
)
_GROUP = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_ARGS = frozenset(
    {
        *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"),
        "actorder",
    }
)
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_IN_ORDER: tuple[str | bool | None, ...] = (None, False, "weight", "static")
_REORDERED: tuple[str | bool | None, ...] = (True, "group", "dynamic")
"""Values of `actorder` by which a group's inputs need not be consecutive. By the others the weight was
quantized in another order, but is stored in the plain one."""


@dataclass(frozen=True, slots=True)
class QuantizationArgs:
    """The quantization of one kind of tensor.

    Attributes:
        bits: of a code.
        kind: `int` or `float`.
        symmetric: no zeros are stored.
        strategy: what shares a scale: `tensor`, `channel`, `group`, `block`, `token`, ...
        group_size: inputs a group, for `group`; else None.
        block: rows and columns, for `block`; else None.
        dynamic: scales are computed while running, not stored.
        reordered: groups follow the order in which inputs were quantized (`g_idx` is stored).
    """

    bits: int
    kind: Kind
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    dynamic: bool
    reordered: bool


@dataclass(frozen=True, slots=True)
class Group:
    """One of `config_groups`.

    Attributes:
        name: its key.
        targets: module names, `re:` patterns or classes.
        weights, inputs, outputs: how those are quantized; None: not.
        layout: how the weights are stored.
    """

    name: str
    targets: tuple[str, ...]
    weights: QuantizationArgs | None
    inputs: QuantizationArgs | None
    outputs: QuantizationArgs | None
    layout: str


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """A checkpoint's `quantization_config`.

    Attributes:
        groups: of weights; one weight may be meant by several.
        ignored: what is left as it is, as `targets`; goes before them.
        kv: how keys and values are quantized; None: not.
    """

    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    kv: QuantizationArgs | None

    def group_of(self, module: str, kind: ParameterKind) -> Group | None:
        """The group that means a module most narrowly: by its name, by a pattern, by its class. Of two
        that mean it alike, that of the target which sorts first, as the tool has it. None: the module
        is ignored, or no group means it.

        Raises:
            CheckpointError: a pattern is no regular expression.
        """
        if is_any(self.ignored, module, kind):
            return None
        by_target = {target: group for group in self.groups for target in group.targets}
        if module in by_target:
            return by_target[module]
        found = [
            (narrow, target)
            for target in by_target
            if (narrow := rank(target, module, kind)) is not None
        ]
        return by_target[min(found)[1]] if found else None


def parse(facts: CheckpointFacts) -> CompressedConfig:
    """The config of a checkpoint whose method is one of `METHODS`.

    Raises:
        CheckpointError: it says what is not known, or what cannot be honoured.
    """
    config = facts.quantization_config
    check_keys(config, _TOP, _METHOD)
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise CheckpointError(
            "quantization_config.sparsity_config", f"{sparsity!r}", allowed="none, or format dense"
        )
    groups = _mapping(config, "config_groups", "quantization_config")
    layout = str(config.get("format"))
    kv = config.get("kv_cache_scheme")
    return CompressedConfig(
        groups=tuple(_group(name, groups, layout) for name in groups),
        ignored=texts(config, "ignore"),
        kv=None if kv is None else _args(config, "kv_cache_scheme", "quantization_config"),
    )


def _group(name: str, groups: Mapping[str, Any], default_layout: str) -> Group:
    path = f"quantization_config.config_groups.{name}"
    group = _mapping(groups, name, "quantization_config.config_groups")
    check_keys(group, _GROUP, _METHOD)
    layout = str(group.get("format") or default_layout)
    if layout not in READABLE:
        raise CheckpointError(f"{path}.format", layout, allowed=", ".join(READABLE))
    args = {
        key: None if group.get(key) is None else _args(group, key, path)
        for key in ("weights", "input_activations", "output_activations")
    }
    return Group(
        name=name,
        targets=texts(group, "targets"),
        weights=args["weights"],
        inputs=args["input_activations"],
        outputs=args["output_activations"],
        layout=layout,
    )


def _args(holder: Mapping[str, Any], key: str, path: str) -> QuantizationArgs:
    args = _mapping(holder, key, path)
    path = f"{path}.{key}"
    check_keys(args, _ARGS, _METHOD)
    group_size = args.get("group_size")
    if group_size is not None and (
        type(group_size) is not int or (group_size < 1 and group_size != -1)
    ):
        raise CheckpointError(
            f"{path}.group_size", f"{group_size!r}", allowed="-1, a positive number or null"
        )
    strategy = args.get("strategy") or _implied_strategy(group_size)
    if strategy not in _STRATEGIES:
        raise CheckpointError(f"{path}.strategy", f"{strategy!r}", allowed=", ".join(_STRATEGIES))
    if strategy == "group" and (group_size is None or group_size < 1):
        raise CheckpointError(f"{path}.group_size", f"{group_size!r}", allowed="a positive number")
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise CheckpointError(f"{path}.num_bits", f"{bits!r}", allowed="1 to 8")
    if kind not in ("int", "float"):
        raise CheckpointError(f"{path}.type", f"{kind!r}", allowed="int, float")
    return QuantizationArgs(
        bits=bits,
        kind=kind,
        symmetric=flag(args, "symmetric", default=True),
        strategy=strategy,
        group_size=group_size if strategy == "group" else None,
        block=_block(args, path) if strategy == "block" else None,
        dynamic=_dynamic(args, path),
        reordered=_reordered(args, path),
    )


def _reordered(args: Mapping[str, Any], path: str) -> bool:
    order = args.get("actorder")
    if order not in _IN_ORDER + _REORDERED:
        allowed = ", ".join(map(repr, _IN_ORDER + _REORDERED))
        raise CheckpointError(f"{path}.actorder", f"{order!r}", allowed=allowed)
    return order in _REORDERED


def _implied_strategy(group_size: int | None) -> str:
    if group_size is None:
        return "tensor"
    return "channel" if group_size < 0 else "group"


def _block(args: Mapping[str, Any], path: str) -> tuple[int, int]:
    """Rows and columns of a block; older files have `128x128`."""
    value = args.get("block_structure")
    parts = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = (int(part) for part in parts or ())
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise CheckpointError(f"{path}.block_structure", f"{value!r}", allowed="[rows, columns]")
    return rows, columns


def _dynamic(args: Mapping[str, Any], path: str) -> bool:
    if args.get("dynamic") == "local":
        raise CheckpointError(f"{path}.dynamic", "'local'", allowed="true or false")
    return flag(args, "dynamic", default=False)


def _mapping(holder: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    value = holder.get(key)
    if not isinstance(value, Mapping):
        was = "is missing" if value is None else f"{value!r}"
        raise CheckpointError(f"{path}.{key}", was, allowed="an object")
    return value
