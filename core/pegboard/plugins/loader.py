"""Imports the plugins that a composition names, and registers their factories."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import pluggy
from pydantic import BaseModel, ValidationError

from pegboard.config_values import shown
from pegboard.errors import (
    FactoryFailed,
    HookSignatureWrong,
    ManifestFunctionFailed,
    ManifestHookMismatch,
    ManifestInvalid,
    OptionsInvalid,
    PluginImportFailed,
    UnknownHook,
)
from pegboard.plugins import hookspecs
from pegboard.plugins.composition import Part
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.guard import guarded
from pegboard.plugins.manifest import SINGLE_FILE, Dotted, Manifest, Origin
from pegboard.plugins.registry import FactoryKey, Registry

_logger = logging.getLogger(__name__)


def load_plugins(manifests: Iterable[Manifest]) -> Registry:
    """A frozen registry of the factories of these plugins.

    Raises:
        PluginImportFailed, UnknownHook, HookSignatureWrong, FactoryFailed, ManifestHookMismatch: of
            the first plugin that is at fault.
    """
    factories: dict[FactoryKey, Callable[..., Any]] = {}
    for manifest in manifests:
        factories |= _register(manifest)
    return Registry(factories)


def import_plugin(origin: Origin) -> ModuleType:
    """The plugin's module, imported.

    Raises:
        PluginImportFailed: its import raised.
    """
    if not origin.builtin and origin.module not in sys.modules:
        _logger.info("importing plugin %r (%s)", origin.plugin, origin)
    with guarded(PluginImportFailed, origin, "import", passes=()):
        if origin.distribution == SINGLE_FILE:
            return _import_file(origin)
        return importlib.import_module(origin.module)


def resolve_dotted(dotted: Dotted, origin: Origin) -> Any:
    """The object that `module:name` of a manifest names.

    Raises:
        PluginImportFailed: the module cannot be imported or has no such name.
    """
    module_name, _, name = dotted.partition(":")
    doing = f"its manifest names {dotted!r}, and that"
    with guarded(PluginImportFailed, origin, doing, passes=(PluginImportFailed,)):
        module = importlib.import_module(module_name) if module_name else import_plugin(origin)
        return getattr(module, name)


def resolve_model(dotted: Dotted, origin: Origin) -> type[BaseModel]:
    """The pydantic model that `module:name` of a manifest means.

    Raises:
        PluginImportFailed: as `resolve_dotted`.
        ManifestInvalid: it means something else.
    """
    model = resolve_dotted(dotted, origin)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise origin.error(
            ManifestInvalid,
            f"its manifest names {dotted!r}, which is {shown(model)}",
            allowed="a subclass of pydantic.BaseModel",
        )
    return model


def options_of(part: Part) -> BaseModel | None:
    """The part's options, validated; None when it takes none.

    Raises:
        OptionsInvalid: they do not fit, or name what the model does not have; each problem with its
            whole path in the config.
    """
    dotted, origin = part.entry.options, part.origin
    if dotted is None:
        if part.options:
            raise origin.error(
                OptionsInvalid,
                f"{part.path}: {part.entry.interface} {part.name!r} takes no options",
                fix=f"leave out {part.path}",
            )
        return None
    model = resolve_model(dotted, origin)
    # An option that would be ignored is a mistake, whatever the model thinks of it.
    takes_any = model.model_config.get("extra") == "allow"
    doing = f"{part.path}: its options model {dotted!r}"
    try:
        with guarded(ManifestFunctionFailed, origin, doing, passes=(ValidationError,)):
            return model.model_validate(part.options, extra=None if takes_any else "forbid")
    except ValidationError as problem:
        lines = [
            ".".join((part.path, *map(str, error["loc"])))
            + (": no such option" if error["type"] == "extra_forbidden" else f": {error['msg']}")
            for error in problem.errors()
        ]
        raise OptionsInvalid(
            origin.plugin,
            "; ".join(lines),
            origin=str(origin),
            allowed=", ".join(model.model_fields),
        ) from None


def _import_file(origin: Origin) -> ModuleType:
    loaded = sys.modules.get(origin.module)
    if loaded is not None and loaded.__file__ == origin.path:
        return loaded
    spec = importlib.util.spec_from_file_location(origin.module, origin.path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[origin.module] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[origin.module]
        raise
    return module


def _register(manifest: Manifest) -> dict[FactoryKey, Callable[..., Any]]:
    origin = manifest.origin
    hooks = pluggy.PluginManager("pegboard")
    hooks.add_hookspecs(hookspecs)
    module = import_plugin(origin)
    with guarded(HookSignatureWrong, origin, "registering its hooks, which take no arguments,"):
        hooks.register(module, name=origin.plugin)
    try:
        hooks.check_pending()
    except pluggy.PluginValidationError as problem:
        raise origin.error(
            UnknownHook,
            str(problem),
            allowed=", ".join(contract.hook for contract in CONTRACTS.values()),
        ) from problem
    factories: dict[FactoryKey, Callable[..., Any]] = {}
    for interface, contract in CONTRACTS.items():
        hook = getattr(hooks.hook, contract.hook)
        if not hook.get_hookimpls():
            continue
        with guarded(FactoryFailed, origin, f"its hook {contract.hook}"):
            for provided in hook():
                checked = _factories(provided, contract.hook, origin)
                factories |= {(origin, interface, name): make for name, make in checked.items()}
    _compare(manifest, {(interface, name) for _, interface, name in factories})
    return factories


def _factories(provided: object, hook: str, origin: Origin) -> Mapping[str, Callable[..., Any]]:
    """The result of a hook, checked to be a mapping of names to factories."""
    wrong = ""
    if not isinstance(provided, Mapping):
        wrong = f"a {type(provided).__name__}"
    else:
        for name, factory in provided.items():
            if not isinstance(name, str):
                wrong = f"a mapping of {shown(name)}"
            elif not callable(factory):
                wrong = f"for {name!r} {shown(factory)}"
    if wrong:
        raise origin.error(
            ManifestHookMismatch,
            f"{hook} returned {wrong}",
            allowed="a mapping of names to factories",
        )
    assert isinstance(provided, Mapping)
    return provided


def _compare(manifest: Manifest, hooked: set[tuple[str, str]]) -> None:
    """Manifest and hooks must name the same things."""
    promised = {(entry.interface, entry.name) for entry in manifest.provides}
    hooked = {(interface, name.removesuffix(".worker")) for interface, name in hooked}
    for names, problem in (
        (promised - hooked, "the manifest names what no hook provides"),
        (hooked - promised, "hooks provide what the manifest does not name"),
    ):
        if names:
            listed = ", ".join(f"{interface} {name!r}" for interface, name in sorted(names))
            raise manifest.origin.error(ManifestHookMismatch, f"{problem}: {listed}")
