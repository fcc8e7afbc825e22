"""How fast this machine runs vitreous, and whatever else is installed, side by side."""
