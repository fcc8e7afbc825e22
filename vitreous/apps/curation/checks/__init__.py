"""What is true of a data set: every file looked at once, and what that means for training."""
