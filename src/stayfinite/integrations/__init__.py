"""At home where people train: one file for each framework and tracker, loaded on demand."""
