"""Jobs that carry out a run: train, transfer, soup, and the trials of a learning-rate grid on a cluster."""
