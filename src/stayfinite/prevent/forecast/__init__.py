"""What is going to overflow, and when: signals of training, their trends, spikes."""
