"""The verbs that carry a run out: train, transfer, soup, and placing trials on a cluster."""
