"""The lines that a server logs as it starts, in the words that people search logs for."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version
from typing import Any

from pegboard.compose import Prepared
from pegboard.config import Config

_SECRET = re.compile(r"(?:^|_)(?:(?:api|admin)_?keys?|secret|password|token)$", re.IGNORECASE)
_MASK = "***"

logger = logging.getLogger("pegboard.server")


def log_settings(config: Config) -> None:
    """Logs the version, and the settings that are not defaults; secrets are masked."""
    logger.info("Pegboard %s, model %s", version("pegboard"), config.model)
    logger.info("non-default args: %s", non_default(config))


def non_default(config: Config) -> dict[str, Any]:
    """The nested keys that differ from their defaults, with secrets masked."""
    masked: dict[str, Any] = _masked(config.model_dump(mode="json", exclude_defaults=True))
    return masked


def log_loaded(prepared: Prepared, seconds: float) -> None:
    """Logs the time that loading took, and the tokens that the KV pool holds."""
    ledger = prepared.ledger
    weights = sum(e.num_bytes for e in ledger.entries if e.name.startswith("weights: "))
    logger.info("Model loading took %.2f GiB memory and %.1f seconds", weights / 2**30, seconds)
    logger.info("Available KV cache memory: %.2f GiB", ledger.kv_budget_bytes / 2**30)
    device = "" if prepared.composition.device == "cpu" else "GPU "
    num_tokens = int(ledger.num_full_sequences * ledger.max_model_len)
    logger.info("%sKV cache size: %s tokens", device, f"{num_tokens:,}")
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{ledger.max_model_len:,}",
        ledger.num_full_sequences,
    )


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _MASK if _SECRET.search(k) else _masked(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return value
