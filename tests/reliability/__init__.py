"""The reliability rig: runs that are killed, stopped, starved and given damaged files, and must end in the same
bits."""
