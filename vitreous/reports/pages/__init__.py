"""HTML pages with their plots and images."""
