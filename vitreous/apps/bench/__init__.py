"""Speed comparison of vitreous with other installed libraries on this machine."""
