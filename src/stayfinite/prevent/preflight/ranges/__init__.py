"""What values can be: intervals, and how operations change them."""
