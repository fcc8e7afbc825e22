"""What chance does to a picture: crops, colours, holes, views, and the tokens that are hidden of it."""
