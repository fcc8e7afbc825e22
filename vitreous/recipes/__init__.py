"""Functions that return a frozen `Run`: what to do when the user does not say."""
