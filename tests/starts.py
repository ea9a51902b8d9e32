"""Starts of ranks that run many calls: what ends them costs no other call its answer.

Apart from tests/rank_sets.py, because it needs no torch, and so begins at once.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ds_parity.errors import HarnessError
from ds_parity.parity.running.launch import run_job, said

MOST_STARTS = 5  # of one set: ranks that end in every call are not started for each

PARTS, PARTED_RANKS = 2, 2  # ranks wait for each other most of their time: two pairs of them share two cores
WORTH_PARTS = 40  # calls: below that, another start takes longer than it saves


def run_in_parts(job, most=MOST_STARTS):
    """Run a job as `run_all` does, its calls dealt out to ranks that are started side by side where there are many.

    No call may need what another one of the same job leaves.
    """
    if len(job.calls) < WORTH_PARTS or job.ranks > PARTED_RANKS:
        return run_all(job, most)
    folders = [job.folder, *(job.folder.with_name(f"{job.folder.name}-beside-{part}") for part in range(1, PARTS))]
    parts = [replace(job, calls=job.calls[at::PARTS], folder=folder) for at, folder in enumerate(folders)]
    results = [None] * len(job.calls)
    with ThreadPoolExecutor(PARTS) as pool:
        for at, of_part in enumerate(pool.map(lambda part: run_all(part, most), parts)):
            results[at::PARTS] = of_part
    return results


def run_all(job, most=MOST_STARTS):
    """Run a job and return the results of its calls; what ended the ranks is the result of the call that they were in.

    The calls behind it are run by ranks that are started anew, so that no other test loses its ranks. What ended
    the last of `most` starts is the result of each call behind it.

    Raises:
        HarnessError: the ranks could not be started.
    """
    results = []
    for start in range(most):
        folder = job.folder.with_name(f"{job.folder.name}-{start}") if start else job.folder
        part = replace(job, calls=job.calls[len(results) :], folder=folder)
        try:
            return results + run_job(part)
        except HarnessError as error:
            heard = [list(said(folder, rank)) for rank in range(job.ranks)]
            if not start and not all(heard):
                raise
            finished = min(sum("finished" in line for line in lines) for lines in heard)
            if len(results) + finished == len(job.calls):  # they ended badly behind the last one, which is nobody's
                raise
            results += [*[line["result"] for line in heard[0] if "finished" in line][:finished], error]
            if len(results) == len(job.calls):
                return results
    return [*results, *[results[-1]] * (len(job.calls) - len(results))]
