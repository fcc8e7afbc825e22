"""Search for duplicate images across datasets: images with the same bytes, the same pixels, or near-duplicates, which
are cropped, scaled or modified."""
