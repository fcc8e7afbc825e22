"""Foreign formats, one file each: tensor names, and how models are detected."""
