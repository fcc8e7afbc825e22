"""The page that `vitreous serve` shows: plain HTML, CSS and JavaScript modules, read as they are."""
