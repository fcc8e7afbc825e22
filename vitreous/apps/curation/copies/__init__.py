"""Search for duplicate images across datasets: the same bytes, the same pixels, or near-duplicates (cropped, scaled or
modified)."""
