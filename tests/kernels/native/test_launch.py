"""How work is cut into jobs."""

import numpy as np
import torch

from clover_local.kernels.native.fields import Job
from clover_local.kernels.native.launch import jobs_for, pointers
from clover_local.kernels.native.matmul import JOB_ROWS
from clover_local.kernels.packed import PackedWeight


def test_long_runs_of_rows_are_cut_and_every_row_has_one_job() -> None:
    first, rows = np.array([0, 1, 2 * JOB_ROWS + 8]), np.array([1, 2 * JOB_ROWS + 7, JOB_ROWS])
    weights = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    jobs = jobs_for(first, rows, weights=weights)
    assert jobs[:, Job.ROWS].tolist() == [1, JOB_ROWS, JOB_ROWS, 7, JOB_ROWS]
    made = [r for job in jobs for r in range(job[Job.FIRST], job[Job.FIRST] + job[Job.ROWS])]
    assert made == list(range(3 * JOB_ROWS + 8))
    assert jobs[:, Job.DATA].tolist() == [10, 20, 20, 20, 30]
    assert jobs[:, Job.MINIMUM].tolist() == [12, 22, 22, 22, 32]


def test_no_rows_make_no_jobs() -> None:
    none = np.zeros(0, np.int64)
    assert jobs_for(none, none, weights=np.zeros((0, 3), np.int64)).shape == (0, len(Job))


def test_pointers_are_those_of_the_parts() -> None:
    data, scale = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, 1).bfloat16()
    minimum = torch.zeros(2, 1)
    assert pointers(PackedWeight(data, scale, None, 4, 32)) == (
        data.data_ptr(),
        scale.data_ptr(),
        0,
    )
    with_minimum = pointers(PackedWeight(data, scale, minimum, 4, 32))
    assert with_minimum[2] == minimum.data_ptr()
