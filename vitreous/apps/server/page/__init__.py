"""The web page of `vitreous serve`: plain HTML, CSS and JavaScript modules, without a build step."""
