"""Choosing one provider of an interface among what is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pegboard.config import Choice, Config
from pegboard.errors import InterfaceVersionRefused
from pegboard.interfaces.device import DeviceFacts
from pegboard.plugins.claims import Claim, foremost, sole
from pegboard.plugins.composition import Decision, Part, Refusal
from pegboard.plugins.discovery import Broken, Catalog, absences
from pegboard.plugins.known import suggestion
from pegboard.plugins.manifest import Provides, Requires

INACTIVE = "inactive"
"""Promise of a part that stands for doing without: `on` does not take it."""

Check = Callable[[Provides], list[str]]
"""Further reasons, beside `Requires`, why an entry does not fit."""


@dataclass(frozen=True)
class Wanted:
    """The config's wish for an interface.

    Attributes:
        interface: its name.
        key: the config's key.
        choice: a plugin's name, `auto`, `on` (auto without `none`) or `none`, with options.
        check: of what may be chosen.
        known_as: where the name is open, what would be installed for it, best first.
        unread: where the name is open, what is said when nothing passes the check, in place of each
            one's reasons.
    """

    interface: str
    key: str
    choice: Choice
    check: Check = lambda entry: []
    known_as: tuple[str, ...] = ()
    unread: str = ""

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def is_open(self) -> bool:
        """Whether any part that fits may be taken."""
        return self.name in ("auto", "on")

    @property
    def path(self) -> str:
        """The options' place in the config."""
        return f"{self.key}.options"


@dataclass
class Findings:
    """The reasons against a composition, and the choices that were left open.

    Attributes:
        refusals, decisions: filled while choosing.
    """

    refusals: list[Refusal] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def refuse(self, code: str, message: str, *, plugin: str = "", fix: str = "") -> None:
        """Notes a reason."""
        self.refusals.append(Refusal(code=code, plugin=plugin, message=message, fix=fix))

    def decide(self, key: str, value: object, why: str) -> None:
        """Notes how an open choice was settled."""
        self.decisions.append(Decision(key=key, value=str(value), why=why))


