"""The guard around every call into a plugin while an engine is prepared and built: whatever the plugin
does, the error names it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from traceback import walk_tb

from pegboard.errors import INTERRUPTS, PluginError, UserError, described
from pegboard.plugins.manifest import Origin

SLOW_S = 10.0
"""After so long, a plugin that does not come back is named in the log. It is not ended: it may wait for
a slow disk, which is no fault of its own."""

MORE = "with PEGBOARD_RAISE=1 the whole traceback is shown"

_logger = logging.getLogger(__name__)


@contextmanager
def guarded(
    kind: type[PluginError],
    origin: Origin,
    doing: str,
    *,
    passes: tuple[type[Exception], ...] = (UserError,),
) -> Iterator[None]:
    """Turns any exception inside into one error that names the plugin. Interrupts pass, and exceptions
    that the plugin may raise.

    Args:
        kind: of the error.
        origin: whose code runs.
        doing: the work, as the message about a failure and the log about a long wait name it.
        passes: errors that are the plugin's own way to say what is wrong.
    """
    # A process that tries plugins listens, to know where one ended it.
    _logger.debug("%s", doing, extra={"origin": origin, "doing": doing})
    watch = Timer(SLOW_S, _tell_slow, (origin, doing))
    watch.daemon = True
    if not origin.builtin:
        watch.start()
    try:
        yield
    except passes:
        raise
    except INTERRUPTS:
        raise
    except BaseException as problem:  # a plugin that calls sys.exit has failed too
        raise failure(kind, origin, doing, problem) from problem
    finally:
        watch.cancel()


def failure(
    kind: type[PluginError], origin: Origin, doing: str, problem: BaseException
) -> PluginError:
    """The error about what a plugin raised."""
    return origin.error(
        kind,
        f"{doing} failed: {described(problem)}{_place(problem, origin)}",
        fix=f"{origin.remedy}; {MORE}",
    )


def culprit(problem: BaseException, origins: Iterable[Origin]) -> Origin | None:
    """The plugin in whose files something was raised, or was called that raised it; None: no
    stranger's."""
    strangers = [origin for origin in origins if origin.path and not origin.builtin]
    for frame, _ in reversed(list(walk_tb(problem.__traceback__))):
        for origin in strangers:
            if Path(frame.f_code.co_filename).is_relative_to(origin.path):
                return origin
    return None


def _place(problem: BaseException, origin: Origin) -> str:
    """The place in the plugin that raised; "": none in its files."""
    for frame, number in reversed(list(walk_tb(problem.__traceback__))):
        file = Path(frame.f_code.co_filename)
        if origin.path and file.is_relative_to(origin.path):
            return f" ({file.name}:{number} in {frame.f_code.co_name})"
    return ""


def _tell_slow(origin: Origin, doing: str) -> None:
    _logger.warning(
        "plugin %r (%s): %s has taken %g seconds and goes on",
        origin.plugin,
        origin,
        doing,
        SLOW_S,
    )
