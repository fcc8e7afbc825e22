"""Images of one data set that are in another one too: the same bytes, the same pixels, or the same picture cut, scaled
or changed."""
