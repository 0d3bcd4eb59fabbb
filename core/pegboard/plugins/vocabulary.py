"""The words of manifests: which promises an interface has, and which fields only one interface reads.

What stands in no table here is refused when a manifest is read, so that a misspelt promise is not one
that nobody notices.
"""

from __future__ import annotations

from pegboard.interfaces.device import DEVICE_FEATURES, DTYPES
from pegboard.interfaces.kernel import JOINT_OPERATIONS, OPERATIONS, REJECTION_OPERATIONS

PROMISES: dict[str, dict[str, str]] = {
    "kv_allocator": {
        "sharing": "A block may have several owners (`SharedBlocks`); prefix caches and forks need it.",
        "pinning": "Blocks can be held for a KV transfer (`PinnedBlocks`).",
    },
    "prefix_cache": {
        "inactive": "It stands for doing without: `prefix_cache: on` does not take it.",
    },
    "drafter": {
        "inactive": "It stands for doing without: no row is asked for drafts.",
        "draft_model": "It acts on `drafter.model`.",
        "probabilities": "It is a `SampledDrafter`: it draws its tokens and says from what, which"
        " `drafter.verification: rejection` needs.",
    },
    "attention": {
        "row_invariant": "A row has the same bits in any batch, chunk, padding and number of threads.",
        "window": "It runs layers whose tokens see only the last ones.",
        "soft_cap": "It runs layers whose scores are capped.",
        "skipped": "It runs layers that have no keys for a row's first tokens.",
        "query_mask": "It reads `AttentionBatch.ancestors`, which trees of drafts need.",
        "lse": "It fills `lse` of `AttentionBackend.forward`.",
        "own_threads": "It brings its own threads. Where all linear kernels and attention promise it,"
        " torch computes with one thread, which would else disturb them.",
    },
    "kernel": {
        "own_threads": "As of `attention`. Row invariance is promised by each operation.",
    },
    "logits_processor": {
        "keeps_state": "What it does to a token depends on how it was called before, so that its state"
        " cannot be recomputed from a row's history. Requests that use it run without drafts and are not"
        " preempted.",
    },
    "executor": {
        "tensor_parallel": "It runs `executor.tensor_parallel` workers that share each layer. No model is"
        " split yet, so that more than one is refused.",
        "pipeline_parallel": "It runs `executor.pipeline_parallel` workers, each with some layers. No"
        " model is split yet, so that more than one is refused.",
    },
}
"""The meaning of each promise, by interface and name. A name with a dot (`acme.compressed`) is one that
plugins use among themselves: any may be promised and required, and the core reads none."""

OWN_FIELDS: dict[str, tuple[str, ...]] = {
    "attention": ("layout", "encodings"),
    "quantizer": (
        "methods",
        "formats",
        "parameters",
        "resident_bytes",
        "kv_scales",
        "notes",
        "alternatives",
        "calibrators",
    ),
    "kernel": ("operations",),
    "executor": ("depth",),
    "logits_processor": ("params", "fields"),
    "checkpoint_source": ("files", "describe"),
    "model": ("architectures", "describe"),
    "drafter": ("describe", "made_by", "speculative_tokens"),
}
"""Fields of `[[provides]]` that are read of these interfaces alone; all others are read of each."""


WORDS: dict[str, tuple[str, ...]] = {
    "devices": tuple(DTYPES),
    "device_features": DEVICE_FEATURES,
    "dtypes": tuple(dict.fromkeys(dtype for dtypes in DTYPES.values() for dtype in dtypes)),
    "operation": (*OPERATIONS, *REJECTION_OPERATIONS, *JOINT_OPERATIONS),
}
"""The words that have a meaning in fields of `[provides.requires]` and of `operations`."""


def is_promise(interface: str, name: str) -> bool:
    """Whether an implementation of an interface may promise that."""
    return name in PROMISES.get(interface, {}) or "." in name


def foreign_fields(interface: str) -> set[str]:
    """Fields that are read of other interfaces alone."""
    own = set(OWN_FIELDS.get(interface, ()))
    return {name for names in OWN_FIELDS.values() for name in names} - own
