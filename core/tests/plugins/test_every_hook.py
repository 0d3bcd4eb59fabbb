"""The engine gets by interface and name what a plugin returns from each hook."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from pegboard.config import PluginsConfig
from pegboard.errors import ManifestHookMismatch
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.discovery import discover
from pegboard.plugins.loader import load_plugins

HOOKS = {
    "pegboard_kv_allocators": "kv_allocator",
    "pegboard_prefix_caches": "prefix_cache",
    "pegboard_schedulers": "scheduler",
    "pegboard_speculation_policies": "speculation_policy",
    "pegboard_drafters": "drafter",
    "pegboard_attention_backends": "attention",
    "pegboard_quantizers": "quantizer",
    "pegboard_kernels": "kernel",
    "pegboard_logits_processors": "logits_processor",
    "pegboard_checkpoint_sources": "checkpoint_source",
    "pegboard_models": "model",
    "pegboard_executors": "executor",
    "pegboard_kv_transfers": "kv_transfer",
    "pegboard_observers": "observer",
    "pegboard_commands": "command",
}

NEEDED = {
    "layout": '":layout"',
    "formats": '["float"]',
    "parameters": '":parameters"',
    "resident_bytes": '":resident_bytes"',
    "operations": '[{operation = "silu_mul"}]',
    "files": '["*.mine"]',
    "describe": '":describe"',
    "architectures": '["MineForCausalLM"]',
}
"""The keys that a manifest entry of some interfaces must have, in TOML."""


def write_plugin(folder: Path, interface: str, hook: str) -> Path:
    """A single-file plugin that provides `mine` of an interface by a hook."""
    contract = CONTRACTS[interface]
    needed = "".join(f"# {field} = {NEEDED[field]}\n" for field in contract.needs)
    header = dedent(f"""\
        # /// pegboard
        # [plugin]
        # name = "mine"
        # [[provides]]
        # interface = "{interface}"
        # version = {max(contract.versions)}
        # name = "mine"
        # summary = "Of the test"
        """)
    code = dedent(f"""\
        # ///
        from pegboard import hookimpl


        @hookimpl
        def {hook}():
            return {{"mine": lambda context: ("made of", context)}}
        """)
    # A module's name must be new: single files stay imported.
    file = folder / f"mine_{interface}.py"
    file.write_text(header + needed + code)
    return file


@pytest.mark.parametrize(("hook", "interface"), HOOKS.items())
def test_factories_reach_the_registry(tmp_path: Path, hook: str, interface: str) -> None:
    file = write_plugin(tmp_path, interface, hook)
    catalog = discover(PluginsConfig(load=[str(file)]))
    registry = load_plugins(
        [manifest for manifest in catalog.manifests if manifest.origin.plugin == "mine"]
    )
    (offer,) = (o for o in catalog.offers(interface) if o.entry.name == "mine")
    factory = registry.factory(offer)
    assert factory("a context") == ("made of", "a context")


@pytest.mark.parametrize(("hook", "interface"), HOOKS.items())
def test_a_hook_of_another_interface_is_refused(tmp_path: Path, hook: str, interface: str) -> None:
    other = next(name for name in HOOKS if name != hook)
    file = write_plugin(tmp_path, interface, other)
    catalog = discover(PluginsConfig(load=[str(file)]))
    with pytest.raises(ManifestHookMismatch, match=re.escape(f"{interface} 'mine'")):
        load_plugins(
            [manifest for manifest in catalog.manifests if manifest.origin.plugin == "mine"]
        )
