"""The papers' figures and tables as commands: what is trained, how it is judged, and a page of the result."""
