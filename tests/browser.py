"""Find the browser for the tests of pages."""

import shutil

import pytest

#: names of headless Chromium and related browsers on the PATH, in order of preference
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Path of an installed Chromium, or None. `.ci/run` installs it."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


#: decorator of tests that need a browser, or `pytestmark` of their files
needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")