@dataclass(kw_only=True)
class Chooser(Findings):
    """Chooses, and collects reasons and decisions.

    Attributes:
        config: what is wanted.
        catalog: what is installed.
        objects: interface to the parts of objects given instead of names.
        unusable: (operation, kernel family) whose self-test failed on this machine.
        device: the device that the engine runs on.
        dtype: activation dtype.
        head_sizes: elements a head, of all layers.
        chosen: interface to its part, of those chosen so far: `auto` takes nothing that needs a
            feature which they do not have.
    """

    config: Config
    catalog: Catalog
    objects: Mapping[str, tuple[Part, ...]]
    unusable: frozenset[tuple[str, str]]
    device: DeviceFacts
    dtype: str
    head_sizes: frozenset[int]
    chosen: dict[str, Part] = field(default_factory=dict)

    def choose(self, wanted: Wanted) -> Part | None:
        """The provider; None when there is none, the reasons being in `refusals`."""
        part = self._choose(wanted)
        if part is not None:
            self.chosen[wanted.interface] = part
        return part

    def _choose(self, wanted: Wanted) -> Part | None:
        for given in self.objects.get(wanted.interface, ()):
            if wanted.choice.is_named and wanted.name != given.name:
                self.refuse_beside_object(wanted.key, wanted.name, given)
            if wanted.choice.options:
                self.refuse(
                    "options",
                    f"{wanted.path}: an object was given for {wanted.interface}, and takes no"
                    " options from the config",
                    plugin=given.name,
                    fix=f"leave out {wanted.path}",
                )
            self.refuse_misfits(wanted.key, given, wanted.check)
            return given
        return self._automatic(wanted) if wanted.is_open else self.named(wanted)

    def every(self, interface: str, key: str, choices: Sequence[Choice]) -> tuple[Part, ...]:
        """Providers for an interface that takes several: those of the core, those that the config
        names (one of the core's may be named for its options), and objects."""
        named: dict[str, Wanted] = {}
        for number, choice in enumerate(choices):
            entry = Wanted(interface, f"{key}[{number}]", choice)
            first = named.setdefault(entry.name, entry)
            if first is not entry:
                message = f"{entry.key}: {entry.name!r} stands in {first.key} too"
                self.refuse("named_twice", message, fix=f"leave out {entry.key}")
        own = [
            _with_options(offer, named.pop(offer.name)) if offer.name in named else offer
            for offer in self.catalog.offers(interface)
            if offer.origin.builtin
        ]
        chosen = [part for entry in named.values() if (part := self.named(entry)) is not None]
        given = self.objects.get(interface, ())
        names = [part.name for part in (*own, *chosen)]
        for part in given:
            self.refuse_misfits(key, part)
            if part.name in names:
                self.refuse_beside_object(interface, part.name, part)
        return (*own, *chosen, *given)

    def refuse_beside_object(self, key: str, name: str, given: Part) -> None:
        """Notes that a plugin's name stands where an object was given too."""
        self.refuse(
            "object",
            f"{key}: {name!r}, but {given.name} ({given.origin}) was given for it",
            plugin=given.name,
            fix=f"leave out the name in {key}, or the object",
        )

    def refuse_misfits(self, key: str, part: Part, check: Check = lambda entry: []) -> None:
        """Notes the reasons why a part that was asked for does not run here."""
        for reason in self._reasons(part, check):
            plugin = part.origin.plugin
            named = part.name if part.name == plugin else f"{part.name} of {plugin}"
            self.refuse("requirement", f"{key}: {named} {reason}", plugin=plugin)

    def misfits(self, provided: Part) -> list[str]:
        """Reasons why it does not run here, by what its manifest entry requires."""
        return _of_all([self._misfits(provided, one) for one in provided.entry.requirements])

    def met(self, provided: Part) -> list[Requires]:
        """The alternatives of its requirements that hold here; all of them if none does."""
        alternatives = provided.entry.requirements
        holding = [one for one in alternatives if not self._misfits(provided, one)]
        return holding or list(alternatives)

    def lacking(self, provided: Part, *, all_chosen: bool = False) -> list[str]:
        """Features that it needs, and that the parts chosen so far do not have."""
        return _of_all([[*self._lacking(one, all_chosen)] for one in self.met(provided)])

    def named(self, wanted: Wanted) -> Part | None:
        """The provider of a name; None when there is none, the reasons being in `refusals`."""
        offer = self._offered(wanted)
        if offer is None:
            return None
        self.refuse_misfits(wanted.key, offer, wanted.check)
        return _with_options(offer, wanted)

    def _automatic(self, wanted: Wanted) -> Part | None:
        fitting: list[Part] = []
        against: list[str] = []
        for offer in self.catalog.offers(wanted.interface):
            if offer.entry.priority < 0 or (
                wanted.name == "on" and INACTIVE in offer.entry.promises
            ):
                continue
            reasons = [*self._reasons(offer, wanted.check), *self.lacking(offer)]
            if reasons:
                against.append(f"{offer.entry.name} ({', '.join(reasons)})")
            else:
                fitting.append(offer)
        if not fitting:
            message = "nothing installed fits" + (f": {'; '.join(against)}" if against else "")
            if all(wanted.check(offer.entry) for offer in self.catalog.offers(wanted.interface)):
                message = wanted.unread or message
            self.refuse(
                "nothing_fits",
                f"{wanted.key}: {message}",
                fix=self._left_out(wanted) or _install(wanted),
            )
            return None
        chosen = self.settle(wanted.key, foremost(self.catalog, fitting))
        if chosen is None:
            return None
        why = "the only one that fits" if len(fitting) == 1 else "highest priority of what fits"
        if against:
            why += f"; not {', '.join(against)}"
        self.decide(wanted.key, chosen.entry.name, why)
        return _with_options(chosen, wanted)

    def _offered(self, wanted: Wanted) -> Part | None:
        offers = self.catalog.offers(wanted.interface)
        found = [offer for offer in offers if offer.entry.name == wanted.name]
        if found:
            return self.settle(wanted.key, sole(self.catalog, found))
        names = sorted({offer.entry.name for offer in offers})
        left_out = self._left_out(wanted)
        if left_out:
            self.refuse("disabled", f"{wanted.key}: {wanted.name!r} is disabled", fix=left_out)
            return None
        broken = self._broken(wanted)
        if broken is not None:
            is_version = isinstance(broken.error, InterfaceVersionRefused)
            code = "interface_version" if is_version else "manifest_invalid"
            self.refuse(code, f"{wanted.key}: {broken.error}", plugin=broken.origin.plugin)
            return None
        self.refuse(
            "not_installed",
            f"{wanted.key}: no installed plugin provides {wanted.name!r};"
            f" installed: {', '.join(names)}",
            plugin=wanted.name,
            fix=_install(wanted) or self._look_at_the_broken(),
        )
        return None

    def _left_out(self, wanted: Wanted) -> str:
        """The fix if a disabled plugin provides the wanted name, or for `auto` a fitting part."""
        return self.catalog.left_out(
            wanted.interface,
            lambda e: not wanted.check(e) if wanted.is_open else e.name == wanted.name,
        )

    def _look_at_the_broken(self) -> str:
        """The fix if a manifest is not readable, so that the provider of a name may be hidden in it."""
        names = ", ".join(broken.origin.plugin for broken in self.catalog.broken)
        return f"'pegboard plugins' says why {names} cannot be used" if names else ""

    def _broken(self, wanted: Wanted) -> Broken | None:
        """The broken plugin that would have provided the name, as far as one can tell."""
        distribution = suggestion(wanted.interface, wanted.name)
        return next(
            (
                broken
                for broken in self.catalog.broken
                if wanted.name == broken.origin.plugin or distribution == broken.origin.distribution
            ),
            None,
        )

    def settle(self, key: str, found: Part | Claim) -> Part | None:
        """The offer; what several plugins claim is a reason to refuse."""
        if isinstance(found, Part):
            return found
        self.refuse(
            "duplicate_name", f"{key}: {found}", plugin=found.origins[0].plugin, fix=found.fix
        )
        return None

    def _reasons(self, provided: Part, check: Check) -> list[str]:
        return [*self.misfits(provided), *check(provided.entry)]

    def _misfits(self, provided: Part, requires: Requires) -> list[str]:
        return [
            *absences(provided.origin, requires),
            *self._device_misfits(requires),
            *self._model_misfits(requires),
        ]

    def _lacking(self, requires: Requires, all_chosen: bool) -> Iterator[str]:
        for feature in requires.features:
            interface, _, name = feature.partition(".")
            provider = self.chosen.get(interface)
            if provider is None and all_chosen:
                yield f"needs {feature}, which nothing here has"
            elif provider is not None and name not in provider.entry.promises:
                yield f"needs {feature}, which {provider.name!r} does not have"

    def _device_misfits(self, requires: Requires) -> Iterator[str]:
        device = self.device
        if requires.devices and device.kind not in requires.devices:
            yield f"runs on {' or '.join(requires.devices)}, not on {device.kind}"
        lacking = [name for name in requires.device_features if name not in device.features]
        if lacking:
            yield f"needs a device with {', '.join(lacking)}"
        if requires.capability and _version(device.capability) < _version(requires.capability):
            has = device.capability or "none"
            yield f"needs compute capability {requires.capability}, not {has}"

    def _model_misfits(self, requires: Requires) -> Iterator[str]:
        if requires.dtypes and self.dtype not in requires.dtypes:
            yield f"runs in {', '.join(requires.dtypes)}, not in {self.dtype}"
        odd = sorted(self.head_sizes - set(requires.head_sizes)) if requires.head_sizes else []
        if odd:
            allowed = ", ".join(map(str, requires.head_sizes))
            yield f"has no heads of {', '.join(map(str, odd))}; allowed: {allowed}"


def _of_all(alternatives: Sequence[list[str]]) -> list[str]:
    """The reasons against several alternatives; none where there is none against one of them."""
    if len(alternatives) == 1 or not all(alternatives):
        return min(alternatives, key=len)
    return [", or ".join(" and ".join(reasons) for reasons in alternatives)]


def _with_options(offer: Part, wanted: Wanted) -> Part:
    options = dict(wanted.choice.options)
    return msgspec.structs.replace(offer, options=options, path=wanted.path)


def _install(wanted: Wanted) -> str:
    names = (wanted.name, *wanted.known_as)
    found = (suggestion(wanted.interface, name) for name in names)
    distribution = next(filter(None, found), None)
    return f"pip install {distribution}" if distribution else ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if text else (0,)
