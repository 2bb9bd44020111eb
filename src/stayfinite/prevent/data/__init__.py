"""Is the data fit to train on? Every batch looked at once, and the bad samples by their index."""
