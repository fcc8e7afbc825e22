"""The web page of `vitreous serve`: HTML, CSS and JavaScript modules without a build step."""
