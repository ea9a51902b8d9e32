"""Starts of ranks that run many calls: what ends them costs no other call its answer.

Apart from tests/rank_sets.py, because it needs no torch, and so begins at once.
"""

from dataclasses import replace

from ds_parity.errors import HarnessError
from ds_parity.parity.running.launch import run_job, said

MOST_STARTS = 5  # of one set: ranks that end in every call are not started for each


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
