"""Find the browser in which the tests of pages run."""

import shutil

import pytest

#: names of headless Chromium and its relatives on the PATH, preferred first
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Path of an installed Chromium; None if there is none. `.ci/run` installs it."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


#: decorator of tests that need a browser; `pytestmark` of files that need it throughout
needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")
