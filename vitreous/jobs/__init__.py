"""Jobs that execute a run from the user's options: train, the learning-rate grid (on this machine or a cluster), soup,
and doctor."""
