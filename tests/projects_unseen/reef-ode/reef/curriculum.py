class Curriculum:
    """Stages of (first step, number of intervals, surveys per interval)."""

    def __init__(self, stages):
        self.stages = sorted(stages)

    def at(self, step):
        current = self.stages[0]
        for stage in self.stages:
            if step >= stage[0]:
                current = stage
        return current[1], current[2]
