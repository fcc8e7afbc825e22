"""A Ray cluster (extra `ray`): found, or started here, and kept quiet."""
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
from typing import Any

from vitreous.errors import UsageError

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # signals are ours: the trials have to save first
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # which prints on stdout even when it is told not to
}


def connected(address: str) -> Any:
    """The module `ray`, connected. Raises UsageError, with the command that installs it, or for a cluster that is not
    there."""
    os.environ.update(QUIET)
    try:
        import ray
        from ray import tune  # noqa: F401
    except ImportError:
        raise UsageError("--ray needs Ray, which is not installed", "pip install 'vitreous[ray]'") from None
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True, **local)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"no Ray cluster at {address}: {reason}", "start one with `ray start --head`, or use --ray local"
        ) from None
    return ray
