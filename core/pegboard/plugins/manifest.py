"""Manifests: what a plugin says of itself, as data. `manifest_reader` makes it of text."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pegboard.config_values import MAX_DEPTH, MAX_DRAFT_NODES
from pegboard.errors import PluginError, printable

OBJECT = "object"
"""The distribution of a part that stands for an object given in Python."""

SINGLE_FILE = "file"
"""The distribution of a plugin in a single file; its manifest alone says its name."""

Dotted = Annotated[str, msgspec.Meta(pattern=r"^[\w.]*:\w+\Z")]
"""`package.module:name`; `:name` is in the plugin's own module."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[^\s]{1,100}\Z")]
"""Configs, metrics and logs say it."""

Line = Annotated[str, msgspec.Meta(pattern=r"^[^\r\n]{0,500}\Z")]

Capability = Annotated[str, msgspec.Meta(pattern=r"^\d{1,3}\.\d{1,3}\Z")]

Depth = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEPTH)]
SpeculativeTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAFT_NODES)]

Priority = Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a plugin.

    Attributes:
        plugin: its entry point's name, or a single file's stem.
        distribution, version: of the installed distribution; of a single file: `file` and ``.
        module: to import; of a single file: the name it is imported under.
        path: of the package's folder or the module's file.
        builtin: it is part of the core's own distribution.
    """

    plugin: str
    distribution: str
    version: str
    module: str
    path: str
    builtin: bool = False

    def __str__(self) -> str:
        if self.distribution == OBJECT:
            return f"object of {self.module}"
        return printable(f"{self.distribution} {self.version}".strip() + f", {self.path}")

    @property
    def owner(self) -> str:
        """Its distribution, or a single file's path."""
        return self.path if self.distribution == SINGLE_FILE else self.distribution

    @property
    def remedy(self) -> str:
        """The fix if the plugin itself is at fault."""
        if self.distribution == OBJECT:
            return f"mend {self.module}, or the attribute manifest of {self.plugin}"
        if self.distribution == SINGLE_FILE:
            return f"mend {self.path}"
        return f"install another version of {self.distribution}, or tell its authors"

    def error(
        self, kind: type[PluginError], was: str, *, allowed: str = "", fix: str = ""
    ) -> PluginError:
        """An error about the plugin, whose fix is `remedy` where no other is given."""
        fix = fix or self.remedy
        return kind(self.plugin, was, origin=str(self), allowed=allowed, fix=fix)


