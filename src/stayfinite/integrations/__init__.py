"""At home where people train: one file for each framework and tracker, loaded only when asked for."""
