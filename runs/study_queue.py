"""Runs of the study on one GPU: python runs/study_queue.py DATA OUT [--begin-within SECONDS] ROW:SEED:RATE[:REPEAT] ...

Two trainings at once take longer than one after the other. But a run first imports, reads its data, and compiles and
tunes kernels, while the GPU is idle. So the next run starts early, is stopped after its first step, and goes on when
the GPU is free. What is trained is evaluated beside the next training. Each is a call of runs/study_row.sh; what it
prints lies in OUT/queue.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROW = Path(__file__).with_name("study_row.sh")


@dataclass
class Job:
    row: str
    seed: str
    rate: str
    repeat: str = ""

    @property
    def name(self) -> str:
        return f"{self.row}-seed{self.seed}" + (f"-repeat{self.repeat}" if self.repeat else "")


class Call:
    """study_row.sh of a job, in a session of its own, so that all its processes can be stopped together."""

    def __init__(self, job: Job, data: Path, out: Path, only: str) -> None:
        self.job, self.log = job, out / "queue" / f"{job.name}-{only or 'eval'}.txt"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = ["bash", str(ROW), job.row, job.seed, str(data), str(out)]
        env = os.environ | {"RATE": job.rate, "REPEAT": job.repeat, "ONLY": only}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def begun(self) -> bool:
        """Whether a step was taken."""
        return "\nstep " in self.log.read_text()

    def done(self) -> bool:
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        if not self.done():
            os.killpg(self.process.pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("jobs", nargs="+", type=lambda text: Job(*text.split(":")), metavar="ROW:SEED:RATE[:REPEAT]")
    parser.add_argument("--begin-within", type=float, default=float("inf"), help="seconds: later, no training begins")
    options = parser.parse_args()
    begin, jobs = time.monotonic(), list(options.jobs)
    training: Call | None = None
    following: Call | None = None  # starts, or waits after its first step
    waits = False
    evaluation: Call | None = None
    trained: list[Job] = []

    def say(what: str, call: Call) -> None:
        print(f"[{time.monotonic() - begin:.0f} s] {call.job.name}: {what}", flush=True)

    def start(job: Job, only: str = "") -> Call:
        return Call(job, options.data, options.out, only)

    try:
        while training or following or evaluation or trained or jobs:
            if training and training.done():
                failed = training.process.returncode
                say(f"failed ({failed}), see {training.log}" if failed else "trained", training)
                trained += [] if failed else [training.job]
                training = None
            if following and following.done():  # finished before, or failed
                training, following, waits = training or following, None if training is None else following, False
            elif following and training is None:
                say("trains", following)
                following.signal(signal.SIGCONT)
                training, following, waits = following, None, False
            elif following and not waits and following.begun():
                following.signal(signal.SIGSTOP)
                waits = True
            if following is None and jobs:
                if time.monotonic() - begin > options.begin_within:
                    print(f"no time for {', '.join(job.name for job in jobs)}", flush=True)
                    jobs.clear()
                else:
                    following = start(jobs.pop(0), "train")
            if evaluation and evaluation.done():
                failed = evaluation.process.returncode
                say(f"evaluation failed ({failed}), see {evaluation.log}" if failed else "evaluated", evaluation)
                evaluation = None
            if evaluation is None and trained:
                evaluation = start(trained.pop(0))
            time.sleep(0.1)
    finally:  # interrupted: nothing goes on unseen
        for call in (training, following, evaluation):
            if call is not None:
                call.signal(signal.SIGCONT)
                call.signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
