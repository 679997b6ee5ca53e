"""Random faults at random times in real training jobs, until the time is over; then a table, and
status 1 for any hang, leftover or wrong end.

python3 soak.py BUILD_DIR MINUTES [--seed N] [--jobs N] [--results FILE]

Each job is the trainer of faults_test.py on 2 to 4 ranks of this host, over shm or tcp, or (as root)
on two or three pretend hosts. It meets one to four faults, one in each attempt. They come from
outside (SIGKILL and SIGSTOP of ranks, SIGKILL and SIGTERM of the launcher, a pulled cable, frames
that are lost one way, resets) at a random moment, or from inside (exceptions, crashes, early exits,
mismatched collectives) at a random step and place; or they meet what is around the ranks: the
launcher, its guard, the disk of its log files, the reader of its output, the first moments of the
job (soak_launcher.py). --jobs run at the same time: most of a fault's time is waiting. With
--results the counts are added to what the file holds, and the table is the sum, so that one long
soak may be several short ones.
"""

import argparse
import datetime
import os
import pathlib
import random
import signal
import sys
import threading
import time
import traceback

from support import soak_jobs, soak_launcher
from support.soak_tally import Tally

# How often each kind of job is chosen. Those on several hosts, which start more processes than
# others, need root.
JOBS = {soak_jobs.run_on_one_host: 4, soak_launcher.run_in_the_start: 3}
JOBS_OF_ROOT = {
    soak_jobs.run_on_two_hosts: 1,
    soak_launcher.run_launchers_of_hosts: 2,
    soak_launcher.run_with_trouble_around: 3,
}


def work(arguments, seed, tally, until):
    chance = random.Random(seed)
    while time.monotonic() < until:
        jobs = JOBS | (JOBS_OF_ROOT if os.geteuid() == 0 else {})
        run = chance.choices(list(jobs), jobs.values())[0]
        try:
            trouble = run(chance, arguments.build, tally)
        except AssertionError as wrong:  # it did not even begin
            tally.count("start", "-", "wrong")
            trouble = f"NO START: {wrong}"
        except Exception:  # of this program's own: the other workers go on, and the run fails
            tally.count("soak", "-", "wrong")
            trouble = f"THE SOAK ITSELF: {traceback.format_exc()}"
        if trouble:
            print(trouble, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--jobs", type=int, default=2 * len(os.sched_getaffinity(0)))
    parser.add_argument("--results")
    arguments = parser.parse_args()
    # The jobs' launchers would leave a signal ignored that was so from the start, as in a shell's
    # background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.geteuid() != 0:
        print("not root: no pretend hosts, and so no partitions; no full disks")
    print(f"seed {arguments.seed}, {arguments.jobs} jobs at a time", flush=True)
    tally, start = Tally(), time.monotonic()
    workers = [
        threading.Thread(
            target=work,
            args=(arguments, f"{arguments.seed}/{index}", tally, start + arguments.minutes * 60),
        )
        for index in range(arguments.jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    tally.runs.append(
        {
            "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "seed": arguments.seed,
            "jobs": arguments.jobs,
            "minutes": round((time.monotonic() - start) / 60, 3),
        }
    )
    print(tally)
    if arguments.results:
        sum_of_all = Tally.read(arguments.results)
        sum_of_all.add(tally)
        sum_of_all.write(arguments.results)
        print(f"\nall runs in {arguments.results}:\n{sum_of_all}")
    sys.exit(1 if tally.bad() or tally.total("injected") == 0 else 0)


if __name__ == "__main__":
    main()
