import logging

from .learner import Learner

log = logging.getLogger("pollen.jobs")


def run_jobs(settings):
    for number in range(settings.jobs):
        log.info("job %d", number)
        learner = Learner(settings)
        learner.begin()
        learner.work(settings.steps_per_job)
        learner.save()
