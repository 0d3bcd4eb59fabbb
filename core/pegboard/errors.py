"""Every error that a user can meet.

PegboardError
├── UserError                 the caller's mistake: one line, exit status 2 or a 4xx
│   ├── ConfigError           a config file, a flag, an option
│   │   └── ConfigMistakes    several of them at once
│   ├── CheckpointError       a model's files
│   ├── TokenizerError        a tokenizer or chat template that cannot be used
│   ├── RequestError          a request (`param` names the field)
│   ├── PluginError           a plugin that was named and cannot be used
│   │   ├── PluginNotInstalled
│   │   ├── ManifestInvalid
│   │   ├── InterfaceVersionRefused
│   │   ├── PluginImportFailed
│   │   ├── UnknownHook
│   │   ├── HookSignatureWrong
│   │   ├── ManifestHookMismatch
│   │   ├── DuplicateName
│   │   ├── OptionsInvalid
│   │   ├── ManifestFunctionFailed
│   │   ├── FactoryFailed
│   │   ├── PluginFailed
│   │   └── InterfaceNotSatisfied
│   └── CompositionRefused    the parts do not go together; carries every reason
└── EngineError               the engine broke: a bug, or a worker that died
    ├── RequestFailed         one request met a fault that is not its sender's; others go on
    ├── EngineDied            the engine's process ended
    └── KernelUnusable        a kernel fails its self-test on this machine

Each user's mistake names the thing, what it was, what is allowed, and the fix, in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb

INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
"""Interruptions, which are no plugin's fault. Any other exception of a plugin, also of sys.exit or of a
library's panic, ends only the call that raised it."""

MAX_REASON_LEN = 300
"""Characters of why a plugin is cut off."""

_MAX_PLACE_LEN = 120

_SHOWN = 1000
"""Characters of what was found, which may come from a file or a client and be of any length."""


def printable(text: str) -> str:
    """A text of others for a terminal: control characters, escapes and marks that turn the direction
    of writing stand there as their codes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def described(error: BaseException) -> str:
    """An exception of others' code in one line."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    except INTERRUPTS:
        raise
    except BaseException:  # it may err as well when it is asked what it is
        return type(error).__name__


def reason_of(error: BaseException) -> str:
    """A plugin's exception and its place, in one line of at most `MAX_REASON_LEN` characters."""
    place = _raised_at(error)
    return described(error)[: MAX_REASON_LEN - len(place)] + place


def _raised_at(error: BaseException) -> str:
    """` (file:line in function)` where a plugin raised it; "": the call itself did not come off."""
    frames = list(walk_tb(error.__traceback__))[1:]
    if not frames:
        return ""
    frame, number = frames[-1]
    place = f"{Path(frame.f_code.co_filename).name}:{number} in {frame.f_code.co_name}"
    return f" ({place[:_MAX_PLACE_LEN]})"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


class PegboardError(Exception):
    """Base of all errors raised on purpose by Pegboard."""


class UserError(PegboardError):
    """A mistake that the user can mend; printed as one line, never as a traceback.

    Args:
        thing: what is wrong, as the user knows it (`scheduler.options.max_wait`).
        was: what was found there.
        allowed: what would have been accepted.
        fix: what to do, as a command or a value where possible.
    """

    def __init__(self, thing: str, was: str = "", *, allowed: str = "", fix: str = "") -> None:
        self.thing = thing
        self.was = was
        self.allowed = allowed
        self.fix = fix
        super().__init__(self._line())

    def _line(self) -> str:
        was = self.was if len(self.was) <= _SHOWN else f"{self.was[:_SHOWN]}..."
        line = f"{self.thing}: {was}" if was else self.thing
        for label, text in (("allowed", self.allowed), ("fix", self.fix)):
            if text:
                line += f"; {label}: {text}"
        return _one_line(line)


class ConfigError(UserError):
    """The config file, a flag or `--set` is wrong; `thing` is the whole path of the key."""


