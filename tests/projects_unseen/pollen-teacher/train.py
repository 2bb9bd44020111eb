"""Semi-supervised pollen recogniser (mean teacher). Meant for preemptible machines: a job does a share of the steps,
writes everything to last.pt and the next job goes on from there. By default all jobs run one after the other."""
import argparse
import logging

import torch

from pollen.jobs import run_jobs
from pollen.settings import Settings


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--jobs", type=int, default=3)
    ap.add_argument("--steps-per-job", type=int, default=40)
    ap.add_argument("--out", default="pollen_run")
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(name)s] %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(41)
    run_jobs(Settings(out=args.out, jobs=args.jobs, steps_per_job=args.steps_per_job))


if __name__ == "__main__":
    main()
