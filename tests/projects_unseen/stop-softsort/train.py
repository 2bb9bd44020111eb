"""Learns to order delivery stops by urgency with a differentiable sort (SoftSort) whose temperature is annealed."""
from stops.cli import main

if __name__ == "__main__":
    main()
