"""Connect to a Ray cluster (extra `ray`), or start one on this machine."""
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

from vitreous.errors import UsageError, install_hint
from vitreous.system.children import block_stop_signals

#: environment variables that Ray reads when it is imported
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # disables the deduplication of log lines, which prints to stdout
}


def connect_ray(address: str) -> Any:
    """Connect to the Ray cluster at `address`, an address for `ray.init` or `local` to start one here. Returns the
    module `ray`.

    Signal handlers do not change. Raises UsageError if Ray is not installed, with the command that installs it, or if
    no cluster responds.
    """
    os.environ.update(RAY_ENVIRONMENT)
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs Ray, which is not installed", install_hint("ray")) from None
    handler = signal.getsignal(signal.SIGTERM)
    local_options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        with block_stop_signals():  # a cluster that is started here must run until the trials have saved their results
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                ignore_reinit_error=True,
                **local_options,
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        hint = "start a cluster with `ray start --head`, or use --ray local"
        raise UsageError(f"no Ray cluster at {address}: {reason}", hint) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return ray