class ConfigMistakes(ConfigError):
    """Several values of one config are wrong; `reasons` holds one line for each."""

    def __init__(self, mistakes: Sequence[ConfigError]) -> None:
        self.reasons = tuple(map(str, mistakes))
        super().__init__("; ".join(self.reasons))


class CheckpointError(UserError):
    """A model reference or one of its files cannot be used; `thing` names the file or tensor."""


class TokenizerError(UserError):
    """The checkpoint's tokenizer or chat template cannot be used."""


class RequestError(UserError):
    """A request cannot be honoured; `param` is the request's field, for the API's error body."""

    def __init__(
        self, param: str | None, was: str = "", *, allowed: str = "", fix: str = ""
    ) -> None:
        self.param = param
        super().__init__(param or "request", was, allowed=allowed, fix=fix)


class PluginError(UserError):
    """A plugin that the composition names cannot be used.

    Args:
        plugin: the plugin's entry-point name, or the name that was asked for.
        was: what went wrong.
        origin: distribution, version and file, as far as known.
        allowed: what would have been accepted.
        fix: what to do.
        key: the config's key that names the plugin, where that is what is wrong.
    """

    def __init__(
        self,
        plugin: str,
        was: str,
        *,
        origin: str = "",
        allowed: str = "",
        fix: str = "",
        key: str = "",
    ) -> None:
        self.plugin = plugin
        self.origin = origin
        thing = key or f"plugin {plugin!r}" + (f" ({origin})" if origin else "")
        super().__init__(thing, was, allowed=allowed, fix=fix)


class PluginNotInstalled(PluginError):
    """Nothing installed provides the name."""


class ManifestInvalid(PluginError):
    """`plugin.toml` is missing, is not TOML, or does not follow the schema."""


class InterfaceVersionRefused(PluginError):
    """The plugin was written for a version of an interface that this core does not accept."""


class PluginImportFailed(PluginError):
    """Importing the plugin raised; the original exception is the `__cause__`."""


class UnknownHook(PluginError):
    """The plugin implements a hook that does not exist."""


class HookSignatureWrong(PluginError):
    """The plugin's hook takes arguments that the hook does not have."""


class ManifestHookMismatch(PluginError):
    """The manifest promises what the hooks do not provide, or the other way round."""


class DuplicateName(PluginError):
    """Two plugins provide one name; only `plugins.replace` settles that."""


class OptionsInvalid(PluginError):
    """The options given to a plugin do not fit its options model."""


class ManifestFunctionFailed(PluginError):
    """A function that the manifest names raised, or answered what it must not; what it raised is the
    `__cause__`."""


class FactoryFailed(PluginError):
    """The plugin's factory raised; the original exception is the `__cause__`."""


class PluginFailed(PluginError):
    """The plugin raised while the engine started; the original exception is the `__cause__`."""


class InterfaceNotSatisfied(PluginError):
    """The factory returned an object that does not implement the interface."""


class CompositionRefused(UserError):
    """Model, plugins and hardware do not go together.

    `reasons` holds one line for every reason found, not only the first.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(map(_one_line, reasons))
        super().__init__("; ".join(self.reasons))


class EngineError(PegboardError):
    """The engine could not go on: a bug, or a worker that died."""


class RequestFailed(EngineError):
    """One request could not be taken, by a fault that is not its sender's: a plugin's, or no memory.
    Nothing of it is left, and others go on."""


class EngineDied(EngineError):
    """The engine's process ended while requests were open."""


class KernelUnusable(EngineError):
    """A kernel computes something wrong on this machine.

    Args:
        operation: what it should compute.
        family: whose kernel it is.
        reason: what its self-test found.
        named: whether the config asked for it by name.
    """

    def __init__(self, operation: str, family: str, reason: str, *, named: bool) -> None:
        self.operation = operation
        self.family = family
        self.reason = reason
        self.named = named
        fix = "; fix: leave it to auto" if named else ""
        super().__init__(f"kernel {family!r} for {operation} fails its self-test: {reason}{fix}")