class Requires(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The needs of a thing: all keys of the table must hold. Of several tables, `[[provides.requires]]`,
    one must hold. An empty list, as by default, allows anything.

    Attributes:
        devices: kinds of device that it runs on (`cpu`, `cuda`).
        device_features: what the device must have, all of them, as `DeviceFacts.features` says it.
        capability: the least CUDA compute capability, `major.minor`.
        dtypes: activation dtypes that it runs with.
        head_sizes: elements of a head that it runs with.
        block_sizes: tokens of a KV block, of an attention backend; the first is taken where the config
            names none and the default is not among them.
        features: promises that other parts must make, `interface.promise` (`attention.query_mask`).
        packages: Python modules that must be importable.
        files: files that must lie in the plugin's folder, such as a library that is built when the
            plugin is installed.
    """

    devices: tuple[str, ...] = ()
    device_features: tuple[str, ...] = ()
    capability: Capability | None = None
    dtypes: tuple[str, ...] = ()
    head_sizes: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


Alternatives = Annotated[tuple[Requires, ...], msgspec.Meta(min_length=1, max_length=16)]


class Operation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operation that a kernel family implements.

    Attributes:
        operation: one of `OPERATIONS`, `REJECTION_OPERATIONS` or `JOINT_OPERATIONS` of
            `interfaces/kernel.py`.
        formats: weight formats that it takes, of `linear` and of what joins it: `LinearWeight.format`.
        dtypes: activation dtypes that it runs with; empty: all.
        devices: kinds of device that it runs on.
        row_invariant: whether it gives each row the same bits in any batch, chunk, padding and number
            of threads.
        reference: whether it was written to be read and compared with, and is slow.
    """

    operation: str
    formats: tuple[str, ...] = ("float",)
    dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    row_invariant: bool = False
    reference: bool = False


class Provides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that a plugin provides.

    Functions are called before the plugin is started, and must not import torch. `facts` are the
    `CheckpointFacts`; `options` what was validated by the options model, None where there is none.

    Attributes:
        interface: the interface that it implements.
        version: the `VERSION` of that interface that it was written for.
        name: the name by which configs choose it.
        summary: one line for `pegboard plugins`.
        options: the pydantic model of its options; without one it takes none.
        requires: what it needs; several tables are alternatives.
        promises: what it can do beyond the least that the interface asks for.
        priority: among those that fit, `auto` takes the highest; one below 0 is never taken by `auto`.
        estimate: `estimate(workload) -> int`, bytes that it holds beside weights and KV, for the memory
            ledger.
        files: names of files that it reads, as patterns (`*.safetensors`).
        describe: of a checkpoint source `describe(path) -> CheckpointFacts`, of a model
            `describe(config) -> ModelShape`, of a drafter
            `describe(facts, target_shape, options) -> DrafterFacts`.
        architectures: names of models that it builds, as the key `architectures` of a checkpoint's
            config says them.
        methods: quantization methods of checkpoints that it reads; `method/layout` is one layout of a
            method that has several.
        formats: the weight formats that it yields, each of which needs a kernel; or
            `formats(facts, options) -> tuple[str, ...]`.
        parameters: `parameters(layer, facts) -> tuple[StoredParameter, ...]`, tensors that a layer has
            in the checkpoint.
        resident_bytes: `resident_bytes(layer, facts, dtype, options) -> int`, bytes that a layer takes
            in memory.
        kv_scales: `kv_scales(facts) -> tuple[StoredKVScales, ...]`, static scales of keys and values
            that the checkpoint holds.
        notes: `notes(facts, options) -> tuple[str, ...]`, lines that `pegboard check` shows.
        alternatives: `alternatives(facts, options) -> tuple[options, ...]`, what options that leave
            something open may stand for, best first.
        calibrators: classes of `Calibrator`, by the method that `pegboard quantize` names.
        layout: `layout(group) -> tuple[TensorSpec, ...]`, the tensors of a block of one layer.
        encodings: KV encodings that it reads and writes; `none` is the activation dtype itself.
        operations: the operations that a kernel family implements.
        params: the pydantic model of the parameters that a request gives it.
        fields: fields of `SamplingParams` that it acts on.
        made_by: what to run where the folder that `drafter.model` names is missing, with `{target}` and
            `{model}` for the two references.
        depth: of an executor, the steps in flight that `executor.depth: auto` means.
        speculative_tokens: of a drafter, the tokens that `drafter.num_speculative_tokens: auto` means.
    """

    interface: str
    version: int
    name: Name
    summary: Line
    options: Dotted | None = None
    requires: Requires | Alternatives = Requires()
    promises: tuple[str, ...] = ()
    priority: Priority = 0
    estimate: Dotted | None = None
    files: tuple[str, ...] = ()
    describe: Dotted | None = None
    architectures: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    formats: tuple[str, ...] | Dotted = ()
    parameters: Dotted | None = None
    resident_bytes: Dotted | None = None
    kv_scales: Dotted | None = None
    notes: Dotted | None = None
    alternatives: Dotted | None = None
    calibrators: dict[str, Dotted] = {}
    layout: Dotted | None = None
    encodings: tuple[str, ...] = ("none",)
    operations: tuple[Operation, ...] = ()
    params: Dotted | None = None
    fields: tuple[str, ...] = ()
    made_by: Line = ""
    depth: Depth = 1
    speculative_tokens: SpeculativeTokens = 4

    @property
    def requirements(self) -> tuple[Requires, ...]:
        """Its needs: one of these must hold."""
        return (self.requires,) if isinstance(self.requires, Requires) else self.requires


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plugin itself.

    Attributes:
        name: the name by which it is found: its entry point's, or a single file's.
        summary: one line for `pegboard plugins`.
    """

    name: Name
    summary: Line = ""


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `plugin.toml`.

    Attributes:
        plugin: the plugin itself.
        provides: the things that it provides, one table each.
    """

    plugin: Header
    provides: tuple[Provides, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin: where it comes from and what it provides."""

    origin: Origin
    provides: tuple[Provides, ...]
