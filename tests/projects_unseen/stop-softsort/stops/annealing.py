"""Temperature schedules: step -> tau."""
import math


def constant(step, start, over):
    return start


def linear(step, start, over):
    return start * max(0.0, 1.0 - step / over)


def cosine(step, start, over, floor=0.05):
    x = min(1.0, step / over)
    return floor + 0.5 * (start - floor) * (1 + math.cos(math.pi * x))


SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine}
