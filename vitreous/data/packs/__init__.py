"""A data set written anew as shards made for training."""
