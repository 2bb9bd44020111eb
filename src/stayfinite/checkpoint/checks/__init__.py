"""What can be wrong with a checkpoint, in itself and for those who shall get it."""
