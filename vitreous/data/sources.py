"""What a user names as data, and the layout that reads it."""

from __future__ import annotations

import os
from pathlib import Path

from vitreous.data.decode import printable
from vitreous.data.layouts.digits import digits
from vitreous.data.layouts.folder import LAYOUT, folder
from vitreous.data.layouts.table import table
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError, nearest


def open_data(source: str | os.PathLike[str], split_seed: int = 0) -> Data:
    """Open a data set: `digits`, a folder with splits, a folder with classes, or a CSV file.

    `split_seed` chooses the held-out tenth(s) where the source has no split of its own. Raises DataError for a missing
    or empty folder, fewer than two classes, or a class that only a held-out split has; UsageError for an unknown name.
    """
    name = os.fspath(source)
    if name == "digits":
        return digits(split_seed)
    path = Path(name)
    if path.is_dir():
        return folder(path, split_seed)
    if path.suffix.lower() == ".csv" and os.path.lexists(path):
        return table(path, split_seed)
    if path.exists():
        raise DataError(f"{printable(path)} is a file, not a data set", LAYOUT)
    if "/" not in name and os.sep not in name and nearest(name, ["digits"]):
        raise DataError(f"no folder and no data set named {printable(name)}", nearest(name, ["digits"]))
    if ":" in name:
        raise UsageError(f"data source {name} is not supported yet", LAYOUT)
    raise DataError(f"no such {'file' if path.suffix.lower() == '.csv' else 'folder'}: {printable(path)}", LAYOUT)
